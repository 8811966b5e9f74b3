"""Gives the front what the engine can do (see `serving.server.calls.Backend`), without blocking its loop."""

import asyncio
import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, TypeVar

from serving.images.encoded import EncodedImage
from serving.images.prompt import require_encoder
from serving.planning.objectives import Binding
from serving.server.calls import Call, Conversation, Refused
from serving.server.changes import add_adapter, delete_context, remove_adapter
from serving.server.context_turns import ContextTurns
from serving.server.engine_figures import storage_figures
from serving.server.executor import Executor
from serving.server.facts import AdapterFacts, ContextFacts, ModelFacts
from serving.server.objectives import Bindings
from serving.server.prompts import whole_prompt_ids
from serving.server.ticket import EngineTicket
from serving.weights.adapters import LoadedAdapter

# A dispatch may take this long before the engine counts as stuck.
_STUCK_S = 120.0
Found = TypeVar("Found")


class EngineBackend:
    """A backend on an executor; before `opened` and after `failed` it refuses calls.

    Attributes:
      executor: None while the model is loading.
      bindings: objectives of apps.
    """

    def __init__(self, bindings: Bindings | None = None) -> None:
        self.bindings = bindings or Bindings()
        self.executor: Executor | None = None
        self._facts: ModelFacts | None = None
        self._why = "loading"
        self._profile: Callable[[], Mapping[str, Any]] | None = None
        self._pool = ThreadPoolExecutor(2, "tokenizer")
        # One at a time: a decoded image takes tens of megabytes.
        self._images = ThreadPoolExecutor(1, "images")

    def opened(
        self,
        executor: Executor,
        name: str = "",
        *,
        profile: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """Answers calls from here on.

        Args:
          executor: has been started.
          name: of the model, for calls; empty for the model's own.
          profile: tells which profile of the device is planned by, for `health`; None to tell nothing of it.
        """
        self._profile = profile
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
            images=engine.options.prompt_rows and engine.model.images is not None,
        )
        self.executor, self._why = executor, ""

    def draining(self) -> None:
        """Says that it is not ready any more."""
        self._why = "draining"

    def facts(self) -> ModelFacts:
        """See `Backend`."""
        adapters = self._ready().adapters.names
        assert self._facts is not None
        return dataclasses.replace(self._facts, adapters=adapters)

    def submit(self, call: Call) -> EngineTicket:
        """See `Backend`; the prompt is encoded here, within the window."""
        return self._ready().submit(self.bindings.applied(call), asyncio.get_running_loop())

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

    async def render(self, prompt: Conversation) -> str:
        """See `Backend`."""
        engine = self._ready().service.engine
        tokenizer = engine.tokenizer.limited(engine.options.context_tokens)
        return await self._work(
            lambda: tokenizer.render_chat(list(prompt.messages), tools=prompt.tools, now=datetime.now())
        )

    async def embed(self, app: str, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[float]]:
        """See `Backend`; a chunk at a time, so that answers go on."""
        executor, found = self._ready(), []
        for prompt in prompts:
            embedding = executor.service.engine.runner.scorer().embedding(prompt)
            while await asyncio.wrap_future(executor.work(app, embedding.step)):
                pass
            assert embedding.vector is not None
            found.append(embedding.vector.tolist())
        return found

    async def encode_images(self, app: str, files: Sequence[bytes]) -> tuple[EncodedImage, ...]:
        """See `Backend`."""
        executor, loop = self._ready(), asyncio.get_running_loop()
        engine = executor.service.engine
        served = engine.options.prompt_rows
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
        adapters = executor.adapters

        def read() -> LoadedAdapter:
            adapters.require_addable(name)
            return adapters.read(adapters.options.path(folder))

        loaded = await self._work(read)
        return await asyncio.wrap_future(executor.work(app, lambda: add_adapter(executor, name, loaded)))

    async def unload_adapter(self, app: str, name: str) -> None:
        """See `Backend`."""
        executor = self._ready()
        await asyncio.wrap_future(executor.work(app, lambda: remove_adapter(executor, name)))

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

    async def pin_context(self, app: str, name: str, pinned: bool) -> ContextFacts:
        """See `Backend`."""
        return await self._of_contexts(app, lambda each: each.pin(app, name, pinned))

    async def delete_context(self, app: str, name: str) -> None:
        """See `Backend`."""
        executor = self._ready()
        executor.kept()
        await asyncio.wrap_future(executor.work(app, lambda: delete_context(executor, app, name)))

    def health(self) -> Mapping[str, Any]:
        """See `Backend`."""
        executor = self.executor
        if executor is None:
            return {"ready": False, "alive": True, "why": self._why}
        alive = executor.alive and time.monotonic() - executor.beat_s < _STUCK_S
        why = self._why or ("" if alive else "the engine's thread does not answer")
        profile = {} if self._profile is None else {"profile": dict(self._profile())}
        return {"ready": alive and not self._why, "alive": alive, "why": why, **profile}

    def snapshot(self) -> Mapping[str, Any]:
        """See `Backend`; as `serving.server.figures.Figures` has it."""
        executor = self.executor
        if executor is None:
            return {}
        queue, contexts = executor.queue(), executor.contexts
        waits = [queue.now_ms - each.since_ms for each in queue.waiting]
        running = Counter(executor.running())
        return {
            **storage_figures(executor.service.engine.model),
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
            **({} if contexts is None else {"contexts": contexts.figures()}),
        }

    def close(self) -> None:
        """Ends the threads that encode prompts and cut images."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._images.shutdown(wait=False, cancel_futures=True)

    def _ready(self) -> Executor:
        if self.executor is None:
            raise Refused(
                "the model is loading; try again in some seconds", reason="loading", retry_after_s=2
            )
        return self.executor

    async def _of_contexts(self, app: str, what: Callable[[ContextTurns], Found]) -> Found:
        """What a function of the contexts returns in the engine's thread."""
        executor = self._ready()
        contexts = executor.kept()
        return await asyncio.wrap_future(executor.work(app, lambda: what(contexts)))

    async def _work(self, work: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)
