"""Measures how much units and layers matter to a model's loss on a calibration text (ELMS, section 3.2).

A unit's importance is the change of the next-token loss by its removal, to first order: the absolute value of
the sum over its weights of gradient times weight (equation 2), averaged over batches. A layer's importance is
the growth of the loss when it is left out.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxllm.config import ModelConfig
from jaxllm.elastic.ladder import is_unit_parameter
from jaxllm.elastic.units import UnitOrder, order_units, unit_arrays, units_of_arrays
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files.atomic import atomic_file
from jaxllm.models.parameters import Params
from jaxllm.models.scanned_layers import Remat, stack_name, unstacked
from training.data.packing import Batch
from training.loop.losses import next_token_losses, outputs_of
from training.loop.parallel import MeshShape, make_mesh, place_rows, stacks_layers
from training.loop.placing import placed, stacked_on

# On less text than this, chance decides the order.
LEAST_TOKENS = 4096
Report = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Importance:
    """Importances of a model's units and layers.

    Attributes:
      groups: for each layer those of its kv-groups, `[K]` float64, in nats per token.
      neurons: for each layer those of its neurons, `[F]`, or `[E, F]` for experts.
      layers: `[L]` float64, the growth of the loss without each layer, in nats per token.
      loss: of the whole model, in nats per token.
    """

    groups: tuple[np.ndarray, ...]
    neurons: tuple[np.ndarray, ...]
    layers: np.ndarray
    loss: float

    def order(self) -> UnitOrder:
        """The units, most important first."""
        return order_units(self.groups, self.neurons)

    def anchors(self, share: float = 0.2) -> tuple[int, ...]:
        """The most important layers, a share of all, ascending.

        Raises:
          ConfigError: `share` is no share.
        """
        if not 0 <= share <= 1:
            raise ConfigError(f"the share of anchor layers must be in [0, 1], got {share}")
        count = round(share * len(self.layers))
        return tuple(sorted(np.argsort(-self.layers, kind="stable")[:count].tolist()))

    def write(self, path: Path) -> None:
        """Writes a file that `read` reads, whole or not at all."""
        arrays = {
            **unit_arrays(self.groups, self.neurons),
            "layers": self.layers,
            "loss": np.array(self.loss),
        }
        with atomic_file(path) as file:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]

    @classmethod
    def read(cls, path: Path, layers: int) -> "Importance":
        """Reads the importances of a model of so many layers.

        Raises:
          CheckpointError: the file is damaged, or of a model of fewer layers.
        """
        try:
            with np.load(path) as saved:
                units = units_of_arrays(saved, layers)
                return cls(*units, layers=saved["layers"], loss=float(saved["loss"]))
        except Exception as error:  # NumPy raises many kinds for a damaged file.
            raise CheckpointError(f"cannot read {path}: {error}; remove it, and it is made again") from error


def measure(
    cfg: ModelConfig,
    params: Params,
    batches: Sequence[Batch],
    *,
    mesh: Mesh | None = None,
    remat: Remat = "none",
    report: Report | None = None,
) -> Importance:
    """Importances of a model's units and layers on a calibration text.

    Args:
      cfg: the whole model.
      params: as float32 arrays.
      batches: the text, packed.
      mesh: the devices, over which rows and parameters are divided; None: the default one.
      remat: see `decoder.forward_documents`.
      report: called with (batches done, batches in all).

    Raises:
      ConfigError: the text is shorter than `LEAST_TOKENS`, or the model's loss on it is not finite.
    """
    tokens = int(sum((batch.weights > 0).sum() for batch in batches))
    if tokens < LEAST_TOKENS:
        raise ConfigError(
            f"the calibration text has {tokens} tokens to predict; give at least {LEAST_TOKENS}"
        )
    units = jax.jit(functools.partial(_unit_sums, cfg, remat=remat))
    loss = jax.jit(functools.partial(_loss, cfg))
    mesh = mesh or make_mesh(MeshShape(data=1), 1)
    own: Params = placed(params.items(), mesh)
    own = stacked_on(own, cfg, mesh) if stacks_layers(mesh) else own
    sums, nats = None, np.zeros(cfg.layers + 1)
    for done, batch in enumerate(batches, start=1):
        share = float((batch.weights > 0).sum()) / tokens
        with jax.set_mesh(mesh):
            rows = jax.tree.map(lambda part: part[0], place_rows(batch, mesh, 1))
            of_batch = jax.tree.map(lambda part: np.abs(np.asarray(part, np.float64)), units(own, rows))
            whole = float(loss(own, rows))
            less = [float(loss(without_layer(cfg, own, layer), rows)) for layer in range(cfg.layers)]
        each = jax.tree.map(lambda part, share=share: share * part, of_batch)
        sums = each if sums is None else jax.tree.map(np.add, sums, each)
        nats += share * np.array([whole, *less])
        if report is not None:
            report(done, len(batches))
    assert sums is not None
    if not np.isfinite(nats[0]):
        raise ConfigError(f"the model's loss on the calibration text is {nats[0]}; its weights are broken")
    return Importance(*sums, layers=nats[1:] - nats[0], loss=float(nats[0]))


def magnitudes(cfg: ModelConfig, params: Params) -> UnitOrder:
    """Orders units by the norm of their weights, largest first, to compare with."""
    squares = _unit_reduce(cfg, {name: jnp.square(jnp.asarray(value)) for name, value in params.items()})
    return order_units(*(jax.tree.map(lambda each: np.sqrt(np.asarray(each)), part) for part in squares))


def random_order(cfg: ModelConfig, seed: int) -> UnitOrder:
    """Orders units at random, to compare with."""
    draw = np.random.default_rng(seed)
    shapes = [(cfg.experts,) if cfg.is_sparse(layer) else () for layer in range(cfg.layers)]
    units = [cfg.units(layer) for layer in range(cfg.layers)]
    return order_units(
        [draw.random(each.kv_heads) for each in units],
        [draw.random((*lead, each.neurons)) for lead, each in zip(shapes, units, strict=True)],
    )


def without_layer(cfg: ModelConfig, params: Params, layer: int) -> dict[str, Any]:
    """The model's parameters with one layer's outputs set to zero."""
    changed = dict(params)
    for output in ("attn.o", "attn.o_bias", "ffn.down", "ffn.down_bias", "experts.down"):
        name = f"layers.{layer}.{output}"
        stack, row = stack_name(cfg, name)
        if row >= 0 and stack in params:
            changed[stack] = jax.tree.map(lambda each, row=row: each.at[row].set(0), params[stack])
        elif name in params:
            changed[name] = jax.tree.map(jnp.zeros_like, params[name])
    return changed


def _loss(cfg: ModelConfig, params: Params, batch: Batch, *, remat: Remat = "none") -> jax.Array:
    outputs = outputs_of(params, batch, cfg=cfg, remat=remat)
    counted = (batch.weights > 0).astype(jnp.float32)
    return jnp.sum(next_token_losses(outputs, batch) * counted) / jnp.sum(counted)


def _unit_sums(
    cfg: ModelConfig, params: Params, batch: Batch, *, remat: Remat
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Gradient times weight of the mean loss, summed over each unit: of kv-groups and of neurons by layer."""
    gradients = jax.grad(lambda params: _loss(cfg, params, batch, remat=remat))(params)
    products = {name: gradients[name] * params[name] for name in params}
    return _unit_reduce(cfg, unstacked(products, cfg))


def _unit_reduce(
    cfg: ModelConfig, values: dict[str, jax.Array]
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Sums of the values of each unit's parameters: `[K]`, and `[F]` or `[E, F]`, by layer."""
    groups: list[Any] = [0.0] * cfg.layers
    neurons: list[Any] = [0.0] * cfg.layers
    for name, value in values.items():
        if not is_unit_parameter(name):
            continue
        _, number, part = name.split(".", 2)
        kept = 2 if part.startswith("experts.") else 1
        own = value.reshape(*value.shape[:kept], -1).sum(-1)
        sums = groups if part.startswith("attn.") else neurons
        sums[int(number)] = sums[int(number)] + own
    return tuple(groups), tuple(neurons)


def calibration_batches(batches: Iterable[Batch], tokens: int) -> list[Batch]:
    """The first batches that together have so many tokens to predict, or all."""
    taken: list[Batch] = []
    for batch in batches:
        if tokens <= 0:
            break
        predicted = int((batch.weights > 0).sum())
        tokens -= predicted
        if predicted:
            taken.append(batch)
    return taken
