"""Answers of calls with an objective: what was planned, what it took, and whether the objective was met."""

from typing import Any

from serving.answer import Answer
from serving.planning.objectives import Cost, Objective, meets
from serving.planning.planner import Plan
from serving.planning.profile import DeviceProfile
from serving.planning.safety_margin import SafetyMargin
from serving.run import Lifecycle, Run


class PlannedCall(Lifecycle):
    """Compares what an answer takes with its plan, and teaches the safety margin.

    Attributes:
      plan: the sub-model, the prompt's kept tokens and what they should take.
      objective: what was asked of the answer's time.
    """

    def __init__(
        self,
        plan: Plan,
        objective: Objective,
        profile: DeviceProfile,
        *,
        reading_ms: float = 0.0,
        margin: SafetyMargin | None = None,
    ) -> None:
        """See the class.

        Args:
          plan, objective: see the class.
          profile: of this device.
          reading_ms: what rendering and encoding the prompt took.
          margin: learns from what the answer takes; None for nothing that learns.
        """
        self.plan, self.objective = plan, objective
        self._profile, self._reading_ms, self._margin = profile, reading_ms, margin
        self._begun = False

    def cost(self, run: Run) -> Cost:
        """What an answer took so far, from the request on; its energy is by the profile."""
        timings, tokens, plan = run.timings, len(run.tokens), self.plan
        known = self._profile.energy is not None
        return Cost(
            ttft_ms=self._reading_ms + plan.planning_ms + timings.ttft_ms,
            tpot_ms=timings.tpot_ms(tokens),
            tokens=tokens,
            joules=self._profile.joules(plan.level, len(plan.kept), tokens) if known else None,
        )

    def stepped(self, run: Run) -> None:
        """Learns from the first token."""
        if not self._begun and self._margin is not None:
            self._margin.saw_first(self.plan.expected, self.cost(run))
        self._begun = True

    def finish(self, run: Run) -> None:
        """Learns from the others."""
        # Who takes the pieces one by one may keep the next ones waiting: then time per token says nothing.
        if run.taken_whole and run.finish_reason is not None and self._margin is not None:
            self._margin.saw_further(self.plan.expected, self.cost(run))


class PlannedAnswer(Answer):
    """An answer to a call with an objective: iterate for pieces of text, then read what it took."""

    def __init__(self, *args: Any, call: PlannedCall, **more: Any) -> None:
        """See `Answer`; `call` is its lifecycle."""
        super().__init__(*args, lifecycle=call, **more)
        self._call = call

    @property
    def plan(self) -> Plan:
        """The sub-model, the prompt's kept tokens and what they should take."""
        return self._call.plan

    @property
    def objective(self) -> Objective:
        """What was asked of the answer's time."""
        return self._call.objective

    @property
    def cost(self) -> Cost:
        """What the answer took so far (see `PlannedCall.cost`)."""
        return self._call.cost(self)

    @property
    def held(self) -> bool:
        """Whether the answer, as far as it is there, met its objective."""
        return meets(self.objective, self.cost, self.plan.whole)
