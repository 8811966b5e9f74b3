"""The identity of callers: the process behind a socket, a key, or the loopback, nobody by their own headers.
Keys are shown once, and stored as digests in a file of the owner's alone. The guard: what web pages and
strangers are told, and that the app behind it does not see their calls."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import socket
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from jaxllm.errors import ConfigError
from jaxllm.serving.server.api.app import Guard
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
from jaxllm.serving.server.service_options import ServerOptions
from jaxllm.serving.server.sockets import (
    EXTENSION,
    Credentials,
    GuardOptions,
    Peer,
    app_of,
    credentials_of,
    require_rules,
)
from tests.serving.server.services import ContextService

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
    for rule in ("", "uid:", "uid:-1", "uid:01", "exe:mail", "user:root", "uid:1;exe:/x", "uid:1,"):
        with pytest.raises(ConfigError, match="a rule for apps is"):
            require_rules({rule: "mail"})


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


def test_with_keys_a_key_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    identity = Identity(keys=KeyFile(path))
    assert identity.identify(scope(LOOPBACK)) == "local"
    for peer in (None, Peer(), STRANGER):
        with pytest.raises(ApiError) as caught:
            identity.identify(scope(peer, (b"x-forwarded-for", b"127.0.0.1")))
        assert caught.value.code == "unknown_peer"
    key, _ = add_key(path, "mail")
    lower = (b"authorization", b"bearer   " + key.encode())
    good: Sequence[tuple[bytes, bytes]] = (bearer(key), (b"x-api-key", key.encode()), lower)
    for peer in (LOOPBACK, STRANGER, None):
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


def test_a_key_of_ones_own_is_needed_besides_those_of_the_file(tmp_path: Path) -> None:
    path, own = tmp_path / "keys.json", "mine-and-long"
    identity = Identity(KeyFile(path), own_key=own)
    assert identity.needs_key
    other, _ = add_key(path, "mail")
    for header in (bearer(own), (b"x-api-key", own.encode()), (b"api-key", own.encode())):
        asked = scope(STRANGER, header)
        assert (identity.identify(asked), is_operator(asked)) == ("local", True)
    assert identity.identify(scope(LOOPBACK, bearer(other))) == "mail"
    for headers in ((), (bearer(own[:-1]),), (bearer(own + "x"),), (bearer(""),)):
        with pytest.raises(ApiError):
            identity.identify(scope(LOOPBACK, *headers))
    Identity(remote=True, own_key=own).require_address("0.0.0.0")
    assert own not in repr(ServerOptions(api_key=own))
    for key in ("short", "with space 123", "ümlaut-ümlaut", "x" * 257, "line\nbreak"):
        with pytest.raises(ConfigError, match="8 to 256"):
            ServerOptions(api_key=key)


def test_addresses_to_listen_on(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    for address in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"):
        Identity().require_address(address)
    for address in ("10.0.0.1", "0.0.0.0", "::", "::ffff:10.0.0.1", "localhost", ""):
        with pytest.raises(ConfigError, match="not a loopback address"):
            Identity(keys=KeyFile(path)).require_address(address)
    for keys in (None, KeyFile(path)):
        with pytest.raises(ConfigError, match="jaxllm keys add"):
            Identity(keys, remote=True).require_address("0.0.0.0")
    add_key(path, "mail")
    Identity(KeyFile(path), remote=True).require_address("0.0.0.0")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config" / "keys.json"


def app_with(keys: KeyFile, key: str) -> str | None:
    found = keys.find(key)
    return None if found is None else found.app


def test_a_key_is_of_its_app_and_is_not_stored(path: Path) -> None:
    for app in ("", "a b", "../x", "x" * 65, "-x", "é", "a\n", "a/b"):
        with pytest.raises(ConfigError, match="an app's name has"):
            add_key(path, app)
    assert not path.exists()
    key, stored = add_key(path, "mail")
    other, _ = add_key(path, "calendar")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key not in path.read_text()
    assert digest(key) in path.read_text()
    keys = KeyFile(path)
    assert (app_with(keys, key), app_with(keys, other)) == ("mail", "calendar")
    for wrong in ("", key[:-1], key + "x", key * 100, "\ud800", stored.sha256, stored.id):
        assert app_with(keys, wrong) is None
    # Writers take turns.
    names = [f"app{number}" for number in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: add_key(path, name), names))
    assert sorted(each.app for each in read_keys(path)[2:]) == names


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


def test_a_file_that_others_may_use_a_malformed_key_and_a_pipe_are_refused(path: Path) -> None:
    add_key(path, "mail")
    for mode in (0o640, 0o602, 0o604):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="chmod 600"):
            read_keys(path)
    path.chmod(0o600)
    text = path.read_text()
    for field in ("id", "app", "sha256", "created_s", "operator"):
        facts = json.loads(text)
        facts["keys"][0][field] = ["x"]
        path.write_text(json.dumps(facts))
        with pytest.raises(ConfigError, match="not a file of API keys"):
            read_keys(path)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        read_keys(path)


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


SOCKET, STRANGER = Peer(credentials=Credentials(1, 7, 7), app="uid-7"), Peer(address="10.0.0.9")
PAGE = "https://app.example"


def call(
    peer: Peer | None = LOOPBACK, *, method: str = "POST", path: str = "/v1/models",
    options: GuardOptions | None = None, **headers: str | list[str],
) -> tuple[int, dict[str, str], Any, list[str]]:  # fmt: skip
    """Status, headers, body and the apps that the guarded app saw."""
    seen: list[str] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope.get("jaxllm.app", ""))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]})
        await send({"type": "http.response.body", "body": b"{}"})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"x", "more_body": False}

    pairs = [
        (name.replace("_", "-").encode(), each.encode("latin-1"))
        for name, values in {"host": "127.0.0.1:8080", **headers}.items()
        for each in ([values] if isinstance(values, str) else values)
    ]
    scope = {
        "type": "http", "method": method, "path": path, "scheme": "http", "headers": pairs,
        "extensions": {} if peer is None else {EXTENSION: peer},
    }  # fmt: skip
    asyncio.run(Guard(app, Identity().identify, options)(scope, receive, send))
    start, body = sent
    found = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], found, json.loads(body["body"] or b"null"), seen


def refused(status: int, *args: Any, **more: Any) -> dict[str, str]:
    got, headers, body, seen = call(*args, **more)
    assert (got, seen) == (status, [])
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert headers["connection"] == "close"
    assert not {name for name in headers if name.startswith("access-control")}
    return body["error"]


def test_clients_read_why_they_are_refused(context_service: ContextService) -> None:
    url, said = context_service.url, [{"role": "user", "content": "Hi"}]
    for headers, status in (({}, 401), ({"Host": "evil.example"}, 403)):
        own = {"api_key": "no", "max_retries": 0, "default_headers": headers}
        with openai.OpenAI(base_url=f"{url}/v1", **own) as client:
            with pytest.raises(openai.APIStatusError) as refused:
                client.chat.completions.create(model="tiny", messages=said)
            assert (refused.value.status_code, bool(refused.value.code)) == (status, True)
        with anthropic.Anthropic(base_url=url, **own) as client:
            with pytest.raises(anthropic.APIStatusError) as refused:
                client.messages.create(model="tiny", max_tokens=1, messages=said)
            assert refused.value.status_code == status
            assert isinstance(refused.value.body, dict)
            assert refused.value.body["type"] == "error"
            assert refused.value.type == ("authentication_error" if status == 401 else "permission_error")
        bearer = {"Authorization": "Bearer no", **headers}
        with contextlib.closing(ollama.Client(url, headers=bearer)) as client:
            with pytest.raises(ollama.ResponseError) as refused:
                client.chat("tiny", said)
            assert refused.value.status_code == status
            assert isinstance(refused.value.error, str)


def test_callers_are_let_through_and_strangers_refused() -> None:
    assert (call()[3], call(SOCKET)[3]) == (["local"], ["uid-7"])
    # Over a socket no page calls, and clients send any name.
    assert call(SOCKET, host="anything.example")[0] == 200
    assert call(SOCKET, host=[])[0] == 200
    assert call(STRANGER, path="/health")[3] == [""]
    assert refused(401, None)["code"] == "unknown_peer"
    assert call(STRANGER)[1]["www-authenticate"] == "Bearer"


def test_names_of_this_service_and_of_others() -> None:
    for host in ("localhost", "localhost:1", "LOCALHOST:8080", "127.0.0.1", "[::1]:8080"):
        assert call(host=host)[0] == 200, host
    for host in (
        "evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8080", "", "localhost:", "::1",
        "0.0.0.0", "localhost:8080@evil.example", "localhost,evil.example", "localhost\x00",
        "localhost:999999",
    ):  # fmt: skip
        assert refused(403, host=host)["type"] == "permission_error"
        assert refused(403, host=host, path="/health")
    # It is named once.
    refused(403, host=["localhost", "localhost"])
    refused(403, host=[])
    options = GuardOptions(hosts=("box.lan",))
    assert call(options=options, host="box.lan:8080")[0] == 200
    refused(403, options=options, host="localhost")


def test_pages_of_others_are_refused() -> None:
    for origin in (
        PAGE, "null", "http://localhost:8080", "http://127.0.0.1:9", "https://127.0.0.1:8080", "",
        "http://127.0.0.1:8080.x",
    ):  # fmt: skip
        refused(403, origin=origin)
        refused(403, SOCKET, origin=origin)
        refused(403, method="OPTIONS", origin=origin, access_control_request_method="POST")


def test_our_own_page_and_named_origins_may_call() -> None:
    status, headers, _, seen = call(origin="http://127.0.0.1:8080")
    assert (status, seen, headers) == (200, ["local"], {"x-own": "1"})
    refused(403, SOCKET, origin="http://127.0.0.1:8080")
    options = GuardOptions(origins=(PAGE,))
    status, headers, _, seen = call(options=options, origin=PAGE)
    assert (status, seen) == (200, ["local"])
    assert (headers["access-control-allow-origin"], headers["vary"]) == (PAGE, "Origin")
    refused(403, options=options, origin=PAGE + ".evil")
    refused(403, options=options, origin=[PAGE, PAGE])
    # Such a page sees why it was refused.
    _, headers, body, _ = call(STRANGER, options=options, origin=PAGE)
    assert (headers["access-control-allow-origin"], body["error"]["code"]) == (PAGE, "unknown_peer")


def test_pages_of_this_machine_may_call_where_they_are_let() -> None:
    options = GuardOptions(localhost_pages=True)
    for origin in ("http://localhost:5173", "http://127.0.0.1:9", "https://LOCALHOST", "http://[::1]:3000"):
        assert call(options=options, origin=origin)[1]["access-control-allow-origin"] == origin.lower()
    for origin in (
        PAGE, "null", "http://localhost.evil.example", "http://127.0.0.1.evil.example", "file://",
        "http://localhost:8080@evil.example", "http://127.0.0.2:9",
    ):  # fmt: skip
        refused(403, options=options, origin=origin)


def test_preflights_need_no_key() -> None:
    status, headers, _, seen = call(
        STRANGER, options=GuardOptions(origins=(PAGE,)), method="OPTIONS", origin=PAGE,
        access_control_request_method="POST", access_control_request_private_network="true",
    )  # fmt: skip
    assert (status, seen) == (204, [])
    assert "access-control-allow-headers" not in headers
    for names, allowed in (
        ("authorization,x-stainless-os", True), ("Content-Type, anthropic-version", True), ("*", False),
        ("a\tb", False), ("x" * 65, False), (",".join(["a"] * 65), False),
    ):  # fmt: skip
        _, headers, _, _ = call(
            options=GuardOptions(origins=(PAGE,)), method="OPTIONS", origin=PAGE,
            access_control_request_method="POST", access_control_request_headers=names,
        )  # fmt: skip
        assert headers.get("access-control-allow-headers") == (names if allowed else None)
    _, headers, _, _ = call(
        STRANGER, options=GuardOptions(origins=(PAGE,)), method="OPTIONS", origin=PAGE,
        access_control_request_method="POST", access_control_request_private_network="true",
    )  # fmt: skip
    assert headers["access-control-allow-private-network"] == "true"
    assert "access-control-allow-credentials" not in headers


def test_web_sockets_are_closed() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(Guard(None, Identity().identify)({"type": "websocket"}, None, send))  # pyright: ignore[reportArgumentType]
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_malformed_origins_and_hosts_are_refused() -> None:
    for origin in ("*", "null", "app.example", "https://app.example/", "https://*.example", "ftp://x"):
        with pytest.raises(ConfigError, match="an origin is"):
            GuardOptions(origins=(origin,))
    for host in ("*", "localhost:8080", "", "a b", "Box"):
        with pytest.raises(ConfigError, match="a host is"):
            GuardOptions(hosts=(host,))


def test_who_sends_much_sees_why_it_is_refused_within_bounds(context_service: ContextService) -> None:
    for size in 5 * [1 << 20, 6 << 20]:
        with httpx.Client(base_url=context_service.url, headers={"Authorization": "Bearer no"}) as client:
            got = client.post("/v1/completions", content=b" " * size)
        assert (got.status_code, got.json()["error"]["code"]) == (401, "invalid_api_key")
    host, _, port = context_service.url.removeprefix("http://").rpartition(":")
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer no\r\n"
    # One that waits to be told to send is refused at once; of one that sends without end too much is read.
    for more, body in (
        ("Expect: 100-continue\r\nContent-Length: 9\r\n", b""),
        ("Content-Length: 99999999\r\n", b" " * 9),
    ):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            # The service may close while the body still comes.
            with contextlib.suppress(ConnectionError):
                connection.sendall((head + more + "\r\n").encode() + body * (1 << 20))
            assert connection.recv(12) == b"HTTP/1.1 401"
