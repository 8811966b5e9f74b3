"""Serves one model to all apps of a device: every call with its own objective, every answer with its plan.

    service = LLMService.open("model.jaxllm")
    service.bind("mail", Slo.parse("<40,70>"))
    answer = service.call("Is this a complaint? ...", app="mail")
    for piece in answer: ...
    answer.plan, answer.cost, answer.met

The service plans, the engine answers. One call runs at a time.
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import numpy as np

from jaxllm.bundle.tiny_lm import read_tiny_lm
from jaxllm.config import WHOLE
from jaxllm.elastic.slo import SLOS, Slo
from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.sampling import Sampling
from jaxllm.text.droppable import PromptTokens, prompt_tokens
from jaxllm.text.prompts import Prompt
from serving.bundles import levels_of
from serving.contexts.context import Context
from serving.contexts.manager import Contexts
from serving.contexts.options import ContextOptions
from serving.engine import Engine
from serving.host.progress import Progress
from serving.loading import LoadedModel
from serving.options import EngineOptions
from serving.planned_answer import PlannedAnswer, PlannedCall
from serving.planning.known_profile import known_profile
from serving.planning.objectives import Binding, Objective
from serving.planning.planner import Plan, Planner
from serving.planning.prefill_times import choose_prefill
from serving.planning.profile import DeviceProfile
from serving.planning.proposer import Proposer
from serving.planning.reach import described, unmet
from serving.planning.safety_margin import CONFIDENCE, SafetyMargin
from serving.planning.tiny_lm import TinyPlanner
from serving.request import DEFAULT_MAX_TOKENS, GenerationConfig
from serving.speculation.options import SpeculationOptions

ANYTHING = Slo(ttft=1.0, tpot=1.0)
_log = logging.getLogger(__name__)


class LLMService:
    """Answers the calls of all apps with one elastic model. Not thread-safe: one call at a time.

    Attributes:
      engine: serves all levels.
      profile: of this device.
      planner: plans every call.
      contexts: of all apps; None where the service keeps none.
    """

    def __init__(
        self,
        engine: Engine[LoadedModel],
        profile: DeviceProfile,
        planner: Planner,
        contexts: Contexts | None = None,
    ) -> None:
        self.engine, self.profile, self.planner, self.contexts = engine, profile, planner, contexts
        self._apps: dict[str, Binding] = {}

    @classmethod
    def open(
        cls,
        model: str | Path | None = None,
        *,
        levels: Sequence[int] | None = None,
        options: EngineOptions | None = None,
        proposer: Proposer | None = None,
        contexts: ContextOptions | None = None,
        speculation: SpeculationOptions | None = None,
        confidence: float = CONFIDENCE,
        progress: Progress | None = None,
    ) -> "LLMService":
        """Opens an elastic bundle, and measures this device's profile where there is none yet.

        Buckets are compiled, or read from disk where an earlier process left them. Measuring takes some
        seconds, once.

        Args:
          model: a bundle; None for the model inside the package.
          levels: to serve, in percent; None for all of the bundle.
          options: of the engine.
          proposer: proposes levels and prompt ratios instead of the bundle's tiny LM.
          contexts: options of contexts that outlive calls; None for no contexts. Their chunks are stored by
            the options' codec, "channel" if that is empty.
          speculation: drafts for the whole model's answers; None for no drafts.
          confidence: the share of answers that should be in time, where a choice can be in time so surely; a
            higher one takes smaller levels.
          progress: called with (stage, done, total).

        Raises:
          JaxllmError: the model cannot be opened, or lacks a level.
        """
        margin = SafetyMargin(confidence)
        options = engine_options(model, levels, options or EngineOptions(), contexts)
        with contextlib.ExitStack() as opened:
            engine = Engine.open(model, options=options, speculation=speculation, progress=progress)
            opened.callback(engine.close)
            profile = known_profile(engine, progress=progress)
            planner = planner_of(engine, profile, proposer, margin=margin)
            service = cls.of_engine(engine, planner, profile, contexts)
            opened.pop_all()
        return service

    @classmethod
    def of_engine(
        cls,
        engine: Engine[LoadedModel],
        planner: Planner,
        profile: DeviceProfile,
        contexts: ContextOptions | None = None,
    ) -> "LLMService":
        """A service of an engine that is warm, ready for its first call.

        Args:
          engine: serves all levels that are planned with; opened with a codec for contexts where there are
            some.
          planner: plans by the profile.
          profile: of this device.
          contexts: options of contexts that outlive calls; None for no contexts.

        Raises:
          JaxllmError: the contexts cannot be opened.
        """
        choose_prefill(engine, profile)
        with contextlib.ExitStack() as opened:
            kept = None if contexts is None else Contexts(engine, contexts)
            if kept is not None:
                # Else the store stays locked until this process ends.
                opened.callback(kept.close)
            service = cls(engine, profile, planner, kept)
            service._rehearse()
            if missed := described(service.unmet(), profile.tokens):
                _log.info("objectives that no choice meets on this device: %s", missed)
            opened.pop_all()
        return service

    def _rehearse(self) -> None:
        """Runs one call, so that the first real one does not wait for the first use of the template, the
        tokenizer and the buckets; the safety margin does not learn from it."""
        try:
            prompt = self.tokenize("Is it so?", "Say yes or no.")
        except JaxllmError as error:
            # A template that is broken, or too long for the window: plain prompts can be answered without it.
            _log.warning("conversations cannot be answered: %s", error)
            return
        self.planner.plan(prompt, ANYTHING, answer_tokens=1)
        config = GenerationConfig(max_tokens=2)
        # The smallest level, because native kernels share buckets between all levels.
        ids = prompt.ids[: self.engine.options.context_tokens - config.max_tokens].tolist()
        self.engine.stream(ids, config, level=self.engine.levels[0]).result()

    def use_profile(self, profile: DeviceProfile) -> None:
        """Plans by another profile of this device from here on, and learns anew how much later answers come.
        No answer runs.

        Args:
          profile: of the engine's levels.
        """
        self.profile = profile
        self.planner.use(profile)
        choose_prefill(self.engine, profile)

    def unmet(self, *objectives: Objective | str) -> dict[Objective, tuple[int, ...]]:
        """The objectives that this device cannot meet with any choice, with the profiled prompt lengths at
        which it cannot.

        Args:
          objectives: to check, or ratios as text; by default ELMS's six and those of bound apps.

        Raises:
          ConfigError: an objective limits energy and the profile has none.
        """
        asked = [Slo.parse(each) if isinstance(each, str) else each for each in objectives]
        bound = [each.objective for each in self._apps.values()]
        return unmet(self.planner, asked or dict.fromkeys([*SLOS, *bound]))

    def close(self) -> None:
        """Closes the contexts, which releases their store, and the engine.

        Raises:
          BudgetExceeded, CheckpointError: an answer could not be stored; all is closed all the same.
        """
        try:
            if self.contexts is not None:
                self.contexts.close()
        finally:
            self.engine.close()

    def new_context(self, app: str, *, level: int | None = None, pinned: bool = False) -> Context:
        """Creates a context of an app, which outlives calls and restarts (newLLMCtx).

        Args:
          app: that owns it; no other app can open it.
          level: the sub-model that answers in it, in percent; None for the whole model.
          pinned: whether its chunks are never evicted for another context.

        Raises:
          ConfigError: the service keeps no contexts, the level is not served, or the app's name is not valid.
          BudgetExceeded: the app may own no more contexts, or there is no room.
        """
        contexts = self._kept()
        return Context(contexts, contexts.create(app, level=level, pinned=pinned))

    def context(self, app: str, name: str) -> Context:
        """Opens a context that an app created before, perhaps in another process.

        Raises:
          ConfigError: the service keeps no contexts.
          ContextGone: the app has no context of this name, or it is of another model, level, codec or
            adapter.
        """
        contexts = self._kept()
        return Context(contexts, contexts.record(app, name))

    def contexts_of(self, app: str) -> list[Context]:
        """All contexts of an app, also those of other models and levels.

        Raises:
          ConfigError: the service keeps no contexts.
        """
        contexts = self._kept()
        return [Context(contexts, record) for record in contexts.store.records(app)]

    def _kept(self) -> Contexts:
        if self.contexts is None:
            raise ConfigError("this service keeps no contexts; open it with ContextOptions")
        return self.contexts

    def bind(self, app: str, objective: Objective, *, strict: bool = False) -> None:
        """Sets the objective of an app's calls that name none.

        Where this device cannot meet it at some prompt lengths (see `unmet`), a warning is logged.

        Raises:
          ConfigError: the app has no name, or the objective limits energy and the profile has none.
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
    ) -> PlannedAnswer:
        """Answers a prompt in time.

        Args:
          prompt: the user's text; or a `Prompt`, which has its own instruction.
          app: that calls, bound before; empty for none.
          slo: the objective, or ratios as text such as "<40,70>"; None for the app's, or for the whole
            model's time.
          strict: refuse the call if no sub-model is fast enough; None for the app's choice.
          instruction: stands before the prompt and is never shortened.
          max_tokens: most tokens of the answer.
          stop: strings that end it.
          sampling: how tokens are chosen; greedy by default.

        Raises:
          ConfigError: the app was not bound, or the prompt is empty.
          ObjectiveMissed: `strict`, and no sub-model is fast enough.
          ContextOverflow: the prompt is too long.
        """
        if app and app not in self._apps:
            raise ConfigError(f"the app {app!r:.80} has no objective; bind it first")
        bound = self._apps.get(app, Binding(ANYTHING))
        objective = Slo.parse(slo) if isinstance(slo, str) else slo or bound.objective
        # Planning runs buckets, too.
        self.engine.runner.require_usable()
        began = time.perf_counter()
        tokens = self.tokenize(prompt, instruction)
        tokenize_ms = 1000 * (time.perf_counter() - began)
        plan = self.planner.plan(
            tokens,
            objective,
            answer_tokens=max_tokens,
            strict=bound.strict if strict is None else strict,
            tokenize_ms=tokenize_ms,
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
            # Without a template an instruction and a prompt are plain lines; a prompt alone is continued.
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
    ) -> PlannedAnswer:
        """Answers a prompt by a plan; `tokenize_ms` is the time of `tokenize`."""
        engine, config = (
            self.engine,
            GenerationConfig(max_tokens=max_tokens, stop=tuple(stop), sampling=sampling or Sampling()),
        )
        ids = np.asarray(prompt.ids)[plan.kept].tolist()
        request = engine.request(ids, config, level=plan.level, tpot_ms=plan.expected.tpot_ms)
        margin = self.planner.safety_margin
        call = PlannedCall(plan, objective, self.profile, tokenize_ms=tokenize_ms, margin=margin)
        return PlannedAnswer(engine.decoding(request), engine.tokenizer, request, call=call)


def engine_options(
    model: str | Path | None,
    levels: Sequence[int] | None,
    options: EngineOptions,
    contexts: ContextOptions | None,
) -> EngineOptions:
    """The options of a service's engine: with the levels that are planned with, and a codec where there are
    contexts (see `LLMService.open`).

    Raises:
      JaxllmError: the model cannot be opened.
    """
    levels = levels_of(model) if levels is None else tuple(sorted({*levels} - {WHOLE}))
    codec = options.kv_codec or ("" if contexts is None else "channel")
    return dataclasses.replace(options, levels=levels, kv_codec=codec)


def planner_of(
    engine: Engine[LoadedModel],
    profile: DeviceProfile,
    proposer: Proposer | None = None,
    *,
    margin: SafetyMargin | None = None,
) -> Planner:
    """A planner of the levels that an engine serves, with its bundle's tiny LM unless another proposer is
    given."""
    if proposer is None and (tiny := read_tiny_lm(engine.model.bundle)) is not None:
        proposer = TinyPlanner(tiny, engine.levels, engine.runner.buckets.store())
    return Planner(profile, engine.levels, proposer, safety_margin=margin)
