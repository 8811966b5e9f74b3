"""Runs the engine in one thread: accepts calls, steps their runs in the scheduler's order, and emits their
events.

Calls are accepted and cancelled between dispatches. Every accepted call ends exactly once: by `Ended`, by
an error, or silently after a cancel. The engine may be live or over exported programs: this module imports
no JAX.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from multiprocessing.connection import wait
from typing import Any, TypeVar

from jaxllm.config import FULL_LEVEL
from jaxllm.errors import BundleError, ConfigError, JaxllmError, NotFinite, one_line
from jaxllm.models.features import feature_refusal
from jaxllm.serving.elastic.objectives import expected_cost
from jaxllm.serving.elastic.planned_service import ANYTHING, PlannedService
from jaxllm.serving.engine.request import GenerationConfig, Session
from jaxllm.serving.engine.run import Run
from jaxllm.serving.engine.step import decode_together, fail, step
from jaxllm.serving.server.calls import Call, ContextBusy, Refused, encoded_prompt
from jaxllm.serving.server.device_state import DeviceState
from jaxllm.serving.server.job import Dispatch, Job, begin, dispatch_of, load_of
from jaxllm.serving.server.logs import named
from jaxllm.serving.server.memory import ServiceMemory
from jaxllm.serving.server.scheduler import (
    Queue,
    SchedulerOptions,
    decayed,
    next_dispatch,
    queue_refusal,
    retry_after_s,
)

Result = TypeVar("Result")
_log = logging.getLogger(__name__)
# Half-life of an app's past use of the engine.
_HALF_LIFE_MS, _IDLE_S = 10_000.0, 0.5
# The next dispatch uses all cores: pause this long so that the event loop can send a first token.
_FIRST_TOKEN_S = 0.0005
# Maximum number of functions of an app that wait for the engine's thread.
_MAX_WAITING = 16
# No further function is started after this time, so that answers continue.
_PERIOD_S = 0.02
# Approximate time of a restart after a failure.
_RESTART_S = 5.0
# An objective of 0 would be none.
_LEAST_WORK = 0.01
# Maximum delay of a call that arrives while the thread waits for a mask.
_MASK_S = 0.005


@dataclasses.dataclass(frozen=True, eq=False)
class _Function:
    """A function of an app for the engine's thread (see `Executor.work`), waiting since a time."""

    app: str
    run: Callable[[], Any]
    adapter: str
    background: bool
    future: Future[Any] = dataclasses.field(default_factory=Future)
    since_s: float = dataclasses.field(default_factory=time.monotonic)


class Executor:
    """Answers calls in its own thread, from `start` to `stop`.

    Attributes:
      service: engine and planner of the answers; used only by the thread.
      options: options of the scheduler.
      memory: the service's memory.
      sessions: caches of ended answers, for prompts with the same prefix.
      contexts: contexts of apps (see `jaxllm.serving.server.context_turns.ContextTurns`); None for none.
      adapters: adapters that calls may name (see `jaxllm.serving.server.opening.Adapters`).
      canary: tests whether the engine answers.
      device: state of the device, as its system reports it.
    """

    def __init__(
        self,
        service: PlannedService,
        options: SchedulerOptions,
        *,
        memory: ServiceMemory,
        adapters: Any,
        contexts: Any = None,
        on_dispatch: Callable[[Dispatch], None] = lambda dispatch: None,
        idle_work: Any = None,
    ) -> None:
        """Makes an executor that has not started.

        Args:
          service, memory, contexts, adapters: see the class.
          options: limits of the queue.
          on_dispatch: called in the thread after each successful dispatch.
          idle_work: work for the thread while it has no calls (see
            `jaxllm.serving.server.opening.ProfileRefinement`); None for none.
        """
        self.service, self.options, self.contexts = service, options, contexts
        self.memory, self.sessions, self.adapters = memory, memory.sessions, adapters
        self._on_dispatch, self._idle_work, self._device = on_dispatch, idle_work, DeviceState()
        self._wake = threading.Condition()
        self._numbers = itertools.count()
        # Guarded by `_wake`: calls that no dispatch has seen yet, functions of apps, why none are accepted.
        self._inbox: list[Job] = []
        self._functions: list[_Function] = []
        self._refusing: str | None = None
        self._close_at_s: float | None = None
        # Written only by the thread; others read snapshots.
        self._jobs: dict[int, Job] = {}
        self._engine_ms: dict[str, float] = {}
        self.beat_s = time.monotonic()

        def answer() -> None:
            adapters.use("")
            service.engine.generate(_PROMPT, GenerationConfig(max_tokens=1))

        self.canary = Canary(answer)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def device(self) -> DeviceState:
        """See the class; may be set from any thread."""
        return self._device

    @device.setter
    def device(self, state: DeviceState) -> None:
        self._device = state
        self.memory.trim = state.trim
        self._notify()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, call: Call, loop: asyncio.AbstractEventLoop) -> Job:
        """Accepts a call; its prompt is encoded in the caller's thread, within the window. A turn in a
        context is encoded in the engine's thread, which owns the contexts; its errors end the answer. Its
        events are read in `loop`.

        Raises:
          Refused: the service is stopping, or the queue is full.
          ConfigError, ContextOverflow: the call cannot be answered under any load.
          ContextGone: the app has no context of this name.
          ContextBusy: a call in the context has not ended.
          AdapterGone: no adapter has this name.
        """
        self.adapters.require(call.adapter)
        self._require_room(call.app)
        job = Job(next(self._numbers), call, loop, self.options, self._notify)
        if call.context:
            self.require_contexts().require(call.app, call.context)
        else:
            engine = self.service.engine
            tokenizer = engine.tokenizer.limited(engine.options.context_tokens)
            prompt, rows = encoded_prompt(
                tokenizer, call.prompt, call.config.task, shorten=bool(call.shorten)
            )
            engine.request(prompt.ids.tolist(), call.config, rows=rows).require_served_by(engine.runner)
            whole = expected_cost(
                self.service.profile, FULL_LEVEL, len(prompt.ids), call.config.max_tokens,
                thought_tokens=call.thought_tokens,
            )  # fmt: skip
            job.encoded(prompt, whole, rows)
        with self._wake:
            self._require_room(call.app)
            if call.context and call.context_tokens is None:
                self.require_free(call.app, call.context, over=False)
            self._inbox.append(job)
            self._wake.notify()
        return job

    def work(
        self, app: str, what: Callable[[], Result], *, adapter: str = "", background: bool = False
    ) -> "Future[Result]":
        """Runs a function of an app in the engine's thread, between two dispatches, unless its future is
        cancelled before; the future has its result or error. Raises Refused if the service is stopping, or
        too many functions of the app wait. Meanwhile the model has `adapter`, empty for none. In the
        `background` it waits while foreground calls have something to compute, up to the scheduler's
        patience."""
        function = _Function(app, what, adapter, background)
        with self._wake:
            self._require_taking()
            if sum(waiting.app == app for waiting in self._functions) >= _MAX_WAITING:
                message = f"{_MAX_WAITING} requests of this app wait for the engine, the maximum; wait"
                raise Refused(message, reason="full")
            self._functions.append(function)
            self._wake.notify()
        return function.future

    def keep_prefix(self, app: str, runner: Any, text: Any) -> None:
        """Caches a scored text (see `jaxllm.serving.runners.scorer.Scoring`) for the app's next answer to it,
        in the engine's thread."""
        if text.cache is not None:
            states = None if runner.cfg.states is None else len(text.tokens)
            session = Session([*text.tokens], text.cache, runner.weights_version, state_tokens=states)
            self.sessions.keep(app, "", session)

    def require_contexts(self) -> Any:
        """The contexts of apps. Raises ConfigError if the service has no contexts."""
        if self.contexts is None:
            refusal = feature_refusal(self.service.engine.cfg, "contexts")
            how = "start it with a folder for them (--contexts)"
            raise ConfigError(refusal or f"this service keeps no contexts; {how}")
        return self.contexts

    def jobs(self) -> list[Job]:
        """The calls that have not ended."""
        with self._wake:
            return [*self._jobs.values(), *(each for each in self._inbox if not each.over)]

    def require_free(self, app: str, name: str, *, over: bool = True) -> None:
        """Checks that no call changes an app's context; `over`: also none that is about to be closed. Raises
        ContextBusy if a call changes it."""
        if any(job.continues(app, name) and (over or not job.over) for job in self.jobs()):
            raise ContextBusy(f"the context {name} answers another call; wait for its end, or close it")

    def stop(self, within_s: float) -> None:
        """Refuses new calls, waits for accepted ones to end, closes the others after `within_s` seconds, and
        ends the thread. Idempotent."""
        with self._wake:
            self._refusing = self._refusing or "draining"
            if self._close_at_s is None:
                self._close_at_s = time.monotonic() + within_s
            self._wake.notify()
        if self.alive:
            self._thread.join()

    def queue(self, *, inbox: bool = True) -> Queue:
        """The current calls, with those that no dispatch has seen or without."""
        return Queue(
            now_ms=1000 * time.perf_counter(),
            work=[*list(self._jobs.values()), *(list(self._inbox) if inbox else ())],
            engine_ms=dict(self._engine_ms),
            context_bytes=0 if self.contexts is None else self.contexts.room_bytes,
        )

    def running(self) -> list[tuple[str, int]]:
        """The app and level of each running answer."""
        runs = [(job.call.app, job.run) for job in list(self._jobs.values())]
        return [(app, run.request.level) for app, run in runs if run is not None]

    @property
    def cache_bytes(self) -> int:
        """Memory of the caches of running answers."""
        return sum(job.cache_bytes for job in list(self._jobs.values()))

    @property
    def resident_cache_bytes(self) -> int:
        """The part of `cache_bytes` that is resident: measured, or of a cache that a dispatch owns the share
        of its tokens."""
        total = 0
        for job in list(self._jobs.values()):
            if (run := job.run) is not None:
                found = run.session.resident_bytes
                room = run.runner.options.context_tokens
                total += job.cache_bytes * len(run.sequence) // room if found is None else found
        return total

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
            if (why := queue_refusal(queue, app, self.options)) is not None:
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
            _log.exception("the engine's thread has failed", extra=named(self._jobs.values()))
        with self._wake:
            self._refusing = self._refusing or "draining"
            jobs, functions = [*self._jobs.values(), *self._inbox], self._functions
            self._jobs, self._inbox, self._functions = {}, [], []
        for job in jobs:
            job.put(error)
        Job.deliver(jobs)
        for function in functions:
            if function.future.set_running_or_notify_cancel():
                function.future.set_exception(error)

    def _one_turn(self) -> bool:
        """Accepts and cancels calls, does other work, then runs one dispatch or waits; returns False if the
        thread should end."""
        self.memory.step()
        self.canary.step()
        with self._wake:
            self.beat_s = time.monotonic()
            accepted, self._inbox = self._inbox, []
            self._jobs |= {job.id: job for job in accepted}
            idle = not self._jobs and not self._functions
            if idle and self._refusing is not None:
                return False
            late = self._close_at_s is not None and self.beat_s >= self._close_at_s
        self.memory.settle(idle=idle)
        if idle:
            # A hot device computes for calls alone.
            hot = self._device.work_share < 1
            if hot or self._idle_work is None or not self._idle_work.step():
                with self._wake:
                    if not self._inbox and not self._functions and self._refusing is None:
                        self._wake.wait(_IDLE_S)
            return True
        if self._idle_work is not None:
            self._idle_work.interrupt()
        for job in list(self._jobs.values()):
            if late or job.cancelled:
                self._close(job, late=late)
        self._run_functions()
        for job in accepted:
            if job.call.context and job.id in self._jobs:
                self._take_turn(job)
        self._compile_grammars()
        if self._jobs:
            self._dispatch()
        return True

    def _run_functions(self) -> None:
        """Calls functions of apps in their order of arrival: one, and more while little time has passed."""
        late_s = time.perf_counter() + _PERIOD_S
        while (function := self._next_function()) is not None:
            began_s, future = time.perf_counter(), function.future
            if future.set_running_or_notify_cancel():
                try:
                    self.adapters.use(function.adapter)
                    future.set_result(self.canary.watched(function.run))
                except BaseException as error:
                    future.set_exception(error)
            self._count(function.app, 1000 * (time.perf_counter() - began_s))
            if time.perf_counter() >= late_s:
                return

    def _next_function(self) -> _Function | None:
        """Removes and returns the next function to call: a background one only if no foreground call could
        go on instead, or it has waited too long."""
        busy = any(job.priority == "foreground" and job.ready for job in self._jobs.values())
        starved_s = time.monotonic() - self.options.patience_ms / 1000
        with self._wake:
            for index, each in enumerate(self._functions):
                if not each.background or not busy or each.since_s < starved_s:
                    return self._functions.pop(index)
        return None

    def _compile_grammars(self) -> None:
        """Starts to compile grammars of waiting calls: at most one per app and priority is being compiled, or
        is compiled and waits with its process for its call. So no app's grammars delay another's or fill
        memory."""
        engine = self.service.engine
        waiting = [
            job for job in self._jobs.values() if job.run is None and job.call.config.grammar is not None
        ]
        ahead = {(job.app, job.priority) for job in waiting if job.prepared is not None}
        for job in waiting:
            config, line = job.call.config, (job.app, job.priority)
            if job.prepared is None and line not in ahead and config.grammar is not None:
                ahead.add(line)
                stop_ids = config.stop_ids(engine.tokenizer.eos_ids)
                job.prepared = engine.grammars.prepare(config.grammar, stop_ids)
                job.prepared.add_done_callback(lambda _: self._notify())
            error = job.prepared.exception() if job.prepared is not None and job.prepared.done() else None
            if isinstance(error, JaxllmError):
                self._failed([job], error)

    def _take_turn(self, job: Job) -> None:
        call = job.call
        with self._wake:
            # From here on later calls find the context in use.
            others = (each for each in self.jobs() if each is not job and not each.over)
            free = not any(each.continues(call.app, call.context) for each in others)
            job.may_continue = job.may_continue or free
        if self._device.work_share < 1:
            # So that other levels are considered, too.
            call = dataclasses.replace(call, objective=call.objective or ANYTHING)
        with self._failing([job]):
            job.take_turn(self.require_contexts().turn(call, free=free))

    def _close(self, job: Job, *, late: bool) -> None:
        if job.run is not None and job.run.stage != "ended":
            try:
                # An error of storing its context is raised to the context's next call.
                fail(job.run)
            except Exception:
                _log.exception("an answer could not be ended as it should")
        self._remove(job)
        if late:
            job.put(Refused("the service has stopped in the middle of the answer", reason="draining"))
            Job.deliver([job])

    def _dispatch(self) -> None:
        for job in self._jobs.values():
            job.refresh()
        queue = self.queue(inbox=False)
        # Under memory pressure only running calls continue.
        if self.memory.short_bytes > 0 and queue.running:
            queue = dataclasses.replace(queue, work=queue.running)
        jobs: list[Any] = next_dispatch(queue, self.options)
        if not jobs:
            # For the masks of calls that cannot continue without.
            matchers = [job.run.decoding.matcher for job in self._jobs.values() if job.run is not None]
            wait([each.channel for each in matchers if each is not None and each.channel], _MASK_S)
            return
        began = time.perf_counter()
        with self._failing(jobs):
            # All calls of one dispatch have the same adapter.
            self.adapters.use(jobs[0].adapter)
            if jobs[0].run is None:
                self._begin(jobs[0])
            runs = [job.run for job in jobs if job.run is not None]
            for run in runs:
                run.resume()
            if len(runs) > 1:
                for run in runs:
                    # In a batch a token takes longer than the profile says.
                    run.uninterrupted = False
                decode_together(runs)
            else:
                step(runs[0])
        took_ms = 1000 * (time.perf_counter() - began)
        if (dispatch := dispatch_of([job for job in jobs if job.id in self._jobs], took_ms)) is not None:
            self._on_dispatch(dispatch)
        first = False
        for job in jobs:
            self._count(job.app, took_ms / len(jobs))
            if job.id in self._jobs:
                self.canary.answered()
                # A client that has read the end may call in the same context at once.
                if job.run is not None and job.run.stage == "ended":
                    self._remove(job)
                first = job.send() or first
        Job.deliver(jobs)
        if first:
            time.sleep(_FIRST_TOKEN_S)

    def _count(self, app: str, took_ms: float) -> None:
        """Adds engine time to an app's count."""
        self._engine_ms = decayed(self._engine_ms, took_ms, _HALF_LIFE_MS)
        self._engine_ms[app] = self._engine_ms.get(app, 0.0) + took_ms

    def _begin(self, job: Job) -> None:
        load = load_of(job, self.queue(), self.options)
        # No state of the device keeps a call that was accepted from the smallest level.
        if (share := self._device.work_share) < 1:
            load = dataclasses.replace(load, work_share=max(share, _LEAST_WORK))
        if job.turn is None:
            begin(job, self.service, self.sessions, load)
            return
        request, context_call = self.require_contexts().begin(job.turn, job.call, load)
        engine = self.service.engine
        run = Run(engine.decoding(request), engine.tokenizer, request, lifecycle=context_call)
        job.begin(run, context_call=context_call)

    @contextlib.contextmanager
    def _failing(self, jobs: Sequence[Job]) -> Iterator[None]:
        """Ends jobs with the error raised inside."""
        try:
            yield
        except JaxllmError as error:
            self.canary.failed(error)
            self._failed(jobs, error)
        except Exception as error:
            self.canary.failed(error)
            _log.exception("the engine failed while it answered", extra=named(jobs))
            name = type(error).__name__
            self._failed(jobs, JaxllmError(f"the engine failed while it answered ({name}); see its log"))

    def _failed(self, jobs: Sequence[Job], error: JaxllmError) -> None:
        for job in jobs:
            self._remove(job, keep=False)
            job.put(error)
        Job.deliver(jobs)

    def _remove(self, job: Job, *, keep: bool = True) -> None:
        """Drops a job; stores its cache for calls with the same prefix, unless it depends on a source."""
        del self._jobs[job.id]
        if job.run is not None:
            # Tracebacks of connections that clients have left refer to calls until they are collected, which
            # counts objects and not the bytes of their arrays: drop those here, and the cache below.
            job.run.release()
        if job.context_call is not None:
            self.require_contexts().ended(job.call.app, job.context_call.record.name)
            return
        if job.run is None:
            return
        kept = keep and job.run.request.source is None
        if not kept or not self.sessions.keep(job.call.app, job.call.prefix_key, job.run.session):
            job.run.session.take()


# An id that every model has: a text may have characters without ids.
_PROMPT = (0,)
# Number of consecutive failures, and the time between two, after which the engine counts as failed.
_MOST_FAILURES, _PAUSE_S = 3, 2.0
# Time without answers after which a readiness request checks the engine.
_STALE_S = 60.0


class EngineFailed(JaxllmError):
    """The engine could not answer several times in a row."""


class Canary:
    """Tracks whether the engine answers. Methods are for the engine's thread unless noted. `answer` lets the
    engine answer one token, and raises its error; `clock` returns seconds.

    Attributes:
      suspected: whether an error may have been the engine's, with no successful answer since.
    """

    def __init__(self, answer: Callable[[], object], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._answer, self._clock = answer, clock
        self.suspected, self._failures = False, 0
        self._answered_s, self._next_s = clock(), clock()

    @property
    def stale(self) -> bool:
        """Whether nothing was answered for a while. From any thread."""
        return self._clock() - self._answered_s > _STALE_S

    def answered(self) -> None:
        """Records that a call got output."""
        self._answered_s = self._clock()

    def failed(self, error: Exception) -> None:
        """Records an error of a call. From any thread."""
        if not isinstance(error, JaxllmError) or isinstance(error, BundleError | NotFinite):
            self.suspected = True

    def watched(self, what: Callable[[], Result]) -> Result:
        """Calls a function and records its errors. From any thread."""
        try:
            return what()
        except Exception as error:
            self.failed(error)
            raise

    def step(self, *, readiness: bool = False) -> None:
        """Tests the engine after an error, or for `readiness` if nothing was answered for a while, if a test
        is due. Raises EngineFailed if the last allowed test failed."""
        if not (self.stale if readiness else self.suspected) or self._clock() < self._next_s:
            return
        try:
            self._answer()
        except Exception as error:
            self.suspected, self._failures = True, self._failures + 1
            self._next_s = self._clock() + _PAUSE_S
            why = one_line(error)
            _log.error("the engine cannot answer (%d of %d times): %s", self._failures, _MOST_FAILURES, why)
            if self._failures >= _MOST_FAILURES:
                raise EngineFailed(f"the engine cannot answer any more: {why}") from error
        else:
            self.suspected, self._failures = False, 0
            self.answered()
