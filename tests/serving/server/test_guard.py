"""The guard: what web pages and strangers are told, and that the app behind it does not see their calls."""

import asyncio
import contextlib
import json
import socket
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from jaxllm.errors import ConfigError
from jaxllm.serving.server.api.app import Guard
from jaxllm.serving.server.identity import Identity
from jaxllm.serving.server.sockets import EXTENSION, Credentials, GuardOptions, Peer
from tests.serving.server.context_service import ContextService

LOOPBACK, SOCKET = Peer(address="127.0.0.1"), Peer(credentials=Credentials(1, 7, 7), app="uid-7")
STRANGER = Peer(address="10.0.0.9")
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
    assert call()[3] == ["local"]
    assert call(SOCKET)[3] == ["uid-7"]
    # Over a socket no page calls, and clients send any name.
    assert call(SOCKET, host="anything.example")[0] == 200
    assert call(SOCKET, host=[])[0] == 200
    assert call(STRANGER, path="/health")[3] == [""]
    assert refused(401, STRANGER)["type"] == "authentication_error"
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


def test_preflights_need_no_key() -> None:
    status, headers, _, seen = call(
        STRANGER, options=GuardOptions(origins=(PAGE,)), method="OPTIONS", origin=PAGE,
        access_control_request_method="POST", access_control_request_private_network="true",
    )  # fmt: skip
    assert (status, seen) == (204, [])
    assert "authorization" in headers["access-control-allow-headers"]
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
            connection.sendall((head + more + "\r\n").encode() + body * (1 << 20))
            assert connection.recv(12) == b"HTTP/1.1 401"
