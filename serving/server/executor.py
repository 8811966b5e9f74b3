"""Runs the engine in one thread, which owns all of JAX: takes calls, steps their runs in the scheduler's
order, and puts their events.

Between any two dispatches calls are accepted and cancelled. Every accepted call ends exactly once: by
`Ended`, by an error, or silently after a cancel.
"""

import asyncio
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.text.droppable import PromptTokens
from jaxllm.text.marked_text import MarkedText
from serving.planned_answer import PlannedCall
from serving.planning.objectives import whole_cost
from serving.planning.planner import Load, Plan
from serving.run import Lifecycle, Run
from serving.server.calls import Call, Refused
from serving.server.dispatches import DispatchObserver, dispatch_of
from serving.server.job import Job, prompt_ids_of
from serving.server.logs import named
from serving.server.memory import ServiceMemory
from serving.server.scheduler import (
    Queue,
    SchedulerOptions,
    decayed,
    expected_load,
    next_action,
    queue_refusal,
    retry_after_s,
)
from serving.server.ticket import EngineTicket
from serving.service import LLMService
from serving.step import close, step

_log = logging.getLogger(__name__)
# In this time an app's past use of the engine counts half.
_HALF_LIFE_MS = 10_000.0
_IDLE_S = 0.5


class Together(Protocol):
    """How several runs take one dispatch."""

    def batchable(self, run: Run, /) -> bool:
        """Whether the next step of a run may be one with others'."""
        ...

    def decode_together(self, runs: Sequence[Run], /) -> None:
        """Takes one dispatch of several runs; a run that fails has ended, with `Run.closed_because`."""
        ...


class OneByOne:
    """Decodes each run by itself (see `Together`)."""

    def batchable(self, run: Run, /) -> bool:
        """See `Together`."""
        del run
        return False

    def decode_together(self, runs: Sequence[Run], /) -> None:
        """See `Together`."""
        for run in runs:
            step(run)


class Executor:
    """Answers calls in a thread of its own, from `start` to `stop`.

    Attributes:
      service: whose engine and planner answer; used by the thread alone.
      options: of the scheduler.
      memory: that the service takes.
      sessions: of ended answers, for prompts that begin in the same way.
    """

    def __init__(
        self,
        service: LLMService,
        options: SchedulerOptions,
        *,
        memory: ServiceMemory | None = None,
        together: Together | None = None,
        observer: DispatchObserver | None = None,
    ) -> None:
        self.service, self.options = service, options
        self.memory = ServiceMemory(service) if memory is None else memory
        self.sessions = self.memory.sessions
        self._together, self._observer = together or OneByOne(), observer
        self._wake = threading.Condition()
        self._numbers = itertools.count()
        # Guarded by `_wake`: calls that no dispatch has seen yet, and why none are taken.
        self._inbox: list[Job] = []
        self._refusing: str | None = None
        self._close_at_s: float | None = None
        # Of the thread alone; others read them as they are.
        self._jobs: dict[int, Job] = {}
        self._engine_ms: dict[str, float] = {}
        self.beat_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, call: Call, loop: asyncio.AbstractEventLoop) -> EngineTicket:
        """Takes a call; its prompt is encoded in the caller's thread, within the window.

        Args:
          call: to answer; one in a context or with an adapter is refused.
          loop: in which its events are read.

        Raises:
          Refused: the service is stopping, or the queue is full.
          ConfigError, ContextOverflow: the call cannot be answered whatever the load.
        """
        _require_supported(call)
        engine, call = self.service.engine, _guided(call)
        self._require_room(call.app)
        tokenizer = engine.tokenizer.limited(engine.options.context_tokens)
        prompt = prompt_ids_of(tokenizer, call.prompt)
        engine.request(prompt, call.config).require_served_by(engine.runner)
        whole = whole_cost(self.service.profile, len(prompt), call.config.max_tokens)
        ticket = EngineTicket(call, loop, self._notify)
        job = Job(next(self._numbers), ticket, prompt, whole, options=self.options)
        with self._wake:
            self._require_room(call.app)
            self._inbox.append(job)
            self._wake.notify()
        return ticket

    def stop(self, within_s: float) -> None:
        """Takes no more calls, waits until those that were taken have ended, closes the others after
        `within_s` seconds, and ends the thread. May be called again."""
        with self._wake:
            self._refusing = self._refusing or "draining"
            if self._close_at_s is None:
                self._close_at_s = time.monotonic() + within_s
            self._wake.notify()
        if self.alive:
            self._thread.join()

    def queue(self) -> Queue:
        """The calls that there are now."""
        jobs = [*list(self._jobs.values()), *list(self._inbox)]
        return Queue(
            now_ms=1000 * time.perf_counter(),
            work=[job.work(self._together.batchable) for job in jobs],
            engine_ms=dict(self._engine_ms),
        )

    def running(self) -> list[tuple[str, int]]:
        """The app and the level of each answer that runs now."""
        runs = [(job.call.app, job.run) for job in list(self._jobs.values())]
        return [(app, run.request.level) for app, run in runs if run is not None]

    @property
    def cache_bytes(self) -> int:
        """Memory of the caches of answers that run now."""
        return sum(job.cache_bytes for job in list(self._jobs.values()))

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _require_room(self, app: str) -> None:
        with self._wake:
            if self._refusing is not None:
                raise Refused("the service is stopping; try again later", reason=self._refusing)
            queue = self.queue()
            waiting = [each.app for each in queue.waiting]
            why = queue_refusal(len(waiting), waiting.count(app), self.options)
            if why is not None:
                raise Refused(f"{why}; try again later", reason="full", retry_after_s=retry_after_s(queue))

    # -- the engine's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        error = JaxllmError("the engine has failed; the service must be started again")
        try:
            while self._one_turn():
                pass
        except BaseException:
            _log.exception(
                "the engine's thread has failed", extra=named(job.call for job in self._jobs.values())
            )
        with self._wake:
            self._refusing = self._refusing or "draining"
            jobs = [*self._jobs.values(), *self._inbox]
            self._jobs, self._inbox = {}, []
        for job in jobs:
            job.ticket.put(error)

    def _one_turn(self) -> bool:
        """Accepts and cancels calls, then takes one dispatch or waits; False where the thread should end."""
        self.memory.step()
        with self._wake:
            self.beat_s = time.monotonic()
            self._jobs |= {job.id: job for job in self._inbox}
            self._inbox.clear()
            if not self._jobs:
                if self._refusing is not None:
                    return False
                self._wake.wait(_IDLE_S)
                return True
            late = self._close_at_s is not None and self.beat_s >= self._close_at_s
        for job in list(self._jobs.values()):
            if late or job.ticket.cancelled:
                self._close(job, late=late)
        self._dispatch()
        return True

    def _startable(self) -> Queue:
        """The queue, without calls that wait where there is too little memory for more than those that
        run."""
        queue = self.queue()
        if self.memory.short and queue.running:
            return dataclasses.replace(queue, work=queue.running)
        return queue

    def _close(self, job: Job, *, late: bool) -> None:
        del self._jobs[job.id]
        if job.run is not None and job.run.stage != "ended":
            close(job.run)
            self._keep(job)
        if late:
            job.ticket.put(Refused("the service has stopped in the middle of the answer", reason="draining"))

    def _dispatch(self) -> None:
        action = next_action(self._startable(), self.options)
        jobs = [self._jobs[each] for each in action.ids]
        began = time.perf_counter()
        try:
            if action.kind == "start":
                self._begin(jobs[0])
            runs = [job.run for job in jobs if job.run is not None]
            for run in runs:
                run.resume()
            if action.kind == "decode":
                for run in runs:
                    # With others a token takes longer than the profile says.
                    run.taken_whole = False
                self._together.decode_together(runs)
            else:
                for run in runs:
                    step(run)
        except JaxllmError as error:
            self._failed(jobs, error)
        except Exception as error:
            _log.exception("the engine failed while it answered", extra=named(job.call for job in jobs))
            name = type(error).__name__
            self._failed(jobs, JaxllmError(f"the engine failed while it answered ({name}); see its log"))
        took_ms = 1000 * (time.perf_counter() - began)
        self._engine_ms = decayed(self._engine_ms, took_ms, _HALF_LIFE_MS)
        self._observe([job for job in jobs if job.id in self._jobs], took_ms)
        for job in jobs:
            app = job.call.app
            self._engine_ms[app] = self._engine_ms.get(app, 0.0) + took_ms / len(jobs)
            if job.id in self._jobs:
                job.tell()
                if job.run is not None and job.run.stage == "ended":
                    del self._jobs[job.id]
                    self._keep(job)

    def _observe(self, jobs: Sequence[Job], took_ms: float) -> None:
        dispatch = dispatch_of(jobs, took_ms)
        if dispatch is not None and self._observer is not None:
            self._observer.dispatched(dispatch)

    def _failed(self, jobs: Sequence[Job], error: JaxllmError) -> None:
        for job in jobs:
            del self._jobs[job.id]
            job.ticket.put(error)

    def _keep(self, job: Job) -> None:
        assert job.run is not None
        self.sessions.keep(job.call.app, job.call.prefix_key, job.run.session)

    def _begin(self, job: Job) -> None:
        """Plans a call with an objective, with the time that it has waited and that others will take, and
        makes its run."""
        engine, call = self.service.engine, job.call
        plan, lifecycle = None, None
        ids, level, tpot_ms = job.prompt, None, None
        if call.objective is not None:
            plan = self._planned(job)
            ids = tuple(np.asarray(job.prompt)[plan.kept].tolist())
            level, tpot_ms = plan.level, plan.expected.tpot_ms
            lifecycle = PlannedCall(
                plan, call.objective, self.service.profile, margin=self.service.planner.safety_margin
            )
        request = engine.request(ids, call.config, level=level, tpot_ms=tpot_ms)
        decoding = engine.decoding(request)
        session = self.sessions.take(call.app, call.prefix_key, ids, decoding.runner.weights_version)
        run = Run(decoding, engine.tokenizer, request, session=session, lifecycle=lifecycle or Lifecycle())
        run.taken_whole = True
        job.begin(run, plan)

    def _planned(self, job: Job) -> Plan:
        call = job.call
        assert call.objective is not None
        queue = self.queue()
        others = Queue(now_ms=queue.now_ms, work=[each for each in queue.work if each.id != job.id])
        # It begins now: of those that wait none goes first, and of those that run the decoding ones do.
        there = expected_load(others, self.options, call.priority, due_ms=-np.inf)
        passed_ms = 1000 * (time.perf_counter() - job.ticket.arrived_s)
        load = Load(waiting_ms=passed_ms + there.waiting_ms, token_share=there.token_share)
        return self.service.planner.plan(
            _unmarked(job.prompt),
            call.objective,
            answer_tokens=call.config.max_tokens,
            strict=bool(call.strict),
            load=load,
        )


def _unmarked(ids: Sequence[int]) -> PromptTokens:
    """Token ids as a planner takes them, of which none may be dropped."""
    return PromptTokens(
        marked=MarkedText.of_template(""),
        ids=np.asarray(ids, np.int32),
        offsets=np.zeros((len(ids), 2), np.int64),
        find_spans=lambda: np.zeros((0, 2), np.int64),
    )


def _require_supported(call: Call) -> None:
    asked = {"a context": call.context, "an adapter": call.adapter}
    for what, given in asked.items():
        if given:
            raise ConfigError(f"this service answers no call with {what}; leave it out")


def _guided(call: Call) -> Call:
    """The call with its grammar and log-probabilities in its config, where the engine reads them."""
    config = call.config
    if call.grammar is not None:
        config = dataclasses.replace(config, grammar=call.grammar)
    if call.top_logprobs is not None:
        config = dataclasses.replace(config, top_logprobs=call.top_logprobs)
    return dataclasses.replace(call, config=config)
