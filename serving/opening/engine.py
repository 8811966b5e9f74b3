"""Opens an engine: places a model's weights, and plugs in drafts, prefills and experts."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxllm.bundle import Bundle
from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.errors import BudgetExceeded
from jaxllm.formats import WeightChoice
from jaxllm.host_settings import require_usable_jax
from jaxllm.serving.engine.engine import AnyModel
from jaxllm.serving.engine.engine import Engine as AnyEngine
from jaxllm.serving.ground.bundles import open_model
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.opening.loading import LoadedModel
from jaxllm.serving.weights.model_level import rank_of, read_adapter_of, require_nested

_log = logging.getLogger("jaxllm")

# Smaller resident weights are read from the processor's caches, where half of the bytes saves nothing.
_LEAST_DRAFTING_BYTES = 48 * 2**20
# Number of sizes of trees that a drafter gets which is opened for lack of memory: logits of trees need much.
_LOOKED_UP_SIZES = 2


class Engine(AnyEngine[AnyModel]):
    """Answers prompts and conversations with one level of a model that it opens (see
    `jaxllm.serving.engine.engine.Engine`)."""

    @classmethod
    def open(
        cls,
        model: str | Path | None = None,
        *,
        weights: WeightChoice | None = None,
        options: EngineOptions | None = None,
        adapter: str | Path | None = None,
        level: int = FULL_LEVEL,
        speculation: SpeculationOptions | None = None,
        warm_up: bool = True,
        progress: Progress | None = None,
    ) -> "Engine[LoadedModel]":
        """Opens a model and compiles its buckets.

        Args:
          model: a bundle, a Hugging Face folder or a GGUF file (prepared on the fly and cached), a name (see
            `jaxllm.serving.ground.bundles.find_model`), or None for the default one.
          weights: width of a folder's weights; "auto" for the best that the options' memory holds, or without
            a limit the smallest that loses at most 1 %; None for the checkpoint's own.
          options: shapes of buckets and caches.
          adapter: initial low-rank adapter in PEFT's layout; its rank and targets are used unless the
            options name some.
          level: level of this engine (see `at`), in percent; added to the options' levels.
          speculation: options of drafting; None for no drafts, `SpeculationOptions.by_itself()` for
            self-drafting if supported and faster.
          warm_up: whether to compile every bucket; else call `warm_up` before the first request.
          progress: callback for (stage, done, total).

        Raises:
          JaxllmError: the model cannot be opened, or does not support the options.
        """
        require_usable_jax()
        bundle = open_model(model, weights=weights, room=_room(options), progress=progress)
        options = _with_levels(options or EngineOptions(), [level])
        if speculation is not None:
            speculation = speculation.within(options.context_tokens or bundle.cfg.window_tokens)
        optional = speculation is not None and speculation.optional
        if optional and not drafts_by_itself(bundle, level, options):
            speculation = None
        tries = [speculation]
        if optional and speculation is not None:
            # Looking tokens up takes little memory.
            trees = dataclasses.replace(speculation.trees, nodes=speculation.trees.nodes[:_LOOKED_UP_SIZES])
            tries += [dataclasses.replace(speculation, drafter="ngram", trees=trees), None]
        while True:
            try:
                speculation = tries.pop(0)
                loaded = _loaded(bundle, options, adapter, level, speculation, progress)
                break
            except BudgetExceeded as error:
                if not tries:
                    raise
                _log.info(
                    "%s does not draft by its high planes, but by lookup if at all: %s", bundle.path, error
                )
        try:
            drafts = None
            if speculation is not None:
                # Here, because a start without drafts should not wait for their import.
                from jaxllm.serving.speculation.drafters import make_drafter
                from jaxllm.serving.speculation.speculation import Speculation

                drafter = make_drafter(loaded, speculation, progress)
                drafts = Speculation(loaded.runner(level), drafter, speculation)
            engine = Engine(loaded, level, drafts)
            if warm_up:
                engine.warm_up(progress=progress)
            return engine
        except BaseException:
            # Else its threads stay until this process ends.
            loaded.close()
            raise


def _room(options: EngineOptions | None) -> Callable[[ModelConfig], int] | None:
    """Bytes that options leave for a model's weights; None without a limit."""
    if options is None or not options.memory_bytes:
        return None
    # Imported here: most models are opened without a limit.
    from jaxllm.serving.weights.memory_plan import fixed_bytes, runtime_bytes

    budget = options.memory_bytes
    return lambda cfg: budget - runtime_bytes(budget) - fixed_bytes(cfg, options.resolve(cfg, quantized=True))


def _loaded(
    bundle: Bundle,
    options: EngineOptions,
    adapter: str | Path | None,
    level: int,
    speculation: SpeculationOptions | None,
    progress: Progress | None,
) -> LoadedModel:
    """Loads an open bundle with the options that a level and speculation need."""
    if speculation is not None:
        options = dataclasses.replace(options, trees=speculation.trees)
        options = _with_levels(options, [speculation.level] if speculation.level else [])
    lora, arrays = (None, {}) if adapter is None else read_adapter_of(bundle, adapter)
    if lora is not None and not options.adapter_rank:
        options = dataclasses.replace(options, adapter_rank=rank_of(arrays), adapter_targets=lora.targets)
    reserved, drafting_level = 0, 0
    if high_planes := speculation is not None and speculation.drafter == "nested":
        require_nested(bundle)
    if speculation is not None and options.memory_bytes:
        from jaxllm.serving.weights.memory_plan import drafter_bytes

        reserved = drafter_bytes(speculation, options.context_tokens, bundle.cfg)
        drafting_level = 0 if high_planes else speculation.level
    loaded = LoadedModel(
        bundle,
        options,
        progress,
        reserved_bytes=reserved,
        drafting_level=drafting_level,
        high_planes=high_planes,
    )
    try:
        if lora is not None:
            loaded.put_adapter(arrays, lora.scaling)
        if level != FULL_LEVEL and loaded.runners.modes is not None:
            loaded.runners.modes.require(level)
    except BaseException:
        loaded.close()
        raise
    return loaded


def drafts_by_itself(bundle: Bundle, level: int, options: EngineOptions) -> bool:
    """Whether self-drafting with the high planes is possible and likely to help: for the whole model, whose
    shape they have, unless its weights are resident and about as small as the processor's caches. High
    planes do not attend to stored chunks in place."""
    nested = bundle.layout.weights == "int8-nested" and bundle.read_in_place
    large = bundle.weight_bytes >= _LEAST_DRAFTING_BYTES or options.memory_bytes > 0
    alone = bundle.cfg.encoder is None and bundle.cfg.states is None and not options.attend_quantized_kv
    return alone and nested and large and level == FULL_LEVEL and not bundle.layout.experts_apart


def _with_levels(options: EngineOptions, levels: Sequence[int]) -> EngineOptions:
    return dataclasses.replace(options, levels=tuple(sorted({*options.levels, *levels})))
