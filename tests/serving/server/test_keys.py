"""API keys: shown once, stored as digests, in a file of the owner's alone, for one writer at a time."""

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from jaxllm.errors import ConfigError
from jaxllm.serving.server.identity import KeyFile, add_key, digest, read_keys, remove_keys


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config" / "keys.json"


def app_of(keys: KeyFile, key: str) -> str | None:
    found = keys.find(key)
    return None if found is None else found.app


def test_a_key_is_of_its_app_and_is_not_stored(path: Path) -> None:
    key, stored = add_key(path, "mail")
    other, _ = add_key(path, "calendar")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key not in path.read_text()
    assert digest(key) in path.read_text()
    keys = KeyFile(path)
    assert (app_of(keys, key), app_of(keys, other)) == ("mail", "calendar")
    for wrong in ("", key[:-1], key + "x", key * 100, "\ud800", stored.sha256, stored.id):
        assert app_of(keys, wrong) is None


def test_changes_are_seen_at_once(path: Path) -> None:
    keys = KeyFile(path)
    with pytest.raises(ConfigError, match="no key 'mail'"):
        remove_keys(path, "mail")
    assert not keys.needed()
    key, stored = add_key(path, "mail")
    assert keys.needed()
    assert app_of(keys, key) == "mail"
    second, _ = add_key(path, "mail")
    assert remove_keys(path, stored.id) == (stored,)
    assert app_of(keys, key) is None
    assert app_of(keys, second) == "mail"
    remove_keys(path, "mail")
    assert app_of(keys, second) is None
    assert keys.needed(), "an empty list shuts"
    path.unlink()
    assert keys.needed(), "so does a file that vanishes"
    assert not KeyFile(path).needed()


def test_operators(path: Path) -> None:
    plain, _ = add_key(path, "mail")
    operator, stored = add_key(path, "admin", operator=True)
    keys = KeyFile(path)
    assert stored.operator
    assert [getattr(keys.find(each), "operator", None) for each in (plain, operator)] == [False, True]
    facts = json.loads(path.read_text())
    # A file of before there were operators.
    for each in facts["keys"]:
        del each["operator"]
    path.write_text(json.dumps(facts))
    assert [each.operator for each in read_keys(path)] == [False, False]
    facts["keys"][0]["operator"] = 1
    path.write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match="malformed operator"):
        read_keys(path)


def test_an_app_has_a_plain_name(path: Path) -> None:
    for app in ("", "a b", "../x", "x" * 65, "-x", "é", "a\n", "a/b"):
        with pytest.raises(ConfigError, match="an app's name has"):
            add_key(path, app)
    assert not path.exists()


def test_a_file_that_others_may_use_is_refused(path: Path) -> None:
    add_key(path, "mail")
    for mode in (0o640, 0o602, 0o604):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="chmod 600"):
            read_keys(path)
    path.chmod(0o600)
    assert len(read_keys(path)) == 1


def test_a_damaged_file_lets_nobody_in(path: Path) -> None:
    key, _ = add_key(path, "mail")
    good = path.read_bytes()
    for content in (
        b"", b"[]", b"{}", b'{"version": 2, "keys": []}', b'{"version": 1, "keys": {}}', b"[" * 100_000,
        b'{"version": 1, "keys": [{}]}', b"\xff", b"[" + b" " * (1 << 20) + b"]",
    ):  # fmt: skip
        path.write_bytes(good)
        keys = KeyFile(path)
        assert app_of(keys, key) == "mail"
        path.write_bytes(content)
        for _ in range(2):
            with pytest.raises(ConfigError, match="not a file of API keys"):
                app_of(keys, key)
        with pytest.raises(ConfigError, match="not a file of API keys"):
            add_key(path, "mail")
        assert path.read_bytes() == content


def test_a_malformed_key_and_a_pipe_are_refused(path: Path) -> None:
    add_key(path, "mail")
    for field in ("id", "app", "sha256", "created_s"):
        facts = json.loads(path.read_bytes())
        facts["keys"][0][field] = ["x"]
        (path.parent / field).write_text(json.dumps(facts))
        (path.parent / field).chmod(0o600)
        with pytest.raises(ConfigError, match="not a file of API keys"):
            read_keys(path.parent / field)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        read_keys(path)


def test_writers_take_turns(path: Path) -> None:
    threads = [threading.Thread(target=add_key, args=(path, f"app{n}")) for n in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert {each.app for each in read_keys(path)} == {f"app{n}" for n in range(8)}
