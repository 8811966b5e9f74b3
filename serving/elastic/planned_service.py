"""Plans and answers calls of apps with objectives, on any kind of engine.

`jaxllm.serving.server.service` adds the features of the live engine: contexts of coded chunks, integer
prefill. `jaxllm.cli.device` adds contexts over exported programs. This module imports no JAX.
"""

import logging
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np

from jaxllm.elastic.slo import SLOS, Slo
from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.sampling_state import Sampling
from jaxllm.serving.elastic.objectives import Binding, Objective, SafetyMargin, meets
from jaxllm.serving.elastic.planner import Planner, described, unmet
from jaxllm.serving.elastic.profile import DeviceProfile
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.engine.request import DEFAULT_MAX_TOKENS, GenerationConfig
from jaxllm.serving.engine.run import Lifecycle, Run
from jaxllm.serving.engine.step import Answer
from jaxllm.serving.ground.plan import Cost, Plan
from jaxllm.text.droppable import PromptTokens, prompt_tokens
from jaxllm.text.prompts import Prompt

ANYTHING = Slo(ttft=1.0, tpot=1.0)
_log = logging.getLogger(__name__)


class PlannedCall(Lifecycle):
    """Compares an answer's cost with its plan, and updates the safety margin.

    Attributes:
      plan: level, the prompt's kept tokens and the expected cost.
      objective: objective of the answer's time or energy.
      profile: profile of this device.
      tokenize_ms: time to render and encode the prompt.
      margin: learns from the answer's cost; None for no learning.
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
        self.plan = self._plan = plan
        self.objective, self.profile = objective, profile
        self.tokenize_ms, self.margin = tokenize_ms, margin
        self._saw_first = self._saw_further = False

    def cost(self, run: Run) -> Cost:
        """The cost of an answer so far, from the request on; its energy comes from the profile."""
        timings, tokens, plan = run.timings, len(run.tokens), self._plan
        known, computed = self.profile.energy is not None, max(1, len(plan.kept) - plan.reused_tokens)
        return Cost(
            ttft_ms=self.tokenize_ms + plan.planning_ms + timings.ttft_ms,
            tpot_ms=timings.tpot_ms(tokens),
            tokens=tokens,
            joules=self.profile.joules(plan.level, computed, tokens) if known else None,
        )

    def met(self, run: Run) -> bool:
        """Whether an answer so far met its objective."""
        return meets(self.objective, self.cost(run), self._plan.whole)

    def stepped(self, run: Run) -> None:
        """Learns from the time to the first token."""
        if not self._saw_first and self.margin is not None:
            self.margin.saw_first(self._plan.expected, self.cost(run))
        self._saw_first = True

    def finish(self, run: Run) -> None:
        """Learns from the time per further token."""
        # Callers may pause between pieces: then the time per token is not the model's.
        whole = run.uninterrupted and run.finish_reason is not None
        if whole and not self._saw_further and self.margin is not None:
            self._saw_further = True
            self.margin.saw_further(self._plan.expected, self.cost(run))


class PlannedService:
    """Answers calls by plans. Not thread-safe: one call at a time.

    Attributes:
      engine: serves all levels.
      profile: profile of this device.
      planner: plans every call.
    """

    def __init__(self, engine: Engine[Any], profile: DeviceProfile, planner: Planner) -> None:
        self.engine, self.profile, self.planner = engine, profile, planner
        self._apps: dict[str, Binding] = {}

    def rehearse(self) -> None:
        """Runs one call, so that the first real one does not wait for the initialization of the template, the
        tokenizer and the buckets; the safety margin ignores it."""
        try:
            prompt = self.tokenize("Is it so?", "Say yes or no.")
        except JaxllmError as error:
            # A template that is broken, or too long for the window: plain prompts work without it.
            _log.warning("conversations cannot be answered: %s", error)
            return
        self.planner.plan(prompt, ANYTHING, answer_tokens=1)
        config = GenerationConfig(max_tokens=2)
        # The smallest level, because native kernels share buckets between all levels.
        ids = prompt.ids[: self.engine.options.context_tokens - config.max_tokens].tolist()
        self.engine.stream(ids, config, level=self.engine.levels[0]).result()

    def unmet(self, *objectives: Objective | str) -> dict[Objective, tuple[int, ...]]:
        """The objectives that no choice meets on this device, with the profiled prompt lengths at which they
        are missed.

        Args:
          objectives: objectives to check, or ratios as text; by default ELMS's six and those of bound apps.

        Raises:
          ConfigError: an objective limits energy and the profile has none.
        """
        asked = [Slo.parse(each) if isinstance(each, str) else each for each in objectives]
        bound = [each.objective for each in self._apps.values()]
        return unmet(self.planner, asked or dict.fromkeys([*SLOS, *bound]))

    def bind(self, app: str, objective: Objective, *, strict: bool = False) -> None:
        """Sets the objective of an app's calls without their own.

        If this device cannot meet it at some prompt lengths (see `unmet`), a warning is logged.

        Raises:
          ConfigError: the app's name is empty, or the objective limits energy and the profile has none.
        """
        if not isinstance(app, str) or not app:
            raise ConfigError(f"an app needs a name, got {app!r:.80}")
        missed = described(unmet(self.planner, [objective]), self.profile.tokens)
        if missed:
            _log.warning("the app %s asks for what no choice meets on this device: %s", app, missed)
        self._apps[app] = Binding(objective, strict)

    def call(
        self,
        prompt: str | Prompt,
        *,
        app: str = "",
        slo: Objective | str | None = None,
        strict: bool | None = None,
        instruction: str = "",
        max_tokens: int = DEFAULT_MAX_TOKENS,
        stop: Sequence[str] = (),
        sampling: Sampling | None = None,
    ) -> Answer:
        """Answers a prompt within its objective.

        Args:
          prompt: the user's text; or a `Prompt`, which includes an instruction.
          app: the calling app, bound before; empty for none.
          slo: the objective, or ratios as text such as "<40,70>"; None for the app's, or for the whole
            model's time.
          strict: whether to reject the call if no level is fast enough; None for the app's choice.
          instruction: text before the prompt, never shortened.
          max_tokens: maximum number of tokens of the answer.
          stop: strings that end the answer.
          sampling: sampling parameters; greedy by default.

        Raises:
          ConfigError: the app was not bound, or the prompt is empty.
          ObjectiveMissed: `strict`, and no level is fast enough.
          ContextOverflow: the prompt is too long.
        """
        if app and app not in self._apps:
            raise ConfigError(f"the app {app!r:.80} has no objective; bind it first (service.bind)")
        bound = self._apps.get(app, Binding(ANYTHING))
        objective = Slo.parse(slo) if isinstance(slo, str) else slo or bound.objective
        # Planning runs buckets, too.
        self.engine.runner.require_usable()
        began = time.perf_counter()
        tokens = self.tokenize(prompt, instruction)
        tokenize_ms = 1000 * (time.perf_counter() - began)
        strict = bound.strict if strict is None else strict
        plan = self.planner.plan(
            tokens, objective, answer_tokens=max_tokens, strict=strict, tokenize_ms=tokenize_ms
        )
        return self.run(
            tokens, plan, objective, tokenize_ms=tokenize_ms,
            max_tokens=max_tokens, stop=stop, sampling=sampling,
        )  # fmt: skip

    def tokenize(self, prompt: str | Prompt, instruction: str = "") -> PromptTokens:
        """Renders and encodes a prompt, and marks the words that a plan may drop.

        Raises:
          ConfigError: the prompt is empty.
          ContextOverflow: it is too long for the window at every prompt ratio.
        """
        # The longest prompt that fits the window at the smallest ratio.
        most = int(self.engine.options.context_tokens / self.planner.least_ratio)
        tokenizer = self.engine.tokenizer.limited(most)
        if isinstance(prompt, str):
            if not prompt.strip():
                raise ConfigError("the prompt is empty; give it at least one word")
            # Without a template, an instruction and a prompt are plain lines; a lone prompt is continued.
            chat = bool(instruction) or tokenizer.has_chat_template
            prompt = Prompt(user=prompt, system=instruction, form="chat" if chat else "text")
        return prompt_tokens(tokenizer, prompt, now=datetime.now())

    def run(
        self,
        prompt: PromptTokens,
        plan: Plan,
        objective: Objective,
        *,
        tokenize_ms: float = 0.0,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        stop: Sequence[str] = (),
        sampling: Sampling | None = None,
    ) -> Answer:
        """Answers a prompt by a plan; `tokenize_ms` is the time of `tokenize`."""
        engine = self.engine
        config = GenerationConfig(max_tokens=max_tokens, stop=tuple(stop), sampling=sampling or Sampling())
        ids = np.asarray(prompt.ids)[plan.kept].tolist()
        request = engine.request(ids, config, level=plan.level, tpot_ms=plan.expected.tpot_ms)
        margin = self.planner.safety_margin
        call = PlannedCall(plan, objective, self.profile, tokenize_ms=tokenize_ms, margin=margin)
        return Answer(engine.decoding(request), engine.tokenizer, request, lifecycle=call)
