"""Runs the engine in one thread, which owns all of JAX: takes calls, steps their runs in the scheduler's
order, and puts their events.

Between any two dispatches calls are accepted and cancelled. Every accepted call ends exactly once: by
`Ended`, by an error, or silently after a cancel.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

from jaxllm.errors import JaxllmError
from jaxllm.text.droppable import PromptTokens
from serving.planning.objectives import Cost, whole_cost
from serving.server.adapters import Adapters
from serving.server.beginning import begin, begin_turn, load_of
from serving.server.calls import Call, Refused
from serving.server.context_turns import ContextTurns
from serving.server.dispatches import DispatchObserver, IdleWork, NoWork, dispatch_of
from serving.server.engine_work import EngineWork
from serving.server.job import Job, require_free
from serving.server.logs import named
from serving.server.memory import ServiceMemory
from serving.server.prompts import guided, prompt_with_rows
from serving.server.scheduler import (
    Queue,
    SchedulerOptions,
    decayed,
    next_action,
    queue_refusal,
    retry_after_s,
)
from serving.server.ticket import EngineTicket
from serving.server.together import OneByOne, Together
from serving.service import LLMService
from serving.step import fail, step

Found = TypeVar("Found")
_log = logging.getLogger(__name__)
# In this time an app's past use of the engine counts half.
_HALF_LIFE_MS, _IDLE_S = 10_000.0, 0.5
# The next dispatch takes all cores: so long the event loop has one to itself to send a first token.
_FIRST_TOLD_S = 0.0005
# A service that has failed is there again after about so long.
_RESTART_S = 5.0
# Of a turn in a context, until it is encoded.
_UNKNOWN = Cost(ttft_ms=0.0, tpot_ms=0.0, tokens=1)


class Executor:
    """Answers calls in a thread of its own, from `start` to `stop`.

    Attributes:
      service: whose engine and planner answer; used by the thread alone.
      options: of the scheduler.
      memory: that the service takes.
      sessions: of ended answers, for prompts that begin in the same way.
      contexts: of apps; None where the service keeps none.
      adapters: that calls may name.
    """

    def __init__(
        self,
        service: LLMService,
        options: SchedulerOptions,
        *,
        memory: ServiceMemory | None = None,
        together: Together | None = None,
        contexts: ContextTurns | None = None,
        adapters: Adapters | None = None,
        observer: DispatchObserver | None = None,
        idle_work: IdleWork | None = None,
    ) -> None:
        self.service, self.options, self.contexts = service, options, contexts
        self.memory = ServiceMemory(service) if memory is None else memory
        self.sessions = self.memory.sessions
        self.adapters = adapters or Adapters(service.engine.model)
        self._together, self._observer = together or OneByOne(), observer
        self._idle_work = idle_work or NoWork()
        self._wake = threading.Condition()
        self._numbers = itertools.count()
        # Guarded by `_wake`: calls that no dispatch has seen yet, and why none are taken.
        self._inbox: list[Job] = []
        self._waiting = EngineWork()
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
        """Takes a call; its prompt is encoded in the caller's thread, within the window. A turn in a context
        is encoded in the engine's thread, which alone knows the context: what is wrong with it ends the
        answer.

        Args:
          call: to answer.
          loop: in which its events are read.

        Raises:
          Refused: the service is stopping, or the queue is full.
          ConfigError, ContextOverflow: the call cannot be answered whatever the load.
          ContextGone: the app has no such context.
          ContextBusy: a call in the context has not ended.
          AdapterGone: there is no such adapter.
        """
        self.adapters.require(call.adapter)
        call = guided(call)
        self._require_room(call.app)
        prompt, rows, whole = PromptTokens.of_ids(()), None, _UNKNOWN
        if call.context:
            self.kept().require(call.app, call.context)
        else:
            engine = self.service.engine
            tokenizer = engine.tokenizer.limited(engine.options.context_tokens)
            prompt, rows = prompt_with_rows(tokenizer, call)
            engine.request(prompt.ids.tolist(), call.config, rows=rows).require_served_by(engine.runner)
            whole = whole_cost(self.service.profile, len(prompt.ids), call.config.max_tokens)
        ticket = EngineTicket(call, loop, self._notify)
        job = Job(next(self._numbers), ticket, prompt, whole, options=self.options, rows=rows)
        with self._wake:
            self._require_room(call.app)
            if call.context and call.context_tokens is None:
                there = [*list(self._jobs.values()), *self._inbox]
                require_free((each for each in there if not each.over), call.app, call.context)
            self._inbox.append(job)
            self._wake.notify()
        return ticket

    def work(self, app: str, what: Callable[[], Found]) -> "Future[Found]":
        """Runs a function in the engine's thread, between two dispatches, on the model without adapters.

        Args:
          app: for which it runs, and which its time is counted for.
          what: is called once, unless the future is cancelled before.

        Returns:
          What it returns or raises.

        Raises:
          Refused: the service is stopping, or too much of the app waits.
        """

        def plainly() -> Found:
            self.adapters.use("")
            return what()

        with self._wake:
            self._require_taking()
            future = self._waiting.add(app, plainly)
            self._wake.notify()
        return future

    def kept(self) -> ContextTurns:
        """The contexts of apps.

        Raises:
          ConfigError: the service keeps none.
        """
        if self.contexts is None:
            raise self.service.without_contexts("start it with a folder for them (--contexts)")
        return self.contexts

    def jobs(self) -> list[Job]:
        """The calls that have not ended."""
        with self._wake:
            return [*self._jobs.values(), *(each for each in self._inbox if not each.over)]

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
        return self._queue([*list(self._jobs.values()), *list(self._inbox)])

    def _queue(self, jobs: Iterable[Job]) -> Queue:
        return Queue(
            now_ms=1000 * time.perf_counter(),
            work=[job.work(self._together.batchable) for job in jobs],
            engine_ms=dict(self._engine_ms),
            context_bytes=0 if self.contexts is None else self.contexts.room_bytes,
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

    def _require_taking(self) -> None:
        if self._refusing is not None:
            raise Refused("the service is stopping; try again later", reason=self._refusing)

    def _require_room(self, app: str) -> None:
        with self._wake:
            self._require_taking()
            queue = self.queue()
            waiting = [each.app for each in queue.waiting]
            why = queue_refusal(len(waiting), waiting.count(app), self.options)
            if why is not None:
                raise Refused(f"{why}; try again later", reason="full", retry_after_s=retry_after_s(queue))

    # -- the engine's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        error = Refused(
            "the engine has failed, and the service ends: it must be started again, which systemd does by "
            "itself; send the request again then",
            reason="failed",
            retry_after_s=_RESTART_S,
        )
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
        self._waiting.fail(error)

    def _one_turn(self) -> bool:
        """Accepts and cancels calls, does other work, then takes one dispatch or waits; False where the
        thread should end."""
        self.memory.step()
        with self._wake:
            self.beat_s = time.monotonic()
            accepted, self._inbox = self._inbox, []
            self._jobs |= {job.id: job for job in accepted}
            idle = not self._jobs and not self._waiting
            if idle and self._refusing is not None:
                return False
            late = self._close_at_s is not None and self.beat_s >= self._close_at_s
        if idle:
            self._idle()
            return True
        self._idle_work.interrupt()
        for job in list(self._jobs.values()):
            if late or job.ticket.cancelled:
                self._close(job, late=late)
        self._count(self._waiting.run())
        for job in accepted:
            if job.call.context and job.id in self._jobs:
                self._take_turn(job)
        if self._jobs:
            self._dispatch()
        return True

    def _idle(self) -> None:
        """Takes a step of other work, or waits for calls where there is none."""
        if not self._idle_work.step():
            with self._wake:
                if not self._inbox and not self._waiting and self._refusing is None:
                    self._wake.wait(_IDLE_S)

    def _take_turn(self, job: Job) -> None:
        call = job.call
        with self._wake:
            # From here on a call that comes finds the context taken.
            others = [
                each for each in (*self._jobs.values(), *self._inbox) if each is not job and not each.over
            ]
            free = not any(each.continues(call.app, call.context) for each in others)
            job.may_continue = job.may_continue or free
        with self._failing([job]):
            job.take_turn(self.kept().turn(call, free=free))

    def _startable(self) -> Queue:
        """The calls that were accepted, of which others may come at any moment; without those that wait where
        there is too little memory for more than those that run."""
        queue = self._queue(self._jobs.values())
        if self.memory.short and queue.running:
            return dataclasses.replace(queue, work=queue.running)
        return queue

    def _close(self, job: Job, *, late: bool) -> None:
        if job.run is not None and job.run.stage != "ended":
            try:
                # An error of storing its context is told by the context's next call.
                fail(job.run)
            except Exception:
                _log.exception("an answer could not be ended as it should")
        self._remove(job)
        if late:
            job.ticket.put(Refused("the service has stopped in the middle of the answer", reason="draining"))

    def _dispatch(self) -> None:
        action = next_action(self._startable(), self.options)
        jobs = [self._jobs[each] for each in action.ids]
        began = time.perf_counter()
        with self._failing(jobs):
            # All of one dispatch have the same.
            self.adapters.use(jobs[0].adapter)
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
        took_ms = 1000 * (time.perf_counter() - began)
        self._observe([job for job in jobs if job.id in self._jobs], took_ms)
        first = False
        for job in jobs:
            self._count({job.call.app: took_ms / len(jobs)})
            if job.id in self._jobs:
                # A client that is told the end may call in the same context at once.
                if job.run is not None and job.run.stage == "ended":
                    self._remove(job)
                first = job.tell() or first
        if first:
            time.sleep(_FIRST_TOLD_S)

    def _count(self, took_ms: Mapping[str, float]) -> None:
        """Counts time of the engine for apps."""
        for app, each in took_ms.items():
            self._engine_ms = decayed(self._engine_ms, each, _HALF_LIFE_MS)
            self._engine_ms[app] = self._engine_ms.get(app, 0.0) + each

    def _begin(self, job: Job) -> None:
        load = load_of(job, self.queue(), self.options)
        if job.turn is None:
            begin(job, self.service, self.sessions, load)
        else:
            begin_turn(job, self.service, self.kept(), load)

    @contextlib.contextmanager
    def _failing(self, jobs: Sequence[Job]) -> Iterator[None]:
        """Ends jobs by what is raised in here."""
        try:
            yield
        except JaxllmError as error:
            self._failed(jobs, error)
        except Exception as error:
            _log.exception("the engine failed while it answered", extra=named(job.call for job in jobs))
            name = type(error).__name__
            self._failed(jobs, JaxllmError(f"the engine failed while it answered ({name}); see its log"))

    def _observe(self, jobs: Sequence[Job], took_ms: float) -> None:
        dispatch = dispatch_of(jobs, took_ms)
        if dispatch is not None and self._observer is not None:
            self._observer.dispatched(dispatch)

    def _failed(self, jobs: Sequence[Job], error: JaxllmError) -> None:
        for job in jobs:
            self._remove(job, keep=False)
            job.ticket.put(error)

    def _remove(self, job: Job, *, keep: bool = True) -> None:
        """Forgets a job, and keeps its cache, unless it follows a source, for calls that begin alike."""
        del self._jobs[job.id]
        if job.kept_by is not None:
            self.kept().ended(job.call.app, job.kept_by.record.name)
        elif keep and job.run is not None and job.run.request.source is None:
            self.sessions.keep(job.call.app, job.call.prefix_key, job.run.session)
