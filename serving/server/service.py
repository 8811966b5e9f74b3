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
from collections.abc import Sequence
from pathlib import Path

from jaxllm.bundle.calibrations import read_contexts
from jaxllm.bundle.levels import read_tiny_lm
from jaxllm.config import WHOLE, ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.features import room_refusal
from jaxllm.serving.contexts.context import Context
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.elastic.known_profile import known_profile
from jaxllm.serving.elastic.planned_service import PlannedService
from jaxllm.serving.elastic.planner import Planner
from jaxllm.serving.elastic.prefill_times import choose_prefill
from jaxllm.serving.elastic.profile import DeviceProfile
from jaxllm.serving.elastic.proposer import Proposer
from jaxllm.serving.elastic.reach import described
from jaxllm.serving.elastic.safety_margin import CONFIDENCE, SafetyMargin
from jaxllm.serving.elastic.tiny_lm import TinyPlanner
from jaxllm.serving.ground.bundles import levels_of, open_model
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.opening.engine import Engine
from jaxllm.serving.opening.loading import LoadedModel

# Of contexts, where options name none. Chunks of 32 tokens have half of the scales of LLMS's 16: in the bytes
# in which all chunks of 16 have 4 bits, the densest quarter of these has 8. Each packaged model that was
# calibrated loses least with them at half of the bytes. Less than eight leave little to choose between.
CODEC, CODEC_CHUNK_TOKENS, _LEAST_CHUNKS = "channel", 32, 8
_log = logging.getLogger(__name__)


class LLMService(PlannedService):
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
        super().__init__(engine, profile, planner)
        self.contexts = contexts

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
        """Opens a model, and measures this device's profile where there is none yet.

        Buckets are compiled, or read from disk where an earlier process left them. Measuring takes some
        seconds of the packaged model and minutes of larger ones, once.

        Args:
          model: an elastic bundle, or another model, which has one level alone; see `Engine.open`.
          levels: to serve, in percent; None for all of the bundle.
          options: of the engine.
          proposer: proposes levels and prompt ratios instead of the bundle's tiny LM.
          contexts: options of contexts that outlive calls; None for no contexts. Their chunks are stored by
            the options' codec; if that is empty as its bundle's calibration chose, else by "channel" in
            chunks of 32 tokens (of 16 in windows below 256), or by "raw" of a model with state layers.
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
            service.rehearse()
            if missed := described(service.unmet(), profile.tokens):
                _log.info("objectives that no choice meets on this device: %s", missed)
            opened.pop_all()
        return service

    def use_profile(self, profile: DeviceProfile) -> None:
        """Plans by another profile of this device from here on, and learns anew how much later answers come.
        No answer runs.

        Args:
          profile: of the engine's levels.
        """
        self.profile = profile
        self.planner.use(profile)
        choose_prefill(self.engine, profile)

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
          ContextGone: the app has no context of this name, or its tokens are of another tokenizer.
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

    def resize(self, budget_bytes: int) -> None:
        """Sets the memory of contexts' chunks while the service runs; chunks beyond it are evicted.

        Args:
          budget_bytes: see `ContextOptions`.

        Raises:
          ConfigError: the service keeps no contexts, or it is not a whole number from 1 up.
          BudgetExceeded: contexts that run or are pinned take more; the budget is as it was.
        """
        self._kept().resize(budget_bytes)

    def _kept(self) -> Contexts:
        if self.contexts is None:
            refusal = room_refusal(self.engine.cfg, "contexts")
            raise ConfigError(refusal or "this service keeps no contexts; open it with ContextOptions")
        return self.contexts


def engine_options(
    model: str | Path | None,
    levels: Sequence[int] | None,
    options: EngineOptions,
    contexts: ContextOptions | None,
) -> EngineOptions:
    """The options of a service's engine: with the levels that are planned with, and where there are contexts
    a codec: the one that was asked for, else the one that the bundle's calibration chose for its model, else
    `CODEC` or, of a model with states, "raw"; the length of chunks goes with that choice unless another was
    asked for (see `LLMService.open`).

    Raises:
      JaxllmError: the model cannot be opened.
    """
    levels = levels_of(model) if levels is None else tuple(sorted({*levels} - {WHOLE}))
    codec, tokens = options.kv_codec, options.kv_chunk_tokens
    if contexts is not None and not codec:
        with open_model(model) as bundle:
            calibration, cfg = read_contexts(bundle), bundle.cfg
        if calibration is not None:
            codec, best = calibration.chosen.codec, calibration.chosen.chunk_tokens
        elif cfg.states is not None:
            codec, best = "raw", tokens
        else:
            codec, best = CODEC, _chunk_tokens(options, cfg)
        tokens = best if tokens == EngineOptions.kv_chunk_tokens else tokens
    return dataclasses.replace(options, levels=levels, kv_codec=codec, kv_chunk_tokens=tokens)


def _chunk_tokens(options: EngineOptions, cfg: ModelConfig) -> int:
    """Tokens of a chunk of `CODEC`: many, where the window has several of them and a prefill can compute one
    again."""
    several = (options.context_tokens or cfg.window_tokens) >= _LEAST_CHUNKS * CODEC_CHUNK_TOKENS
    again = not options.chunk_tokens or any(each % CODEC_CHUNK_TOKENS == 0 for each in options.chunk_tokens)
    return CODEC_CHUNK_TOKENS if several and again else EngineOptions.kv_chunk_tokens


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
