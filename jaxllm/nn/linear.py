"""Matrix products of a model: every product goes through this module."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm.config import Activation
from jaxllm.kernels import converted, native, native_products
from jaxllm.kernels.converted import natively, on_platform
from jaxllm.kernels.native_call import Adaptable, UsedUnits, only_of_rows
from jaxllm.nn.layers import Norm, activate, by_sequence, gated, normalize
from jaxllm.quant import (
    Adapted,
    BlockedArray,
    OwnProduct,
    Prefix,
    QArray,
    Weight,
    dequantize,
    embedding_rows,
)
from jaxllm.quant.parts import StackedArray, map_parts, part_matrix, taken

# Products of activations with matrices of their dtype; those in bfloat16 are summed in float32.
#
# XLA's CPU backend computes a product of two bfloat16 matrices at the processor's bfloat16 speed only if its
# result is requested in float32; otherwise it converts both to float32 first. Gradients follow the same
# rule: by default the gradient of a product with a float32 result would be one of mixed types.


def dense_product(rows: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
    """Activations `[M, K]` times a matrix of their dtype, over the matrix's axis `axis` (0 or 1), which has K
    entries: `[M, N]` in the same dtype."""
    if rows.dtype == jnp.bfloat16:
        return _half_product(rows, matrix, axis)
    return jax.lax.dot_general(rows, matrix, (((1,), (axis,)), ((), ())))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _half_product(rows: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
    return _summed(rows, matrix, 1, axis)


def _forward(rows: jax.Array, matrix: jax.Array, axis: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _half_product(rows, matrix, axis), (rows, matrix)


def _backward(
    axis: int, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    rows, matrix = saved
    of_rows = _summed(gradient, matrix, 1, 1 - axis)
    sides = (gradient, rows) if axis else (rows, gradient)
    return of_rows, _summed(*sides, 0, 0)


def _summed(left: jax.Array, right: jax.Array, left_axis: int, right_axis: int) -> jax.Array:
    """The product over one axis of each matrix, rounded to bfloat16."""
    dims = (((left_axis,), (right_axis,)), ((), ()))
    return jax.lax.dot_general(left, right, dims, preferred_element_type=jnp.float32).astype(left.dtype)


_half_product.defvjp(_forward, _backward)


# Weights lead with their unit axes (`[*U, D]`: the rows of a kv group, of an MLP neuron, of a vocabulary
# entry), on whichever side of the product units are, so that a prefix of units is a prefix of memory:
#
# - `to_units`:   x `[..., D]`  with w `[*U, D]` -> `[..., *U]` (q, k, v, gate, up, head)
# - `from_units`: h `[..., *U]` with w `[*U, D]` -> `[..., D]`  (o, down)
#
# and functions that a kernel may fuse: `normed_to_units` (a norm, then several products of the same
# activations), `feed_forward`, and `add_normed`, which ends a block.
#
# `used` limits a product to the first units: outputs of others are undefined, and as inputs they add
# nothing.
#
# With a `step`, activations are quantized to 8-bit integer multiples of it, clipped at ±127, in every format
# of weights (mllm-NPU, arXiv 2407.05858, equation 1; for its outliers see `jaxllm.int8_prefill.shadow`).
#
# With `valid_rows`, an int32 scalar, only the first `valid_rows` rows of activations are computed; the other
# rows of the result are undefined. Only native products save this work.
#
# With `batch_invariant`, native products give each token bit for bit its result without the others, which
# verification of drafted tokens needs. 8-bit products always do; at fewer bits products of many tokens are
# slower this way. XLA's part is computed for each sequence of a batch separately.
#
# Callers need not know the format of a weight, nor the kernel: on a CPU native kernels for weights in blocks
# (`kernels/native.py`), loops over converted blocks for other quantized ones (`kernels/converted.py`); plain
# products elsewhere. Gradients are of activations and float weights.


# Static steps of a feed-forward block: of the inputs of its first products, and of the input of its last.
Steps = tuple[jax.Array, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FeedForward:
    """Weights `[F, D]`, biases and activation of a feed-forward block, gated or plain (`gate` None). `drop`
    changes the input of `down` in training."""

    up: Weight
    down: Weight
    gate: Weight | None = None
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None
    gate_bias: jax.Array | None = None
    activation: Activation = dataclasses.field(default="silu", metadata={"static": True})
    drop: Callable[[jax.Array], jax.Array] | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Its weights, in the order of their use."""
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)

    @property
    def biased(self) -> bool:
        """Whether it has any bias."""
        return any(bias is not None for bias in (self.up_bias, self.down_bias, self.gate_bias))


# Options of a product besides activations and weights, by name (see above): `used`, `valid_rows` and `step`,
# or `steps` of a block. They are operands of the functions that a platform chooses from.
_Options = dict[str, Any]


def to_units(
    x: jax.Array,
    weight: Weight,
    bias: jax.Array | None = None,
    *,
    used: UsedUnits | None = None,
    batch_invariant: bool = False,
    step: jax.Array | None = None,
    valid_rows: jax.Array | None = None,
) -> jax.Array:
    """Contracts the last axis of `x` `[..., D]` with that of `weight` `[*U, D]`: `[..., *U]`."""
    units, width = weight.shape[:-1], weight.shape[-1]
    if not math.prod(units):
        return jnp.zeros((*x.shape[:-1], *units), x.dtype)
    rows = x.reshape(-1, width)

    def by_kernel(rows: jax.Array, weight: Adaptable, options: _Options) -> jax.Array:
        return native_products.to_units(rows, [weight], batch_invariant=batch_invariant, **options)[0]

    def by_xla(rows: jax.Array, weight: Weight, options: _Options) -> jax.Array:
        return _product(rows, weight, options["step"], axis=1)

    options: _Options = {"used": used, "step": step, "valid_rows": valid_rows}
    if in_blocks(weight):
        out = natively(by_kernel, by_xla, rows, weight, options)
    else:
        out = by_xla(rows, weight, options)
    return _with_bias(out.reshape(*x.shape[:-1], *units), bias)


def normed_to_units(
    x: jax.Array,
    norm: Norm | None,
    weights: Sequence[Weight],
    biases: Sequence[jax.Array | None],
    *,
    used: UsedUnits | None = None,
    batch_invariant: bool = False,
    step: jax.Array | None = None,
    valid_rows: jax.Array | None = None,
) -> list[jax.Array]:
    """`to_units` of `norm(x)`, or of x unchanged, with each weight."""

    def apart(x: jax.Array, norm: Norm | None, weights: list[Weight], options: _Options) -> list[jax.Array]:
        normed = x if norm is None else normalize(x, norm, batch_invariant=batch_invariant)
        return [to_units(normed, weight, batch_invariant=batch_invariant, **options) for weight in weights]

    def together(
        x: jax.Array, norm: Norm | None, weights: list[Adaptable], options: _Options
    ) -> list[jax.Array]:
        rows = x.reshape(-1, x.shape[-1])
        fused = {} if norm is None else {"norm_scale": norm.scale, "norm_eps": norm.eps}
        products = native_products.to_units(
            rows, weights, batch_invariant=batch_invariant, **fused, **options
        )
        return [
            out.reshape(*x.shape[:-1], *weight.shape[:-1])
            for out, weight in zip(products, weights, strict=True)
        ]

    options: _Options = {"used": used, "step": step, "valid_rows": valid_rows}
    if not math.prod(weights[0].shape):
        # Nothing to compute: a level's block without units.
        outs = apart(x, None, list(weights), options)
        return [_with_bias(out, bias) for out, bias in zip(outs, biases, strict=True)]
    formats = [_format(weight) for weight in weights]
    if len(set(formats)) > 1:
        # A fused kernel for the weights of each format, such as keys and values of 8 bits.
        found: dict[int, jax.Array] = {}
        for form in dict.fromkeys(formats):
            places = [place for place, each in enumerate(formats) if each == form]
            own = [weights[place] for place in places], [biases[place] for place in places]
            products = normed_to_units(x, norm, *own, batch_invariant=batch_invariant, **options)
            found |= dict(zip(places, products, strict=True))
        return [found[place] for place in range(len(weights))]
    if (norm is None or norm.bias is None) and _one_format(weights):
        outs = natively(together, apart, x, norm, list(weights), options)
    else:
        outs = apart(x, norm, list(weights), options)
    return [_with_bias(out, bias) for out, bias in zip(outs, biases, strict=True)]


def from_units(
    h: jax.Array,
    weight: Weight,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    used: UsedUnits | None = None,
    batch_invariant: bool = False,
    step: jax.Array | None = None,
    valid_rows: jax.Array | None = None,
) -> jax.Array:
    """Contracts the unit axes of `h` `[..., *U]` with those of `weight` `[*U, D]`, and adds `residual`
    `[..., D]` if there is one: `[..., D]`."""
    units, width = weight.shape[:-1], weight.shape[-1]
    batch = h.shape[: h.ndim - len(units)]
    if not math.prod(units):
        out = _with_bias(jnp.zeros((*batch, width), h.dtype), bias)
        return out if residual is None else residual + out

    def by_kernel(
        h: jax.Array, weight: Adaptable, residual: jax.Array | None, options: _Options
    ) -> jax.Array:
        rows = h.reshape(-1, math.prod(units))
        add = None if residual is None else residual.reshape(-1, width).astype(rows.dtype)
        return native_products.from_units(
            rows, weight, residual=add, batch_invariant=batch_invariant, **options
        )

    def by_xla(h: jax.Array, weight: Weight, residual: jax.Array | None, options: _Options) -> jax.Array:
        h = h if options["used"] is None else options["used"].only(h, len(batch))
        out = _product(h.reshape(-1, math.prod(units)), weight, options["step"], axis=0)
        return out if residual is None else residual.reshape(out.shape) + out

    options: _Options = {"used": used, "step": step, "valid_rows": valid_rows}
    if in_blocks(weight):
        out = natively(by_kernel, by_xla, h, weight, residual, options)
        return _with_bias(out.reshape(*batch, width), bias)
    out = _with_bias(by_xla(h, weight, None, options).reshape(*batch, width), bias)
    return out if residual is None else residual + out


def feed_forward(
    x: jax.Array,
    norm: Norm | None,
    weights: FeedForward,
    *,
    add_input: bool,
    used: UsedUnits | None = None,
    batch_invariant: bool = False,
    steps: Steps | None = None,
    valid_rows: jax.Array | None = None,
) -> jax.Array:
    """`down(activation(gate(norm(x))) · up(norm(x)))` of `x` `[..., D]`, plus x if `add_input`; without a
    norm x is read unchanged. `steps`: of the inputs of the first products and of `down` (see above)."""

    def apart(x: jax.Array, norm: Norm | None, weights: FeedForward, options: _Options) -> jax.Array:
        step, hidden_step = options["steps"] or (None, None)
        shared = {
            "used": options["used"],
            "valid_rows": options["valid_rows"],
            "batch_invariant": batch_invariant,
        }
        if weights.gate is None:
            (up,) = normed_to_units(x, norm, (weights.up,), (weights.up_bias,), step=step, **shared)
            hidden = by_sequence(
                lambda up: activate(up, weights.activation), up, batch_invariant=batch_invariant
            )
        else:
            both, biases = (weights.gate, weights.up), (weights.gate_bias, weights.up_bias)
            outs = normed_to_units(x, norm, both, biases, step=step, **shared)
            hidden = by_sequence(
                lambda gate, up: gated(gate, up, weights.activation), *outs, batch_invariant=batch_invariant
            )
        hidden = only_of_rows(hidden, options["used"], hidden.ndim - 1)
        hidden = hidden if weights.drop is None else weights.drop(hidden)
        shared |= {"residual": x if add_input else None}
        return from_units(hidden, weights.down, weights.down_bias, step=hidden_step, **shared)

    def together(x: jax.Array, norm: Norm | None, weights: FeedForward, options: _Options) -> jax.Array:
        fused = norm is None or norm.bias is None
        normed = x if norm is None or fused else normalize(x, norm, batch_invariant=batch_invariant)
        rows = normed.reshape(-1, x.shape[-1])
        out = native_products.feed_forward(
            rows,
            weights.gate,  # pyright: ignore[reportArgumentType]: all are in blocks
            weights.up,  # pyright: ignore[reportArgumentType]
            weights.down,  # pyright: ignore[reportArgumentType]
            activation=weights.activation,
            norm_scale=None if norm is None or not fused else norm.scale,
            norm_eps=0.0 if norm is None else norm.eps,
            residual=add_input and fused,
            batch_invariant=batch_invariant,
            **options,
        ).reshape(x.shape)
        return x + out if add_input and not fused else out

    options: _Options = {"used": used, "steps": steps, "valid_rows": valid_rows}
    if (
        not weights.up.shape[0]
        or weights.biased
        or weights.drop is not None
        or not _one_format(weights.weights)
    ):
        return apart(x, norm, weights, options)
    return natively(together, apart, x, norm, weights, options)


def add_normed(
    residual: jax.Array,
    x: jax.Array,
    norm: Norm,
    valid_rows: jax.Array | None = None,
    *,
    batch_invariant: bool = False,
) -> jax.Array:
    """`residual + norm(x)`, `[..., D]`. Native kernels give each token bit for bit its result without
    others."""

    def by_xla(x: jax.Array, residual: jax.Array, norm: Norm, valid_rows: jax.Array | None) -> jax.Array:
        del valid_rows
        return residual + normalize(x, norm, batch_invariant=batch_invariant)

    def by_kernel(x: jax.Array, residual: jax.Array, norm: Norm, valid_rows: jax.Array | None) -> jax.Array:
        rows = (-1, x.shape[-1])
        wide = residual.astype(jnp.float32).reshape(rows)
        return native_products.add_normed(wide, x.reshape(rows), norm.scale, norm.eps, valid_rows).reshape(
            x.shape
        )

    if norm.bias is not None:
        return by_xla(x, residual, norm, valid_rows)
    return natively(by_kernel, by_xla, x, residual, norm, valid_rows)


def embed(
    tokens: jax.Array, embedding: Weight, dtype: DTypeLike, valid_rows: jax.Array | None = None
) -> jax.Array:
    """Rows of `embedding` `[V, D]` at `tokens` (any shape, in range): `[*tokens.shape, D]` in `dtype`; for
    `valid_rows` see the module docstring."""

    def by_xla(tokens: jax.Array, valid_rows: jax.Array | None) -> jax.Array:
        del valid_rows
        return embedding_rows(embedding, tokens, dtype)

    if not isinstance(embedding, BlockedArray) or not native.kernels().native:
        return by_xla(tokens, valid_rows)
    blocked = embedding

    def by_kernel(tokens: jax.Array, valid_rows: jax.Array | None) -> jax.Array:
        return native_products.unit_rows(blocked, tokens, valid_rows).astype(dtype)

    return jax.lax.platform_dependent(tokens, valid_rows, cpu=by_kernel, default=by_xla)


def in_blocks(weight: Weight) -> bool:
    """Whether the weight is in blocks, as native kernels require."""
    stacked = isinstance(weight, Adapted) and weight.stacked
    return isinstance(_stored(weight), BlockedArray) and not stacked


def _one_format(weights: Sequence[Weight]) -> bool:
    """Whether all weights are in blocks of one format, which a fused kernel needs."""
    formats = {_format(weight) for weight in weights}
    return len(formats) == 1 and None not in formats


def _format(weight: Weight) -> tuple[int, int, bool, bool] | None:
    """What weights of a fused kernel have in common; None if the weight is not in blocks."""
    stored = _stored(weight)
    if not isinstance(stored, BlockedArray) or not in_blocks(weight):
        return None
    return stored.bits, stored.group, stored.nested, stored.minima


def _stored(weight: Weight) -> Weight:
    return weight.base if isinstance(weight, Adapted) else weight


def _product(rows: jax.Array, weight: Weight, step: jax.Array | None = None, *, axis: int) -> jax.Array:
    """XLA's product of activations with a weight `[*U, D]`: over its last axis (1), `[M, D]` -> `[M,
    prod(U)]`, or over its units (0), `[M, prod(U)]` -> `[M, D]`."""
    units, width = weight.shape[:-1], weight.shape[-1]
    if isinstance(weight, OwnProduct):
        return weight.product(rows, dequantize(weight.base, rows.dtype).reshape(-1, width), axis - 2)
    if isinstance(weight, Prefix) and not weight.axis and not axis:
        # The weight stays whole and shared; activations of missing units are zero.
        missing = math.prod(weight.base.shape[:-1]) - rows.shape[-1]
        return _product(jnp.pad(rows, ((0, 0), (0, missing))), weight.base, step, axis=0)
    if isinstance(weight, Adapted):
        # `OwnProduct` has this shape already.
        left = weight.left
        left = left if isinstance(left, OwnProduct) else taken(left).reshape(left.shape[0], -1)
        first, second = (weight.right, left) if axis else (left, weight.right)
        low = _product(rows, first, axis=1)
        return _product(rows, weight.base, step, axis=axis) + _product(low, second, axis=0)
    if step is not None:
        if native_products.in_integers(weight) and axis:
            return native_products.rows_product(rows, _flat(taken(weight)), step)
        if native_products.in_integers(weight):
            return native_products.reduction_product(rows, taken(weight), step)
        rows = native_products.rounded(rows, step)

    def whole(rows: jax.Array, weight: Weight) -> jax.Array:
        return dense_product(rows, dequantize(weight, rows.dtype).reshape(-1, width), axis)

    def by_blocks(rows: jax.Array, weight: Weight) -> jax.Array:
        if axis:
            return converted.rows_product(rows, _flat(weight))
        if isinstance(weight, QArray) and weight.ndim == 3:
            return converted.stacked_reduction_product(rows.reshape(-1, *units), weight)
        return converted.reduction_product(rows, _flat(weight))

    stored_as_is = isinstance(weight, jax.Array | StackedArray) and weight.dtype == rows.dtype
    in_one = isinstance(weight, BlockedArray) or stored_as_is or converted.fits_one_block(weight, rows.dtype)
    return whole(rows, weight) if in_one else on_platform(by_blocks, whole, (rows, weight))


def _with_bias(out: jax.Array, bias: jax.Array | None) -> jax.Array:
    return out if bias is None else out + bias.astype(out.dtype)


def _flat(weight: Weight) -> Weight:
    return map_parts(part_matrix, weight)
