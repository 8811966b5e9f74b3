"""A sealed store refuses what it did not write, and what it wrote before."""

import dataclasses
import errno
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxllm.errors import CheckpointError, ConfigError, ContextGone, JaxllmError, Unreadable
from jaxllm.serving.contexts.encryption import Ledger, Vault
from jaxllm.serving.contexts.layout import CATALOG
from jaxllm.serving.contexts.record import Record, encoded
from jaxllm.serving.contexts.saving import seal
from jaxllm.serving.contexts.segment import Segment, write_segment
from jaxllm.serving.contexts.store import ContextStore
from jaxllm.serving.host.direct_io import Storage
from tests.faults import FailingDevice
from tests.serving.contexts.mutations import rows, with_row
from tests.serving.contexts.test_store import ORIGIN, blobs, grown, holds

Opened = Callable[[], ContextStore]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys"


@pytest.fixture
def opened(root: Path, keys: Path) -> Opened:
    def store() -> ContextStore:
        found = ContextStore(root, keys=keys)
        seal(found)
        return found

    return store


@pytest.fixture
def record(opened: Opened) -> Record:
    """A context of two commits."""
    with opened() as store:
        record = store.commit(*grown(store.create("mail", ORIGIN), [8, 4]))
        return store.commit(*grown(record, [8, 4, 8]))


@pytest.fixture
def folder(root: Path, record: Record) -> Path:
    return root / "app-mail" / record.name


def refused(opened: Opened, name: str, match: str, app: str = "mail") -> None:
    with opened() as store:
        with pytest.raises(CheckpointError, match=match):
            store.record(name, app)
        (damage,) = store.verify()
        assert (damage.name, damage.lost) == (name, True)


def test_what_a_sealed_store_wrote_is_there_again(opened: Opened, record: Record, keys: Path) -> None:
    assert (keys / "sealed").exists()
    with opened() as store:
        assert holds(store, record.name) == record
        assert store.verify() == store.damage() == []
        later = store.note(dataclasses.replace(record, tokens=(*record.tokens, 9)))
    with opened() as store:
        assert store.record(record.name).tokens == later.tokens
        store.delete(record.name)
        assert store.vault is not None
        assert store.vault.ledger.database.run("SELECT * FROM newest") == []


@pytest.mark.parametrize("what", ["tokens", "a context", "an app", "another's"])
def test_forged_records_are_refused(opened: Opened, record: Record, root: Path, what: str) -> None:
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


def test_plain_chunks_are_refused(record: Record, folder: Path, keys: Path, root: Path) -> None:
    path = folder / "9.kv"
    write_segment(path, {0: (8, blobs(0, 8))}, ["source"])
    vault = Vault(keys, root)
    with pytest.raises(CheckpointError, match="is not encrypted"):
        Segment(path, Storage(), vault)
    (keys / "sealed").unlink()
    with Segment(path, Storage(), Vault(keys, root)) as segment:
        assert segment.layers == 3


@pytest.mark.parametrize("operator", [False, True])
def test_older_files_that_are_put_back_are_refused(
    opened: Opened, record: Record, root: Path, keys: Path, operator: bool
) -> None:
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
def test_a_deleted_context_does_not_come_back(
    opened: Opened, record: Record, root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    shutil.copytree(root, root.with_name("copy"))
    with opened() as store, monkeypatch.context() as patch:
        if killed:
            # After its record was removed.
            patch.setattr(Ledger, "forget", lambda *_: None)
        store.delete(record.name)
        folder.mkdir(parents=True, exist_ok=killed)
    with opened() as store:
        store.sweep()
        assert not folder.exists()
    shutil.rmtree(root)
    shutil.copytree(root.with_name("copy"), root)
    if killed:
        with opened() as store:
            # The ledger was not told.
            assert store.record(record.name) == record
    else:
        refused(opened, record.name, "has deleted this context")


def test_a_kill_before_the_ledger_knows_loses_nothing(
    opened: Opened, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for salt in (1, 2):
        with opened() as store, monkeypatch.context() as patch:
            patch.setattr(Ledger, "wrote", killed)
            with pytest.raises(KeyboardInterrupt):
                store.commit(*grown(record, [8, 4, 8], salt))
        with opened() as store:
            assert store.damage() == []
            record = holds(store, record.name, salt)
    with opened() as store:
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "wrote", killed)
            with pytest.raises(KeyboardInterrupt):
                store.create("mail", ORIGIN)
        assert store.verify() == []
    with opened() as store:
        assert store.verify() == []


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_ledger_that_cannot_be_written_loses_nothing(
    opened: Opened, record: Record, keys: Path, error: int
) -> None:
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


def test_a_damaged_ledger_is_no_deleted_context(opened: Opened, record: Record, keys: Path) -> None:
    path = keys / "newest.sqlite"
    whole = path.read_bytes()
    path.write_bytes(b"{}")
    with pytest.raises(ConfigError, match="restore it from a copy"):
        opened()
    path.write_bytes(whole)
    with opened() as store:
        assert store.record(record.name, "mail") == record


def test_plain_contexts_are_encrypted_and_the_store_is_sealed(
    root: Path, keys: Path, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_a_key_that_comes_back_brings_its_contexts(opened: Opened, record: Record, keys: Path) -> None:
    key = (keys / "app-mail.key").read_bytes()
    (keys / "app-mail.key").unlink()
    with opened() as store:
        with pytest.raises(ContextGone, match="key was erased"):
            store.record(record.name, "mail")
        (keys / "app-mail.key").write_bytes(key)
        (keys / "app-mail.key").chmod(0o600)
        assert holds(store, record.name) == record
