"""Describes the training that recovers the losses of smaller levels (ELMS, section 3.2): of all levels
together, or of an adapter for each.

Together every step trains the whole model on the text, and the smallest level and one other, sampled at
random, on the whole model's distribution (the sandwich rule of universally slimmable networks, arXiv
1903.05134, with nested weights as in MatFormer, arXiv 2310.07707). The alternative is a low-rank adapter per
level over frozen weights (`level_job`, and `cut_level_job` on CPUs).

Where one compiled step serves all levels, a level is the whole model's parameters, and counts of the units
that it uses. Unused units add nothing to their layer's outputs, so losses and gradients are the sub-model's,
but XLA computes them nevertheless: a step of any level is as slow as one of the whole model. A CPU computes
the adapter of a level over the level's own weights, and compiles a step for each.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.elastic.ladder import LEVELS, Ladder, sub_config, sub_model
from jaxllm.errors import ConfigError
from jaxllm.kernels.native_call import PARAMETER, counts_of
from jaxllm.models.lora import (
    LoraConfig,
    adapt,
    adapted_parameters,
    adapter_shapes,
    init_adapter,
    parameters_of,
)
from jaxllm.models.parameters import ENCODER, Params
from jaxllm.models.scanned_layers import STACKS, is_stacked, scan_runs, stacked
from jaxllm.options import option
from jaxllm.training.decoders import LoraRecipe
from jaxllm.training.loop.hardware import step_flops_per_token
from jaxllm.training.loop.losses import Outputs, distillation_losses, divergences, next_token_losses
from jaxllm.training.loop.trainer import Job
from jaxllm.training.seq2seq.forward import AnyBatch, outputs_of_any
from jaxllm.training.settings import LevelSettings, TrainSettings

Counts = Mapping[str, Any]
Measure = Literal["gradient", "fisher"]
# In a layer without units these add to the residual nevertheless.
_OUTPUTS = ("attn.o_bias", "ffn.down_bias", "shared.down")


def level_counts(cfg: ModelConfig, ladder: Ladder, level: int) -> dict[str, np.ndarray]:
    """Returns the units that a level uses: per layer `layers.{layer}.used_units` `[3]` int32, see
    `UsedUnits`; for an encoder-decoder those of both sides."""
    return {
        f"{lead}layers.{layer}.{PARAMETER}": own
        for lead, side in sides(sub_config(cfg, ladder, level))
        for layer, own in enumerate(_counts(side))
    }


def sides(cfg: ModelConfig) -> list[tuple[str, ModelConfig]]:
    """Lists the decoder, and the encoder if there is one, each with the prefix of its parameters' names."""
    return [("", cfg)] if cfg.encoder is None else [("", cfg), (ENCODER, cfg.encoder)]


def counts_of_levels(cfg: ModelConfig, ladder: Ladder, levels: tuple[int, ...]) -> dict[str, np.ndarray]:
    """`level_counts` of several levels, with a leading axis of levels."""
    each = [level_counts(cfg, ladder, level) for level in levels]
    return {name: np.stack([own[name] for own in each]) for name in each[0]} if each else {}


def at_level(params: Params, counts: Counts, cfg: ModelConfig) -> dict[str, Any]:
    """Returns parameters that compute a level; also inside a step.

    Args:
      params: float arrays of the whole model, units in order, equal layers in stacks or not.
      counts: counts of the level, with unstacked layers or stacked like `params`.
    """
    own = stacked(counts, cfg) if is_stacked(params) and not is_stacked(counts) else counts
    return {**used_experts(params, own), **own}


def without_layer(cfg: ModelConfig, params: Params, layer: jax.Array | int) -> dict[str, Any]:
    """Returns the parameters with one layer that adds nothing, an int32 scalar; -1 for none. The layers of
    an encoder are counted after the decoder's."""
    found: dict[str, Any] = dict(params)
    first = 0
    for lead, side in sides(cfg):
        whole = _counts(side)
        for prefix, numbers in _rows(params, side).items():
            kept = first + np.asarray(numbers, np.int32) != jnp.asarray(layer, jnp.int32)
            prefix = lead + prefix
            found[prefix + PARAMETER] = jnp.where(kept[..., None], whole[np.asarray(numbers)], 0)
            for name in _OUTPUTS:
                if prefix + name in params:
                    value = jnp.asarray(params[prefix + name])
                    flags = kept.reshape(kept.shape + (1,) * (value.ndim - kept.ndim))
                    found[prefix + name] = value * flags.astype(value.dtype)
        first += side.layers
    return used_experts(found, found)


def used_experts(params: Params, counts: Counts) -> dict[str, Any]:
    """Returns parameters, or an adapter, in which unused neurons of experts add nothing: products of
    experts, unlike others, ignore counts. Both are in stacks, or neither is."""
    found: dict[str, Any] = dict(params)
    for name, value in params.items():
        prefix, is_down, part = name.partition("experts.down")
        if not is_down or part not in ("", ".left"):
            continue
        weight, neurons = jnp.asarray(value), jnp.asarray(counts[prefix + PARAMETER])[..., 1]
        axis = neurons.ndim + 1
        inside = jnp.arange(weight.shape[axis], dtype=jnp.int32) < neurons[..., None]
        shape = (*neurons.shape, 1, weight.shape[axis]) + (1,) * (weight.ndim - axis - 1)
        found[name] = jnp.where(inside.reshape(shape), weight, jnp.zeros((), weight.dtype))
    return found


def adapter_of_level(cfg: ModelConfig, part: ModelConfig, lora: LoraConfig, seed: int) -> dict[str, Any]:
    """Returns a new adapter of a level, in the shapes of the whole model: zero for units that the level
    lacks."""
    return wide_adapter(cfg, jax.device_get(init_adapter(part, lora, jax.random.key(seed))))


def wide_adapter(cfg: ModelConfig, adapter: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """An adapter of a level in the shapes of the whole model: zero for units that the level lacks."""
    wide = {}
    for name, value in adapter.items():
        parameter, _, side = name.rpartition(".")
        shape = adapter_shapes(cfg, parameter, adapter[f"{parameter}.right"].shape[-2])[side == "right"]
        wide[name] = np.pad(value, [(0, more - own) for own, more in zip(value.shape, shape, strict=True)])
    return wide


def cut_adapter(part: ModelConfig, adapter: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """An adapter in the shapes of the whole model, cut to those of a level."""
    cut = {}
    for name in parameters_of(adapter):
        shapes = adapter_shapes(part, name, adapter[f"{name}.right"].shape[-2])
        for side, shape in zip(("left", "right"), shapes, strict=True):
            own = adapter[f"{name}.{side}"]
            cut[f"{name}.{side}"] = np.ascontiguousarray(own[tuple(map(slice, shape))])
    return cut


def _counts(cfg: ModelConfig) -> np.ndarray:
    """The units of each layer of one side, `[L, 3]` int32."""
    units = [cfg.units(layer) for layer in range(cfg.layers)]
    return counts_of([each.kv_heads for each in units], [each.neurons for each in units], 0)


def _rows(params: Params, cfg: ModelConfig) -> dict[str, Any]:
    """Prefixes of layers' parameters, and the numbers of their layers: of a stack `[n]`, else one."""
    if not is_stacked(params):
        return {f"layers.{layer}.": layer for layer in range(cfg.layers)}
    found: dict[str, Any] = {}
    for run in scan_runs(cfg):
        for like in range(run.first, run.first + run.period):
            numbers = [like + row * run.period for row in range(run.repeats)]
            stack = run.repeats > 1
            found[f"{STACKS if stack else 'layers.'}{like}."] = numbers if stack else like
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticRecipe(LoraRecipe, LevelSettings):
    """One run; `steps` are those of each level's adapter, or of all levels together. The options' help
    describes it."""

    folder = "elastic"

    levels: tuple[int, ...] = option(LEVELS, "Levels to make, ascending, up to 100.")
    calibration_tokens: int = option(1 << 16, "Training tokens on which importance is measured.", low=1)
    importance: Measure = option(
        "gradient", "Importance of units: the gradient of the loss, or Fisher information, row by row."
    )
    teacher_share: float = option(
        0.0, "With --recovery lora, share of the loss from the whole model's distribution.", low=0, high=1
    )
    shortened_share: float = option(
        0.0,
        "Share of the questions that lose words, as prompts do in service (see "
        "`jaxllm.training.data.documents`).",
        low=0,
        high=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # Checks the levels.
        Ladder(levels=self.levels)
        if self.units != "equal" and self.order != "importance":
            raise ConfigError(f"units = {self.units} chooses by importance: set order = importance")
        if self.depth and self.units != "global":
            raise ConfigError("levels lack whole blocks if units are chosen globally: set units = global")
        if self.teacher_share and self.recovery != "lora":
            raise ConfigError(
                f"teacher_share is of the adapters of --recovery lora, not of {self.recovery}: leave it out"
            )
        if self.whole_kl_nats and self.recovery != "joint":
            raise ConfigError(
                f"whole_kl_nats bounds a joint recovery; {self.recovery} leaves the whole model as it is, so "
                "leave it out"
            )


def joint_job(
    cfg: ModelConfig,
    params: Mapping[str, Any],
    ladder: Ladder,
    settings: TrainSettings,
    *,
    original: Params | None = None,
) -> Job:
    """Returns the job that trains the weights of all levels together.

    The loss of a step is the mean of the whole model's, the smallest level's and that of one level between
    them; the held-out loss is the mean over all levels of the next-token loss. The whole model's loss is
    the next-token loss, and with `original` also its divergence from that model's distribution.

    Args:
      params: its initial float32 parameters, units in order.
      settings: settings of the training.
      original: model that the whole model stays close to; None for no constraint.
    """
    dtype = jnp.dtype(settings.computed_in)
    smaller = counts_of_levels(cfg, ladder, tuple(level for level in ladder.levels if level != FULL_LEVEL))
    levels = counts_of_levels(cfg, ladder, ladder.levels)
    count = len(ladder.levels) - 1

    def run(params: Params, batch: AnyBatch, counts: Mapping[str, Any] | None = None) -> Outputs:
        own = params if counts is None else at_level(params, counts, cfg)
        return outputs_of_any(own, batch, cfg=cfg, dtype=dtype, remat=settings.remat)

    def sampled_losses(
        params: Params, frozen: Any, batch: AnyBatch, key: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        whole = run(params, batch)
        losses = next_token_losses(whole, batch)
        if original is not None:
            losses = losses + divergences(whole, run(frozen, batch), batch)
        if not count:
            return losses, jnp.zeros(())
        wanted = jax.lax.stop_gradient(whole)
        sampled = jnp.zeros(1, jnp.int32)
        if count > 1:
            sampled = jnp.stack([sampled[0], jax.random.randint(key, (), 1, count)])

        def taught(counts: Mapping[str, Any]) -> jax.Array:
            return distillation_losses(run(params, batch, counts), wanted, batch, teacher_share=1.0)

        # One after the other: a step then holds the activations of one level, and has the code of one.
        others = jax.lax.map(taught, {name: jnp.asarray(each)[sampled] for name, each in smaller.items()})
        return (losses + others.sum(0)) * np.float32(1 / (1 + sampled.shape[0])), jnp.zeros(())

    def losses(params: Params, frozen: Any, batch: AnyBatch) -> tuple[jax.Array, jax.Array]:
        del frozen
        each = jax.lax.map(
            lambda counts: next_token_losses(run(params, batch, counts), batch),
            {name: jnp.asarray(own) for name, own in levels.items()},
        )
        return each.mean(0), jnp.zeros(())

    # The whole model, and one level or two; unused units are computed nevertheless. The original's forward
    # pass is a third of a step.
    runs = 1 + min(count, 2) + (0 if original is None else 1 / 3)
    flops = step_flops_per_token(cfg, settings.row_tokens) * runs
    beside = {} if original is None else {"frozen": dict(original), "frozen_cfg": cfg}
    return Job(dict(params), losses, sampled_losses=sampled_losses, cfg=cfg, flops_per_token=flops, **beside)


def level_job(
    cfg: ModelConfig, params: Params, ladder: Ladder, recipe: ElasticRecipe, *, adapters: bool = True
) -> Job:
    """Returns the job that trains the adapter of a level over frozen weights, or only measures without
    `adapters`. The training loss is a mixture by `recipe.teacher_share` of the divergence from the whole
    model's distribution and of the next-token loss; the held-out loss is the latter.

    The counts among the frozen arrays define the level: first those of the whole model; `Trainer.beside`
    switches to another.

    Args:
      params: its parameters, units in order.
    """

    def of_level(adapter: Params, frozen: Any) -> tuple[Any, Any]:
        counts = {name: each for name, each in frozen.items() if name.endswith(PARAMETER)}
        return used_experts(adapter, counts), used_experts(frozen, counts)

    def whole(frozen: Any) -> Any:
        return {name: each for name, each in frozen.items() if not name.endswith(PARAMETER)}

    adapted_parameters(cfg, recipe.lora.targets)
    if not adapters:
        recipe = dataclasses.replace(recipe, teacher_share=0.0)
    init = adapter_of_level(cfg, cfg, recipe.lora, recipe.seed) if adapters else {}
    frozen = {**params, **level_counts(cfg, ladder, FULL_LEVEL)}
    job = _adapter_job(cfg, cfg, recipe, init=init, frozen=frozen, of_level=of_level, whole=whole)
    return dataclasses.replace(job, frozen_cfg=cfg)


def _adapter_job(
    cfg: ModelConfig,
    part: ModelConfig,
    recipe: ElasticRecipe,
    *,
    init: Any,
    frozen: dict[str, Any],
    of_level: Callable[[Params, Any], tuple[Any, Any]],
    whole: Callable[[Any], Any],
) -> Job:
    """The job of a level's adapter: `of_level` has the adapter and the level's parameters, of the config
    `part`, and `whole` the whole model's, of the frozen arrays."""
    dtype, scaling, share = jnp.dtype(recipe.computed_in), recipe.lora.scaling, recipe.teacher_share

    def run(adapter: Params, frozen: Any, batch: AnyBatch) -> Outputs:
        own, params = of_level(adapter, frozen)
        return outputs_of_any(adapt(params, own, scaling), batch, cfg=part, dtype=dtype, remat=recipe.remat)

    def losses(adapter: Params, frozen: Any, batch: AnyBatch) -> tuple[jax.Array, jax.Array]:
        return next_token_losses(run(adapter, frozen, batch), batch), jnp.zeros(())

    def taught(adapter: Params, frozen: Any, batch: AnyBatch, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        del key
        wanted = outputs_of_any(whole(frozen), batch, cfg=cfg, dtype=dtype)
        ours = run(adapter, frozen, batch)
        return distillation_losses(ours, wanted, batch, teacher_share=share), jnp.zeros(())

    flops = step_flops_per_token(part, recipe.row_tokens, adapter=True)
    if share:
        flops += step_flops_per_token(cfg, recipe.row_tokens) / 3
    return Job(init, losses, frozen, taught if share else None, cfg=part, flops_per_token=flops)


def cut_level_job(
    cfg: ModelConfig,
    params: Params,
    ladder: Ladder,
    level: int,
    recipe: ElasticRecipe,
    before: Mapping[str, np.ndarray],
) -> Job:
    """Returns the job that trains the adapter of a level over the level's own frozen weights.

    Losses are those of `level_job`.

    Args:
      params: its parameters, units in order.
      before: adapter of a larger level to begin at, cut to the units of this one; empty for a new one.
    """
    part = sub_config(cfg, ladder, level)
    init = dict(init_adapter(part, recipe.lora, jax.random.key(recipe.seed)))
    for name, like in init.items():
        if name in before:
            own = np.asarray(before[name])[tuple(map(slice, like.shape))]
            # In a layer a smaller level may have more units of one kind.
            init[name] = jnp.pad(own, [(0, n - has) for n, has in zip(like.shape, own.shape, strict=True)])
    whole = dict(params) if recipe.teacher_share else {}
    return _adapter_job(
        cfg, part, recipe, init=init, frozen={"level": sub_model(params, part), "whole": whole},
        of_level=lambda adapter, frozen: (adapter, frozen["level"]), whole=lambda frozen: frozen["whole"],
    )  # fmt: skip


def divergence_job(cfg: ModelConfig, original: Params, settings: TrainSettings) -> Job:
    """Measures the divergence of a model's distribution over the next token from the original's, in nats per
    token; it trains nothing."""
    dtype = jnp.dtype(settings.computed_in)

    def losses(params: Params, frozen: Any, batch: AnyBatch) -> tuple[jax.Array, jax.Array]:
        ours, theirs = (outputs_of_any(each, batch, cfg=cfg, dtype=dtype) for each in (params, frozen))
        return divergences(ours, theirs, batch), jnp.zeros(())

    return Job({}, losses, frozen=dict(original), cfg=cfg, frozen_cfg=cfg)
