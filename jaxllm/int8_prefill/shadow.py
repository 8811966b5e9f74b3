"""Multiplies with a static scale in 8 bits, and shadow outliers in floats (mllm-NPU, arXiv 2407.05858,
section 3.3).

With one calibrated step for all activations, a product is a product of integer tensors with one scale, which
suits integer processors. The few channels with outliers exceed 127 steps. Their excess is gathered into a
compact tensor and multiplied with these channels' weights in floats, on another processor if there is one.
The sum is exact (equation 1): x = clip(x) + excess(x).

Compact tensors have static sizes. Exceeding channels are counted first; the smallest size for all of them is
used, or the largest size several times, so that nothing is dropped. (No size is for all channels: every
dispatch would reserve memory for all weights in floats, which is hardly ever needed.)

Steps, channels and layers are chosen by `calibration.py`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import Axes, shaped
from jaxllm.config import ModelConfig
from jaxllm.kernels import native_products
from jaxllm.kernels.converted import natively
from jaxllm.kernels.native_call import UsedUnits
from jaxllm.kernels.native_products import TOP_LEVEL
from jaxllm.models.layer_stack import LayerParams
from jaxllm.models.parameters import Params, param_specs
from jaxllm.nn import linear
from jaxllm.nn.layers import Norm, activate, normalize
from jaxllm.nn.linear import FeedForward, Steps, in_blocks
from jaxllm.quant import Weight, contracted_rows

# Sizes of compact tensors in channels, ascending: few outliers are the rule (5 to 15 channels in the paper's
# models), and each size is a branch to compile.
_ROOMS = (16, 128)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FloatRows:
    """Weights in floats of the channels with outliers, for the products of one input.

    Excess is large and multiplies the rounding errors of quantized weights, hence floats. Channels without a
    row here use the 8-bit weight.

    Attributes:
      place: `[D]` int32, index of each channel's row, or -1.
      rows: per weight, `[R, outputs]` floats, perhaps mapped from storage.
    """

    place: jax.Array
    rows: tuple[jax.Array, ...]

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above at trace time."""
        axes.check(jnp.int32, "D", place=self.place)


# Keyword arguments of products.
_How = dict[str, Any]


def excess(x: jax.Array, step: jax.Array) -> jax.Array:
    """The part of `x` beyond ±127 steps, in the shape of x: zero for most values."""
    top = np.float32(TOP_LEVEL) * step
    return x - jnp.clip(x, -top, top)


def rooms(channels: int) -> tuple[int, ...]:
    """Sizes of compact tensors for an input of `channels` channels, ascending from 0."""
    return (0, *(room for room in _ROOMS if room < channels), *([channels] if channels <= _ROOMS[-1] else []))


@shaped(x="float T D", step="float32")
def shadow_products(
    x: jax.Array, step: jax.Array, weights: Sequence[Weight], rows: FloatRows, *, last: bool
) -> tuple[list[jax.Array], jax.Array]:
    """Products of the excess of `x` `[T, D]` with each weight.

    Args:
      x: activations; NaN and infinity are ignored here, the integer product shows them.
      step: float32 scalar.
      weights: their D inputs are contracted, along the last axis if `last`, else along all other axes
        together.
      rows: weights in floats; channels without a row use the quantized weights.
      last: see `weights`.

    Returns:
      `[T, outputs]` float32 for each weight, and the number of channels with an outlier, int32 scalar.
    """
    if not x.shape[-1] or not math.prod(weights[0].shape):
        # Of a level's block without units.
        none = [jnp.zeros((len(x), _outputs(each, last)), jnp.float32) for each in weights]
        return none, jnp.zeros((), jnp.int32)
    x = x.astype(jnp.float32)
    hit = jnp.any(jnp.abs(x) > np.float32(TOP_LEVEL) * step, axis=0)
    count = jnp.sum(hit, dtype=jnp.int32)
    _, *sizes, largest = rooms(x.shape[-1])

    def compact_products(x: jax.Array, channels: jax.Array, before: jax.Array) -> list[jax.Array]:
        # Unused entries are channel 0 with an excess of zero.
        real = before + jnp.arange(len(channels), dtype=jnp.int32) < count
        beyond = jnp.nan_to_num(excess(x[:, channels], step), nan=0.0, posinf=0.0, neginf=0.0)
        compact = jnp.where(real, beyond, np.float32(0))
        return [compact @ each for each in _rows_of(channels, real, weights, rows, last)]

    def nothing(x: jax.Array, hit: jax.Array) -> list[jax.Array]:
        return [jnp.zeros((len(x), _outputs(each, last)), jnp.float32) for each in weights]

    def once(room: int) -> Callable[[jax.Array, jax.Array], list[jax.Array]]:
        return lambda x, hit: compact_products(x, _first(hit, room), jnp.zeros((), jnp.int32))

    def as_often_as_needed(x: jax.Array, hit: jax.Array) -> list[jax.Array]:
        channels = _first(hit, -(-len(hit) // largest) * largest)

        def add(number: jax.Array, found: list[jax.Array]) -> list[jax.Array]:
            own = jax.lax.dynamic_slice_in_dim(channels, number * largest, largest)
            more = compact_products(x, own, number * largest)
            return [each + added for each, added in zip(found, more, strict=True)]

        return jax.lax.fori_loop(0, -(-count // largest), add, nothing(x, hit))

    branches = [nothing, *(once(room) for room in sizes), as_often_as_needed]
    smallest = sum((count > room).astype(jnp.int32) for room in (0, *sizes))
    return jax.lax.switch(smallest, branches, x, hit), count


def added_by_shadow(
    x: jax.Array, step: jax.Array, weights: Sequence[Weight], rows: FloatRows, *, last: bool
) -> tuple[list[jax.Array], jax.Array]:
    """The shadow of a product's inputs `[..., inputs]` for each of its results `[..., *units]`, in their
    shapes; and the number of channels with an outlier (see `shadow_products`)."""
    found, count = shadow_products(x.reshape(-1, x.shape[-1]), step, weights, rows, last=last)
    units = [each.shape[:-1] if last else each.shape[-1:] for each in weights]
    shaped = [
        out.astype(x.dtype).reshape(*x.shape[:-1], *unit) for out, unit in zip(found, units, strict=True)
    ]
    return shaped, count


def _first(hit: jax.Array, room: int) -> jax.Array:
    """The channels `[room]` int32 where `hit` is true, ascending, padded with channel 0."""
    (channels,) = jnp.nonzero(hit, size=room, fill_value=0)
    return channels.astype(jnp.int32)


def _rows_of(
    channels: jax.Array, real: jax.Array, weights: Sequence[Weight], rows: FloatRows, last: bool
) -> list[jax.Array]:
    """The rows of some channels, `[N, outputs]` of each weight; rows of padding are finite and otherwise
    undefined."""

    def of_weights() -> list[jax.Array]:
        return [contracted_rows(each, channels, last=last) for each in weights]

    if not rows.rows[0].shape[0]:
        return of_weights()
    place = rows.place[channels]

    def of_floats() -> list[jax.Array]:
        at = jnp.maximum(place, 0)
        cut = [floats[:, : _outputs(each, last)] for floats, each in zip(rows.rows, weights, strict=True)]
        return [jnp.take(each, at, axis=0, mode="clip").astype(jnp.float32) for each in cut]

    def of_both() -> list[jax.Array]:
        known = place[:, None] >= 0
        return [jnp.where(known, *pair) for pair in zip(of_floats(), of_weights(), strict=True)]

    # Dequantizing rows takes longer than the product, so it is only done if some channel has no float row.
    return jax.lax.cond(jnp.any(real & (place < 0)), of_both, of_floats)


def _outputs(weight: Weight, last: bool) -> int:
    return int(np.prod(weight.shape[:-1])) if last else weight.shape[-1]


# Products with a static step together with their shadow, for one processor that computes both. Native kernels
# find and multiply outliers inside the products (`jaxllm.kernels.native_products`); elsewhere they are
# multiplied separately, with the same result but for the order of sums. Functions have the parameters of
# those in `linear.py`.


def normed_to_units(
    x: jax.Array,
    norm: Norm,
    weights: Sequence[Weight],
    biases: Sequence[jax.Array | None],
    step: jax.Array,
    rows: FloatRows,
    *,
    used: UsedUnits | None = None,
    valid_rows: jax.Array | None = None,
) -> tuple[list[jax.Array], jax.Array]:
    """Products `[..., *U]` of `norm(x)` `[..., D]` with each weight `[*U, D]`, and the number of the D
    channels with outliers, `[1]` int32."""

    def apart(
        x: jax.Array, norm: Norm, weights: Sequence[Weight], step: jax.Array, rows: FloatRows, how: _How
    ) -> tuple[list[jax.Array], jax.Array]:
        outs = linear.normed_to_units(x, norm, weights, [None] * len(weights), step=step, **how)
        shadows, count = added_by_shadow(normalize(x, norm), step, weights, rows, last=True)
        sums = [out + shadow.astype(out.dtype) for out, shadow in zip(outs, shadows, strict=True)]
        return sums, count[None]

    def fused(
        x: jax.Array, norm: Norm, weights: Any, step: jax.Array, rows: FloatRows, how: _How
    ) -> tuple[list[jax.Array], jax.Array]:
        how = {"norm_scale": norm.scale, "norm_eps": norm.eps, **how}
        flat = x.reshape(-1, x.shape[-1])
        *products, count = native_products.to_units(
            flat, weights, step=step, shadow=(rows.place, *rows.rows), **how
        )
        shapes = [(*x.shape[:-1], *weight.shape[:-1]) for weight in weights]
        return [out.reshape(shape) for out, shape in zip(products, shapes, strict=True)], count

    operands = x, norm, list(weights), step, rows, {"used": used, "valid_rows": valid_rows}
    native = norm.bias is None and _supported(weights)
    outs, count = natively(fused, apart, *operands) if native else apart(*operands)
    return [_with_bias(out, bias) for out, bias in zip(outs, biases, strict=True)], count


def from_units(
    h: jax.Array,
    weight: Weight,
    bias: jax.Array | None,
    step: jax.Array,
    rows: FloatRows,
    *,
    residual: jax.Array | None = None,
    used: UsedUnits | None = None,
    valid_rows: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Product `[..., D]` of `h` `[..., *U]` with `weight` `[*U, D]`, plus `residual` if there is one, and the
    number of inputs with outliers, `[1]` int32."""
    batch = h.shape[: h.ndim + 1 - len(weight.shape)]

    def apart(
        h: jax.Array, weight: Weight, residual: jax.Array | None, step: jax.Array, rows: FloatRows, how: _How
    ) -> tuple[jax.Array, jax.Array]:
        out, used = linear.from_units(h, weight, residual=residual, step=step, **how), how["used"]
        seen = h if used is None else used.only(h, len(batch))
        (shadow,), count = added_by_shadow(seen.reshape(*batch, -1), step, [weight], rows, last=False)
        return out + shadow.astype(out.dtype), count[None]

    def fused(
        h: jax.Array, weight: Any, residual: jax.Array | None, step: jax.Array, rows: FloatRows, how: _How
    ) -> tuple[jax.Array, jax.Array]:
        width = weight.shape[-1]
        add = None if residual is None else residual.reshape(-1, width).astype(h.dtype)
        flat = h.reshape(-1, int(rows.place.shape[0]))
        out, count = native_products.from_units_with_shadow(
            flat, weight, step=step, shadow=(rows.place, rows.rows[0]), residual=add, **how
        )
        return out.reshape(*batch, width), count

    operands = h, weight, residual, step, rows, {"used": used, "valid_rows": valid_rows}
    out, count = natively(fused, apart, *operands) if _supported([weight]) else apart(*operands)
    return _with_bias(out, bias), count


def feed_forward(
    x: jax.Array,
    norm: Norm,
    weights: FeedForward,
    steps: Steps,
    rows: tuple[FloatRows, FloatRows],
    *,
    add_input: bool,
    used: UsedUnits | None = None,
    valid_rows: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`linear.feed_forward` of `x` `[..., D]`, and the numbers of the D channels and of the F units with
    outliers, `[2]` int32; steps and rows are pairs, for both."""

    def apart(
        x: jax.Array,
        norm: Norm,
        weights: FeedForward,
        steps: Steps,
        rows: tuple[FloatRows, FloatRows],
        how: _How,
    ) -> tuple[jax.Array, jax.Array]:
        gate = [] if weights.gate is None else [(weights.gate, weights.gate_bias)]
        first, biases = zip(*gate, (weights.up, weights.up_bias), strict=True)
        products, outer = normed_to_units(x, norm, first, biases, steps[0], rows[0], **how)
        hidden = activate(products[0], weights.activation)
        hidden = hidden * products[1] if gate else hidden
        residual, down = x if add_input else None, (weights.down, weights.down_bias)
        out, inner = from_units(hidden, *down, steps[1], rows[1], residual=residual, **how)
        return out, jnp.concatenate([outer, inner])

    def fused(
        x: jax.Array,
        norm: Norm,
        weights: Any,
        steps: Steps,
        rows: tuple[FloatRows, FloatRows],
        how: _How,
    ) -> tuple[jax.Array, jax.Array]:
        out, counts = native_products.feed_forward_with_shadow(
            x.reshape(-1, x.shape[-1]),
            weights.gate,
            weights.up,
            weights.down,
            steps=steps,
            shadow=(rows[0].place, *rows[0].rows, rows[1].place, rows[1].rows[0]),
            activation=weights.activation,
            norm_scale=norm.scale,
            norm_eps=norm.eps,
            residual=add_input,
            **how,
        )
        return out.reshape(x.shape), counts

    operands = x, norm, weights, steps, rows, {"used": used, "valid_rows": valid_rows}
    native = norm.bias is None and not weights.biased and _supported(weights.weights)
    return natively(fused, apart, *operands) if native else apart(*operands)


def _supported(weights: Sequence[Weight]) -> bool:
    """Whether the native kernels can compute the shadow of all weights."""
    return all(in_blocks(each) and native_products.takes(each) for each in weights)  # pyright: ignore[reportArgumentType]


def _with_bias(out: jax.Array, bias: jax.Array | None) -> jax.Array:
    return out if bias is None else out + bias.astype(out.dtype)


# The products of a layer that have a static step, named by their inputs, which have one each; their indices.
PRODUCTS = ("project", "out", "widen", "narrow")
PROJECT, OUT, WIDEN, NARROW = range(4)


def product_matrices(params: Params, layer: int, product: int, cfg: ModelConfig) -> list[Weight]:
    """The weights of one of `PRODUCTS`."""
    return matrices_of(LayerParams(params, f"layers.{layer}."), product, cfg)[0]


def product_sizes(cfg: ModelConfig, layer: int, product: int) -> tuple[int, list[int]]:
    """Number of inputs of a product, and of outputs of each of its weights."""
    specs = param_specs(cfg)
    shapes = [specs[name].shape for name in product_names(layer, product, cfg)]
    units = [int(np.prod(shape[:-1], dtype=object)) for shape in shapes]
    if contracts_last_axis(product):
        return shapes[0][-1], units
    return units[0], [shape[-1] for shape in shapes]


def product_names(layer: int, product: int, cfg: ModelConfig) -> list[str]:
    """The names of the weights of one of `PRODUCTS`, among a model's parameters."""
    return [f"layers.{layer}.{name}" for name in _names(product, cfg)]


def contracts_last_axis(product: int) -> bool:
    """Whether a product contracts its weights' last axis; else it contracts their units."""
    return product in (PROJECT, WIDEN)


def matrices_of(
    weights: LayerParams, product: int, cfg: ModelConfig
) -> tuple[list[Weight], list[jax.Array | None]]:
    """The weights and biases of one of `PRODUCTS`, from a layer's parameters."""
    names = _names(product, cfg)
    return [weights[name] for name in names], [weights.vector(f"{name}_bias") for name in names]


def _names(product: int, cfg: ModelConfig) -> list[str]:
    """The names of a product's weights within a layer."""
    gate = ["ffn.gate"] if cfg.gated_ffn else []
    return (["attn.q", "attn.k", "attn.v"], ["attn.o"], [*gate, "ffn.up"], ["ffn.down"])[product]
