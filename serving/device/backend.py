"""Gives the HTTP front what a device's service can do (see `serving.server.calls.Backend`).

One thread owns the engine. It answers one call at a time, foreground calls first, and does other work between
two of an answer's steps.
"""

import asyncio
import collections
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime
from typing import Any, TypeVar

from jaxllm.errors import ConfigError, JaxllmError
from serving.device.contexts import DeviceContexts
from serving.device.jobs import Job, begin
from serving.device.service import DeviceService
from serving.images.encoded import EncodedImage
from serving.planning.objectives import Binding
from serving.server.calls import AdapterGone, Call, ContextBusy, Conversation, Refused
from serving.server.facts import AdapterFacts, ContextFacts, ModelFacts
from serving.server.objectives import Bindings
from serving.server.prompts import guided, prompt_ids_of, prompt_of
from serving.server.ticket import EngineTicket
from serving.step import fail, step

_log = logging.getLogger(__name__)
_RETRY_S = 2.0
Found = TypeVar("Found")


class DeviceBackend:
    """A backend on a service, from its making to `close`.

    Args:
      service: used by the engine's thread alone from here on.
      queued: most calls that wait.
    """

    def __init__(self, service: DeviceService, *, queued: int = 64) -> None:
        self._service, self._queued = service, queued
        engine = service.engine
        self._manifest = engine.model.executor.manifest
        self._facts = ModelFacts(
            name=engine.name,
            window_tokens=engine.options.context_tokens,
            vocab_size=engine.cfg.vocab_size,
            levels=engine.levels,
            has_chat_template=engine.tokenizer.has_chat_template,
            adapters=engine.model.adapters,
            opened_s=time.time(),
            chat_template=engine.tokenizer.chat_template,
        )
        self._tokenizer = engine.tokenizer.limited(engine.options.context_tokens)
        self._bindings = Bindings()
        self._wake = threading.Condition()
        # Guarded by `_wake`.
        self._waiting: list[EngineTicket] = []
        self._work: collections.deque[tuple[Callable[[], Any], Future[Any]]] = collections.deque()
        self._closing = False
        self._running: EngineTicket | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Takes no more calls, ends those that run or wait, and closes the service."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self._service.close()

    # -- the event loop's side --------------------------------------------------------------------

    def facts(self) -> ModelFacts:
        """See `Backend`."""
        return self._facts

    def submit(self, call: Call) -> EngineTicket:
        """See `Backend`; what is wrong with a turn in a context is told by the ticket's events."""
        self._require_adapter(call.adapter)
        call = guided(self._bindings.applied(call))
        if call.context:
            self._contexts()
        else:
            engine = self._service.engine
            request = engine.request(prompt_of(self._tokenizer, call).ids.tolist(), call.config)
            request.require_served_by(engine.runner)
        ticket = EngineTicket(call, asyncio.get_running_loop(), self._notify)
        with self._wake:
            self._require_taking()
            if len(self._waiting) >= self._queued:
                raise Refused(
                    f"{self._queued} calls wait; try again later", reason="full", retry_after_s=_RETRY_S
                )
            self._waiting.append(ticket)
            self._wake.notify()
        return ticket

    async def tokenize(self, prompt: Conversation | str, *, special: bool = True) -> Sequence[int]:
        """See `Backend`."""
        if isinstance(prompt, str):
            return await asyncio.to_thread(
                self._tokenizer.encode, prompt, add_special_tokens=special, special=special
            )
        return await asyncio.to_thread(prompt_ids_of, self._tokenizer, prompt)

    async def detokenize(self, ids: Sequence[int]) -> str:
        """See `Backend`."""
        return await asyncio.to_thread(self._tokenizer.decode, ids)

    async def render(self, prompt: Conversation) -> str:
        """See `Backend`."""
        return await asyncio.to_thread(
            self._tokenizer.render_chat, list(prompt.messages), tools=prompt.tools, now=datetime.now()
        )

    async def embed(self, app: str, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[float]]:
        """Refuses: programs give logits, and no hidden states."""
        raise ConfigError("exported programs embed no texts; use `jaxllm serve` with a bundle")

    async def encode_images(self, app: str, files: Sequence[bytes]) -> tuple[EncodedImage, ...]:
        """Refuses: no encoder of images is exported."""
        raise ConfigError("exported programs read no images; use `jaxllm serve` with a bundle")

    def adapters(self) -> Sequence[AdapterFacts]:
        """Those that were exported with the model."""
        adapters, inputs = self._service.engine.model.executor.adapters, self._manifest.adapters
        size = 0 if inputs is None else inputs.file_bytes
        return [
            AdapterFacts(
                name=each, digest=adapters.digest(each), size_bytes=size, loaded_s=self._facts.opened_s
            )
            for each in adapters.names
        ]

    async def load_adapter(self, app: str, name: str, folder: str) -> AdapterFacts:
        """Refuses: adapters are exported with the model."""
        raise ConfigError(
            "programs take the adapters that they were exported with; export the model with --adapter-input"
        )

    async def unload_adapter(self, app: str, name: str) -> None:
        """Refuses: they are the folder's."""
        self._require_adapter(name)
        raise ConfigError(f"the adapter {name!r:.80} was exported with the programs, and stays")

    def binding(self, app: str) -> tuple[Binding | None, bool]:
        """See `Backend`."""
        return self._bindings.of(app), self._bindings.is_own(app)

    async def bind(self, app: str, binding: Binding) -> Sequence[int]:
        """See `Backend`."""
        missed = await self._soon(functools.partial(self._service.unmet, binding.objective))
        self._bindings.bind(app, binding)
        return missed.get(binding.objective, ())

    def unbind(self, app: str) -> None:
        """See `Backend`."""
        self._bindings.unbind(app)

    async def create_context(
        self, app: str, *, level: int | None = None, pinned: bool = False, adapter: str = ""
    ) -> ContextFacts:
        """See `Backend`."""
        self._require_adapter(adapter)
        contexts = self._contexts()

        def create() -> ContextFacts:
            return contexts.facts(contexts.create(app, level=level, pinned=pinned, adapter=adapter))

        return await self._soon(create)

    async def contexts(self, app: str) -> Sequence[ContextFacts]:
        """See `Backend`."""
        contexts = self._service.contexts
        if contexts is None:
            return ()
        return await self._soon(lambda: [contexts.facts(each) for each in contexts.store.records(app)])

    async def pin_context(self, app: str, name: str, pinned: bool) -> ContextFacts:
        """See `Backend`."""
        contexts = self._contexts()
        return await self._soon(lambda: contexts.facts(contexts.pin(app, name, pinned)))

    async def delete_context(self, app: str, name: str) -> None:
        """See `Backend`."""
        contexts = self._contexts()

        def delete() -> None:
            record = contexts.store.record(name, app)
            if contexts.running == name:
                raise ContextBusy(f"the context {name} answers a call; wait for its end, or close it")
            contexts.delete(record.name)

        await self._soon(delete)

    def health(self) -> Mapping[str, Any]:
        """See `Backend`."""
        alive, why = self._thread.is_alive(), "draining" if self._closing else ""
        return {
            "ready": alive and not why, "alive": alive,
            "why": why or ("" if alive else "the engine's thread has ended"),
        }  # fmt: skip

    def snapshot(self) -> Mapping[str, Any]:
        """See `Backend`."""
        running, waiting = self._running, list(self._waiting)
        oldest_s = min((each.arrived_s for each in waiting), default=time.perf_counter())
        return {
            "queue": {
                "waiting": len(waiting),
                "limit": self._queued,
                "oldest_ms": 1000 * (time.perf_counter() - oldest_s),
            },
            "running": [] if running is None else [{"app": running.call.app, "count": 1}],
        }

    def _contexts(self) -> DeviceContexts:
        if self._service.contexts is None:
            raise ConfigError("this service keeps no contexts; start it with a folder for them (--contexts)")
        return self._service.contexts

    def _require_adapter(self, name: str) -> None:
        if name and name not in self._facts.adapters:
            known = ", ".join(map(repr, self._facts.adapters)) or "none"
            raise AdapterGone(
                f"the programs have no adapter {name!r:.80}, but {known}; export the model with "
                "--adapter-input NAME=DIR"
            )

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _require_taking(self) -> None:
        if self._closing:
            raise Refused("the service is stopping; try again later", reason="draining")

    async def _soon(self, what: Callable[[], Found]) -> Found:
        """What a function returns in the engine's thread, between two steps."""
        future: Future[Found] = Future()
        with self._wake:
            self._require_taking()
            self._work.append((what, future))
            self._wake.notify()
        return await asyncio.wrap_future(future)

    # -- the engine's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._waiting or self._work or self._closing):
                    self._wake.wait()
                ticket = self._next()
                closing = self._closing
            self._do_work()
            if ticket is not None and not ticket.cancelled:
                self._running = ticket
                with self._failing(ticket):
                    self._answer(ticket)
                self._running = None
            if closing:
                break
        stopping = Refused("the service has stopped", reason="draining")
        for each in self._waiting:
            each.put(stopping)
        for _, future in self._work:
            future.set_exception(stopping)

    def _next(self) -> EngineTicket | None:
        """Takes the call that has waited longest, a foreground call before all others."""
        if not self._waiting or self._closing:
            return None
        found = min(self._waiting, key=lambda each: (each.call.priority != "foreground", each.arrived_s))
        self._waiting.remove(found)
        return found

    def _answer(self, ticket: EngineTicket) -> None:
        job: Job = begin(ticket, self._service, self._tokenizer)
        run = job.run
        try:
            while run.stage != "ended":
                if ticket.cancelled or self._closing:
                    if not ticket.cancelled:
                        ticket.put(Refused("the service has stopped in the middle", reason="draining"))
                    fail(run)
                    return
                run.resume()
                step(run)
                job.tell()
                self._do_work()
        except BaseException:
            fail(run)
            raise

    def _do_work(self) -> None:
        while self._work:
            what, future = self._work.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(what())
                except Exception as error:
                    future.set_exception(error)

    @contextlib.contextmanager
    def _failing(self, ticket: EngineTicket) -> Any:
        """Ends a call by what is raised in here."""
        try:
            yield
        except JaxllmError as error:
            ticket.put(error)
        except Exception as error:
            _log.exception("the engine failed while it answered")
            name = type(error).__name__
            ticket.put(JaxllmError(f"the engine failed while it answered ({name}); see its log"))
