"""Describes how a model becomes elastic: the importance of its units and layers, and the joint training of
all levels, which recovers the losses of smaller levels (ELMS, section 3.2).

A unit's importance is the change of the next-token loss by its removal, to first order: the absolute value
of the sum over its weights of gradient times weight (equation 2), averaged over batches. Its Fisher
information, for comparison, is the mean of that sum's square over rows, each with a backward pass of its
own (second order, arXiv 1906.10771, equation 5). A layer's importance is the growth of the loss without it.
Parameters and gradients are sharded over a mesh; only scores of units and layers leave it. For an
encoder-decoder one backward pass over pairs gives the scores of both sides.

Every step trains the whole model on the text, and the smallest level and one other, sampled at random, on
the whole model's distribution (the sandwich rule of universally slimmable networks, arXiv 1903.05134, with
nested weights as in MatFormer, arXiv 2310.07707). The alternative, a low-rank adapter per level over frozen
weights, is `level_job`.

In training a level is the whole model's parameters, and counts of the units that it uses. Unused units add
nothing to their layer's outputs, so losses and gradients are the sub-model's, and one compiled step serves
all levels. XLA computes unused units nevertheless, so a step of any level is as slow as one of the whole
model.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.elastic.ladder import LEVELS, Ladder, is_unit_parameter, sub_config
from jaxllm.elastic.units import UnitOrder, of_encoder, order_arrays, order_of_arrays, order_of_scores
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files.atomic import atomic_file
from jaxllm.kernels.native_call import PARAMETER, counts_of
from jaxllm.models.lora import LoraConfig, adapter_shapes, init_adapter, parameters_of
from jaxllm.models.parameters import ENCODER, Params
from jaxllm.models.scanned_layers import STACKS, Remat, is_stacked, scan_runs, stacked, unstacked
from jaxllm.options import option
from jaxllm.training.decoders import LoraRecipe, lora_job
from jaxllm.training.loop.hardware import step_flops_per_token
from jaxllm.training.loop.losses import Outputs, distillation_losses, divergences, next_token_losses
from jaxllm.training.loop.parallel import MeshShape, laid_out, make_mesh, place_rows
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
      cfg: config of the whole model.
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
    lacks.

    Args:
      cfg: config of the whole model.
      part: config of the level.
      lora: config of the adapter.
      seed: seed of its random factors.
    """
    wide = {}
    for name, value in jax.device_get(init_adapter(part, lora, jax.random.key(seed))).items():
        parameter, _, side = name.rpartition(".")
        shape = adapter_shapes(cfg, parameter, lora.rank)[side == "right"]
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
        if self.units == "global" and self.order != "importance":
            raise ConfigError("units are chosen globally by their importance: set order = importance")
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
      cfg: config of the whole model.
      params: its initial float32 parameters, units in order.
      ladder: the levels.
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
    cfg: ModelConfig, params: Params, ladder: Ladder, recipe: LoraRecipe, *, adapters: bool = True
) -> Job:
    """Returns the job that trains the adapter of a level over frozen weights, or only measures without
    `adapters`.

    The counts among the frozen arrays define the level: first those of the whole model; `Trainer.beside`
    switches to another.

    Args:
      cfg: config of the whole model.
      params: its parameters, units in order.
      ladder: the levels.
      recipe: recipe of the adapters.
    """
    frozen: dict[str, Any] = {**params, **level_counts(cfg, ladder, FULL_LEVEL)}
    job = lora_job(cfg, frozen, recipe)

    def losses(adapter: Params, frozen: Params, batch: AnyBatch) -> tuple[jax.Array, jax.Array]:
        counts = {name: each for name, each in frozen.items() if name.endswith(PARAMETER)}
        return job.losses(used_experts(adapter, counts), used_experts(frozen, counts), batch)

    init = adapter_of_level(cfg, cfg, recipe.lora, recipe.seed) if adapters else {}
    return dataclasses.replace(job, init=init, losses=losses)


def divergence_job(cfg: ModelConfig, original: Params, settings: TrainSettings) -> Job:
    """Measures the divergence of a model's distribution over the next token from the original's, in nats per
    token; it trains nothing."""
    dtype = jnp.dtype(settings.computed_in)

    def losses(params: Params, frozen: Any, batch: AnyBatch) -> tuple[jax.Array, jax.Array]:
        ours, theirs = (outputs_of_any(each, batch, cfg=cfg, dtype=dtype) for each in (params, frozen))
        return divergences(ours, theirs, batch), jnp.zeros(())

    return Job({}, losses, frozen=dict(original), cfg=cfg, frozen_cfg=cfg)


# On less text than this, chance decides the order.
LEAST_TOKENS = 4096
Report = Callable[[int, int], None]
BatchT = TypeVar("BatchT", bound=AnyBatch)
_Units = dict[str, jax.Array]
# The units of the parameters of a block; of all others neurons.
_KINDS = {"attn": "groups", "cross": "cross"}


@dataclasses.dataclass(frozen=True, eq=False)
class Importance:
    """Importances of a model's units and layers.

    Attributes:
      groups: importances of the kv-groups of each layer, `[K]` float64, in nats per token.
      neurons: importances of the neurons of each layer, `[F]`, or `[E, F]` for experts.
      layers: `[L]` float64, the growth of the loss without each layer, in nats per token.
      loss: loss of the whole model, in nats per token.
      cross: importances of the kv-groups over the source of each layer of an encoder-decoder's decoder.
      encoder: those of its encoder.
    """

    groups: tuple[np.ndarray, ...]
    neurons: tuple[np.ndarray, ...]
    layers: np.ndarray
    loss: float
    cross: tuple[np.ndarray, ...] = ()
    encoder: "Importance | None" = None

    @classmethod
    def of_arrays(
        cls, cfg: ModelConfig, units: Mapping[str, np.ndarray], layers: np.ndarray, loss: float
    ) -> "Importance":
        """Importances from the named arrays of `units`, and from those of all layers, the encoder's after the
        decoder's."""
        own = order_of_arrays(cfg, units)
        if cfg.encoder is None:
            return cls(own.groups, own.neurons, layers=layers, loss=loss)
        return cls(
            own.groups,
            own.neurons,
            layers=layers[: cfg.layers],
            loss=loss,
            cross=own.cross,
            encoder=cls.of_arrays(cfg.encoder, of_encoder(units), layers[cfg.layers :], loss),
        )

    @property
    def units(self) -> dict[str, np.ndarray]:
        """Scores of all units, by name, for `order_of_scores`."""
        return order_arrays(self)  # pyright: ignore[reportArgumentType]: scores in place of indices

    def order(self, cfg: ModelConfig) -> UnitOrder:
        """Returns the units of the model, most important first."""
        return order_of_scores(cfg, self.units)

    def ladder(self, levels: tuple[int, ...], anchor_share: float) -> Ladder:
        """The levels of the model, with anchors on each side."""
        own = None if self.encoder is None else self.encoder.ladder(levels, anchor_share)
        return Ladder(levels=levels, anchors=self.anchors(anchor_share), encoder=own)

    def anchors(self, share: float = 0.2) -> tuple[int, ...]:
        """Returns the most important layers, a share of all, ascending.

        Raises:
          ConfigError: `share` is not in [0, 1].
        """
        if not 0 <= share <= 1:
            raise ConfigError(f"the share of anchor layers must be in [0, 1], got {share}")
        count = round(share * len(self.layers))
        return tuple(sorted(np.argsort(-self.layers, kind="stable")[:count].tolist()))

    def write(self, path: Path) -> None:
        """Writes a file for `read`, atomically."""
        layers = self.layers
        if self.encoder is not None:
            layers = np.concatenate([layers, self.encoder.layers])
        arrays = {**self.units, "layers": layers, "loss": np.array(self.loss)}
        with atomic_file(path) as file:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]

    @classmethod
    def read(cls, path: Path, cfg: ModelConfig) -> "Importance":
        """Reads the importances of a model.

        Raises:
          CheckpointError: the file is damaged, or of a model of fewer layers.
        """
        try:
            with np.load(path) as saved:
                return cls.of_arrays(cfg, saved, saved["layers"], float(saved["loss"]))
        except Exception as error:  # NumPy raises many kinds for a damaged file.
            raise CheckpointError(f"cannot read {path}: {error}; remove it, and it is made again") from error


def measure(
    cfg: ModelConfig,
    params: Params,
    batches: Sequence[AnyBatch],
    *,
    mesh: Mesh | None = None,
    remat: Remat = "none",
    by: Measure = "gradient",
    report: Report | None = None,
) -> Importance:
    """Returns importances of a model's units and layers on a calibration text.

    Args:
      cfg: config of the whole model.
      params: float arrays, which stay in place if they are on the mesh; bfloat16 ones also make activations
        bfloat16.
      batches: the text, packed; or pairs of sources and targets.
      mesh: devices that rows and parameters are divided over; None for the default one.
      remat: see `decoder.forward_documents`.
      by: measure of units; "fisher" gives squares of nats per token.
      report: callback for (batches done, number of batches).

    Raises:
      ConfigError: the text is shorter than `LEAST_TOKENS`, or the model's loss on it is not finite.
    """
    tokens = int(sum((batch.weights > 0).sum() for batch in batches))
    if tokens < LEAST_TOKENS:
        raise ConfigError(
            f"the calibration text has {tokens} tokens to predict; give at least {LEAST_TOKENS}"
        )
    mesh = mesh or make_mesh(MeshShape(data=1), 1)
    everywhere = NamedSharding(mesh, PartitionSpec())
    units = unit_step(cfg, mesh, remat=remat, by=by)
    # One function for all layers: which of them is left out is an argument.
    loss = jax.jit(
        lambda params, batch, layer: _loss(cfg, without_layer(cfg, params, layer), batch),
        out_shardings=everywhere,
    )
    own: Params = laid_out(params.items(), cfg, mesh)
    count = sum(side.layers for _, side in sides(cfg))
    sums, nats = None, np.zeros(count + 1)
    for done, batch in enumerate(batches, start=1):
        share = float((batch.weights > 0).sum()) / tokens
        with jax.set_mesh(mesh):
            rows = jax.tree.map(lambda part: part[0], place_rows(batch, mesh, 1))
            of_batch = jax.tree.map(lambda part: np.abs(np.asarray(part, np.float64)), units(own, rows))
            losses = [float(loss(own, rows, np.int32(layer))) for layer in range(-1, count)]
        each = jax.tree.map(lambda part, share=share: share * part, of_batch)
        sums = each if sums is None else jax.tree.map(np.add, sums, each)
        nats += share * np.array(losses)
        if report is not None:
            report(done, len(batches))
    assert sums is not None
    if not np.isfinite(nats[0]):
        raise ConfigError(f"the model's loss on the calibration text is {nats[0]}; its weights are broken")
    return Importance.of_arrays(cfg, sums, nats[1:] - nats[0], float(nats[0]))


def unit_step(
    cfg: ModelConfig, mesh: Mesh, *, remat: Remat = "none", by: Measure = "gradient"
) -> Callable[[Params, AnyBatch], _Units]:
    """The compiled step of (parameters, batch), both on the mesh, to sums of kv groups and neurons by layer
    (named as `Importance.units`), which every device has: one backward pass, or one for each row by
    "fisher"."""
    sums_of = _unit_sums if by == "gradient" else _unit_squares
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(functools.partial(sums_of, cfg, remat=remat), out_shardings=everywhere)


def magnitudes(cfg: ModelConfig, tensors: Iterable[tuple[str, np.ndarray]]) -> UnitOrder:
    """Orders units by the norm of their weights, largest first, to compare with; reads one tensor after the
    other."""
    squares = ((name, np.square(np.asarray(value, np.float32))) for name, value in tensors)
    return order_of_scores(cfg, {name: np.sqrt(each) for name, each in _unit_reduce(squares).items()})


def random_order(cfg: ModelConfig, seed: int) -> UnitOrder:
    """Orders units at random, to compare with."""
    draw = np.random.default_rng(seed)
    scores = {}
    for lead, side in sides(cfg):
        kinds = ("groups", "cross") if side.encoder is not None else ("groups",)
        for layer in range(side.layers):
            units, experts = side.units(layer), (side.experts,) if side.is_sparse(layer) else ()
            scores |= {f"{lead}{kind}.{layer}": draw.random(units.kv_heads) for kind in kinds}
            scores[f"{lead}neurons.{layer}"] = draw.random((*experts, units.neurons))
    return order_of_scores(cfg, scores)


def _loss(cfg: ModelConfig, params: Params, batch: AnyBatch, *, remat: Remat = "none") -> jax.Array:
    embedding: Any = params["embed.tokens"]
    outputs = outputs_of_any(params, batch, cfg=cfg, dtype=embedding.dtype, remat=remat)
    counted = (batch.weights > 0).astype(jnp.float32)
    # A row of padding has none.
    return jnp.sum(next_token_losses(outputs, batch) * counted) / jnp.maximum(jnp.sum(counted), 1)


def _unit_sums(cfg: ModelConfig, params: Params, batch: AnyBatch, *, remat: Remat) -> _Units:
    """Gradient times weight of the mean loss, summed over each unit: of kv-groups and of neurons by layer."""
    gradients = jax.grad(lambda params: _loss(cfg, params, batch, remat=remat))(params)
    sums = {}
    for name, gradient in gradients.items():
        like = name.replace(STACKS, "layers.", 1)
        if is_unit_parameter(like):
            value: Any = params[name]
            product = gradient.astype(jnp.float32) * value.astype(jnp.float32)
            # Summed before layers are separated, so that no product is retained.
            kept = int(name != like) + (2 if ".experts." in name else 1)
            sums[name] = product.reshape(*product.shape[:kept], -1).sum(-1)
    return _unit_reduce(unstacked(sums, cfg).items())


def _unit_squares(cfg: ModelConfig, params: Params, batch: AnyBatch, *, remat: Remat) -> _Units:
    """Returns squares of `_unit_sums` of each row, averaged over rows by their tokens."""
    rows: AnyBatch = jax.tree.map(lambda each: each[:, None], batch)
    tokens = jnp.asarray(batch.weights > 0, jnp.float32).sum(1)

    def add_row(sums: _Units, each: tuple[AnyBatch, jax.Array]) -> tuple[_Units, None]:
        row, share = each
        own = _unit_sums(cfg, params, row, remat=remat)
        return jax.tree.map(lambda sum_, part: sum_ + share * jnp.square(part), sums, own), None

    shapes = jax.eval_shape(
        functools.partial(_unit_sums, cfg, remat=remat), params, jax.tree.map(lambda each: each[0], rows)
    )
    nothing = jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), shapes)
    sums, _ = jax.lax.scan(add_row, nothing, (rows, tokens / jnp.maximum(tokens.sum(), 1)))
    return sums


def _unit_reduce(values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Sums of the values of each unit's parameters, `[K]`, and `[F]` or `[E, F]`, by layer."""
    sums: dict[str, Any] = {}
    for name, value in values:
        if not is_unit_parameter(name):
            continue
        lead = ENCODER if name.startswith(ENCODER) else ""
        _, number, part = name.removeprefix(lead).split(".", 2)
        block = part.partition(".")[0]
        kept = 2 if block == "experts" else 1
        unit = f"{lead}{_KINDS.get(block, 'neurons')}.{number}"
        sums[unit] = sums.get(unit, 0.0) + value.reshape(*value.shape[:kept], -1).sum(-1)
    return sums


def calibration_batches(batches: Iterable[BatchT], tokens: int) -> list[BatchT]:
    """Returns the first batches that together have so many tokens to predict, or all."""
    taken: list[BatchT] = []
    for batch in batches:
        if tokens <= 0:
            break
        predicted = int((batch.weights > 0).sum())
        tokens -= predicted
        if predicted:
            taken.append(batch)
    return taken
