"""The identity of callers: the process behind a socket, a key, or the loopback, nobody by their own headers.
Keys are shown once, and stored as digests in a file of the owner's alone, for one writer at a time."""

import json
import os
import socket
import stat
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxllm.errors import ConfigError
from jaxllm.serving.server.api.errors import ApiError
from jaxllm.serving.server.identity import (
    Identity,
    KeyFile,
    add_key,
    digest,
    is_operator,
    read_keys,
    remove_keys,
)
from jaxllm.serving.server.sockets import (
    EXTENSION,
    Credentials,
    Peer,
    app_of,
    credentials_of,
    is_loopback,
    require_rules,
)

HERE = Credentials(os.getpid(), os.geteuid(), os.getegid())
OTHER_USER = HERE.uid + 1
LOOPBACK = Peer(address="127.0.0.1")


def scope(peer: Peer | None, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "http", "headers": list(headers), "client": ("127.0.0.1", 1)}
    if peer is not None:
        found["extensions"] = {EXTENSION: peer}
    return found


def bearer(key: str) -> tuple[bytes, bytes]:
    return (b"authorization", f"Bearer {key}".encode())


def test_rules(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert credentials_of(ours) == HERE, "the kernel names the process"
    exe, uid = os.readlink(f"/proc/{os.getpid()}/exe"), HERE.uid
    assert app_of(HERE, {}) == f"uid-{uid}"
    assert app_of(HERE, {f"uid:{uid}": "user", "uid:99999": "other"}) == "user"
    for rule in (f"exe:{exe}", f"uid:{uid},exe:{exe}", f"exe:{sys.executable}"):
        assert app_of(HERE, {f"uid:{uid}": "user", rule: "program"}) == "program"
    assert app_of(HERE, {"exe:/usr/bin/env": "program"}) == f"uid-{uid}"
    # Another user's process of the same program is not the app.
    elsewhere = Credentials(HERE.pid, OTHER_USER, 0)
    assert app_of(elsewhere, {f"exe:{exe}": "program"}) == f"uid-{OTHER_USER}"
    assert app_of(elsewhere, {f"uid:{OTHER_USER},exe:{exe}": "program"}) == "program"
    # A process that is gone.
    assert app_of(Credentials(2**22 + 1, uid, 0), {f"exe:{exe}": "program"}) == f"uid-{uid}"
    # A program is its file and not its name.
    copy = tmp_path / "mail"
    copy.symlink_to(exe)
    assert app_of(HERE, {f"exe:{copy}": "program"}) == "program"
    copy.unlink()
    copy.write_bytes(b"another file")
    assert app_of(HERE, {f"exe:{copy}": "program"}) == f"uid-{HERE.uid}"


def test_who_may_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    path = tmp_path / "keys.json"
    identity = Identity(keys=KeyFile(path))

    def operates(asked: dict[str, Any]) -> bool:
        identity.identify(asked)
        return is_operator(asked)

    for uid, allowed in ((0, True), (1000, True), (1001, False)):
        assert operates(scope(Peer(credentials=Credentials(1, uid, uid), app="mail"))) is allowed
    # Without keys who is on the loopback has the service to themselves.
    assert operates(scope(LOOPBACK))
    monkeypatch.undo()
    plain, _ = add_key(path, "mail")
    operator, _ = add_key(path, "admin", operator=True)
    assert not operates(scope(LOOPBACK, bearer(plain)))
    assert operates(scope(LOOPBACK, bearer(operator)))


def test_malformed_rules_and_options_are_refused() -> None:
    for rule in ("", "uid:", "uid:-1", "uid:01", "exe:mail", "user:root", "uid:1;exe:/x", "uid:1,"):
        with pytest.raises(ConfigError, match="a rule for apps is"):
            require_rules({rule: "mail"})
    with pytest.raises(ConfigError, match="name"):
        require_rules({"uid:1": "a b"})


def test_loopback() -> None:
    for address in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"):
        assert is_loopback(address), address
    for address in ("10.0.0.1", "0.0.0.0", "::", "::ffff:10.0.0.1", "localhost", ""):
        assert not is_loopback(address), address


def test_without_keys_the_loopback_is_local(tmp_path: Path) -> None:
    identity = Identity(keys=KeyFile(tmp_path / "keys.json"))
    assert identity.identify(scope(LOOPBACK)) == "local"
    for peer in (None, Peer(), Peer(address="10.0.0.1")):
        with pytest.raises(ApiError) as caught:
            identity.identify(scope(peer, (b"x-forwarded-for", b"127.0.0.1")))
        assert caught.value.code == "unknown_peer"


def test_with_keys_a_key_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    identity = Identity(keys=KeyFile(path))
    assert identity.identify(scope(LOOPBACK)) == "local"
    key, _ = add_key(path, "mail")
    lower = (b"authorization", b"bearer   " + key.encode())
    good: Sequence[tuple[bytes, bytes]] = (bearer(key), (b"x-api-key", key.encode()), lower)
    for peer in (LOOPBACK, Peer(address="10.0.0.1"), None):
        for header in good:
            assert identity.identify(scope(peer, header)) == "mail"
        with pytest.raises(ApiError) as caught:
            identity.identify(scope(peer))
        assert caught.value.code == "missing_api_key"
        for header in (bearer(key + "x"), (b"x-api-key", b"\xff" * 9)):
            with pytest.raises(ApiError) as caught:
                identity.identify(scope(peer, header))
            assert caught.value.code == "invalid_api_key"
            assert key not in str(caught.value)
    # Over a socket keys are not looked at.
    for headers in ((), (bearer(key),), (bearer("wrong"),)):
        assert identity.identify(scope(Peer(credentials=HERE, app="uid-7"), *headers)) == "uid-7"
    # The same key twice is one key; two keys are none.
    assert identity.identify(scope(LOOPBACK, good[0], good[1])) == "mail"
    with pytest.raises(ApiError):
        identity.identify(scope(LOOPBACK, good[0], (b"x-api-key", b"other")))
    # A file that cannot be read lets nobody in.
    path.chmod(0o644)
    with pytest.raises(ApiError) as caught:
        Identity(keys=KeyFile(path)).identify(scope(LOOPBACK, bearer(key)))
    assert str(tmp_path) not in str(caught.value)


def test_addresses_to_listen_on(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    Identity().require_address("127.0.0.1")
    with pytest.raises(ConfigError, match="not a loopback address"):
        Identity(keys=KeyFile(path)).require_address("0.0.0.0")
    for keys in (None, KeyFile(path)):
        with pytest.raises(ConfigError, match="jaxllm keys add"):
            Identity(keys, remote=True).require_address("0.0.0.0")
    add_key(path, "mail")
    Identity(KeyFile(path), remote=True).require_address("0.0.0.0")


def test_an_app_is_found_once_for_a_request(tmp_path: Path) -> None:
    asked, identity = scope(LOOPBACK), Identity()
    assert identity.identify(asked) == "local"
    identity.keys = KeyFile(tmp_path / "keys.json")
    add_key(tmp_path / "keys.json", "mail")
    assert identity.identify(asked) == "local"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config" / "keys.json"


def app_with(keys: KeyFile, key: str) -> str | None:
    found = keys.find(key)
    return None if found is None else found.app


def test_a_key_is_of_its_app_and_is_not_stored(path: Path) -> None:
    key, stored = add_key(path, "mail")
    other, _ = add_key(path, "calendar")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key not in path.read_text()
    assert digest(key) in path.read_text()
    keys = KeyFile(path)
    assert (app_with(keys, key), app_with(keys, other)) == ("mail", "calendar")
    for wrong in ("", key[:-1], key + "x", key * 100, "\ud800", stored.sha256, stored.id):
        assert app_with(keys, wrong) is None


def test_changes_are_seen_at_once(path: Path) -> None:
    keys = KeyFile(path)
    with pytest.raises(ConfigError, match="no key 'mail'"):
        remove_keys(path, "mail")
    assert not keys.needed()
    key, stored = add_key(path, "mail")
    assert keys.needed()
    assert app_with(keys, key) == "mail"
    second, _ = add_key(path, "mail")
    assert remove_keys(path, stored.id) == (stored,)
    assert app_with(keys, key) is None
    assert app_with(keys, second) == "mail"
    remove_keys(path, "mail")
    assert app_with(keys, second) is None
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
    facts["keys"][0]["operator"] = 1
    path.write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match="not a file of API keys"):
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
        assert app_with(keys, key) == "mail"
        path.write_bytes(content)
        for _ in range(2):
            with pytest.raises(ConfigError, match="not a file of API keys"):
                app_with(keys, key)
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
