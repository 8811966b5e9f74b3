"""Serves one model to all apps of a device: every call with its own objective, every answer with its plan.

    service = LLMService.open("model.jaxllm")
    service.bind("mail", Slo.parse("<40,70>"))
    answer = service.call("Is this a complaint? ...", app="mail")
    for piece in answer: ...
    answer.plan, answer.cost, answer.met

The service plans and the engine answers, one call at a time.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from jaxllm.bundle.calibrations import read_contexts
from jaxllm.bundle.tiny_lm import read_tiny_lm
from jaxllm.config import FULL_LEVEL
from jaxllm.errors import ConfigError
from jaxllm.models.features import feature_refusal
from jaxllm.serving.contexts.context import Context
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.elastic.objectives import CONFIDENCE, SafetyMargin
from jaxllm.serving.elastic.planned_service import PlannedService
from jaxllm.serving.elastic.planner import Planner, Proposer, described
from jaxllm.serving.elastic.profile import DeviceProfile
from jaxllm.serving.elastic.profiling import choose_prefill, known_profile
from jaxllm.serving.elastic.tiny_lm import TinyPlanner
from jaxllm.serving.ground.bundles import find_model, levels_of, open_model
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.opening.engine import Engine
from jaxllm.serving.opening.loading import LoadedModel

# Defaults for contexts. Chunks of 32 tokens have half as many scales as LLMS's of 16: in the bytes of all
# 16-token chunks at 4 bits, the densest quarter of these has 8. Every calibrated packaged model loses least
# with them at half of the bytes. Fewer than eight chunks leave little choice.
CODEC, CODEC_CHUNK_TOKENS, _LEAST_CHUNKS = "channel", 32, 8
_log = logging.getLogger(__name__)


class LLMService(PlannedService):
    """Answers the calls of all apps with one elastic model. Not thread-safe: one call at a time.

    Attributes:
      engine: engine with all levels.
      profile: profile of this device.
      planner: planner of every call.
      contexts: contexts of all apps; None for none.
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
        """Opens a model, and measures this device's profile if there is none.

        Buckets are compiled, or loaded from disk if an earlier process cached them. Measuring takes seconds
        for the packaged model and minutes for larger ones, once. Raises JaxllmError if the model cannot be
        opened, or lacks a level.

        Args:
          model: an elastic bundle, or another model, which has only one level; see `Engine.open`.
          levels: levels to serve, in percent; None for all of the bundle.
          options: options of the engine.
          proposer: proposer of levels and prompt ratios instead of the bundle's tiny LM.
          contexts: options of contexts that outlive calls; None for no contexts. Chunks are stored with the
            options' codec; if that is empty, with the one chosen by the bundle's calibration, else with
            "channel" in chunks of 32 tokens (16 in windows below 256), or "raw" for a model with state
            layers.
          speculation: options of drafts for the whole model's answers; None for no drafts.
          confidence: share of answers that should meet their objective if a choice can be that certain; a
            higher share leads to smaller levels.
          progress: callback for (stage, done, total).
        """
        margin, model = SafetyMargin(confidence), find_model(model, progress)
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
        """Makes a service, ready for its first call, of a warm engine with all planned levels, opened with a
        codec if there are contexts. Raises JaxllmError if the contexts cannot be opened."""
        choose_prefill(engine, profile)
        with contextlib.ExitStack() as opened:
            kept = None if contexts is None else Contexts(engine, contexts)
            if kept is not None:
                # Otherwise the store stays locked until this process ends.
                opened.callback(kept.close)
            service = cls(engine, profile, planner, kept)
            service.rehearse()
            if missed := described(service.unmet(), profile.tokens):
                _log.info("objectives that no choice meets on this device: %s", missed)
            opened.pop_all()
        return service

    def use_profile(self, profile: DeviceProfile) -> None:
        """Replaces the profile of this device, and resets the learned margin; no answer may be running."""
        self.profile = profile
        self.planner.use(profile)
        choose_prefill(self.engine, profile)

    def close(self) -> None:
        """Closes the contexts, which releases their store, and the engine. Raises BudgetExceeded or
        CheckpointError if an answer could not be stored; everything is closed nevertheless."""
        try:
            if self.contexts is not None:
                self.contexts.close()
        finally:
            self.engine.close()

    def new_context(self, app: str, *, level: int | None = None, pinned: bool = False) -> Context:
        """Creates a context of an app, which outlives calls and restarts (newLLMCtx).

        Args:
          app: owner; no other app can open it.
          level: level that answers in it, in percent; None for the whole model.
          pinned: whether its chunks are never evicted for another context.

        Raises:
          ConfigError: the service has no contexts, the level is not served, or the app's name is invalid.
          BudgetExceeded: the app has reached its number of contexts, or there is no space.
        """
        contexts = self._kept()
        return Context(contexts, contexts.create(app, level=level, pinned=pinned))

    def context(self, app: str, name: str) -> Context:
        """Opens an existing context of an app, also from an earlier process. Raises ConfigError if the
        service has no contexts, and ContextGone if the app has no context of this name, or its tokens are of
        another tokenizer."""
        contexts = self._kept()
        return Context(contexts, contexts.record(app, name))

    def contexts_of(self, app: str) -> list[Context]:
        """All contexts of an app, including those of other models and levels. Raises ConfigError if the
        service has no contexts."""
        contexts = self._kept()
        return [Context(contexts, record) for record in contexts.store.records(app)]

    def resize(self, budget_bytes: int) -> None:
        """Sets the memory limit of contexts' chunks at runtime; evicts chunks beyond it.

        Raises:
          ConfigError: the service has no contexts, or the limit is not a positive integer.
          BudgetExceeded: running or pinned contexts need more; the limit is unchanged.
        """
        self._kept().resize(budget_bytes)

    def _kept(self) -> Contexts:
        if self.contexts is None:
            refusal = feature_refusal(self.engine.cfg, "contexts")
            raise ConfigError(refusal or "this service keeps no contexts; open it with ContextOptions")
        return self.contexts


def engine_options(
    model: str | Path | None,
    levels: Sequence[int] | None,
    options: EngineOptions,
    contexts: ContextOptions | None,
) -> EngineOptions:
    """The options of a service's engine: with the planned levels and, if there are contexts, a codec: the
    requested one, else the one chosen by the bundle's calibration, else `CODEC`, or "raw" for a model with
    states. The chunk length belongs to that choice unless another is requested (see `LLMService.open`).
    Raises JaxllmError if the model cannot be opened."""
    levels = levels_of(model) if levels is None else tuple(sorted({*levels} - {FULL_LEVEL}))
    codec, tokens = options.kv_codec, options.kv_chunk_tokens
    if contexts is not None and not codec:
        with open_model(model) as bundle:
            calibration, cfg = read_contexts(bundle), bundle.cfg
        if calibration is not None:
            codec, best = calibration.chosen.codec, calibration.chosen.chunk_tokens
        elif cfg.states is not None:
            codec, best = "raw", tokens
        else:
            codec = CODEC
            # The longer size if the window has several chunks and a prefill can recompute one.
            several = (options.context_tokens or cfg.window_tokens) >= _LEAST_CHUNKS * CODEC_CHUNK_TOKENS
            again = not options.chunk_tokens or any(n % CODEC_CHUNK_TOKENS == 0 for n in options.chunk_tokens)
            best = CODEC_CHUNK_TOKENS if several and again else tokens
        tokens = best if tokens == EngineOptions.kv_chunk_tokens else tokens
    return dataclasses.replace(options, levels=levels, kv_codec=codec, kv_chunk_tokens=tokens)


def planner_of(
    engine: Engine[LoadedModel],
    profile: DeviceProfile,
    proposer: Proposer | None = None,
    *,
    margin: SafetyMargin | None = None,
    progress: Progress | None = None,
) -> Planner:
    """A planner for the levels of an engine, with its bundle's tiny LM unless another proposer is given."""
    if proposer is None and (tiny := read_tiny_lm(engine.model.bundle)) is not None:
        proposer = TinyPlanner(tiny, engine.levels, engine.runner.buckets.store(), progress=progress)
    return Planner(profile, engine.levels, proposer, safety_margin=margin)
