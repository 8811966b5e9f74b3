"""A model in two folders: what an update must be, when it is used, and that a store always has a model."""

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
import zipfile
from unittest.mock import Mock

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from jaxllm.cli.device import command
from jaxllm.errors import BudgetExceeded, ConfigError, ProgramError
from jaxllm.export.device import store as store_module
from jaxllm.export.device import update as update_module
from jaxllm.export.device.store import ModelStore
from jaxllm.export.folder_format.manifest import LOOP, MAIN, MANIFEST, STORE, TOKENIZER, Manifest
from jaxllm.export.folder_format.publisher import SIGNATURE, read_private_key, read_public_key, sign_folder
from tests.export.device.conftest import updated, zipped

PRIVATE = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
PUBLIC = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo


def write_key(path, key=None, password=None):
    """Private and public PEM files of a new key."""
    key = key or ed25519.Ed25519PrivateKey.generate()
    lock = (
        serialization.NoEncryption() if password is None else serialization.BestAvailableEncryption(password)
    )
    path.write_bytes(key.private_bytes(*PRIVATE, lock))
    public = path.with_suffix(".public")
    public.write_bytes(key.public_key().public_bytes(*PUBLIC))
    return path, public


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return write_key(tmp_path_factory.mktemp("keys") / "publisher.pem")


@pytest.fixture(scope="module")
def sign(keys):
    return read_private_key(keys[0])


@pytest.fixture(scope="module")
def made(folder, keys, sign, tmp_path_factory):
    """A store whose model is release 1, to be copied."""
    place = tmp_path_factory.mktemp("made")
    first = updated(folder, place / "first", release=1, sign=sign)
    return ModelStore.make(place / "store", first, keys[1])


@pytest.fixture
def store(made, tmp_path):
    return ModelStore(shutil.copytree(made.folder, tmp_path / "store"))


@pytest.fixture
def update(folder, sign, tmp_path):
    return updated(folder, tmp_path / "update", release=2, sign=sign, **{MAIN: b"print(2)"})


def trial(code):
    """What tries an update by running code."""
    return lambda folder: [[sys.executable, "-c", code, str(folder)]]


PASSES = trial("")
FAILS = trial("import sys; sys.exit('error: level 40 answers otherwise')")
KILLED = trial("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")


def test_an_update_is_tried_and_then_used(store, update, folder, sign, tmp_path):
    assert store.settled(FAILS) == store.folder / "a"
    said = store.install(zipped(update, tmp_path / "update.zip"))
    assert said == "release 2 is installed, and tried at the next start"
    assert store.install(update) == "release 2 is tried at the next start already; nothing was changed"
    assert store.settled(PASSES) == store.folder / "b"
    assert Manifest.read(store.folder / "b").release == 2
    assert store.install(update) == "release 2 is in use already; nothing was changed"
    # The next one replaces the first model, and fails: the second stays, and it may come again.
    third = updated(folder, tmp_path / "third", release=3, sign=sign)
    with pytest.raises(ConfigError, match="a is used by a process that began before the last update"):
        store.install(third)
    store = ModelStore(shutil.copytree(store.folder, tmp_path / "restarted"))
    for tries, using in ((FAILS, "b"), (PASSES, "a")):
        store.install(third)
        assert store.settled(tries) == store.folder / using
        assert ("level 40 answers otherwise" in store.facts().get("failed", "")) == (tries is FAILS)
    assert {each.name for each in store.folder.iterdir()} == {STORE, MAIN, "a", "b"}


def test_a_trial_that_is_ended_from_outside_is_repeated_some_times(store, update):
    store.install(update)
    for _ in range(3):
        assert store.settled(KILLED).name == "a"
        assert store.state.trying == "b"
    assert store.settled(PASSES).name == "a"
    assert store.facts()["failed"] == "3 starts of it were ended from outside"
    store.install(update)
    store.settled(KILLED)
    assert store.settled(PASSES).name == "b"


class Wrong:
    """Makes updates that are refused of one that is not."""

    def __init__(self, update, sign):
        self.update, self.sign, self.path = update, sign, update.with_suffix(".zip")

    def changed(self, name, change):
        (self.update / name).write_bytes(change((self.update / name).read_bytes()))
        return self.update

    def without(self, name):
        (self.update / name).unlink()
        return self.update

    def signed(self, **changes):
        dataclasses.replace(Manifest.read(self.update), **changes).write(self.update)
        sign_folder(self.update, self.sign)
        return self.update

    def without_loop(self):
        files = Manifest.read(self.update).files
        return self.signed(files={name: each for name, each in files.items() if name != LOOP})

    def cut(self):
        path = zipped(self.update, self.path)
        path.write_bytes(path.read_bytes()[:-30])
        return path

    def archive(self, more=(), **options):
        with zipfile.ZipFile(self.path, "w", **options) as file:
            for each in self.update.iterdir():
                file.write(each, f"device/{each.name}")
            for name in more:
                file.writestr(name, "")
        return self.path


MANY = [f"device/{each}{'x' * 99}" for each in range(1 << 15)]
WRONG = [
    ("is not signed", lambda it: it.without(SIGNATURE)),
    ("signature is not by this", lambda it: it.changed(SIGNATURE, lambda raw: raw[:-1])),
    ("more than 64 bytes", lambda it: it.changed(SIGNATURE, lambda raw: raw * 2)),
    (
        "signature is not by this",
        lambda it: it.changed(MANIFEST, lambda raw: raw.replace(b'e": 2', b'e": 9')),
    ),
    ("tokenizer.json is damaged", lambda it: it.changed(TOKENIZER, lambda raw: raw[:-1] + b"~")),
    ("tokenizer.json is damaged", lambda it: it.changed(TOKENIZER, lambda raw: raw[:-1])),
    ("tokenizer.json is damaged", lambda it: it.changed(TOKENIZER, lambda raw: raw + b" ")),
    ("tokenizer.json is missing", lambda it: it.without(TOKENIZER)),
    ("is release 0, and 1 is in use", lambda it: it.signed(release=0)),
    ("is release 1, and 1 is in use", lambda it: it.signed(release=1)),
    ("no folder of a device", lambda it: it.without_loop()),
    ("ai-edge-litert", lambda it: it.signed(made_with={"ai-edge-litert": "999"}, format="tflite")),
    ("not a zip file", lambda it: it.update / MANIFEST),
    ("no such file", lambda it: it.update / "none"),
    ("program.json is missing", lambda it: it.update.parent),
    ("not a zip file", lambda it: it.cut()),
    ("not those of one folder", lambda it: it.archive(["other/more"])),
    ("directory is too large", lambda it: it.archive(MANY)),
    ("otherwise than by deflate", lambda it: it.archive(compression=zipfile.ZIP_LZMA)),
]


@pytest.mark.parametrize(("said", "harm"), WRONG)
def test_a_wrong_update_leaves_everything_as_it_was(store, update, folder, sign, tmp_path, said, harm):
    store.install(updated(folder, tmp_path / "before", release=2, sign=sign, **{MAIN: b"before"}))
    before = sorted((each, each.stat().st_mtime_ns) for each in store.folder.rglob("*"))
    with pytest.raises((ProgramError, ConfigError), match=said) as refused:
        store.install(harm(Wrong(update, sign)))
    assert "\n" not in str(refused.value)
    assert sorted((each, each.stat().st_mtime_ns) for each in store.folder.rglob("*")) == before
    # An update that was installed before is still tried.
    assert store.settled(PASSES).name == "b"


def test_storage_that_is_full_leaves_the_model_in_use(store, update, monkeypatch):
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: Mock(free=9))
        with pytest.raises(BudgetExceeded, match=r"takes [\d,]+ bytes of storage, and 9 are free"):
            store.install(update)
    real = update_module.Update._copy

    def full(self, name, stored, file, out):
        if out is not None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        real(self, name, stored, file, out)

    with monkeypatch.context() as late:
        late.setattr(update_module.Update, "_copy", full)
        with pytest.raises(BudgetExceeded, match="no storage left for the model"):
            store.install(update)
    assert {each.name for each in store.folder.iterdir()} == {STORE, MAIN, "a"}
    assert store.settled(FAILS).name == "a"
    store.install(update)
    assert store.settled(PASSES).name == "b"


def test_files_of_others_and_changes_of_others_stay(store, update, tmp_path):
    (store.folder / "b").mkdir()
    note = store.folder / "b" / "note.txt"
    note.write_text("mine")
    with pytest.raises(ConfigError, match=r"note\.txt is not of this store"):
        store.install(update)
    assert note.read_text() == "mine"
    note.unlink()
    with store._changing(wait=False), pytest.raises(ConfigError, match="being changed by another process"):
        store.install(update)
    with pytest.raises(ConfigError, match="exists already"):
        ModelStore.make(store.folder, update)
    for text in (
        "[]",
        "{}",
        '{"using": "c", "files": {}}',
        '{"using": "a", "trying": "a", "files": {}}',
        "{",
    ):
        (store.folder / STORE).write_text(text)
        with pytest.raises(ProgramError, match=r"store\.json: malformed"):
            ModelStore(store.folder)


def test_keys(keys, tmp_path):
    elliptic, public = write_key(tmp_path / "ec.pem", ec.generate_private_key(ec.SECP256R1()))
    locked, _ = write_key(tmp_path / "locked.pem", password=b"secret")
    (tmp_path / "text").write_text("no key")
    for path, said in (
        (elliptic, "not ed25519"), (locked, "is encrypted"), (keys[1], "not the PEM file of a key"),
        (tmp_path / "text", "not the PEM file of a key"), (tmp_path / "none", "cannot be read"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            read_private_key(path)
    for path, said in ((public, "not ed25519"), (keys[0], "not the PEM file of a key")):
        with pytest.raises(ConfigError, match=said):
            read_public_key(path)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_signatures_are_those_of_openssl(store, update, keys):
    def openssl(*arguments):
        subprocess.run(
            ["openssl", "pkeyutl", "-rawin", *map(str, arguments)], check=True, capture_output=True
        )

    given = ("-in", update / MANIFEST)
    openssl("-verify", "-pubin", "-inkey", keys[1], *given, "-sigfile", update / SIGNATURE)
    (update / SIGNATURE).unlink()
    openssl("-sign", "-inkey", keys[0], *given, "-out", update / SIGNATURE)
    store.install(update)


def test_the_command(made, update, keys, tmp_path, monkeypatch):
    def run(*arguments):
        return CliRunner().invoke(command.device, [str(each) for each in arguments])

    assert (
        "release 1; run it with"
        in run(made.folder / "a", "store", tmp_path / "mine", "--key", keys[1]).output
    )
    assert "installed" in run(tmp_path / "mine", "install", update).output
    facts = json.loads(run(tmp_path / "mine", "status", "--json").output)
    assert facts["trying"].endswith("release 2 (b)")
    assert "not a store" in str(run(update, "status").exception)
    # What a command opens is tried with the means of that command.
    tried = Mock(return_value="")
    monkeypatch.setattr(store_module, "_trial", tried)
    monkeypatch.setattr(command, "open_device", Mock(side_effect=ConfigError("opened")))
    assert str(run("--threads", 3, tmp_path / "mine", "facts").exception) == "opened"
    (arguments,) = tried.call_args.args
    assert arguments[1:5] == ["-m", "jaxllm.cli.device", "--threads", "3"]
    assert arguments[-2:] == [str((tmp_path / "mine" / "b").resolve()), "facts"]
    assert command.open_device.call_args.args[0].name == "b"
