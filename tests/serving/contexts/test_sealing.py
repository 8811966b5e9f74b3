"""Encrypted contexts: nothing readable on storage, the same chunks back, and gone with their key. A sealed
store refuses what it did not write, and what it wrote before."""

import dataclasses
import errno
import logging
import os
import shutil
import stat

import numpy as np
import pytest

from jaxllm.errors import CheckpointError, ConfigError, ContextGone, JaxllmError, Unreadable
from jaxllm.serving.contexts.context import Context, erase
from jaxllm.serving.contexts.encryption import Vault
from jaxllm.serving.contexts.layout import CATALOG
from jaxllm.serving.contexts.record import encoded
from jaxllm.serving.contexts.saving import compact, seal
from jaxllm.serving.contexts.segment import Segment, file_bytes, write_segment
from jaxllm.serving.contexts.store import ContextStore
from jaxllm.serving.host.storage import Storage
from tests.faults import FailingDevice
from tests.serving.contexts.mutations import rows, with_row
from tests.serving.contexts.test_store import ORIGIN, blobs, grown, holds


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def keys(tmp_path):
    return tmp_path / "keys"


def made(root, keys, app="mail"):
    """A context of three chunks."""
    with ContextStore(root, keys=keys) as store:
        record = store.create(app, ORIGIN)
        store.commit(*grown(record, [8, 4, 8]))
    return record.name


def content(folder):
    return b"".join(each.read_bytes() for each in sorted(folder.rglob("*")) if each.is_file())


def test_a_context_is_there_again_and_nothing_of_it_can_be_read(tmp_path, root, keys):
    name = made(root, keys)
    on_storage = content(root)
    for secret in (b'"tokens"', b"0,1,2,3", b"blob_bytes", *[each.tobytes()[:16] for each in blobs(0, 8)]):
        assert secret not in on_storage
    with ContextStore(root, keys=keys) as store:
        record = holds(store, name)
        assert store.verify() == []
        # Single chunks of single layers, by their offsets.
        for chunk in (2, 0, 1):
            (blob,) = store.open(name, [chunk]).read(1, [chunk])
            np.testing.assert_array_equal(blob, blobs(chunk, record.bits[chunk])[1])
        # The size of a file is known before.
        chunks = {chunk: (bits, blobs(chunk, bits)) for chunk, bits in enumerate(record.bits)}
        path = store.folder(record) / record.files[0]
        assert path.stat().st_size == file_bytes(chunks, encrypted=True)
        for salt in range(1, 10):
            store.commit(*grown(record, [8, 4, 8], salt))
            compact(store, name)
        holds(store, name, 9)
    made(tmp_path / "plain", None)
    assert b'"tokens"' in content(tmp_path / "plain")


def test_keys_are_closed_to_others(tmp_path, root, keys):
    made(root, keys)
    made(root, keys, "calendar")
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    files = sorted(keys.glob("*.key"))
    assert [each.name for each in files] == ["app-calendar.key", "app-mail.key"]
    assert {stat.S_IMODE(each.stat().st_mode) for each in keys.rglob("*") if each.is_file()} == {0o600}
    assert files[0].read_bytes() != files[1].read_bytes()
    keys.chmod(0o750)
    with pytest.raises(ConfigError, match="private to this user"):
        ContextStore(root, keys=keys)
    keys.chmod(0o700)
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write to, so what is in it could be replaced"):
        ContextStore(root, keys=keys)
    tmp_path.chmod(0o700)
    with pytest.raises(ConfigError, match="must not lie in"):
        ContextStore(root, keys=root / "keys")


def test_equal_contexts_look_different_and_are_of_their_place(root, keys):
    first, second = (root / "app-mail" / made(root, keys) / "0.kv" for _ in range(2))
    one, other = (np.frombuffer(path.read_bytes(), np.uint8) for path in (first, second))
    # Padding and the header apart.
    assert (one == other)[one != 0][64:].mean() < 0.05
    # A segment cannot be put in another context's place, even of the same app.
    second.write_bytes(first.read_bytes())
    with ContextStore(root, keys=keys) as store:
        assert [(each.name, each.chunks) for each in store.verify()] == [(second.parent.name, (0, 1, 2))]


@pytest.mark.parametrize("other", [False, True])
def test_a_context_is_gone_with_its_key(root, keys, other):
    name, kept = made(root, keys), made(root, keys, "calendar")
    key = (keys / "app-mail.key").read_bytes()
    (keys / "app-mail.key").unlink()
    if other:
        # A new context has a new key.
        made(root, keys)
    before = content(root)
    with ContextStore(root, keys=keys) as store:
        with pytest.raises(ContextGone, match="key was erased"):
            store.record(name, "mail")
        with pytest.raises(ContextGone, match="never made"):
            store.record(name, "calendar")
        holds(store, kept)
        assert [each.name for each in store.damage()] == [name]
        store.verify(repair=True)
        assert content(root) == before, "what a returning key could open is never removed"
        if not other:
            (keys / "app-mail.key").write_bytes(key)
            (keys / "app-mail.key").chmod(0o600)
            holds(store, name)


def test_a_key_that_cannot_be_used_is_no_erased_key(root, keys):
    """Nor are keys that nobody gave: contexts are refused, and stay."""
    name = made(root, keys)
    with ContextStore(root) as store:
        with pytest.raises(Unreadable, match="is encrypted"):
            store.record(name, "mail")
        store.verify(repair=True)
    path = keys / "app-mail.key"
    key = path.read_bytes()
    for spoil in (lambda: path.write_bytes(key[:-1]), lambda: path.chmod(0o644)):
        spoil()
        with ContextStore(root, keys=keys) as store, pytest.raises(Unreadable):
            store.record(name, "mail")
        path.write_bytes(key)
        path.chmod(0o600)
    with ContextStore(root, keys=keys) as store:
        holds(store, name)


def test_any_change_is_seen(root, keys):
    name = made(root, keys)
    catalog = root / CATALOG
    body = rows(catalog.read_bytes())[name][2] or b""
    at = catalog.read_bytes().index(body[:64])
    for path in (root / "app-mail" / name / "0.kv", catalog):
        whole, draw, told = path.read_bytes(), np.random.default_rng(0), 0
        places = draw.integers(0, len(whole), 60) if path != catalog else at + draw.integers(0, 64, 30)
        for place in places:
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x01]) + whole[place + 1 :])
            with ContextStore(root, keys=keys) as store:
                try:
                    damaged = store.verify()
                    holds(store, name)
                    told += bool(damaged)
                except CheckpointError:
                    told += 1
        path.write_bytes(whole)
        assert told > 20, path.name


def test_conversations_go_on(kept, tmp_path):
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
    with pytest.raises(ConfigError, match="not encrypted"):
        erase(kept(), "mail")


# A sealed store


@pytest.fixture
def opened(root, keys):
    def store():
        found = ContextStore(root, keys=keys)
        seal(found)
        return found

    return store


@pytest.fixture
def record(opened):
    """A context of two commits."""
    with opened() as store:
        record = store.commit(*grown(store.create("mail", ORIGIN), [8, 4]))
        return store.commit(*grown(record, [8, 4, 8]))


def refused(opened, name, match, app="mail"):
    with opened() as store:
        with pytest.raises(CheckpointError, match=match):
            store.record(name, app)
        (damage,) = store.verify()
        assert (damage.name, damage.lost) == (name, True)


def test_what_a_sealed_store_wrote_is_there_again(opened, record, keys):
    assert (keys / "sealed").exists()
    with opened() as store:
        assert holds(store, record.name) == record
        assert store.verify() == store.damage() == []
        later = store.note(dataclasses.replace(record, tokens=(*record.tokens, 9)))
    with opened() as store:
        assert store.record(record.name).tokens == later.tokens
        store.delete(record.name)
        assert store.vault is not None
        assert store.vault._ledger.run("SELECT * FROM newest") == []


@pytest.mark.parametrize("what", ["tokens", "a context", "an app", "another's"])
def test_forged_records_are_refused(opened, record, root, what):
    """Plain ones of a context, and of a context and an app that never were; and one of another context."""
    name, app = ("a" * 16 if what != "tokens" else record.name), "new" if what == "an app" else "mail"
    path = root / CATALOG
    _, sealed, body = rows(path.read_bytes())[record.name]
    if what != "another's":
        # It needs no key.
        bare = dataclasses.replace(record.cut(0), tokens=(1, 2, 3), checksums={}, rows="", used=1 << 40)
        sealed, body = 0, encoded(dataclasses.replace(bare, name=name, app=app))
    # Its checksum is right.
    path.write_bytes(with_row(path.read_bytes(), name, f"app-{app}", sealed, body))
    match = "encrypted content was changed" if what == "another's" else "is not encrypted"
    refused(opened, name, match, app)
    with opened() as store:
        assert [each.name for each in store.records()] == [record.name] * (what != "tokens")


def test_plain_chunks_are_refused(record, keys, root):
    path = root / "app-mail" / record.name / "9.kv"
    write_segment(path, {0: (8, blobs(0, 8))}, ["source"])
    vault = Vault(keys, root)
    with pytest.raises(CheckpointError, match="is not encrypted"):
        Segment(path, Storage(), vault)
    (keys / "sealed").unlink()
    with Segment(path, Storage(), Vault(keys, root)) as segment:
        assert segment.layers == 3


@pytest.mark.parametrize("operator", [False, True])
def test_older_files_that_are_put_back_are_refused(opened, record, root, keys, operator):
    """Until an operator has them taken, or a repair sets them aside."""
    shutil.copytree(root, root.with_name("yesterday"))
    with opened() as store:
        newer = store.commit(*grown(record, [8, 4, 8], 1))
        store.commit(*grown(newer, [8, 4, 8], 2))
    shutil.rmtree(root)
    shutil.copytree(root.with_name("yesterday"), root)
    refused(opened, record.name, "was put back")
    if operator:
        (keys / "sealed").unlink()
        for _ in range(2):
            with opened() as store:
                assert holds(store, record.name) == record
            assert (keys / "sealed").exists()
    else:
        with opened() as store:
            (damage,) = store.verify(repair=True)
            assert list((root / damage.aside).glob("*.kv"))
            assert store.verify() == store.records() == []


@pytest.mark.parametrize("killed", [False, True])
def test_a_deleted_context_does_not_come_back(opened, record, root, monkeypatch, killed):
    folder = root / "app-mail" / record.name
    shutil.copytree(root, root.with_name("copy"))
    with opened() as store, monkeypatch.context() as patch:
        if killed:
            # After its record was removed.
            patch.setattr(Vault, "forget", lambda *_: None)
        store.delete(record.name)
        folder.mkdir(parents=True, exist_ok=killed)
    with opened() as store:
        store.sweep()
        assert not folder.exists()
    shutil.rmtree(root)
    shutil.copytree(root.with_name("copy"), root)
    if not killed:
        # Else the ledger was not told.
        refused(opened, record.name, "has deleted this context")


def test_a_kill_before_the_ledger_knows_loses_nothing(opened, record, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    for salt in (1, 2, 3):
        with opened() as store, monkeypatch.context() as patch:
            patch.setattr(Vault, "wrote", killed)
            with pytest.raises(KeyboardInterrupt):
                store.create("mail", ORIGIN) if salt == 3 else store.commit(*grown(record, [8, 4, 8], salt))
        with opened() as store:
            assert store.verify() == []
            record = holds(store, record.name, min(salt, 2))


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_ledger_that_cannot_be_written_loses_nothing(opened, record, keys, error):
    with opened() as store:
        with FailingDevice(keys, at=None) as device:
            device.fail(error)
            with pytest.raises(JaxllmError):
                store.commit(*grown(record, [8, 4, 8], 1))
            with pytest.raises(JaxllmError):
                store.create("mail", ORIGIN)
            if error == errno.EIO:
                with pytest.raises(Unreadable):
                    store.record(record.name)
        assert store.verify() == []
        record = store.record(record.name)
    with opened() as store:
        assert store.record(record.name) == record
        assert store.verify() == []


def test_plain_contexts_are_encrypted_and_the_store_is_sealed(root, keys, opened, caplog):
    with ContextStore(root) as store:
        names = [store.create(app, ORIGIN).name for app in ("mail", "calendar")]
        for name in names:
            store.commit(*grown(store.record(name), [8, 4, 8]))
    plain = root / "app-calendar" / names[1]
    with FailingDevice(plain, at=None) as device, caplog.at_level(logging.WARNING):
        device.fail(errno.EIO)
        opened().close()
    assert "not all could be encrypted" in caplog.text
    assert not (keys / "sealed").exists()
    with opened() as store:
        for name in names:
            holds(store, name)
        assert store.verify() == []
    assert (keys / "sealed").exists()
    files = [each.read_bytes() for each in root.rglob("*") if each.is_file()]
    assert not any(secret in each for each in files for secret in (b"tokens", b"blob_bytes"))
    with ContextStore(root) as store, pytest.raises(Unreadable, match="is encrypted"):
        store.record(names[0], "mail")
