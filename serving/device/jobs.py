"""Holds one call of a device's service while it runs: its plan or context, and the events of its steps."""

import math
import time
from datetime import datetime

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.text.tokenizer import Tokenizer
from serving.contexts.turn_ids import conversation_turn_ids, turn_ids
from serving.device.service import DeviceService
from serving.planned_answer import PlannedCall
from serving.planning.objectives import whole_cost
from serving.planning.planner import Load
from serving.run import Lifecycle, Run
from serving.server.calls import Call, Conversation, Ended, Piece, Started
from serving.server.prompts import TimeLimits, prompt_of, time_limits
from serving.server.ticket import EngineTicket


class Job:
    """A call that runs.

    Attributes:
      ticket: of the call.
      run: that answers it.
    """

    def __init__(
        self,
        ticket: EngineTicket,
        run: Run,
        *,
        source: str,
        prompt_tokens: int,
        context: str = "",
        context_tokens: int = 0,
        limits: TimeLimits | None = None,
    ) -> None:
        """See the class.

        Args:
          ticket, run: see the class.
          source: of the plan (see `Started`).
          prompt_tokens: of the whole prompt, a context's included.
          context: its name; empty for none.
          context_tokens: that the context had before.
          limits: that the call's objective allows; None for none.
        """
        self.ticket, self.run = ticket, run
        self._source, self._prompt_tokens, self._limits = source, prompt_tokens, limits or TimeLimits()
        self._context, self._context_tokens = context, context_tokens
        self._began_s = self._first_s = self._last_s = time.perf_counter()
        self._told = 0

    def tell(self) -> None:
        """Puts the events of what the run's last step gave."""
        run, now = self.run, time.perf_counter()
        if len(run.tokens) > self._told:
            self._last_s = now
            if not self._told:
                self._first_s = now
                self.ticket.put(self._started())
            new, self._told = slice(self._told, len(run.tokens)), len(run.tokens)
            told = run.logprobs
            logprobs = None if told is None else tuple(told[new])
            self.ticket.put(Piece(run.new_text(), tuple(run.tokens[new]), logprobs))
        if run.stage == "ended":
            self.ticket.put(run.closed_because or self._ended())

    def _started(self) -> Started:
        run, call = self.run, self.ticket.call
        return Started(
            prompt_tokens=self._prompt_tokens,
            kept_tokens=run.prompt_tokens,
            reused_tokens=run.reused_tokens,
            level=run.request.level,
            source=self._source,
            queued_ms=1000 * (self._began_s - self.ticket.arrived_s),
            context_tokens=self._context_tokens,
            objective=call.objective,
            bound=call.bound,
        )

    def _ended(self) -> Ended:
        run, limits, count = self.run, self._limits, len(self.run.tokens)
        ttft_ms = 1000 * (self._first_s - self.ticket.arrived_s)
        tpot_ms = 1000 * (self._last_s - self._first_s) / (count - 1) if count > 1 else 0.0
        in_time = ttft_ms <= limits.ttft_ms and tpot_ms <= limits.tpot_ms
        return Ended(
            finish_reason=run.finish_reason or "length",
            stop_string=run.stop_string,
            tokens=count,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            engine_ttft_ms=run.timings.ttft_ms,
            engine_tpot_ms=run.timings.tpot_ms(count),
            met=None if self.ticket.call.objective is None else in_time,
            drafted=run.drafted_tokens / count if count else 0.0,
            seed=run.seed,
            context=self._context,
            context_tokens=len(run.sequence) if self._context else 0,
            ttft_limit_ms=limits.ttft_ms if math.isfinite(limits.ttft_ms) else None,
            tpot_limit_ms=limits.tpot_ms if math.isfinite(limits.tpot_ms) else None,
        )


def begin(ticket: EngineTicket, service: DeviceService, tokenizer: Tokenizer) -> Job:
    """Plans a call with an objective, or takes its turn in a context, and makes its run.

    Args:
      ticket: of the call.
      service: that answers.
      tokenizer: limited to the window.

    Raises:
      ObjectiveMissed: no level is in time, and the call insists.
      JaxllmError: the engine cannot answer it.
    """
    call, engine = ticket.call, service.engine
    if call.context:
        return _turn(ticket, service, tokenizer)
    service.set_adapter(call.adapter or None)
    prompt, count = prompt_of(tokenizer, call), call.config.max_tokens
    whole = whole_cost(service.profile, len(prompt.ids), count)
    ids, level, tpot_ms, lifecycle, source = prompt.ids, None, None, Lifecycle(), "unplanned"
    if call.objective is not None:
        waited_ms = 1000 * (time.perf_counter() - ticket.arrived_s)
        plan = service.planner.plan(
            prompt,
            call.objective,
            answer_tokens=count,
            strict=bool(call.strict),
            load=Load(waiting_ms=waited_ms),
        )
        ids, level, tpot_ms, source = prompt.ids[plan.kept], plan.level, plan.expected.tpot_ms, plan.source
        margin = service.planner.safety_margin
        lifecycle = PlannedCall(plan, call.objective, service.profile, margin=margin)
    request = engine.request(np.asarray(ids).tolist(), call.config, level=level, tpot_ms=tpot_ms)
    run = Run(engine.decoding(request), engine.tokenizer, request, lifecycle=lifecycle)
    run.taken_whole = True
    limits = time_limits(call.objective, whole)
    return Job(ticket, run, source=source, prompt_tokens=len(prompt.ids), limits=limits)


def _turn(ticket: EngineTicket, service: DeviceService, tokenizer: Tokenizer) -> Job:
    """The job of a turn in a context, whose level it has."""
    call = ticket.call
    context = service.context(call.app, call.context)
    before = context.tokens
    if call.adapter not in ("", own := context.adapter):
        made = f"the adapter {own!r}" if own else "no adapter"
        raise ConfigError(
            f"the context {context.name} was made with {made}, and its cache is of no use to "
            f"{call.adapter!r:.80}; leave the adapter out, or make another context"
        )
    if call.context_tokens not in (None, len(before)):
        raise ConfigError(
            f"the context {context.name} has {len(before)} tokens, and the call continues the first "
            f"{call.context_tokens}: contexts over programs are not forked; make a new one"
        )
    answer = context.generate(_turn_ids(tokenizer, call, before), config=call.config)
    whole = whole_cost(service.profile, answer.prompt_tokens, call.config.max_tokens)
    return Job(
        ticket,
        answer,
        source="context",
        prompt_tokens=answer.prompt_tokens,
        context=context.name,
        context_tokens=len(before),
        limits=time_limits(call.objective, whole),
    )


def _turn_ids(tokenizer: Tokenizer, call: Call, before: tuple[int, ...]) -> list[int]:
    """The tokens that a call adds to a context."""
    prompt, now = call.prompt, datetime.now()
    if isinstance(prompt, tuple):
        return list(prompt)
    if isinstance(prompt, str):
        return turn_ids(tokenizer, before, prompt, now=now)
    assert isinstance(prompt, Conversation)
    return conversation_turn_ids(tokenizer, before, prompt.messages, tools=prompt.tools, now=now)
