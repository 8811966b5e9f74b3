"""Serves the front on a Unix socket, in a thread, with uvicorn."""

import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import httpx
import httpx2
import pytest

from jaxllm.serving.server.api.app import make_app
from jaxllm.serving.server.api.errors import ApiError
from jaxllm.serving.server.api.requests import ApiState
from tests.serving.server.api.fake import FakeBackend
from tests.serving.server.running import running

LIMITS = {"body_bytes": 1 << 17, "body_s": 2.0, "answers_per_request": 4, "stored_response_bytes": 1 << 18}


def identify(scope: Mapping[str, Any]) -> str:
    """The key is the app's name; without one it is `local`."""
    key = dict(scope["headers"]).get(b"authorization", b"Bearer local").decode().removeprefix("Bearer ")
    if key == "wrong":
        raise ApiError("the API key is not valid", status=401)
    return key


def operating(scope: MutableMapping[str, Any]) -> str:
    """The same, of operators."""
    scope["jaxllm.operator"] = True
    return identify(scope)


class Served:
    """A running front.

    Attributes:
      path: of its socket.
      http: a client.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.backend = FakeBackend()
        self.http = httpx.Client(
            transport=httpx.HTTPTransport(uds=path), base_url="http://localhost", timeout=20
        )

    def own(self, base: str = "") -> dict[str, Any]:
        """What OpenAI's and Anthropic's clients of the app `app` are made with."""
        transport = httpx2.HTTPTransport(uds=self.path)
        return {
            "api_key": "app", "base_url": f"http://localhost{base}", "max_retries": 0,
            "http_client": httpx2.Client(transport=transport),
        }  # fmt: skip

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self.http.post(path, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})

    def __getattr__(self, name: str) -> Any:
        """The app's backend is the newest, so that each test scripts its own."""
        return getattr(self.backend, name)


@pytest.fixture(scope="session")
def front() -> Iterator[Served]:
    # Paths of sockets are short.
    with tempfile.TemporaryDirectory(prefix="api") as folder, pytest.MonkeyPatch.context() as patch:
        for name, limit in LIMITS.items():
            patch.setattr(ApiState, name, limit)
        served = Served(str(Path(folder) / "s"))
        app = make_app(served, identify=operating)
        with running(app, uds=served.path), served.http:
            yield served


@pytest.fixture
def served(front: Served) -> Served:
    front.backend = FakeBackend()
    return front
