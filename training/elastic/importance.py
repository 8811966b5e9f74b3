"""Measures the importance of a model's units and layers (ELMS, section 3.2), and orders units by it.

A unit's importance is the change of the next-token loss by its removal, to first order: the absolute value
of the sum over its weights of gradient times weight (equation 2), averaged over batches. Its Fisher
information, for comparison, is the mean of that sum's square over rows, each with a backward pass of its
own (second order, arXiv 1906.10771, equation 5). A layer's importance is the growth of the loss without it.
Parameters and gradients are sharded over a mesh; only scores of units and layers leave it. For an
encoder-decoder one backward pass over pairs gives the scores of both sides.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.config import ModelConfig
from jaxllm.elastic.ladder import Ladder, is_unit_parameter
from jaxllm.elastic.units import UnitOrder, of_encoder, order_arrays, order_of_arrays, order_of_scores
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files.atomic import atomic_file
from jaxllm.models.parameters import ENCODER, Params
from jaxllm.models.scanned_layers import STACKS, Remat, unstacked
from jaxllm.training.elastic.job import Measure, sides, without_layer
from jaxllm.training.loop.losses import next_token_losses
from jaxllm.training.loop.parallel import MeshShape, laid_out, make_mesh, place_rows
from jaxllm.training.seq2seq.forward import AnyBatch, outputs_of_any

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
