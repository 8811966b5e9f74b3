"""Serves a tiny model with contexts over HTTP, as the daemon does, for apps with keys."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from jaxllm import EngineOptions
from jaxllm.bundle.levels import elastic_parts
from jaxllm.client import Client
from jaxllm.elastic.ladder import Ladder
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.server.adapters import Adapters
from jaxllm.serving.server.api.app import make_app
from jaxllm.serving.server.backend import Backend
from jaxllm.serving.server.identity import Identity, KeyFile, add_key
from jaxllm.serving.server.limits import Limits
from jaxllm.serving.server.opening import live_turns
from jaxllm.serving.server.scheduler import SchedulerOptions
from jaxllm.serving.server.service import LLMService
from jaxllm.serving.server.service_options import ServerOptions
from jaxllm.serving.server.sockets import GuardOptions, protocol
from tests.serving.server.executors import make_executor
from tests.serving.server.running import running
from tests.tiny import END_ID, write_tiny_bundle

WINDOW = 128
# An answer then has as many tokens as it may, the same each time.
WHOLE = {"logit_bias": {str(END_ID): -100}, "temperature": 0}


def open_tiny(folder: Path, *, adapter_rank: int = 0) -> LLMService:
    """A service with contexts in `folder`."""
    parts = elastic_parts(Ladder(levels=(50, 100)))
    path = write_tiny_bundle(folder / "tiny.jaxllm", "int8", parts=parts)
    engine = EngineOptions(
        context_tokens=WINDOW, cache_tokens=(WINDOW,), chunk_tokens=(16,), decode_block=4, buckets_bytes=0,
        batch_rows=(2,), adapter_rank=adapter_rank,
    )  # fmt: skip
    return LLMService.open(path, options=engine, contexts=ContextOptions(folder=folder / "contexts"))


class ContextService:
    """A running service.

    Attributes:
      service: that answers.
      backend: of the front.
      keys: of apps.
      url: of the service.
    """

    def __init__(self, service: LLMService, folder: Path, adapters: ServerOptions | None = None) -> None:
        self.service, self._folder, self._adapters = service, folder, adapters
        self.backend = Backend(Limits())
        self.keys = {app: add_key(folder / "keys.json", app)[0] for app in ("mail", "spy")}
        self.keys["admin"] = add_key(folder / "keys.json", "admin", operator=True)[0]
        self.executor: Any = None
        self._sockets = [socket.create_server(("127.0.0.1", 0))]
        self.url = f"http://127.0.0.1:{self._sockets[0].getsockname()[1]}"
        self._clients = contextlib.ExitStack()
        self.begin()

    def begin(self) -> None:
        """Answers calls."""
        adapters = Adapters(self.service.engine.model, self._adapters)
        turns = live_turns(self.service, adapters, self.backend.limits_of)
        options = SchedulerOptions(batch_rows=max(self.service.engine.options.batch_rows, default=1))
        self.executor = make_executor(
            self.service, options, contexts=turns, adapters=adapters,
            on_dispatch=self.backend.metrics.report,
        )  # fmt: skip
        self.executor.start()
        self.backend.opened(self.executor, "tiny")

    def restart(self, **options: Any) -> None:
        """Ends all calls, closes the store and opens it again."""
        self.without_adapter()
        self.executor.stop(0)
        contexts = self.service.contexts
        assert contexts is not None
        before = {"folder": contexts.options.folder, "encryption": contexts.options.encryption}
        contexts.close()
        self.service.contexts = Contexts(self.service.engine, ContextOptions(**before | options))
        self.begin()

    def without_adapter(self) -> None:
        """Takes away the adapter of the last call, as a call without one does."""
        self.executor.work("mail", lambda: self.executor.adapters.use("")).result(60)

    def http(self, app: str, **headers: str) -> httpx.Client:
        """A client of an app; closed at the end."""
        key = {"Authorization": f"Bearer {self.keys[app]}"}
        return self._clients.enter_context(httpx.Client(base_url=self.url, headers=key | headers, timeout=60))

    def client(self, app: str) -> Client:
        """Our own client of an app; closed at the end."""
        return self._clients.enter_context(Client(self.url, api_key=self.keys[app]))

    @contextlib.contextmanager
    def serving(self) -> Iterator["ContextService"]:
        """Serves until the end of the block."""
        identity = Identity(keys=KeyFile(self._folder / "keys.json"))
        front = make_app(self.backend, identify=identity.identify, guard=GuardOptions())
        with running(front, self._sockets, http=protocol({})):
            try:
                yield self
            finally:
                self._clients.close()
                self.executor.stop(0)
        self.backend.close()
        self.service.close()
