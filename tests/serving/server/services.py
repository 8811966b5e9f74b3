"""Services for tests: over HTTP as the daemon serves them, executors alone, and what is said to them."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from jaxllm import EngineOptions, GenerationConfig
from jaxllm.bundle.levels import elastic_parts
from jaxllm.client import Client
from jaxllm.elastic.ladder import Ladder
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.server import executor as executors
from jaxllm.serving.server.api.app import make_app
from jaxllm.serving.server.backend import Backend
from jaxllm.serving.server.calls import Call, Ended, Piece, Started
from jaxllm.serving.server.executor import Executor
from jaxllm.serving.server.identity import Identity, KeyFile, add_key
from jaxllm.serving.server.limits import Limits
from jaxllm.serving.server.opening import Adapters, live_turns, service_memory
from jaxllm.serving.server.scheduler import SchedulerOptions
from jaxllm.serving.server.service import LLMService
from jaxllm.serving.server.service_options import ServerOptions
from jaxllm.serving.server.sockets import GuardOptions, protocol
from tests.tiny import END_ID, write_tiny_bundle


@contextlib.contextmanager
def running(app: Any, sockets: Any = None, **config: Any) -> Iterator[uvicorn.Server]:
    """The server of an app, until the end of the block; `config` goes before what tests have."""
    own = {"lifespan": "off", "ws": "none", "log_level": "critical", "access_log": False}
    server = uvicorn.Server(uvicorn.Config(app, **{**own, **config}))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=sockets)))
    thread.start()
    try:
        while not server.started:
            thread.join(0.01)
            assert thread.is_alive()
        yield server
    finally:
        server.should_exit = True
        thread.join()


def make_executor(service: LLMService, options: SchedulerOptions | None = None, **more: Any) -> Executor:
    """An executor with the service's memory and adapters, unless others are given; not started."""
    engine = service.engine
    engine.runner.fill([each for level in engine.levels for each in engine.runner_at(level).fork_buckets()])
    more.setdefault("memory", service_memory(service))
    more.setdefault("adapters", Adapters(service.engine.model))
    return Executor(service, options or SchedulerOptions(), **more)


PROMPT = "the quick brown fox jumps over the lazy dog"


def call(prompt=PROMPT, *, app="mail", tokens=12, grammar=None, top_logprobs=None, **more):
    config = GenerationConfig(max_tokens=tokens, ignore_eos=True, grammar=grammar, top_logprobs=top_logprobs)
    return Call(app=app, request_id="1", prompt=prompt, config=config, **more)


async def read(ticket):
    return [event async for event in ticket.events()]


def written(events):
    """Text and tokens of an answer."""
    pieces = [each for each in events if isinstance(each, Piece)]
    return "".join(each.text for each in pieces), [token for each in pieces for token in each.tokens]


def together(executor, *calls):
    async def run():
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*(read(executor.submit(each, loop)) for each in calls))

    return asyncio.run(run())


WINDOW = 128
# An answer then has as many tokens as it may, the same each time.
FULL_LEVEL = {"logit_bias": {str(END_ID): -100}, "temperature": 0}


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
    """A running service, with keys of apps."""

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

    def http(self, app: str) -> httpx.Client:
        """A client of an app; closed at the end."""
        key = {"Authorization": f"Bearer {self.keys[app]}"}
        return self._clients.enter_context(httpx.Client(base_url=self.url, headers=key, timeout=60))

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


FOX = "the quick brown fox"


def made(http, **options):
    answer = http.post("/v1/contexts", json=options)
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


def said(http, name, prompt, tokens=8, **more):
    """The answer to a text, token ids or messages in a context."""
    field = "messages" if isinstance(prompt, list) and isinstance(prompt[0], dict) else "prompt"
    body = {field: prompt, "max_tokens": tokens, **FULL_LEVEL, **more}
    return http.post(f"/v1/contexts/{name}/generate", json=body)


def facts(http, name, prompt, tokens=8, **more):
    answer = said(http, name, prompt, tokens, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()["jaxllm"]


def user(text):
    return {"role": "user", "content": text}


@contextlib.contextmanager
def slowly(monkeypatch):
    """Steps take a while, so that answers run while others come."""
    real = executors.step

    def step(run):
        time.sleep(0.05)
        return real(run)

    with monkeypatch.context() as patch:
        patch.setattr(executors, "step", step)
        yield


def until(there: Callable[[], object]) -> None:
    """Waits for what comes in a moment."""
    late_s = time.monotonic() + 60
    while not there():
        assert time.monotonic() < late_s, "it did not come about"
        time.sleep(0.01)


def idle(served):
    """Waits until the engine has noticed that a client has left."""
    until(lambda: not served.executor.queue().work)


@contextlib.contextmanager
def streamed(http, name, tokens=40):
    body = {"prompt": FOX, "max_tokens": tokens, "stream": True, **FULL_LEVEL}
    with http.stream("POST", f"/v1/contexts/{name}/generate", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        yield answer.iter_lines()


MB = 1 << 20
STARTED = Started(
    prompt_tokens=120, kept_tokens=96, reused_tokens=64, level=70, source="proposed", queued_ms=12.0
)
ENDED = Ended(
    finish_reason="stop", stop_string=None, tokens=21, ttft_ms=200.0, tpot_ms=30.0, engine_ttft_ms=180.0,
    engine_tpot_ms=25.0, met=True, drafted=0.5, seed=1,
)  # fmt: skip
FIGURES = {
    "queue": {"waiting": 2, "limit": 64, "oldest_ms": 84.0},
    "running": {"assistant": {100: 1}, "mail": {70: 2}, "keyboard": {30: 1}},
    "memory": {
        "process_bytes": 1710 * MB, "limit_bytes": 2048 * MB, "pressure": 0.004, "children_bytes": 13 * MB,
        "parts": {"weights": 912 * MB, "rest": 798 * MB}, "pages": {"heap": 1710 * MB}, "holdings": {
            "weights": {"size_bytes": 912 * MB},
            "kv": {"size_bytes": 118 * MB},
            "contexts": {"size_bytes": 143 * MB, "limit_bytes": 256 * MB, "least_bytes": 16 * MB},
        },
    },
    "contexts": {
        "assistant": {"contexts": 6, "pinned": 1, "stored_bytes": 61 * MB, "chunks": {"raw": 12, "8": 96}},
        "mail": {"contexts": 14, "pinned": 0, "stored_bytes": 88 * MB, "chunks": {"raw": 0, "2": 301}},
    },
    "adapters": {"mail-tone": 6 * MB},
    "experts": {"visits": 120_400, "hits": 109_322, "foreseen": 31_220, "hit_rate": 109_322 / 120_400},
    "read_bytes": {"weights": 0, "experts": 5_400 * MB, "contexts": 310 * MB},
    "grammars": {"compiled": 5, "refused": 1, "ended": 2},
}  # fmt: skip
