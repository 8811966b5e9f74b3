"""Serves the front on a Unix socket, in a thread, with uvicorn, over a scripted backend in memory."""

import asyncio
import collections
import dataclasses
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx
import httpx2
import pytest

from jaxllm.elastic.slo import Slo
from jaxllm.errors import ContextGone
from jaxllm.serving.elastic.objectives import Binding
from jaxllm.serving.engine.decoding import TokenLogprob
from jaxllm.serving.server import calls
from jaxllm.serving.server.api.app import make_app
from jaxllm.serving.server.api.errors import ApiError
from jaxllm.serving.server.api.requests import ApiState
from jaxllm.serving.server.calls import AdapterFacts, Call, ContextFacts, Conversation, Event, ModelFacts
from jaxllm.serving.server.device_state import DeviceState
from jaxllm.serving.server.limits import Bindings
from tests.serving.server.api.scripted import answer_format, patched
from tests.serving.server.services import running


class FedTicket:
    """What a reader sees of a job, whose events a generator gives."""

    def __init__(self) -> None:
        self.news, self.cancelled = asyncio.Event(), False
        self._events: collections.deque[Any] = collections.deque()
        self._feeding: asyncio.Future[None] | None = None

    def taken(self) -> Any:
        if self._feeding is None:
            self._feeding = asyncio.ensure_future(self._feed())
        if not self._events:
            return None
        if isinstance(event := self._events.popleft(), Exception):
            raise event
        return event

    async def _feed(self) -> None:
        try:
            async for event in self.events():
                self._events.append(event)
                self.news.set()
        except Exception as error:
            self._events.append(error)
            self.news.set()

    def cancel(self) -> None:
        self.cancelled = True
        if self._feeding is not None:
            self._feeding.cancel()

    def events(self) -> AsyncIterator[Any]:
        raise NotImplementedError


class FakeTicket(FedTicket):
    """Gives its pieces, or waits for ever where it is told to."""

    def __init__(self, backend: "FakeBackend", call: Call) -> None:
        super().__init__()
        self._backend, self.call = backend, call
        self.answers_s: list[float] = []
        self.progress, self.arrived_s = backend.progress, -1.0

    def saw_answer(self, at_s: float) -> None:
        self.answers_s.append(at_s)

    async def events(self) -> AsyncIterator[Event]:
        backend = self._backend
        if backend.hangs_at == "prefill":
            await asyncio.Event().wait()
        await asyncio.sleep(backend.silent_s)
        if backend.error is not None:
            raise backend.error
        yield calls.Started(
            prompt_tokens=7, kept_tokens=7, reused_tokens=3, level=70, source="profile", queued_ms=1.0
        )
        for index, text in enumerate(backend.said(self.call)):
            logprobs = None
            if (count := self.call.config.top_logprobs) is not None:
                top = tuple((65 + i, -1.0 - i) for i in range(count))
                logprobs = (TokenLogprob(65, -0.5, top),)
            yield calls.Piece(text, (65,), logprobs, at_s=index)
            if backend.late_error is not None:
                raise backend.late_error
            if backend.hangs_at == "decode" and index == 0:
                await asyncio.Event().wait()
        yield calls.Ended(
            finish_reason=backend.finish_reason, stop_string=backend.stop_string, tokens=len(backend.pieces),
            ttft_ms=5.0, tpot_ms=2.0, engine_ttft_ms=4.0, engine_tpot_ms=2.0, met=True, drafted=0.0,
            seed=self.call.config.sampling.seed or 0, context=self.call.context, context_tokens=9,
        )  # fmt: skip


class FakeBackend:
    """See `jaxllm.serving.server.backend.Backend`."""

    def __init__(self, *pieces: str, template: str = "") -> None:
        self.pieces = pieces or ("Hel", "lo")
        self.template = template
        self.error: Exception | None = None
        self.late_error: Exception | None = None
        self.refusal: Exception | None = None
        self.hangs_at = ""
        self.finish_reason: Literal["stop", "length"] = "stop"
        self.sampling: dict[str, float] = {}
        # Gives the pieces of the answer to a call, where they depend on it.
        self.script: Callable[[Call], Sequence[str]] | None = None
        self.silent_s = 0.0
        self.progress: Mapping[str, int] | None = None
        self.opens_thought, self.obeys = False, True
        self.stop_string: str | None = None
        self.infill: tuple[str, ...] = ()
        self.alive = self.ready = True
        self.tickets: list[FakeTicket] = []
        self.kept: dict[tuple[str, str], ContextFacts] = {}
        self.bindings = Bindings({"bound": Binding(Slo(ttft=0.4, tpot=0.7), strict=True)})
        self.named = {"mail": AdapterFacts(name="mail", digest="d1", size_bytes=5, created_s=1.0)}
        self.device = DeviceState()

    def require_executor(self) -> "FakeBackend":
        return self

    def said(self, call: Call) -> Sequence[str]:
        return self.pieces if self.script is None else self.script(call)

    @property
    def calls(self) -> list[Call]:
        return [ticket.call for ticket in self.tickets]

    def facts(self) -> ModelFacts:
        return ModelFacts(
            name="tiny", window_tokens=128, vocab_size=300, levels=(70, 100), has_chat_template=True,
            adapters=tuple(self.named), opened_s=1.0, chat_template=self.template,
            answer_format=answer_format(self.template), sampling=self.sampling, infill=self.infill,
            digest="d1" * 32, size_bytes=7, weights="int8", architecture="llama",
            shape={"parameters": 6_500_000, "layers": 2, "heads": 4, "kv_heads": 2, "hidden_size": 8},
        )  # fmt: skip

    def submit(self, call: Call) -> FakeTicket:
        if self.refusal is not None:
            raise self.refusal
        if call.context and (call.app, call.context) not in self.kept:
            raise ContextGone(f"no context {call.context!r}")
        self.tickets.append(FakeTicket(self, call))
        return self.tickets[-1]

    async def tokenize(
        self, prompt: Conversation | str, *, special: bool = True, longer: bool = False
    ) -> Sequence[int]:
        text = prompt if isinstance(prompt, str) else await self.render(prompt)
        return list(text.encode())

    async def detokenize(self, ids: Sequence[int]) -> str:
        return bytes(each for each in ids if each < 256).decode(errors="replace")

    async def token_bytes(self, ids: Sequence[int], *, begins: bool = False) -> Sequence[bytes]:
        return [bytes([each]) for each in ids]

    async def render(self, prompt: Conversation) -> str:
        text = "".join(f"{each['role']}: {each['content']}\n" for each in prompt.messages)
        off = self.obeys and prompt.template_options.get("enable_thinking") is False
        opens = self.opens_thought and not off
        return text + ("<think>\n" if opens else "")

    async def embed(self, app: str, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[float]]:
        return [[0.6, 0.8] for _ in prompts]

    def adapters(self) -> Sequence[AdapterFacts]:
        return list(self.named.values())

    async def load_adapter(self, app: str, name: str, folder: str) -> AdapterFacts:
        self.named[name] = AdapterFacts(name=name, digest=folder, size_bytes=7, created_s=2.0)
        return self.named[name]

    async def unload_adapter(self, app: str, name: str) -> None:
        if self.named.pop(name, None) is None:
            raise calls.AdapterGone(f"no adapter {name!r}")

    async def bind(self, app: str, binding: Binding) -> Sequence[int]:
        self.bindings.bind(app, binding)
        return (8,)

    async def contexts(self, app: str, what: Callable[[Any], Any]) -> Any:
        return what(self)

    async def list_contexts(self, app: str) -> Sequence[ContextFacts]:
        return [facts for (owner, _), facts in self.kept.items() if owner == app]

    async def delete_context(self, app: str, name: str) -> None:
        self.found(app, name)
        del self.kept[app, name]

    # As of `ContextTurns`.

    def create(self, app: str, *, level: int | None, pinned: bool, adapter: str) -> ContextFacts:
        name = f"c{len(self.kept)}"
        facts = ContextFacts(
            name=name, tokens=0, level=level or 100, pinned=pinned, stored_bytes=0, adapter=adapter
        )
        return self.kept.setdefault((app, name), facts)

    def found(self, app: str, name: str) -> ContextFacts:
        if (app, name) not in self.kept:
            raise ContextGone("no such context")
        return self.kept[app, name]

    def pin(self, app: str, name: str, pinned: bool) -> ContextFacts:
        self.kept[app, name] = dataclasses.replace(self.found(app, name), pinned=pinned)
        return self.kept[app, name]

    async def readiness(self) -> Mapping[str, Any]:
        return self.health()

    def health(self) -> Mapping[str, Any]:
        return {"alive": self.alive, "ready": self.ready}


LIMITS = {"body_bytes": 1 << 17, "body_s": 2.0, "answers_per_request": 4, "stored_response_bytes": 1 << 18}


def identify(scope: MutableMapping[str, Any]) -> str:
    """The key is the app's name, and an operator's; without one it is `local`."""
    key = dict(scope["headers"]).get(b"authorization", b"Bearer local").decode().removeprefix("Bearer ")
    if key == "wrong":
        raise ApiError("the API key is not valid", status=401)
    scope["jaxllm.operator"] = True
    return key


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
        patched(patch)
        app = make_app(served, identify=identify)
        served.front_seals = app.state.api.seals
        with running(app, uds=served.path), served.http:
            yield served


@pytest.fixture
def served(front: Served) -> Served:
    front.backend = FakeBackend()
    return front
