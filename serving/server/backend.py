"""Gives the front the functions of any kind of engine without blocking its loop; enforces apps' limits, and
counts each call from submission to end."""

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
from jaxllm.serving.engine.decoding import TokenLogprob
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
    Refused,
    Scored,
    Started,
    TextToScore,
    content_tokens,
    encoded_prompt,
    images_of,
    rendered,
)
from jaxllm.serving.server.executor import Executor
from jaxllm.serving.server.job import Job
from jaxllm.serving.server.limits import AppLimits, Bindings, Limiter, Limits, Reserved
from jaxllm.serving.server.logs import CURRENT
from jaxllm.serving.server.metrics import Metrics
from jaxllm.serving.server.start import StartProgress
from jaxllm.text.answer_syntax import PLAIN_FORMAT, AnswerFormat
from jaxllm.text.token_bytes import TokenBytes
from jaxllm.text.tokenizer import Tokenizer

# Maximum time of a dispatch before the engine counts as stuck.
_STUCK_S = 120.0
# Timeout of the engine's answer to a readiness request.
_CANARY_S = 10.0
# Time in which a device may cool.
_COOL_S = 60.0
# Maximum number of tokens whose bytes are cached.
_MOST_KNOWN = 1 << 18
# Maximum number of tokens of a prompt that is truncated.
_MOST_TRUNCATED = 1 << 17
Result = TypeVar("Result")


class Backend:
    """The engine's side of the service; it refuses calls before `opened`. All methods are called in the event
    loop, and none blocks it.

    Attributes:
      executor: runs the calls; None while the model is loading.
      bindings: objectives of apps.
      limiter: limits of all apps; replaceable.
      metrics: counts of all calls.
      start: progress of the model's opening.
    """

    def __init__(self, limits: Limits | None = None, bindings: Bindings | None = None) -> None:
        self.limiter, self.metrics = Limiter(limits or Limits()), Metrics(self.snapshot, self._measure)
        self.bindings, self.start = bindings or Bindings(), StartProgress()
        self.executor: Executor | None = None
        self._facts: ModelFacts | None = None
        self._token_bytes: TokenBytes | None = None
        self._known_bytes: dict[tuple[int, bool], bytes] = {}
        self._why = "loading"
        self._profile: Callable[[], Mapping[str, Any]] | None = None
        self._storage: Callable[[], Mapping[str, Any]] = dict
        self._pool = ThreadPoolExecutor(2, "tokenizer")
        # One at a time: a decoded image needs tens of megabytes.
        self._images = ThreadPoolExecutor(1, "images")
        self._scoring, self._scoring_waits = asyncio.Lock(), 0

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
          storage: returns counts of reads from storage (see `snapshot`).
          model_sampling: whether calls without sampling options default to the model's recommended sampling.
        """
        self._profile, self._storage = profile, storage
        engine = executor.service.engine
        self._facts = ModelFacts(
            name=name or engine.name, window_tokens=engine.options.context_tokens,
            vocab_size=engine.cfg.vocab_size, levels=engine.levels,
            has_chat_template=engine.tokenizer.has_chat_template, adapters=(), opened_s=time.time(),
            chat_template=engine.tokenizer.chat_template, answer_format=_answer_format(engine.tokenizer),
            sampling=engine.tokenizer.files.sampling if model_sampling else {},
            images=_supports_images(engine) and engine.model.images is not None,
            infill=_infill(engine.tokenizer), **_model_facts(engine),
        )  # fmt: skip
        self._token_bytes = TokenBytes(engine.tokenizer)
        self.executor, self._why = executor, ""

    def draining(self) -> None:
        """Marks the backend as not ready."""
        self._why = "draining"

    def facts(self) -> ModelFacts:
        """Facts of the model; raises Refused while it is loading."""
        adapters = self.require_executor().adapters.names
        assert self._facts is not None
        return dataclasses.replace(self._facts, adapters=adapters)

    def submit(self, call: Call) -> Job:
        """Accepts a call, and encodes its prompt within the window. Errors of a context turn, such as an
        instruction after the first turn, are raised by the job's events.

        Raises:
          Refused: the service is loading or draining, its queue is full, or a limit of the app is reached.
          ConfigError, ContextOverflow: the call cannot be answered under any load.
          ContextGone: the app has no context of this name.
          ContextBusy: the context answers another call.
        """
        try:
            executor, call = self.require_executor(), self.bindings.applied(call)
            if not self._in_foreground(call.app):
                call = dataclasses.replace(call, priority="background")
            call, tokens = self._counted(call)
            count, now_s = call.config.max_tokens, time.monotonic()
            reserved = self.limiter.admit(call.app, prompt_tokens=tokens, max_tokens=count, now_s=now_s)
            try:
                job = executor.canary.watched(lambda: executor.submit(call, asyncio.get_running_loop()))
            except BaseException:
                self.limiter.ended(call.app, reserved, started=False, tokens=0, now_s=time.monotonic())
                raise
        except Refused as error:
            self.metrics.count("calls_refused", call.app, error.reason)
            raise
        self.metrics.count("calls_accepted", call.app)
        if (request := CURRENT.get()) is not None:
            request.calls.append(job)
        job.on_event = functools.partial(self._account, job, reserved)
        return job

    def limits_of(self, app: str) -> AppLimits:
        """An app's limits now. From any thread."""
        return self.limiter.limits.of(app)

    def _in_foreground(self, app: str) -> bool:
        """Whether an app is in the foreground, as all are if the device's system reports none. Raises Refused
        if it may not call now."""
        state = self.require_executor().device
        if state.work_share == 0:
            message = f"the device is too hot to compute (thermal state {state.thermal}); try again later"
            raise Refused(message, reason="hot", retry_after_s=_COOL_S)
        if state.foreground is None or app not in state.foreground:
            if self.limits_of(app).foreground_only:
                message = f"the app {app} may call in the foreground alone, and is not there now"
                raise Refused(message, reason="background")
            return state.foreground is None
        return True

    def _counted(self, call: Call) -> tuple[Call, int]:
        """The call with its encoded prompt and the number of prompt tokens, if the app's tokens are limited;
        the executor encodes other prompts once it has room for them. A turn in a context only counts its
        messages, since the context's tokens were counted when they came."""
        limits = self.limits_of(call.app)
        if not limits.tokens_per_minute and not limits.tokens_per_day:
            return call, 0
        tokenizer = self._tokenizer()
        if call.context:
            return call, content_tokens(tokenizer, call.prompt)
        prompt = tuple(encoded_prompt(tokenizer, call.prompt, call.config.task)[0].ids.tolist())
        # Ids without rows would lose the prompt embeddings of images.
        return (call if images_of(call.prompt) else dataclasses.replace(call, prompt=prompt)), len(prompt)

    def _account(self, job: Job, reserved: Reserved, event: Event | JaxllmError | None) -> None:
        """Counts an event of a call when its reader gets it (see `Job.on_event`)."""
        app, start = job.app, job.started
        match event:
            case Started():
                self.metrics.report(event, app)
                self.limiter.started(app)
            case Ended():
                self.metrics.report(event, app)
            case None:
                self.metrics.count("calls_cancelled", app)
            case JaxllmError():
                self.metrics.count("calls_failed", app, job.outcome)
        if event is None or isinstance(event, Ended | JaxllmError):
            tokens = job.read_tokens + (0 if start is None else start.prompt_tokens - start.context_tokens)
            now_s = time.monotonic()
            self.limiter.ended(app, reserved, started=start is not None, tokens=tokens, now_s=now_s)

    async def tokenize(
        self, prompt: Conversation | str, *, special: bool = True, longer: bool = False
    ) -> Sequence[int]:
        """The token ids of a prompt; `longer`: also of one that does not fit the window, within bounds."""
        tokenizer = self._tokenizer(longer=longer)
        if not isinstance(prompt, str):
            return await self._encode(lambda: encoded_prompt(tokenizer, prompt)[0].ids.tolist())
        return await self._encode(
            lambda: tokenizer.encode(prompt, add_special_tokens=special, special=special)
        )

    async def tokenize_ends(
        self, text: str, ends: Sequence[str]
    ) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """The token ids of a text and of its possible ends, as tasks encode them: where the tokenizer joins
        the text's last token with an end, all ends begin before it."""
        # Imported here: exported programs have no tasks.
        from jaxllm.tasks.example import TaskExample
        from jaxllm.tasks.questions import branching

        tokenizer = self._tokenizer()
        example = TaskExample(user=text, form="text", answer=ends[0], options=tuple(ends))
        found = await self._encode(lambda: branching(tokenizer, example))
        return found.trunk, found.branches

    async def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        tokenizer = self.require_executor().service.engine.tokenizer
        return await self._encode(lambda: tokenizer.decode(ids))

    async def token_bytes(self, ids: Sequence[int], *, begins: bool = False) -> Sequence[bytes]:
        """The bytes of each token's text (see `jaxllm.text.token_bytes.TokenBytes`)."""
        self.require_executor()
        if len(self._known_bytes) > _MOST_KNOWN:
            # Not cleared: others may be waiting for a part of it.
            self._known_bytes = {}
        known, found = self._known_bytes, self._token_bytes
        assert found is not None
        if missing := [token for token in dict.fromkeys(ids) if (token, begins) not in known]:
            data = await self._encode(lambda: found.of(missing, begins=begins))
            known |= {(token, begins): each for token, each in zip(missing, data, strict=True)}
        return [known[token, begins] for token in ids]

    async def render(self, prompt: Conversation) -> str:
        """The text of a conversation by the chat template."""
        tokenizer = self._tokenizer()
        return await self._encode(lambda: rendered(tokenizer, prompt))

    async def embed(self, app: str, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[float]]:
        """The mean of the last layer's hidden states over each prompt's tokens, normalized; one chunk at a
        time, so that answers continue."""
        scorer, runner = self._scorer()
        self._in_foreground(app)
        found = []
        for prompt in prompts:
            embedding = scorer.embedding(prompt)
            # As in `score`.
            await asyncio.to_thread(runner.buckets.keep, embedding.buckets)
            while await self._in_engine(app, embedding.step):
                pass
            assert embedding.vector is not None
            found.append(embedding.vector.tolist())
        return found

    async def score(self, app: str, text: TextToScore) -> list[list[TokenLogprob]]:
        """The log-probabilities of a text's tokens after its first, and of each of its ends; one chunk at a
        time in the background, so that answers continue, and one text at a time, so that one cache suffices.
        It counts as a call of the app.

        Raises:
          Refused: the service is loading or draining, or a limit is reached.
          ConfigError, ContextOverflow: the text cannot be scored.
          AdapterGone: its adapter is no longer loaded.
        """
        executor, count, now_s = self.require_executor(), text.count, time.monotonic()
        scorer, runner = self._scorer(text.level)
        if self._scoring_waits >= executor.options.queued:
            self.metrics.count("calls_refused", app, "full")
            raise Refused(f"{self._scoring_waits} texts wait to be scored, the maximum", reason="full")
        scoring = scorer.scoring(text.tokens, text.ends, top=text.top)
        try:
            self._in_foreground(app)
            reserved = self.limiter.admit(app, prompt_tokens=count, max_tokens=0, now_s=now_s)
        except Refused as error:
            self.metrics.count("calls_refused", app, error.reason)
            raise
        self._scoring_waits, used = self._scoring_waits + 1, 0
        self.metrics.count("calls_accepted", app)
        try:
            async with self._scoring:
                # A missing bucket would keep answers waiting while it is compiled.
                await asyncio.to_thread(runner.buckets.keep, scoring.buckets)
                while await self._in_engine(app, scoring.step, adapter=text.adapter, background=True):
                    pass
                if text.keep:
                    keep = functools.partial(executor.keep_prefix, app, runner, scoring)
                    await self._in_engine(app, keep, adapter=text.adapter)
            used = count
            self.metrics.report(Scored(count), app)
        except JaxllmError as error:
            self.metrics.count("calls_failed", app, type(error).__name__)
            raise
        except asyncio.CancelledError:
            self.metrics.count("calls_cancelled", app)
            raise
        finally:
            self._scoring_waits -= 1
            self.limiter.ended(app, reserved, started=False, tokens=used, now_s=time.monotonic())
        parts = [text.tokens[1:], *text.ends]
        return [_token_logprobs(*each) for each in zip(scoring.scores, parts, strict=True)]

    def _scorer(self, level: int | None = None) -> tuple[Any, Any]:
        """What scores and embeds texts, and its runner; raises ConfigError if the engine cannot."""
        engine = self.require_executor().service.engine
        # Engines of exported programs have other options.
        if not hasattr(engine.options, "prompt_embeddings"):
            raise ConfigError("exported programs neither embed nor score; use `jaxllm serve` with a bundle")
        # Imported here: exported programs run without JAX.
        from jaxllm.serving.runners.scorer import Scorer

        runner = engine.runner_at(level)
        return Scorer(runner), runner

    async def encode_images(self, app: str, files: Sequence[bytes]) -> tuple[EncodedImage, ...]:
        """Decodes and encodes images for a conversation, one tile at a time between dispatches.

        Raises:
          ConfigError: the model has no image encoder, or an image cannot be read.
          ContextOverflow: the images do not fit the window.
        """
        engine, loop = self.require_executor().service.engine, asyncio.get_running_loop()
        encoder = require_encoder(engine.model.images, engine.name, served=_supports_images(engine))
        window = engine.options.context_tokens
        images = await loop.run_in_executor(self._images, lambda: encoder.cut_all(files, window))
        found = []
        for image in images:
            tiles = [functools.partial(encoder.encode_tile, tile, app) for tile in image.pixels]
            found.append(encoder.joined(image, [await self._in_engine(app, each) for each in tiles]))
        return tuple(found)

    def adapters(self) -> Sequence[AdapterFacts]:
        """The adapters that calls may name."""
        return self.require_executor().adapters.facts()

    async def load_adapter(self, app: str, name: str, folder: str) -> AdapterFacts:
        """Loads an adapter from the folder of adapters, for an operator.

        Raises:
          ConfigError, CheckpointError: the folder cannot be read, is elsewhere or does not fit the model; or
            loading is not allowed.
          AdapterBusy: the name is in use.
          BudgetExceeded: there are too many adapters, or there is no memory.
        """
        executor = self.require_executor()
        loaded = await self._encode(lambda: executor.adapters.read(name, folder))

        def add() -> AdapterFacts:
            if executor.memory.short_bytes:
                raise BudgetExceeded("the service has no memory for an adapter; give it more (--memory)")
            return executor.adapters.add(name, loaded)

        return await self._in_engine(app, add)

    async def unload_adapter(self, app: str, name: str) -> None:
        """Unloads an adapter, for an operator; also drops caches of ended answers that were computed with it.
        Raises AdapterGone if no adapter has this name, and AdapterBusy if calls use it."""
        executor = self.require_executor()

        def unload() -> None:
            executor.adapters.require(name)
            if using := sum(job.adapter == name for job in executor.jobs()):
                raise AdapterBusy(f"{using} calls use the adapter {name!r:.80}; wait for their end")
            executor.sessions.forget(executor.adapters.unload(name))

        await self._in_engine(app, unload)

    async def bind(self, app: str, binding: Binding) -> Sequence[int]:
        """Binds an app to an objective. Raises ConfigError if it limits energy, and the device's profile has
        none, and BudgetExceeded if too many apps are bound.

        Returns:
          The profiled prompt lengths at which no choice meets it on this device.
        """
        service, asked = self.require_executor().service, binding.objective
        missed = await self._in_engine(app, lambda: service.unmet(asked))
        self.bindings.bind(app, binding)
        return missed.get(asked, ())

    async def contexts(self, app: str, what: Callable[[Any], Result]) -> Result:
        """Runs a function of the contexts (`jaxllm.serving.server.context_turns.ContextTurns`) in the
        engine's thread and returns its result. Raises ConfigError if the service has no contexts."""
        contexts = self.require_executor().require_contexts()
        return await self._in_engine(app, lambda: what(contexts))

    async def list_contexts(self, app: str) -> Sequence[ContextFacts]:
        """All contexts of an app; none if the service has no contexts."""
        if self.require_executor().contexts is None:
            return ()
        return await self.contexts(app, lambda each: each.listed(app))

    async def delete_context(self, app: str, name: str) -> None:
        """Deletes a context. Raises ContextGone if the app has no context of this name, and ContextBusy if it
        is answering."""

        def delete(contexts: Any) -> None:
            self.require_executor().require_free(app, name)
            contexts.delete(app, name)

        await self.contexts(app, delete)

    def health(self) -> Mapping[str, Any]:
        """`ready` (warm, not draining, engine not failing), `alive` (recent heartbeat of the engine), and
        `why` not; for an open model also `profile` (see `ProfileRefinement.facts` in
        `jaxllm.serving.server.opening`), and heat and trim level of the `device` (see `DeviceState`)."""
        executor = self.executor
        if executor is None:
            return {"ready": False, "alive": True, "why": self._why, "start": dict(self.start.facts)}
        alive = executor.alive and time.monotonic() - executor.beat_s < _STUCK_S
        why = self._why or ("" if alive else "the engine's thread does not answer")
        why = why or ("the engine fails, and is tested now" if executor.canary.suspected else "")
        profile = {} if self._profile is None else {"profile": dict(self._profile())}
        # Which apps are in the foreground is not for all who may ask.
        device = {"thermal": executor.device.thermal, "trim": executor.device.trim}
        return {"ready": not why, "alive": alive, "why": why, **profile, "device": device}

    async def readiness(self) -> Mapping[str, Any]:
        """`health`, after a test answer of one token if the engine has answered nothing for a while."""
        executor = self.executor
        if executor is not None and executor.canary.stale:
            test = functools.partial(executor.canary.step, readiness=True)
            # A busy engine is ready; a failing one is reported by `health`.
            with contextlib.suppress(JaxllmError, TimeoutError):
                await asyncio.wait_for(self._in_engine("", test), _CANARY_S)
        return self.health()

    def snapshot(self) -> Mapping[str, Any]:
        """Current values for metrics, as plain data. Each part may be missing:

        queue: `waiting` calls, their `limit`, and the age `oldest_ms`.
        running: number of answers by app and level.
        memory: `process_bytes`, `limit_bytes` (0 for none), `pressure` (share of time in which tasks of the
          machine waited for memory), and `holdings` by kind, each with `size_bytes` and optionally
          `limit_bytes` and `least_bytes`; on Linux `parts` by what takes memory and `pages` by their kind,
          each together `process_bytes`, and `children_bytes` of child processes.
        contexts: by app, `contexts`, `pinned`, `stored_bytes`, and resident `chunks` by bits.
        adapters: bytes by name.
        experts: `visits`, `hits`, `foreseen` (predicted) since the start, and the `hit_rate`.
        read_bytes: bytes read from storage since the start, by kind.
        grammars: counts since the start, by outcome.
        device: see `DeviceState.figures`.
        """
        executor = self.executor
        if executor is None:
            return {}
        queue, contexts, adapters = executor.queue(), executor.contexts, executor.adapters
        waits = [queue.now_ms - each.since_ms for each in queue.waiting]
        queued = {"waiting": len(waits), "limit": executor.options.queued}
        running: dict[str, Counter[int]] = {}
        for app, level in executor.running():
            running.setdefault(app, Counter())[level] += 1
        return {
            **self._storage(),
            "queue": {**queued, "oldest_ms": max(waits, default=0.0)},
            "running": running,
            "memory": executor.memory.figures(
                executor.cache_bytes, adapters.size_bytes, executor.resident_cache_bytes
            ),
            "adapters": {each.name: each.size_bytes for each in adapters.facts()},
            "grammars": executor.service.engine.grammars.counts,
            "device": executor.device.figures,
            **({} if contexts is None else {"contexts": contexts.figures()}),
        }

    def _measure(self) -> None:
        if self.executor is not None:
            self.executor.memory.measure()

    def close(self) -> None:
        """Stops the threads that encode prompts and cut images."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._images.shutdown(wait=False, cancel_futures=True)

    def require_executor(self) -> Executor:
        """The executor; raises Refused while the model is loading."""
        if self.executor is None:
            message = f"the model is loading: {self.start.text}; try again in some seconds"
            wait_s = self.start.facts.get("left_s", 2)
            raise Refused(message, reason="loading", retry_after_s=max(2, wait_s))
        return self.executor

    async def _encode(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def _in_engine(self, app: str, work: Callable[[], Result], **how: Any) -> Result:
        return await asyncio.wrap_future(self.require_executor().work(app, work, **how))

    def _tokenizer(self, *, longer: bool = False) -> Tokenizer:
        """The tokenizer, for texts within the window, or for longer ones."""
        engine = self.require_executor().service.engine
        window = engine.options.context_tokens
        return engine.tokenizer.limited(max(window, _MOST_TRUNCATED) if longer else window)


def _token_logprobs(scores: Any, tokens: Sequence[int]) -> list[TokenLogprob]:
    """The scores of tokens from a `jaxllm.steps.model.ScoredChunk` of one row."""
    columns = (scores.logprobs, scores.ranks, scores.top_ids, scores.top_logprobs)
    return [
        TokenLogprob(token, logprob, tuple(zip(ids, values, strict=True)), rank)
        for token, logprob, rank, ids, values in zip(
            tokens, *(each[0].tolist() for each in columns), strict=True
        )
    ]


def _answer_format(tokenizer: Tokenizer) -> AnswerFormat:
    """The format of the model's answers; a plain one for a broken template, which chats report."""
    try:
        return tokenizer.answer_format
    except JaxllmError:
        return PLAIN_FORMAT


# Of CodeLlama, StarCoder, Qwen, Granite, DeepSeek and Codestral: before prefix, suffix and middle.
_INFILL = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), ("<|fim_begin|>", "<|fim_hole|>", "<|fim_end|>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)  # fmt: skip


def _infill(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The special tokens of fill-in prompts; empty for none."""
    known = {text for text, _ in tokenizer.special_tokens}
    return next((each for each in _INFILL if known.issuperset(each)), ())


def _model_facts(engine: Engine[Any]) -> dict[str, Any]:
    """What lists of models tell: of exported programs less is known."""
    cfg, bundle = engine.cfg, getattr(engine.model, "bundle", None)
    facts: dict[str, Any] = {"architecture": cfg.model_type}
    if bundle is None:
        return facts
    # Imported here: exported programs run without JAX.
    from jaxllm.models.parameters import parameter_count

    shape = {
        "parameters": parameter_count(cfg), "layers": cfg.layers, "heads": cfg.heads,
        "kv_heads": cfg.kv_heads, "hidden_size": cfg.hidden_size,
    }  # fmt: skip
    own = {"digest": bundle.fingerprint, "size_bytes": bundle.weight_bytes, "weights": bundle.layout.weights}
    return facts | own | {"shape": shape}


def _supports_images(engine: Engine[Any]) -> bool:
    return getattr(engine.options, "prompt_embeddings", False)
