"""Holds one accepted call in the engine's thread: its prompt, its run, its deadlines and its events."""

import math
import time
from collections.abc import Callable, Iterable

from jaxllm.text.droppable import PromptTokens
from serving.contexts.answer import ContextCall
from serving.planning.objectives import Cost
from serving.planning.planner import Plan
from serving.prompt_rows import PromptRows
from serving.run import Run
from serving.server.calls import Call, ContextBusy, Ended, Piece, Started
from serving.server.context_turns import ContextTurn
from serving.server.prompts import time_limits
from serving.server.scheduler import SchedulerOptions, Work
from serving.server.ticket import EngineTicket


class Job:
    """A call that was accepted and has not ended.

    Attributes:
      id: unique in the executor.
      ticket: of the call.
      prompt: its token ids.
      rows: that stand in place of some of them; None for none, and in a context.
      marked: the prompt with what a plan may drop of it; of none in a context.
      whole: cost of the whole model's answer on an idle device.
      limits: of its objective.
      run: None until it begins.
      plan: of a call with an objective, once it begins.
      turn: of a call in a context, once it is encoded.
      may_continue: whether a call in a context, until its turn is encoded, may change that context.
      kept_by: restores and stores its context; None until it begins.
      cache_bytes: memory of its cache, as of its last step.
      adapter: that answers, a context's once the turn is encoded; empty for none.
    """

    def __init__(
        self,
        number: int,
        ticket: EngineTicket,
        prompt: PromptTokens,
        whole: Cost,
        *,
        options: SchedulerOptions,
        rows: PromptRows | None = None,
    ) -> None:
        self.rows = rows
        self.id, self.ticket, self._options = number, ticket, options
        self.run: Run | None = None
        self.plan: Plan | None = None
        self.turn: ContextTurn | None = None
        self.kept_by: ContextCall | None = None
        self.adapter = ticket.call.adapter
        self.may_continue = ticket.call.context_tokens is None
        self.marked = prompt
        self._expect(tuple(prompt.ids.tolist()), whole)
        self._began_s = self._first_s = self._last_s = ticket.arrived_s
        self._told = self._capacity_tokens = self.cache_bytes = 0

    @property
    def call(self) -> Call:
        """That was asked."""
        return self.ticket.call

    @property
    def over(self) -> bool:
        """Whether it has ended, or will before its next step."""
        return self.ticket.cancelled or (self.run is not None and self.run.stage == "ended")

    def continues(self, app: str, name: str) -> bool:
        """Whether it changes an app's context."""
        continues = self.may_continue if self.turn is None else not self.turn.forks
        return (self.call.app, self.call.context) == (app, name) and continues

    @property
    def untold_tokens(self) -> int:
        """Tokens of the answer that no event has told yet."""
        return 0 if self.run is None else len(self.run.tokens) - self._told

    def work(self, batchable: Callable[[Run], bool]) -> Work:
        """The call as the scheduler sees it."""
        arrived, run, cost = 1000 * self.ticket.arrived_s, self.run, self._expected
        stage = "start" if run is None else run.stage
        prefill = cost.ttft_ms
        if run is not None and run.stage == "prefill":
            left = run.prompt_tokens - len(run.session.tokens)
            prefill *= min(1.0, max(0.0, left / max(1, self._expected_tokens)))
        decodes = stage in ("decode", "finish")
        told = 0 if run is None else len(run.tokens)
        return Work(
            id=self.id,
            app=self.call.app,
            priority=self.call.priority,
            since_ms=1000 * self._last_s,
            due_ms=1000 * self._first_s + told * self._tpot_ms if decodes else arrived + self._ttft_ms,
            left_ms=cost.tpot_ms if decodes else prefill,
            rest_ms=(0.0 if decodes else prefill) + cost.tpot_ms * (self.call.config.max_tokens - told),
            stage=stage,
            context_bytes=0 if self.turn is None else self.turn.most_bytes,
            token_ms=cost.tpot_ms,
            tpot_ms=self._tpot_ms,
            batchable=run is not None and batchable(run),
            adapter=self.adapter,
        )

    def take_turn(self, turn: ContextTurn) -> None:
        """Takes the turn of a call in a context, before it begins."""
        self.turn, self.adapter = turn, turn.adapter
        self._expect(turn.asked.told, turn.whole)
        self._expected_tokens = turn.computed_tokens

    def begin(self, run: Run, plan: Plan | None = None, kept_by: ContextCall | None = None) -> None:
        """Takes the run of the call, before its first step."""
        self.run, self.plan, self.kept_by, self._began_s = run, plan, kept_by, time.perf_counter()
        if plan is not None:
            # From here on others need not wait for the whole model.
            self._expected, self._expected_tokens = plan.expected, len(plan.kept) - plan.reused_tokens

    def _expect(self, prompt: tuple[int, ...], whole: Cost) -> None:
        priority = self.call.priority
        self.prompt, self.whole, self.limits = prompt, whole, time_limits(self.call.objective, whole)
        self._expected, self._expected_tokens = whole, len(prompt)
        self._ttft_ms = min(self.limits.ttft_ms, self._options.ttft_ms(priority))
        self._tpot_ms = min(self.limits.tpot_ms, self._options.tpot_ms(priority))

    def tell(self) -> bool:
        """Puts the events of what the run's last step gave; whether the first token is among them."""
        run, now = self.run, time.perf_counter()
        assert run is not None
        self._last_s = now
        cache = run.session.cache
        if cache is not None and cache.capacity_tokens != self._capacity_tokens:
            self._capacity_tokens, self.cache_bytes = cache.capacity_tokens, run.session.size_bytes
        first = len(run.tokens) > 0 == self._told
        if len(run.tokens) > self._told:
            if first:
                self._first_s = now
                self.ticket.put(self._started(run))
            new, self._told = slice(self._told, len(run.tokens)), len(run.tokens)
            told = run.logprobs
            logprobs = None if told is None else tuple(told[new])
            self.ticket.put(Piece(run.new_text(), tuple(run.tokens[new]), logprobs))
        if run.stage == "ended":
            self.ticket.put(run.closed_because or self._ended(run))
        return first

    def _started(self, run: Run) -> Started:
        source = "unplanned" if self.plan is None else self.plan.source
        return Started(
            prompt_tokens=len(self.prompt),
            kept_tokens=run.prompt_tokens,
            reused_tokens=run.reused_tokens,
            level=run.request.level,
            source=source if self.turn is None else "context",
            queued_ms=1000 * (self._began_s - self.ticket.arrived_s),
            context_tokens=0 if self.turn is None else self.turn.asked.known,
            adapter=self.adapter,
            objective=self.call.objective,
            bound=self.call.bound,
            moved=() if self.kept_by is None else self.kept_by.restoration.moved,
            shared=0 if self.kept_by is None else self.kept_by.restoration.shared,
        )

    def _ended(self, run: Run) -> Ended:
        count, limits = len(run.tokens), self.limits
        ttft_ms = 1000 * (self._first_s - self.ticket.arrived_s)
        tpot_ms = 1000 * (self._last_s - self._first_s) / (count - 1) if count > 1 else 0.0
        return Ended(
            finish_reason=run.finish_reason or "length",
            stop_string=run.stop_string,
            tokens=count,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            engine_ttft_ms=run.timings.ttft_ms,
            engine_tpot_ms=run.timings.tpot_ms(count),
            met=None
            if self.call.objective is None
            else ttft_ms <= limits.ttft_ms and tpot_ms <= limits.tpot_ms,
            drafted=run.drafted_tokens / count if count else 0.0,
            seed=run.seed,
            context="" if self.kept_by is None else self.kept_by.record.name,
            context_tokens=0 if self.kept_by is None else len(run.sequence),
            ttft_limit_ms=limits.ttft_ms if math.isfinite(limits.ttft_ms) else None,
            tpot_limit_ms=limits.tpot_ms if math.isfinite(limits.tpot_ms) else None,
        )


def require_free(jobs: Iterable[Job], app: str, name: str) -> None:
    """Checks that none of some calls changes an app's context.

    Raises:
      ContextBusy: one does.
    """
    if any(each.continues(app, name) for each in jobs):
        raise ContextBusy(f"the context {name} answers another call; wait for its end, or close it")
