"""Answers of calls with an objective: their plan, their cost, and whether the objective was met."""

from typing import Any

from serving.answer import Answer
from serving.planning.objectives import Cost, Objective, meets
from serving.planning.planner import Plan
from serving.planning.profile import DeviceProfile
from serving.planning.safety_margin import SafetyMargin
from serving.run import Lifecycle, Run


class PlannedCall(Lifecycle):
    """Compares an answer's cost with its plan, and updates the safety margin.

    Attributes:
      plan: the sub-model, the prompt's kept tokens and the expected cost.
      objective: of the answer's time or energy.
    """

    def __init__(
        self,
        plan: Plan,
        objective: Objective,
        profile: DeviceProfile,
        *,
        tokenize_ms: float = 0.0,
        margin: SafetyMargin | None = None,
    ) -> None:
        """See the class.

        Args:
          plan, objective: see the class.
          profile: of this device.
          tokenize_ms: time to render and encode the prompt.
          margin: learns from the answer's cost; None for no learning.
        """
        self.plan, self.objective = plan, objective
        self._profile, self._tokenize_ms, self._margin = profile, tokenize_ms, margin
        self._saw_first = self._saw_further = False

    def cost(self, run: Run) -> Cost:
        """The cost of an answer so far, from the request on; its energy comes from the profile."""
        timings, tokens, plan = run.timings, len(run.tokens), self.plan
        known, computed = self._profile.energy is not None, max(1, len(plan.kept) - plan.reused_tokens)
        return Cost(
            ttft_ms=self._tokenize_ms + plan.planning_ms + timings.ttft_ms,
            tpot_ms=timings.tpot_ms(tokens),
            tokens=tokens,
            joules=self._profile.joules(plan.level, computed, tokens) if known else None,
        )

    def stepped(self, run: Run) -> None:
        """Learns from the time to the first token."""
        if not self._saw_first and self._margin is not None:
            self._margin.saw_first(self.plan.expected, self.cost(run))
        self._saw_first = True

    def finish(self, run: Run) -> None:
        """Learns from the time per further token."""
        # A caller that iterates may pause between pieces: then the time per token is not the model's.
        whole = run.taken_whole and run.finish_reason is not None
        if whole and not self._saw_further and self._margin is not None:
            self._saw_further = True
            self._margin.saw_further(self.plan.expected, self.cost(run))


class PlannedAnswer(Answer):
    """An answer to a call with an objective: iterate over its pieces of text, then read its attributes."""

    def __init__(self, *args: Any, call: PlannedCall, **more: Any) -> None:
        """See `Answer`; `call` is its lifecycle."""
        super().__init__(*args, lifecycle=call, **more)
        self._call = call

    @property
    def plan(self) -> Plan:
        """The sub-model, the prompt's kept tokens and the expected cost."""
        return self._call.plan

    @property
    def objective(self) -> Objective:
        """Of the answer's time or energy."""
        return self._call.objective

    @property
    def cost(self) -> Cost:
        """The cost of the answer so far (see `PlannedCall.cost`)."""
        return self._call.cost(self)

    @property
    def met(self) -> bool:
        """Whether the answer so far met its objective."""
        return meets(self.objective, self.cost, self.plan.whole)
