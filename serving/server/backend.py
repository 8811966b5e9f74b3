"""Gives the front the functions of any kind of engine (see `jaxllm.serving.server.calls.Backend`) without
blocking its loop; enforces apps' limits, and counts each call from submission to end."""

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from jaxllm.errors import BudgetExceeded, ConfigError, JaxllmError
from jaxllm.serving.elastic.objectives import Binding
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.images.prompt import EncodedImage, require_encoder
from jaxllm.serving.server.calls import (
    AdapterBusy,
    AdapterFacts,
    Call,
    ContextFacts,
    Conversation,
    Ended,
    Event,
    ModelFacts,
    Piece,
    Refused,
    Started,
)
from jaxllm.serving.server.executor import Executor
from jaxllm.serving.server.job import Job, require_free
from jaxllm.serving.server.limits import Admission, AppLimits, Limiter, Limits
from jaxllm.serving.server.logs import CallRecord, current_request
from jaxllm.serving.server.metrics import Metrics
from jaxllm.serving.server.objectives import Bindings
from jaxllm.serving.server.prompts import content_tokens, images_of, rendered, whole_prompt_ids
from jaxllm.text.token_bytes import TokenBytes

# Maximum time of a dispatch before the engine counts as stuck.
_STUCK_S = 120.0
# Timeout of the engine's answer to a readiness request.
_CANARY_S = 10.0
Result = TypeVar("Result")


class EngineBackend:
    """A backend on an executor; it refuses calls before `opened`.

    Attributes:
      executor: runs the calls; None while the model is loading.
      bindings: objectives of apps.
      limiter: limits of all apps; replaceable.
      metrics: counts of all calls.
    """

    def __init__(self, limits: Limits | None = None, bindings: Bindings | None = None) -> None:
        self.limiter, self.metrics = Limiter(limits or Limits()), Metrics(self.snapshot)
        self.bindings = bindings or Bindings()
        self.executor: Executor | None = None
        self._facts: ModelFacts | None = None
        self._token_bytes: TokenBytes | None = None
        self._why = "loading"
        self._profile: Callable[[], Mapping[str, Any]] | None = None
        self._storage: Callable[[], Mapping[str, Any]] = dict
        self._pool = ThreadPoolExecutor(2, "tokenizer")
        # One at a time: a decoded image needs tens of megabytes.
        self._images = ThreadPoolExecutor(1, "images")

    def opened(
        self,
        executor: Executor,
        name: str = "",
        *,
        profile: Callable[[], Mapping[str, Any]] | None = None,
        storage: Callable[[], Mapping[str, Any]] = dict,
        model_sampling: bool = True,
    ) -> None:
        """Starts answering calls.

        Args:
          executor: a started executor.
          name: model name in calls; empty for the model's own.
          profile: returns facts of the device profile used by plans, for `health`; None for none.
          storage: returns counts of reads from storage (see `Backend.snapshot`).
          model_sampling: whether calls without sampling options default to the model's recommended sampling.
        """
        self._profile, self._storage = profile, storage
        engine = executor.service.engine
        self._facts = ModelFacts(
            name=name or engine.name,
            window_tokens=engine.options.context_tokens,
            vocab_size=engine.cfg.vocab_size,
            levels=engine.levels,
            has_chat_template=engine.tokenizer.has_chat_template,
            adapters=(),
            opened_s=time.time(),
            chat_template=engine.tokenizer.chat_template,
            sampling=engine.tokenizer.files.sampling if model_sampling else {},
            images=_reads_images(engine),
        )
        self._token_bytes = TokenBytes(engine.tokenizer)
        self.executor, self._why = executor, ""

    def draining(self) -> None:
        """Marks the backend as not ready."""
        self._why = "draining"

    def facts(self) -> ModelFacts:
        """See `Backend`."""
        adapters = self._ready().adapters.names
        assert self._facts is not None
        return dataclasses.replace(self._facts, adapters=adapters)

    def submit(self, call: Call) -> Job:
        """See `Backend`; encodes the prompt within the window.

        Raises:
          Refused: also if a limit of the app is reached.
        """
        try:
            executor, call = self._ready(), self.bindings.applied(call)
            call, prompt_tokens = self._counted(executor, call)
            admission = self.limiter.admit(
                call.app,
                prompt_tokens=prompt_tokens,
                max_tokens=call.config.max_tokens,
                now_s=time.monotonic(),
            )
            try:
                job = executor.canary.watched(lambda: executor.submit(call, asyncio.get_running_loop()))
            except BaseException:
                admission.ended(tokens=0, now_s=time.monotonic())
                raise
        except Refused as error:
            self.metrics.refused(call.app, error.reason)
            raise
        self.metrics.accepted(call.app)
        record, request = CallRecord(), current_request()
        if request is not None:
            request.calls.append(record)
        job.on_event = functools.partial(self._account, call.app, admission, record)
        return job

    def limits_of(self, app: str) -> AppLimits:
        """An app's limits now. From any thread."""
        return self.limiter.limits.of(app)

    def _counted(self, executor: Executor, call: Call) -> tuple[Call, int]:
        """The call with its encoded prompt and the number of prompt tokens, if the app's tokens are limited;
        the executor encodes other prompts once it has room for them. A turn in a context only counts its
        messages, since the context's tokens were counted when they came."""
        if not self.limits_of(call.app).tokens_per_minute:
            return call, 0
        engine = executor.service.engine
        tokenizer = engine.tokenizer.limited(engine.options.context_tokens)
        if call.context:
            return call, content_tokens(tokenizer, call.prompt)
        prompt = whole_prompt_ids(tokenizer, call.prompt, call.config.task)
        # Ids without rows would lose the prompt embeddings of images.
        return (call if images_of(call.prompt) else dataclasses.replace(call, prompt=prompt)), len(prompt)

    def _account(
        self, app: str, admission: Admission, record: CallRecord, event: Event | JaxllmError | None
    ) -> None:
        """Counts an event of a call when its reader gets it (see `Job.on_event`)."""
        match event:
            case Started():
                record.started = event
                admission.started()
                self.metrics.started(app, event)
                return
            case Piece():
                record.tokens += len(event.tokens)
                return
            case Ended():
                record.ended, record.tokens, record.outcome = event, event.tokens, "ended"
                self.metrics.ended(app, event)
            case None:
                self.metrics.cancelled(app)
            case _:
                record.outcome = type(event).__name__
                self.metrics.failed(app, record.outcome)
        start = record.started
        prompt = 0 if start is None else start.prompt_tokens - start.context_tokens
        admission.ended(tokens=prompt + record.tokens, now_s=time.monotonic())

    async def tokenize(self, prompt: Conversation | str, *, special: bool = True) -> Sequence[int]:
        """See `Backend`."""
        engine = self._ready().service.engine
        tokenizer = engine.tokenizer.limited(engine.options.context_tokens)
        if isinstance(prompt, str):
            return await self._work(
                lambda: tokenizer.encode(prompt, add_special_tokens=special, special=special)
            )
        return await self._work(lambda: whole_prompt_ids(tokenizer, prompt))

    async def detokenize(self, ids: Sequence[int]) -> str:
        """See `Backend`."""
        tokenizer = self._ready().service.engine.tokenizer
        return await self._work(lambda: tokenizer.decode(ids))

    async def token_bytes(self, ids: Sequence[int], *, begins: bool = False) -> Sequence[bytes]:
        """See `Backend`."""
        self._ready()
        found = self._token_bytes
        assert found is not None
        return await self._work(lambda: found.of(ids, begins=begins))

    async def render(self, prompt: Conversation) -> str:
        """See `Backend`."""
        engine = self._ready().service.engine
        tokenizer = engine.tokenizer.limited(engine.options.context_tokens)
        return await self._work(lambda: rendered(tokenizer, prompt))

    async def embed(self, app: str, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[float]]:
        """See `Backend`; one chunk at a time, so that answers continue."""
        executor, found = self._ready(), []
        for prompt in prompts:
            embedding = scorer_of(executor.service.engine).embedding(prompt)
            while await asyncio.wrap_future(executor.work(app, embedding.step)):
                pass
            assert embedding.vector is not None
            found.append(embedding.vector.tolist())
        return found

    async def encode_images(self, app: str, files: Sequence[bytes]) -> tuple[EncodedImage, ...]:
        """See `Backend`."""
        executor, loop = self._ready(), asyncio.get_running_loop()
        engine = executor.service.engine
        served = getattr(engine.options, "prompt_rows", False)
        encoder = require_encoder(engine.model.images, engine.name, served=served)
        window = engine.options.context_tokens
        images = await loop.run_in_executor(self._images, lambda: encoder.cut_all(files, window))
        found = []
        for image in images:
            rows = []
            for tile in image.pixels:
                work = executor.work(app, functools.partial(encoder.encode_tile, tile, app))
                rows.append(await asyncio.wrap_future(work))
            found.append(encoder.joined(image, rows))
        return tuple(found)

    def adapters(self) -> Sequence[AdapterFacts]:
        """See `Backend`."""
        return self._ready().adapters.facts()

    async def load_adapter(self, app: str, name: str, folder: str) -> AdapterFacts:
        """See `Backend`."""
        executor = self._ready()
        loaded = await self._work(lambda: executor.adapters.read(name, folder))

        def add() -> AdapterFacts:
            if executor.memory.short:
                raise BudgetExceeded("the service has no memory for an adapter; give it more (--memory)")
            return executor.adapters.add(name, loaded)

        return await asyncio.wrap_future(executor.work(app, add))

    async def unload_adapter(self, app: str, name: str) -> None:
        """See `Backend`; also drops caches of ended answers that were computed with it."""
        executor = self._ready()

        def unload() -> None:
            executor.adapters.require(name)
            using = sum(job.adapter == name for job in executor.jobs())
            if using:
                raise AdapterBusy(f"{using} calls use the adapter {name!r:.80}; wait for their end")
            executor.sessions.forget(executor.adapters.unload(name))

        await asyncio.wrap_future(executor.work(app, unload))

    def binding(self, app: str) -> tuple[Binding | None, bool]:
        """See `Backend`."""
        return self.bindings.of(app), self.bindings.is_own(app)

    async def bind(self, app: str, binding: Binding) -> Sequence[int]:
        """See `Backend`."""
        executor, asked = self._ready(), binding.objective
        missed = await asyncio.wrap_future(executor.work(app, lambda: executor.service.unmet(asked)))
        self.bindings.bind(app, binding)
        return missed.get(asked, ())

    def unbind(self, app: str) -> None:
        """See `Backend`."""
        self.bindings.unbind(app)

    async def create_context(
        self, app: str, *, level: int | None = None, pinned: bool = False, adapter: str = ""
    ) -> ContextFacts:
        """See `Backend`."""
        return await self._of_contexts(
            app, lambda each: each.create(app, level=level, pinned=pinned, adapter=adapter)
        )

    async def contexts(self, app: str) -> Sequence[ContextFacts]:
        """See `Backend`."""
        if self._ready().contexts is None:
            return ()
        return await self._of_contexts(app, lambda each: each.listed(app))

    async def context(self, app: str, name: str) -> ContextFacts:
        """See `Backend`."""
        return await self._of_contexts(app, lambda each: each.found(app, name))

    async def pin_context(self, app: str, name: str, pinned: bool) -> ContextFacts:
        """See `Backend`."""
        return await self._of_contexts(app, lambda each: each.pin(app, name, pinned))

    async def delete_context(self, app: str, name: str) -> None:
        """See `Backend`."""

        def delete(contexts: Any) -> None:
            require_free(self._ready().jobs(), app, name)
            contexts.delete(app, name)

        await self._of_contexts(app, delete)

    def health(self) -> Mapping[str, Any]:
        """See `Backend`."""
        executor = self.executor
        if executor is None:
            return {"ready": False, "alive": True, "why": self._why}
        alive = executor.alive and time.monotonic() - executor.beat_s < _STUCK_S
        why = self._why or ("" if alive else "the engine's thread does not answer")
        why = why or ("the engine fails, and is tested now" if executor.canary.suspected else "")
        profile = {} if self._profile is None else {"profile": dict(self._profile())}
        return {"ready": not why, "alive": alive, "why": why, **profile}

    async def readiness(self) -> Mapping[str, Any]:
        """See `Backend`."""
        executor = self.executor
        if executor is not None and executor.canary.stale:
            # A busy engine is ready; a failing one is reported by `health`.
            with contextlib.suppress(JaxllmError, TimeoutError):
                tested = executor.work("", executor.canary.check)
                await asyncio.wait_for(asyncio.wrap_future(tested), _CANARY_S)
        return self.health()

    def snapshot(self) -> Mapping[str, Any]:
        """See `Backend`."""
        executor = self.executor
        if executor is None:
            return {}
        queue, contexts = executor.queue(), executor.contexts
        waits = [queue.now_ms - each.since_ms for each in queue.waiting]
        running = Counter(executor.running())
        return {
            **self._storage(),
            "queue": {
                "waiting": len(waits),
                "limit": executor.options.queued,
                "oldest_ms": max(waits, default=0.0),
            },
            "running": [
                {"app": app, "level": level, "count": count} for (app, level), count in running.items()
            ],
            "memory": executor.memory.figures(executor.cache_bytes, executor.adapters.size_bytes),
            "adapters": {each.name: each.size_bytes for each in executor.adapters.facts()},
            "grammars": executor.service.engine.grammars.counts,
            **({} if contexts is None else {"contexts": contexts.figures()}),
        }

    def close(self) -> None:
        """Stops the threads that encode prompts and cut images."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._images.shutdown(wait=False, cancel_futures=True)

    def _ready(self) -> Executor:
        if self.executor is None:
            raise Refused(
                "the model is loading; try again in some seconds", reason="loading", retry_after_s=2
            )
        return self.executor

    async def _of_contexts(self, app: str, what: Callable[[Any], Result]) -> Result:
        """Runs a function of the contexts in the engine's thread and returns its result."""
        executor = self._ready()
        contexts = executor.require_contexts()
        return await asyncio.wrap_future(executor.work(app, lambda: what(contexts)))

    async def _work(self, work: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def _reads_images(engine: Engine[Any]) -> bool:
    return getattr(engine.options, "prompt_rows", False) and engine.model.images is not None


def scorer_of(engine: Engine[Any]) -> Any:
    """Embeds texts with the model of an engine.

    Raises:
      ConfigError: the engine runs exported programs, or its weights are streamed.
    """
    if not isinstance(getattr(engine.options, "prompt_rows", None), bool):
        raise ConfigError("exported programs embed no texts; use `jaxllm serve` with a bundle")
    # Imported here: exported programs run without JAX.
    from jaxllm.serving.runners.scorer import Scorer

    return Scorer(engine.runner)
