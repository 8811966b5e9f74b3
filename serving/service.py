"""One model for all apps of a device: every call with its own objective, every answer with its plan.

    service = LLMService.open("model.jaxllm")
    service.bind("mail", Slo.parse("<40,70>"))
    answer = service.call("Is this a complaint? ...", app="mail")
    for piece in answer: ...
    answer.plan, answer.cost, answer.held

The service plans, the engine answers. One call runs at a time.
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

import numpy as np

from jaxllm.bundle.tiny_lm import read_tiny_lm
from jaxllm.config import WHOLE
from jaxllm.elastic.slo import SLOS, Slo
from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.sampling import Sampling
from jaxllm.tasks.droppable import PromptTokens, prompt_tokens
from jaxllm.tasks.example import TaskExample
from serving.contexts.context import Context
from serving.contexts.manager import Contexts
from serving.contexts.options import ContextOptions
from serving.engine import Engine
from serving.generation import DEFAULT_MAX_TOKENS, Generation, GenerationConfig
from serving.models import levels_of
from serving.objectives import Cost, Objective, meets
from serving.options import EngineOptions
from serving.planner import Plan, Planner, Proposer
from serving.prefill.times import reads_both_ways
from serving.profile import (
    DeviceProfile,
    choose_prefill,
    load_profile,
    profile_path,
    save_profile,
)
from serving.profiling import measure
from serving.progress import Progress
from serving.reach import described, unmet
from serving.slack import CONFIDENCE, Slack
from serving.speculative.options import SpeculationOptions
from serving.tiny_lm import TinyPlanner

ANYTHING = Slo(ttft=1.0, tpot=1.0)
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Binding:
    """What an app asks of all its calls.

    Attributes:
      objective: of its answers' times.
      strict: calls that no sub-model can answer in time are refused.
    """

    objective: Objective
    strict: bool = False


class Answer(Iterator[str]):
    """An answer as it comes: iterate for pieces of text, then read what it took.

    Attributes:
      plan: the sub-model, the prompt's kept tokens and what they should take.
      objective: what was asked of its time.
      generation: the answer's text, tokens and timings.
    """

    def __init__(
        self,
        plan: Plan,
        objective: Objective,
        generation: Generation,
        profile: DeviceProfile,
        reading_ms: float = 0.0,
        slack: Slack | None = None,
    ) -> None:
        self.plan, self.objective, self.generation = plan, objective, generation
        self._profile, self._reading_ms, self._slack = profile, reading_ms, slack
        self._begun = False

    def __next__(self) -> str:
        piece = next(self.generation)
        self._begin()
        return piece

    def result(self) -> "Answer":
        """Runs to the end and returns itself."""
        # Who takes the pieces one by one may keep the next ones waiting: then time per token says nothing.
        whole = not self._begun
        self.generation.result()
        self._begin()
        if whole and self._slack is not None:
            self._slack.saw_further(self.plan.expected, self.cost)
        return self

    def _begin(self) -> None:
        if not self._begun and self._slack is not None and self.generation.tokens:
            self._slack.saw_first(self.plan.expected, self.cost)
        self._begun = True

    def close(self) -> None:
        """Stops."""
        self.generation.close()

    @property
    def text(self) -> str:
        """The answer so far."""
        return self.generation.text

    @property
    def cost(self) -> Cost:
        """What the answer took so far, from the request on; its energy is by the profile."""
        timings, tokens, plan = self.generation.timings, len(self.generation.tokens), self.plan
        known = self._profile.energy is not None
        return Cost(
            ttft_ms=self._reading_ms + plan.planning_ms + timings.ttft_ms,
            tpot_ms=timings.tpot_ms(tokens),
            tokens=tokens,
            joules=self._profile.joules(plan.level, len(plan.kept), tokens) if known else None,
        )

    @property
    def held(self) -> bool:
        """Whether the answer, as far as it is there, met its objective."""
        return meets(self.objective, self.cost, self.plan.whole)


class LLMService:
    """Answers the calls of all apps with one elastic model. Not thread-safe: one call at a time.

    Attributes:
      engine: serves all levels.
      profile: of this device.
      planner: decides.
      contexts: what apps said before; None where none are kept.
    """

    def __init__(
        self, engine: Engine, profile: DeviceProfile, planner: Planner, contexts: Contexts | None = None
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
        """Opens an elastic bundle with all that serving it takes.

        Its graphs are compiled, or read where an earlier process left them; times are measured where this
        device has none yet, which takes some seconds once.

        Args:
          model: a bundle; None for the model inside the package.
          levels: to serve, in percent; None for all of the bundle.
          options: of the engine.
          proposer: decides instead of the bundle's tiny LM.
          contexts: where contexts that outlive calls are kept, and how much they may take; None for none.
            Their chunks are stored by the options' codec, by channels if it names none.
          speculation: how drafts speed the whole model's answers up; None for no drafts.
          confidence: the share of answers that should be in time, of those that any choice answers in time so
            surely; more of it takes smaller levels.
          progress: called with (stage, done, total).

        Raises:
          JaxllmError: the model cannot be opened, or lacks a level.
        """
        slack = Slack(confidence)
        options = options or EngineOptions()
        levels = levels_of(model) if levels is None else tuple(sorted({*levels} - {WHOLE}))
        options = dataclasses.replace(options, levels=levels)
        if contexts is not None and not options.kv_codec:
            options = dataclasses.replace(options, kv_codec="channel")
        with contextlib.ExitStack() as opened:
            engine = Engine.open(model, options=options, speculation=speculation, progress=progress)
            opened.callback(engine.close)
            path = profile_path(engine.bundle, engine.options)
            profile = load_profile(path)
            if (
                profile is None
                or not set(engine.table.levels) <= set(profile.levels)
                or (reads_both_ways(engine) and profile.prefill is None)
            ):
                profile = measure(engine, progress=progress).beside(profile)
                save_profile(profile, path)
            choose_prefill(engine, profile)
            kept = None if contexts is None else Contexts(engine, contexts)
            if kept is not None:
                # Else nobody could open the store again before this process ends.
                opened.callback(kept.close)
            service = cls(engine, profile, planner_of(engine, profile, proposer, slack=slack), kept)
            service._rehearse()
            if missed := described(service.unmet(), profile.tokens):
                _log.info("objectives that no choice meets on this device: %s", missed)
            opened.pop_all()
        return service

    def _rehearse(self) -> None:
        """Goes once through what a call does, so that the first one does not wait for what the template, the
        tokenizer and the graphs set up when they are first used; nothing is learned from it."""
        try:
            prompt = self.read("Is it so?", "Say yes or no.")
        except JaxllmError as error:
            # A template that is broken, or too long for the window: plain prompts can be answered without it.
            _log.warning("conversations cannot be answered: %s", error)
            return
        self.planner.plan(prompt, ANYTHING, answer_tokens=1)
        config = GenerationConfig(max_tokens=2)
        # The smallest level, whose graphs native kernels share with all others.
        ids = prompt.ids[: self.engine.options.context_tokens - config.max_tokens].tolist()
        self.engine.stream(ids, config, level=self.engine.table.levels[0]).result()

    def unmet(self, *objectives: Objective | str) -> dict[Objective, tuple[int, ...]]:
        """The objectives that this device cannot meet at some prompt lengths, whatever the service chose,
        with those of the profile's lengths at which it cannot.

        Args:
          objectives: those to look at, or ratios as text; by default ELMS's six and those of bound apps.

        Raises:
          ConfigError: an objective is about energy and the profile has none.
        """
        asked = [Slo.parse(each) if isinstance(each, str) else each for each in objectives]
        bound = [each.objective for each in self._apps.values()]
        return unmet(self.planner, asked or dict.fromkeys([*SLOS, *bound]))

    def close(self) -> None:
        """Lets another process have the contexts, and ends the reading of weights."""
        if self.contexts is not None:
            self.contexts.close()
        self.engine.close()

    def new_context(self, app: str, *, level: int | None = None, pinned: bool = False) -> Context:
        """A new context of an app: what is said in it stays, across calls and restarts (newLLMCtx).

        Args:
          app: whose it is; no other app can open it.
          level: the sub-model that answers in it, in percent; None for the whole model.
          pinned: its chunks never leave memory for those of another context.

        Raises:
          ConfigError: the service keeps no contexts, the level is not served, or the app's name is no name.
          BudgetExceeded: the app may own no more, or there is no room.
        """
        contexts = self._kept()
        return Context(contexts, contexts.create(app, level=level, pinned=pinned))

    def context(self, app: str, name: str) -> Context:
        """A context that an app made before, perhaps in another process.

        Raises:
          ConfigError: the service keeps no contexts.
          ContextGone: the app has none of this name, or it is of another model, level, codec or adapter.
        """
        contexts = self._kept()
        return Context(contexts, contexts.record(app, name))

    def contexts_of(self, app: str) -> list[Context]:
        """All contexts of an app, those too that another model or level made.

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
        """Says what an app asks of the calls that it makes without an objective of their own.

        Where this device cannot meet that at some prompt lengths (see `unmet`), a warning is logged.

        Raises:
          ConfigError: the app has no name, or the objective is about energy and the profile has none.
        """
        if not isinstance(app, str) or not app:
            raise ConfigError(f"an app needs a name, got {app!r:.80}")
        missed = described(unmet(self.planner, [objective]), self.profile.tokens)
        if missed:
            _log.warning("the app %s asks for what no choice meets on this device: %s", app, missed)
        self._apps[app] = Binding(objective, strict)

    def call(
        self,
        prompt: str | TaskExample,
        *,
        app: str = "",
        slo: Objective | str | None = None,
        strict: bool | None = None,
        instruction: str = "",
        max_tokens: int = DEFAULT_MAX_TOKENS,
        stop: Sequence[str] = (),
        sampling: Sampling | None = None,
    ) -> Answer:
        """Answers a prompt in time.

        Args:
          prompt: what the user says; or a question, which brings its instruction along.
          app: whose call it is, one that was bound; empty for none.
          slo: the objective, or ratios as text such as "<40,70>"; None for the app's, or for all the time
            that the whole model takes.
          strict: refuse the call if no sub-model is fast enough; None for the app's choice.
          instruction: what to do with the prompt; it is never shortened.
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
        # A plan takes graphs, too.
        self.engine.table.require_usable()
        began = time.perf_counter()
        read = self.read(prompt, instruction)
        reading_ms = 1000 * (time.perf_counter() - began)
        plan = self.planner.plan(
            read,
            objective,
            answer_tokens=max_tokens,
            strict=bound.strict if strict is None else strict,
            reading_ms=reading_ms,
        )
        return self.run(
            read, plan, objective, reading_ms=reading_ms, max_tokens=max_tokens, stop=stop, sampling=sampling
        )

    def read(self, prompt: str | TaskExample, instruction: str = "") -> PromptTokens:
        """A prompt as the model reads it, and what of it may go.

        Raises:
          ConfigError: it is empty.
          ContextOverflow: it is so long that no plan would make it fit.
        """
        # Of a longer prompt a plan may leave out as much as this.
        most = int(self.engine.options.context_tokens / self.planner.least_ratio)
        tokenizer = self.engine.tokenizer.limited(most)
        if isinstance(prompt, str):
            if not prompt.strip():
                raise ConfigError("the prompt is empty; give it at least one word")
            # Without a template an instruction and a prompt are plain lines; a prompt alone is gone on from.
            chat = bool(instruction) or tokenizer.has_chat_template
            prompt = TaskExample(user=prompt, answer="", system=instruction, form="chat" if chat else "text")
        return prompt_tokens(tokenizer, prompt, now=datetime.now())

    def run(
        self,
        prompt: PromptTokens,
        plan: Plan,
        objective: Objective,
        *,
        reading_ms: float = 0.0,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        stop: Sequence[str] = (),
        sampling: Sampling | None = None,
    ) -> Answer:
        """Answers a prompt as a plan says; `reading_ms` is what `read` took."""
        config = GenerationConfig(max_tokens=max_tokens, stop=tuple(stop), sampling=sampling or Sampling())
        ids = np.asarray(prompt.ids)[plan.kept].tolist()
        plan = dataclasses.replace(plan, prefill=self.engine.prefill_mode(len(ids), plan.level))
        generation = self.engine.stream(ids, config, level=plan.level, tpot_ms=plan.expected.tpot_ms)
        return Answer(plan, objective, generation, self.profile, reading_ms, self.planner.slack)


def planner_of(
    engine: Engine, profile: DeviceProfile, proposer: Proposer | None = None, *, slack: Slack | None = None
) -> Planner:
    """Plans for the levels that an engine serves, with its bundle's tiny LM if there is no other proposer."""
    if proposer is None and (tiny := read_tiny_lm(engine.bundle)) is not None:
        proposer = TinyPlanner(tiny, engine.table.levels, engine.table.store)
    return Planner(profile, engine.table.levels, proposer, slack=slack)
