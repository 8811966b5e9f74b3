"""Holds one accepted call from its submission to its end: its prompt, run, deadlines and events.

The engine's thread adds events without waiting, those of a dispatch together: for a slow reader they
accumulate, at most one per piece of the answer.
"""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.elastic.slo import Slo
from jaxllm.errors import JaxllmError, ObjectiveMissed
from jaxllm.serving.contexts.record import Record, TurnTokens
from jaxllm.serving.elastic.objectives import Cost, Latency, Objective
from jaxllm.serving.elastic.planned_service import ANYTHING, PlannedCall, PlannedService
from jaxllm.serving.elastic.planner import IDLE, Load, Plan
from jaxllm.serving.engine.run import DispatchKind, Lifecycle, Run
from jaxllm.serving.engine.step import batchable
from jaxllm.serving.ground.prompt_embeddings import PromptEmbeddings
from jaxllm.serving.guided.compiler import PreparedGrammar
from jaxllm.serving.server.calls import Call, Ended, Event, Piece, Refused, Started, time_limits
from jaxllm.serving.server.memory import PrefixSessions
from jaxllm.serving.server.scheduler import Queue, SchedulerOptions, Work, expected_load
from jaxllm.text.droppable import PromptTokens

# Placeholder cost until a context turn is tokenized.
UNKNOWN = Cost(ttft_ms=0.0, tpot_ms=0.0, tokens=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextTurn:
    """A call's turn in a context.

    Attributes:
      record: the context that the call names.
      before: number of the context's tokens that the turn follows.
      asked: these tokens and the turn's.
      computed_tokens: tokens of the prompt that are in no stored chunk of the context's level.
      whole: expected cost of the whole model, if it had the context's chunks; ratios are relative to it.
      costs: expected costs by level; at others than the context's all tokens are computed.
      most_tokens: maximum tokens of the context when the answer has ended.
      most_bytes: bytes that chunks of the context will take in memory; at least 1.
      adapter: name of the adapter that the context was made with; empty for none.
      forks: whether it is answered in a new context, with the tokens that the turn follows.
      rows: prompt embeddings in place of tokens; None for none.
    """

    record: Record
    before: int
    asked: TurnTokens
    computed_tokens: int
    whole: Cost
    costs: Mapping[int, Cost]
    most_tokens: int
    most_bytes: int
    adapter: str = ""
    forks: bool = False
    rows: PromptEmbeddings | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dispatch:
    """A successful dispatch.

    Attributes:
      kind: see `jaxllm.serving.engine.run.Dispatched`.
      rows: number of answers in it.
      took_ms: its duration.
      tokens: number of tokens that it gave to answers; 0 for all chunks of a prompt but the last.
      chunk_tokens: length of the prefilled chunk, including padding; 0 for other kinds.
      mode: arithmetic of the chunk's products, "int8" or "float"; empty for other kinds.
    """

    kind: DispatchKind
    rows: int
    took_ms: float
    tokens: int = 0
    chunk_tokens: int = 0
    mode: str = ""


class Job(Work):
    """An accepted call from its submission to its end; `Work` is what the scheduler sees of it.

    Attributes:
      call: the app's call.
      arrived_s: arrival time, by `time.perf_counter`.
      cancelled: whether the reader left; the engine's thread looks between two dispatches.
      on_event: called in the event loop with each event, with the error that ended the answer, or with None
        if the reader leaves before the end.
      news: set in the event loop when there may be events; jobs with the same reader share one.
      started, ended: events that the reader has read; None until then.
      read_tokens: number of the answer's tokens that the reader has read.
      outcome: "ended", "cancelled", or the name of the class of the error that ended it.
      marked: the prompt with the words that a plan may drop; empty in a context until its turn is encoded.
      prompt: the prompt's token ids.
      rows: prompt embeddings in place of some of them; None for none, and in a context.
      whole: expected cost of the whole model's answer on an idle device.
      run: None until it begins.
      plan: plan of a call with an objective, once it begins.
      turn: turn of a call in a context, once it is encoded.
      context_call: restores and stores the context of a turn; None until it begins.
      may_continue: whether a call in a context, until its turn is encoded, may change that context.
      prepared: its grammar, compiled or being compiled; None before, and without a grammar.
      cache_bytes: memory of its cache, as of its last step.
      adapter: name of the adapter that answers, a context's once the turn is encoded; empty for none.
    """

    def __init__(
        self,
        number: int,
        call: Call,
        loop: asyncio.AbstractEventLoop,
        options: SchedulerOptions,
        on_cancel: Callable[[], None],
    ) -> None:
        self.arrived_s = self._began_s = self._first_s = self._last_s = time.perf_counter()
        arrived_ms = 1000 * self.arrived_s
        super().__init__(
            id=number, app=call.app, priority=call.priority, since_ms=arrived_ms, due_ms=arrived_ms,
            adapter=call.adapter,
        )  # fmt: skip
        self.call, self.cancelled, self._loop, self._options = call, False, loop, options
        self.on_event: Callable[[Event | JaxllmError | None], None] = lambda event: None
        self._on_cancel, self._put_last, self._read_last = on_cancel, False, False
        self._events: collections.deque[Event | JaxllmError] = collections.deque()
        # Those that are not in the event loop yet; used only by the engine's thread.
        self._outgoing: list[Event | JaxllmError] = []
        self.news = asyncio.Event()
        self.started: Started | None = None
        self.ended: Ended | None = None
        self.read_tokens, self.outcome = 0, "cancelled"
        self._answer_s: float | None = None
        self.run: Run | None = None
        self.plan: Plan | None = None
        self.turn: ContextTurn | None = None
        self.context_call: Any = None
        self.prepared: PreparedGrammar | None = None
        self.may_continue = call.context_tokens is None
        self._sent = self._capacity_tokens = self.cache_bytes = 0
        self.encoded(PromptTokens.of_ids(()), UNKNOWN)

    # -- the reader, in the event loop -------------------------------------------------------------

    def cancel(self) -> None:
        """Ends the answer between two dispatches; its context keeps complete tokens. Later events are
        dropped. Does nothing after the end."""
        if not self._put_last and not self.cancelled:
            self.cancelled = True
            self._on_cancel()
        self._seen(None)
        self.news.set()

    def taken(self) -> Event | None:
        """Removes and returns the next event, `Started`, a `Piece` or `Ended`; None if it is not there, or
        after a cancel. Raises the JaxllmError that ended the answer."""
        if self.cancelled or not self._events:
            return None
        event = self._events.popleft()
        if isinstance(event, Ended):
            event = self._judged(event)
        self._seen(event)
        if isinstance(event, JaxllmError):
            raise event
        return event

    async def events(self) -> AsyncIterator[Event]:
        """Yields the events (see `taken`) up to `Ended`. For one reader. A slow reader delays only its own
        answer."""
        try:
            while not self.cancelled and self.ended is None:
                self.news.clear()
                while (event := self.taken()) is not None:
                    yield event
                if self.ended is None:
                    await self.news.wait()
        finally:
            # A reader that stops early has left.
            self.cancel()

    def saw_answer(self, at_s: float) -> None:
        """Records when the first text or call came, which only the reader distinguishes from reasoning."""
        if self._answer_s is None:
            self._answer_s = at_s

    def _judged(self, end: Ended) -> Ended:
        """The end with the time to the first text or call, if the reader recorded it, and whether an
        objective of that time was met."""
        if self._answer_s is None:
            return end
        answer_ms, met = 1000 * (self._answer_s - self.arrived_s), end.met
        if self.call.first_token == "answer" and isinstance(self.call.objective, Slo | Latency):
            met = met and answer_ms <= self._limits[0]
        return dataclasses.replace(end, met=met, answer_ttft_ms=answer_ms)

    @property
    def progress(self) -> Mapping[str, int] | None:
        """Progress of the prompt, as llama.cpp's server reports it: tokens in total, found in a cache, and
        computed or found, and milliseconds since the call; None before it begins and after it."""
        run = self.run
        if run is None or run.stage != "prefill":
            return None
        return {
            "total": run.prompt_tokens, "cache": run.reused_tokens, "processed": len(run.session.tokens),
            "time_ms": round(1000 * (self._last_s - self.arrived_s)),
        }  # fmt: skip

    def _seen(self, event: Event | JaxllmError | None) -> None:
        if self._read_last:
            return
        match event:
            case Started():
                self.started = event
            case Piece():
                self.read_tokens += len(event.tokens)
            case Ended():
                self.ended, self.read_tokens, self.outcome = event, event.tokens, "ended"
            case JaxllmError():
                self.outcome = type(event).__name__
        self._read_last = event is None or isinstance(event, Ended | JaxllmError)
        self.on_event(event)

    def put(self, event: Event | JaxllmError) -> None:
        """Adds an event, from the engine's thread, which `deliver` takes to the reader; an `Ended` or an
        error is the last, and later ones are dropped."""
        if not self._put_last:
            self._put_last = isinstance(event, Ended | JaxllmError)
            self._outgoing.append(event)

    @staticmethod
    def deliver(jobs: "Sequence[Job]") -> None:
        """Takes the events that were added to jobs to their readers, from the engine's thread: once for all,
        because each time interrupts the event loop."""
        batches: dict[asyncio.AbstractEventLoop, list[tuple[Job, list[Event | JaxllmError]]]] = {}
        for job in jobs:
            if job._outgoing:
                batches.setdefault(job._loop, []).append((job, job._outgoing))
                job._outgoing = []
        for loop, batch in batches.items():
            # The loop may be closed while the engine's thread ends its last calls.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_add, batch)

    # -- for the scheduler ---------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether it has ended, or will before its next step."""
        return self.cancelled or (self.run is not None and self.run.stage == "ended")

    def continues(self, app: str, name: str) -> bool:
        """Whether it changes an app's context."""
        continues = self.may_continue if self.turn is None else not self.turn.forks
        return (self.app, self.call.context) == (app, name) and continues

    @property
    def unsent_tokens(self) -> int:
        """Number of the answer's tokens that are in no event yet."""
        return 0 if self.run is None else len(self.run.tokens) - self._sent

    def refresh(self) -> None:
        """Updates what the scheduler sees, in the engine's thread."""
        run, cost = self.run, self._expected
        self.since_ms, self.token_ms = 1000 * self._last_s, cost.tpot_ms
        self.context_bytes = 0 if self.turn is None else self.turn.most_bytes
        if run is None:
            config = self.call.config
            self.ready = config.grammar is None or (self.prepared is not None and self.prepared.done())
            self.due_ms, self.left_ms = 1000 * self.arrived_s + self._ttft_ms, cost.ttft_ms
            self.rest_ms = cost.ttft_ms + cost.tpot_ms * config.max_tokens
            return
        self.ready = run.decoding.ready
        self.stage, self.batchable = run.stage, batchable(run)
        decoded_ms = cost.tpot_ms * run.wanted_tokens
        if run.stage in ("decode", "finish"):
            self.due_ms = 1000 * self._first_s + len(run.tokens) * self.tpot_ms
            self.left_ms, self.rest_ms = cost.tpot_ms, decoded_ms
            return
        self.due_ms, self.left_ms = 1000 * self.arrived_s + self._ttft_ms, cost.ttft_ms
        if run.stage == "prefill":
            left = run.prompt_tokens - len(run.session.tokens)
            self.left_ms *= min(1.0, max(0.0, left / max(1, self._expected_tokens)))
        self.rest_ms = self.left_ms + decoded_ms

    # -- the engine's thread -----------------------------------------------------------------------

    def encoded(self, prompt: PromptTokens, whole: Cost, rows: PromptEmbeddings | None = None) -> None:
        """Sets the prompt, the expected cost of the whole model's answer on an idle device, and prompt
        embeddings."""
        self.marked, self.rows = prompt, rows
        self._expect(tuple(prompt.ids.tolist()), whole)

    def take_turn(self, turn: ContextTurn) -> None:
        """Sets the turn of a call in a context, before it begins."""
        self.turn, self.adapter = turn, turn.adapter
        self._expect(turn.asked.all_tokens, turn.whole)
        self._expected_tokens = turn.computed_tokens

    def begin(self, run: Run, plan: Plan | None = None, context_call: Any = None) -> None:
        """Sets the run of the call, before its first step."""
        self.run, self.plan, self.context_call = run, plan, context_call
        self._began_s = time.perf_counter()
        if plan is not None:
            # Other calls no longer wait for the whole model.
            self._expected, self._expected_tokens = plan.expected, len(plan.kept) - plan.reused_tokens
        self.refresh()

    def _expect(self, prompt: tuple[int, ...], whole: Cost) -> None:
        self.prompt, self.whole = prompt, whole
        self._limits = time_limits(self.call.objective, whole)
        self._expected, self._expected_tokens = whole, len(prompt)
        # The first token of all comes before a thought that the limit includes.
        most_ms = self._limits[0] - whole.thought_tokens * whole.tpot_ms
        self._ttft_ms = min(max(most_ms, 0.0), self._options.ttft_ms(self.priority))
        self.tpot_ms = min(self._limits[1], self._options.tpot_ms(self.priority))
        self.refresh()

    def send(self) -> bool:
        """Adds the events of the run's last step; returns whether the first token is among them."""
        run, now = self.run, time.perf_counter()
        assert run is not None
        self._last_s = now
        cache = run.session.cache
        if cache is not None and cache.capacity_tokens != self._capacity_tokens:
            self._capacity_tokens, self.cache_bytes = cache.capacity_tokens, run.session.size_bytes
        first = len(run.tokens) > 0 == self._sent
        if len(run.tokens) > self._sent:
            if first:
                self._first_s = now
                self.put(self._started(run))
            new, self._sent = slice(self._sent, len(run.tokens)), len(run.tokens)
            logprobs = None if run.logprobs is None else tuple(run.logprobs[new])
            shown = run.stops.ends[new.start - 1] if new.start else 0
            ends = tuple(end - shown for end in run.stops.ends[new])
            self.put(Piece(run.new_text(), tuple(run.tokens[new]), logprobs, ends, now))
        if run.stage == "ended":
            self.put(run.closed_because or self._ended(run))
        self.refresh()
        return first

    def _started(self, run: Run) -> Started:
        started = Started(
            prompt_tokens=len(self.prompt), kept_tokens=run.prompt_tokens, reused_tokens=run.reused_tokens,
            level=run.request.level, source="unplanned" if self.plan is None else self.plan.source,
            queued_ms=1000 * (self._began_s - self.arrived_s), adapter=self.adapter,
            objective=self.call.objective, bound=self.call.bound,
        )  # fmt: skip
        if self.turn is None:
            return started
        own = {"source": "context", "context_tokens": self.turn.asked.known}
        restored = self.context_call.restoration
        return dataclasses.replace(started, moved=restored.moved, shared=restored.shared, **own)

    def _ended(self, run: Run) -> Ended:
        count, limits = len(run.tokens), self._limits
        ttft_ms = 1000 * (self._first_s - self.arrived_s)
        tpot_ms = 1000 * (self._last_s - self._first_s) / (count - 1) if count > 1 else 0.0
        in_time = ttft_ms <= limits[0] and tpot_ms <= limits[1]
        return Ended(
            finish_reason=run.finish_reason or "length", stop_string=run.stop_string, tokens=count,
            ttft_ms=ttft_ms, tpot_ms=tpot_ms, engine_ttft_ms=run.timings.ttft_ms,
            engine_tpot_ms=run.timings.tpot_ms(count), met=None if self.call.objective is None else in_time,
            drafted=run.drafted_tokens / count if count else 0.0, seed=run.seed,
            context="" if self.context_call is None else self.context_call.record.name,
            context_tokens=0 if self.context_call is None else len(run.sequence),
        )  # fmt: skip


def _add(batch: Sequence[tuple[Job, Sequence[Event | JaxllmError]]]) -> None:
    """Adds events to what the readers of jobs have not read, in the event loop."""
    for job, events in batch:
        if not job.cancelled:
            job._events.extend(events)
        job.news.set()


def dispatch_of(jobs: Sequence[Job], took_ms: float) -> Dispatch | None:
    """The last dispatch of jobs, before they emit its events; None if it failed for all."""
    steps = [job.run.dispatched for job in jobs if job.run is not None and job.run.dispatched is not None]
    if not steps:
        return None
    chunk, tokens = steps[0].chunk, sum(job.unsent_tokens for job in jobs)
    dispatch = Dispatch(kind=steps[0].kind, rows=len(steps), took_ms=took_ms, tokens=tokens)
    if chunk is None:
        return dispatch
    return dataclasses.replace(dispatch, chunk_tokens=chunk.tokens, mode=chunk.mode)


def load_of(job: Job, queue: Queue, options: SchedulerOptions) -> Load:
    """The time that a job beginning now has waited, and that others will take from it."""
    others = dataclasses.replace(queue, work=[each for each in queue.work if each.id != job.id])
    load = expected_load(others, options, job.call.priority)
    passed_ms = 1000 * (time.perf_counter() - job.arrived_s)
    return Load(waiting_ms=passed_ms + load.waiting_ms, token_share=load.token_share)


def begin(job: Job, service: PlannedService, sessions: PrefixSessions, load: Load) -> None:
    """Makes the run of a call without a context, with the cache of an earlier answer with the same prefix.
    Raises ObjectiveMissed or Refused if no choice meets the objective of a strict call (see `_planned`), and
    JaxllmError if the engine cannot answer it."""
    engine, call = service.engine, job.call
    ids, rows, plan, level, tpot_ms, lifecycle = job.prompt, job.rows, None, None, None, Lifecycle()
    if rows is not None:
        # The ids that caches have.
        ids = rows.placed(ids, engine.cfg)
    objective = call.objective or (ANYTHING if load.work_share < 1 else None)
    if objective is not None:
        cached = sessions.reusable(call.app, ids)
        reused = {
            level: cached[version]
            for level in engine.levels
            if (version := engine.runner_at(level).weights_version) in cached
        }
        plan = _planned(job, service, objective, load, reused)
        ids = tuple(np.asarray(ids)[plan.kept].tolist())
        rows = rows and rows.kept(plan.kept)
        level, tpot_ms = plan.level, plan.expected.tpot_ms
        lifecycle = PlannedCall(plan, objective, service.profile, margin=service.planner.safety_margin)
    request = engine.request(ids, call.config, level=level, tpot_ms=tpot_ms, rows=rows)
    decoding, session = engine.decoding(request), None
    if request.source is None:
        # A decoder's cache depends on its source.
        session = sessions.take(call.app, call.prefix_key, ids, engine.runner_at(request.level))
    run = Run(decoding, engine.tokenizer, request, session=session, lifecycle=lifecycle)
    run.uninterrupted = True
    job.begin(run, plan)


def _planned(
    job: Job, service: PlannedService, objective: Objective, load: Load, reused: Mapping[int, int]
) -> Plan:
    """The plan of a call; refuses a strict one that only the load keeps from its objective."""
    call, count = job.call, job.call.config.max_tokens
    planner = service.planner.thinking(call.thought_tokens)
    plan = functools.partial(planner.plan, job.marked, objective, answer_tokens=count, reused=reused)
    try:
        return plan(strict=bool(call.strict), load=load)
    except ObjectiveMissed as missed:
        # Raises the same error if the load is not the cause.
        plan(strict=True, load=IDLE)
        message = f"other calls use the time that this strict call requires ({missed}); try again later"
        raise Refused(message, reason="full", retry_after_s=max(1.0, load.waiting_ms / 1000)) from missed
