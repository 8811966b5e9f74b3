"""Encrypted contexts: nothing readable on storage, the same chunks back, and gone with their key."""

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from jaxllm.errors import CheckpointError, ConfigError, ContextGone, Unreadable
from jaxllm.serving.contexts.context import Context, erase
from jaxllm.serving.contexts.layout import CATALOG, folder_bytes
from jaxllm.serving.contexts.saving import compact
from jaxllm.serving.contexts.segment import file_bytes
from jaxllm.serving.contexts.store import ContextStore
from tests.serving.contexts.mutations import rows
from tests.serving.contexts.test_store import ORIGIN, blobs, grown, holds


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def made(tmp_path: Path, keys: Path | None, app: str = "mail") -> str:
    """A context of three chunks."""
    with ContextStore(tmp_path / "store", keys=keys) as store:
        record = store.create(app, ORIGIN)
        store.commit(*grown(record, [8, 4, 8]))
    return record.name


def content(folder: Path) -> bytes:
    return b"".join(each.read_bytes() for each in sorted(folder.rglob("*")) if each.is_file())


def test_a_context_is_there_again_and_nothing_of_it_can_be_read(tmp_path: Path, keys: Path) -> None:
    name = made(tmp_path, keys)
    on_storage = content(tmp_path / "store")
    for secret in (b'"tokens"', b"0,1,2,3", b"blob_bytes", *[each.tobytes()[:16] for each in blobs(0, 8)]):
        assert secret not in on_storage
    with ContextStore(tmp_path / "store", keys=keys) as store:
        record = holds(store, name)
        assert store.verify() == []
        # Single chunks of single layers, by their offsets.
        for chunk in (2, 0, 1):
            (blob,) = store.open(name, [chunk]).read(1, [chunk])
            np.testing.assert_array_equal(blob, blobs(chunk, record.bits[chunk])[1])
        for salt in range(1, 10):
            store.commit(*grown(record, [8, 4, 8], salt))
            compact(store, name)
        holds(store, name, 9)
    plain = made(tmp_path / "plain", None)
    assert b'"tokens"' in content(tmp_path / "plain")
    assert plain != name


def test_keys_are_closed_to_others(tmp_path: Path, keys: Path) -> None:
    made(tmp_path, keys)
    made(tmp_path, keys, "calendar")
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    files = sorted(keys.glob("*.key"))
    assert [each.name for each in files] == ["app-calendar.key", "app-mail.key"]
    assert {stat.S_IMODE(each.stat().st_mode) for each in keys.rglob("*") if each.is_file()} == {0o600}
    assert {stat.S_IMODE(each.stat().st_mode) for each in files} == {0o600}
    assert files[0].read_bytes() != files[1].read_bytes()
    keys.chmod(0o750)
    with pytest.raises(ConfigError, match="private to this user"):
        ContextStore(tmp_path / "store", keys=keys)
    keys.chmod(0o700)
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write to, so what is in it could be replaced"):
        ContextStore(tmp_path / "store", keys=keys)
    tmp_path.chmod(0o700)
    with pytest.raises(ConfigError, match="must not lie in"):
        ContextStore(tmp_path / "store", keys=tmp_path / "store" / "keys")


def test_equal_contexts_look_different(tmp_path: Path, keys: Path) -> None:
    first, second = made(tmp_path, keys), made(tmp_path, keys)
    folder = tmp_path / "store" / "app-mail"
    pages = [(folder / name / "0.kv").read_bytes() for name in (first, second)]
    same = np.frombuffer(pages[0], np.uint8) == np.frombuffer(pages[1], np.uint8)
    # Padding and the header apart.
    there = np.frombuffer(pages[0], np.uint8) != 0
    assert same[there][64:].mean() < 0.05


@pytest.mark.parametrize("other", [False, True])
def test_a_context_is_gone_with_its_key(tmp_path: Path, keys: Path, other: bool) -> None:
    name, kept = made(tmp_path, keys), made(tmp_path, keys, "calendar")
    (keys / "app-mail.key").unlink()
    if other:
        # A new context has a new key.
        made(tmp_path, keys)
    before = content(tmp_path / "store")
    with ContextStore(tmp_path / "store", keys=keys) as store:
        with pytest.raises(ContextGone, match="key was erased"):
            store.record(name, "mail")
        with pytest.raises(ContextGone, match="never made"):
            store.record(name, "calendar")
        holds(store, kept)
        assert [each.name for each in store.damage()] == [name]
        store.verify(repair=True)
    assert content(tmp_path / "store") == before, "what a returning key could open is never removed"


def test_a_key_that_cannot_be_used_is_no_erased_key(tmp_path: Path, keys: Path) -> None:
    """Nor are keys that nobody gave: contexts are refused, and stay."""
    name = made(tmp_path, keys)
    with ContextStore(tmp_path / "store") as store:
        with pytest.raises(Unreadable, match="is encrypted"):
            store.record(name, "mail")
        store.verify(repair=True)
    path = keys / "app-mail.key"
    key = path.read_bytes()
    for spoil in (lambda: path.write_bytes(key[:-1]), lambda: path.chmod(0o644)):
        spoil()
        with ContextStore(tmp_path / "store", keys=keys) as store, pytest.raises(Unreadable):
            store.record(name, "mail")
        path.write_bytes(key)
        path.chmod(0o600)
    with ContextStore(tmp_path / "store", keys=keys) as store:
        holds(store, name)


def test_any_change_is_seen(tmp_path: Path, keys: Path) -> None:
    name = made(tmp_path, keys)
    catalog = tmp_path / "store" / CATALOG
    body = rows(catalog.read_bytes())[name][2]
    assert body is not None
    at = catalog.read_bytes().index(body[:64])
    for path in (tmp_path / "store" / "app-mail" / name / "0.kv", catalog):
        whole = path.read_bytes()
        draw = np.random.default_rng(0)
        told = 0
        places = draw.integers(0, len(whole), 60) if path != catalog else at + draw.integers(0, 64, 30)
        for place in places:
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x01]) + whole[place + 1 :])
            with ContextStore(tmp_path / "store", keys=keys) as store:
                try:
                    damaged = store.verify()
                    holds(store, name)
                    told += bool(damaged)
                except CheckpointError:
                    told += 1
        path.write_bytes(whole)
        assert told > 20, path.name


def test_files_are_of_their_place(tmp_path: Path, keys: Path) -> None:
    """A segment cannot be put in another context's place, even of the same app."""
    first, second = made(tmp_path, keys), made(tmp_path, keys)
    folder = tmp_path / "store" / "app-mail"
    (folder / second / "0.kv").write_bytes((folder / first / "0.kv").read_bytes())
    with ContextStore(tmp_path / "store", keys=keys) as store:
        assert [(each.name, each.chunks) for each in store.verify()] == [(second, (0, 1, 2))]


def test_the_size_of_a_file_is_known_before(tmp_path: Path, keys: Path) -> None:
    name = made(tmp_path, keys)
    chunks = {chunk: (bits, blobs(chunk, bits)) for chunk, bits in enumerate([8, 4, 8])}
    path = tmp_path / "store" / "app-mail" / name / "0.kv"
    assert path.stat().st_size == file_bytes(chunks, encrypted=True)
    assert folder_bytes([path.parent]) == path.stat().st_size


def test_conversations_go_on(kept, tmp_path: Path) -> None:
    contexts = kept(encryption=tmp_path / "keys", recompute=False)
    context = Context(contexts, contexts.create("mail"))
    said = context.generate(list(range(5, 45)), max_tokens=8).result().tokens
    contexts = kept(encryption=tmp_path / "keys", recompute=False)
    again = Context(contexts, contexts.record("mail", context.name))
    answer = again.generate([3, 4], max_tokens=4).result()
    assert answer.restoration.read
    assert again.tokens[: 40 + len(said) - 1] == (*range(5, 45), *said)[: 40 + len(said) - 1]
    erase(contexts, "mail")
    assert sorted(os.listdir(tmp_path / "keys")) == ["newest.sqlite", "sealed"]
    with pytest.raises(ContextGone):
        contexts.record("mail", context.name)


def test_only_encrypted_contexts_are_erased(kept) -> None:
    with pytest.raises(ConfigError, match="not encrypted"):
        erase(kept(), "mail")
