"""Makes the optimizers of all jobs: AdamW or Muon after clipping, with warm-up and cosine decay."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jaxllm.models.parameters import ENCODER
from jaxllm.models.scanned_layers import STACKS
from jaxllm.training.loop.parallel import AXES
from jaxllm.training.settings import TrainSettings

# Newton-Schulz iterations and the coefficients of their quintic, which maximize its slope at zero.
STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# Root mean square of an update, near AdamW's.
UPDATE_RMS = 0.2


@dataclasses.dataclass(frozen=True)
class Matrix:
    """View of an array as matrices: the stacked axes, those of rows and those of columns."""

    stacked: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def view(self, array: jax.Array) -> jax.Array:
        """An array as `[N, R, C]`."""
        ordered = array.transpose(self._order)
        sizes = (self.stacked, self.rows, self.columns)
        return ordered.reshape(*(int(np.prod([array.shape[axis] for axis in each])) for each in sizes))

    def back(self, matrices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Reshapes matrices `[N, R, C]` back to the array of that shape."""
        ordered = matrices.reshape(*(shape[axis] for axis in self._order))
        return ordered.transpose(tuple(int(axis) for axis in np.argsort(self._order)))

    @property
    def _order(self) -> tuple[int, ...]:
        return (*self.stacked, *self.rows, *self.columns)


def scale_by_muon(
    matrix_of: Callable[[str, int], Matrix | None], *, dtype: Any = jnp.float32
) -> optax.GradientTransformation:
    """Nesterov momentum, made orthogonal and scaled to `UPDATE_RMS`.

    Args:
      matrix_of: function from a parameter's name and rank to its view; never None for parameters that
        arrive here.
      dtype: dtype of the products' operands; they are summed in float32.
    """

    def scaled(updates: Any, state: Any, params: Any = None) -> tuple[dict[str, Any], Any]:
        del params
        # optax leaves placeholders for parameters of another optimizer.
        arrays = {name: value for name, value in updates.items() if isinstance(value, jax.Array)}
        seen: dict[str, Matrix] = {}
        for name, value in arrays.items():
            matrix = matrix_of(name, value.ndim)
            assert matrix is not None
            seen[name] = matrix
        views = {name: seen[name].view(value) for name, value in arrays.items()}
        found = orthogonal(views, dtype)
        for name, value in found.items():
            scale = np.float32(UPDATE_RMS * max(value.shape[1:]) ** 0.5)
            found[name] = seen[name].back(scale * value, arrays[name].shape)
        return {**updates, **found}, state

    stateless = optax.GradientTransformation(lambda params: optax.EmptyState(), scaled)
    return optax.chain(optax.trace(0.95, nesterov=True), stateless)


def orthogonal(matrices: Mapping[str, jax.Array], dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    """Maps stacks `[N, R, C]` by name to nearly the closest orthogonal matrices, in float32.

    The devices of the current mesh share the matrices of each shape, transposed or not.
    """
    alike: dict[tuple[int, int], list[str]] = {}
    for name, stack in matrices.items():
        alike.setdefault((min(stack.shape[1:]), max(stack.shape[1:])), []).append(name)
    found: dict[str, jax.Array] = {}
    for names in alike.values():
        stacks = [matrices[name].astype(dtype) for name in names]
        # Products are of rows with rows: few rows are less work.
        wide = [each.swapaxes(1, 2) if each.shape[1] > each.shape[2] else each for each in stacks]
        done, mesh = jnp.concatenate(wide), jax.sharding.get_abstract_mesh()
        if mesh.empty:
            done = _newton_schulz(done)
        else:
            # Each device of the mesh computes a share.
            count, shares = done.shape[0], PartitionSpec(AXES)
            padded = jnp.pad(done, ((0, -count % mesh.size), (0, 0), (0, 0)))
            done = jax.shard_map(_newton_schulz, in_specs=shares, out_specs=shares)(padded)[:count]
        starts = np.cumsum([0, *(each.shape[0] for each in wide)])
        for name, start, end in zip(names, starts, starts[1:], strict=False):
            own = done[start:end]
            found[name] = own if own.shape[1:] == matrices[name].shape[1:] else own.swapaxes(1, 2)
    return {name: found[name] for name in matrices}


def _newton_schulz(stack: jax.Array) -> jax.Array:
    # XLA's CPU backend computes a product of two matrices faster than one of two stacks.
    return jax.lax.platform_dependent(
        stack,
        cpu=lambda stack: jax.lax.map(_iterated, stack),
        default=_iterated,
    )


def _iterated(matrices: jax.Array) -> jax.Array:
    """Newton-Schulz of a matrix `[R, C]` or a stack of them."""
    linear, cubic, quintic = (np.float32(each) for each in COEFFICIENTS)
    dtype = matrices.dtype

    def product(how: str, left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.einsum(how, left.astype(dtype), right.astype(dtype), preferred_element_type=jnp.float32)

    norm = jnp.sqrt(jnp.sum(jnp.square(matrices.astype(jnp.float32)), axis=(-2, -1), keepdims=True))
    found = matrices.astype(jnp.float32) / (norm + np.float32(1e-8))
    for _ in range(STEPS):
        squared = product("...rk,...ck->...rc", found, found)
        higher = cubic * squared + quintic * product("...rk,...kc->...rc", squared, squared)
        found = linear * found + product("...rk,...kc->...rc", higher, found)
    return found


def learning_rate(settings: TrainSettings) -> optax.Schedule:
    """Linear warm-up to the peak, then a cosine to the final share at the last step."""
    peak = settings.peak_learning_rate
    # Starts at one step's worth, not at zero, so that the first step learns, too.
    warmup = optax.schedules.linear_schedule(peak / (settings.warmup_steps + 1), peak, settings.warmup_steps)
    cosine = optax.schedules.cosine_decay_schedule(
        peak, max(settings.steps - settings.warmup_steps, 1), settings.final_learning_rate_share
    )
    return optax.schedules.join_schedules([warmup, cosine], [settings.warmup_steps])


def make_optimizer(settings: TrainSettings) -> optax.GradientTransformation:
    """Returns AdamW (arXiv 1711.05101), or Muon (arXiv 2502.16982) for the matrices of layers and AdamW for
    the rest, after clipping by the global norm."""
    schedule = learning_rate(settings)
    if settings.optimizer == "muon":
        factor = settings.muon_learning_rate_factor
        muon = optax.chain(
            scale_by_muon(_as_matrix, dtype=jnp.dtype(settings.computed_in)),
            # Decay is as fast as AdamW's, independent of the factor.
            optax.add_decayed_weights(settings.weight_decay / factor, decays),
            optax.scale_by_learning_rate(lambda step: schedule(step) * factor),
        )
        inner = optax.partition(
            {True: muon, False: _adamw(settings, schedule, nesterov=True)},
            lambda params: {name: matrix is not None for name, matrix in matrices(params).items()},
        )
    else:
        inner = _adamw(settings, schedule)
    return optax.chain(optax.clip_by_global_norm(settings.clip_norm), inner)


def _adamw(
    settings: TrainSettings, schedule: optax.Schedule, *, nesterov: bool = False
) -> optax.GradientTransformation:
    return optax.adamw(
        schedule,
        b1=settings.beta1,
        b2=settings.beta2,
        weight_decay=settings.weight_decay,
        mask=decays,
        nesterov=nesterov,
    )


def matrices(params: Any) -> dict[str, Matrix | None]:
    """Returns Muon's view of each parameter as a matrix; None for those that AdamW updates."""
    # optax also calls this with placeholders for masked parameters.
    return {name: _as_matrix(name, getattr(value, "ndim", 0)) for name, value in params.items()}


def _as_matrix(name: str, rank: int) -> Matrix | None:
    # Embeddings are read by rows, and a router's rows compete: neither is a map whose spectrum matters.
    stack = int(name.startswith(STACKS))
    in_layer = stack or name.removeprefix(ENCODER).startswith("layers.")
    if rank - stack < 2 or not in_layer or name.endswith((".router", "bias")):
        return None
    # Leading axes of layers and experts are neither side: each has a matrix of its own.
    first = stack + int(".experts." in name)
    units, width = tuple(range(first, rank - 1)), (rank - 1,)
    stacked = tuple(range(first))
    # Rows are the axis that a product sums over.
    reads_units = name.endswith((".o", ".down"))
    return Matrix(stacked, units, width) if reads_units else Matrix(stacked, width, units)


def decays(params: Mapping[str, Any]) -> dict[str, bool]:
    """Marks the parameters with weight decay: matrices, not norms or biases."""
    return {name: not name.endswith((".scale", "bias")) for name in params}
