"""Begins calls: plans those with an objective, takes the turns of those in contexts, and makes their runs."""

import functools
import time
from collections.abc import Mapping

import numpy as np

from jaxllm.errors import ObjectiveMissed
from serving.planned_answer import PlannedCall
from serving.planning.planner import IDLE, Load, Plan
from serving.run import Lifecycle, Run
from serving.server.calls import Refused
from serving.server.context_turns import ContextTurns
from serving.server.job import Job
from serving.server.prefix_sessions import PrefixSessions
from serving.server.scheduler import Queue, SchedulerOptions, expected_load
from serving.service import LLMService


def load_of(job: Job, queue: Queue, options: SchedulerOptions) -> Load:
    """What a job that begins now has waited, and what others will take from it."""
    others = Queue(now_ms=queue.now_ms, work=[each for each in queue.work if each.id != job.id])
    # Of those that wait none goes first, and of those that run the decoding ones do.
    there = expected_load(others, options, job.call.priority, due_ms=-np.inf)
    passed_ms = 1000 * (time.perf_counter() - job.ticket.arrived_s)
    return Load(waiting_ms=passed_ms + there.waiting_ms, token_share=there.token_share)


def begin(job: Job, service: LLMService, sessions: PrefixSessions, load: Load) -> None:
    """Makes the run of a call that is in no context, with the cache of an earlier answer where one begins in
    the same way.

    Raises:
      ObjectiveMissed, Refused: no choice is in time, and the call insists (see `_planned`).
      JaxllmError: the engine cannot answer it.
    """
    engine, call = service.engine, job.call
    plan, lifecycle = None, None
    ids, rows, level, tpot_ms = job.prompt, job.rows, None, None
    if rows is not None:
        # As caches have them.
        ids = rows.placed(ids, engine.cfg)
    if call.objective is not None:
        there = sessions.reusable(call.app, ids)
        reused = {
            level: there[version]
            for level in engine.levels
            if (version := engine.runner_at(level).weights_version) in there
        }
        plan = _planned(job, service, load, reused)
        ids = tuple(np.asarray(ids)[plan.kept].tolist())
        rows = rows and rows.kept(plan.kept)
        level, tpot_ms = plan.level, plan.expected.tpot_ms
        lifecycle = PlannedCall(plan, call.objective, service.profile, margin=service.planner.safety_margin)
    request = engine.request(ids, call.config, level=level, tpot_ms=tpot_ms, rows=rows)
    decoding = engine.decoding(request)
    session = None
    if request.source is None:
        # What a decoder computed after one source is of no use after another.
        session = sessions.take(call.app, call.prefix_key, ids, engine.runner_at(request.level))
    run = Run(decoding, engine.tokenizer, request, session=session, lifecycle=lifecycle or Lifecycle())
    run.taken_whole = True
    job.begin(run, plan)


def begin_turn(job: Job, service: LLMService, contexts: ContextTurns, load: Load) -> None:
    """Makes the run of a call in a context, whose level it has.

    Raises:
      ObjectiveMissed: the context's level will not be in time, and the call insists.
      JaxllmError: the engine cannot answer it.
    """
    assert job.turn is not None
    engine = service.engine
    request, kept_by = contexts.begin(job.turn, job.call, load)
    run = Run(engine.decoding(request), engine.tokenizer, request, lifecycle=kept_by)
    job.begin(run, kept_by=kept_by)


def _planned(job: Job, service: LLMService, load: Load, reused: Mapping[int, int]) -> Plan:
    """The plan of a call; `reused` as `Planner.plan` takes it.

    Raises:
      ObjectiveMissed: no choice is in time even on an idle device, and the call insists.
      Refused: the load alone is why none is.
    """
    call = job.call
    objective, count = call.objective, call.config.max_tokens
    assert objective is not None
    plan = functools.partial(service.planner.plan, job.marked, objective, answer_tokens=count, reused=reused)
    try:
        return plan(strict=bool(call.strict), load=load)
    except ObjectiveMissed as missed:
        # Raises the same where nobody else is the cause.
        plan(strict=True, load=IDLE)
        raise Refused(
            f"other calls take the time that this one insists on ({missed}); try again later",
            reason="full",
            retry_after_s=max(1.0, load.waiting_ms / 1000),
        ) from missed
