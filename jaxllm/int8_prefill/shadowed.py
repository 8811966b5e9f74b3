"""Products with a static step together with their shadow (mllm-NPU, arXiv 2407.05858, equation 1), for one
processor that computes both.

Native kernels find and multiply outliers inside the products (`jaxllm.kernels.native_shadow`); elsewhere they
are multiplied separately (`shadow.py`), with the same result but for the order of sums. Functions have the
parameters of those in `linear.py`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxllm.int8_prefill.shadow import FloatRows, added_by_shadow
from jaxllm.kernels import native_shadow
from jaxllm.kernels.native_operands import Adaptable
from jaxllm.kernels.platforms import natively
from jaxllm.kernels.used_units import UsedUnits
from jaxllm.nn import linear
from jaxllm.nn.layers import activate
from jaxllm.nn.linear import FeedForward, Steps, in_blocks
from jaxllm.nn.norms import Norm, normalize
from jaxllm.quant import Weight


def normed_to_units(
    x: jax.Array,
    norm: Norm,
    weights: Sequence[Weight],
    biases: Sequence[jax.Array | None],
    step: jax.Array,
    rows: FloatRows,
    *,
    used: UsedUnits | None = None,
    live: jax.Array | None = None,
) -> tuple[list[jax.Array], jax.Array]:
    """Products `[..., *U]` of `norm(x)` `[..., D]` with each weight `[*U, D]`, and the number of the D
    channels with outliers, `[1]` int32."""

    def beside(
        x: jax.Array,
        norm: Norm,
        weights: Sequence[Weight],
        used: UsedUnits | None,
        step: jax.Array,
        rows: FloatRows,
        live: jax.Array | None,
    ) -> tuple[list[jax.Array], jax.Array]:
        outs = linear.normed_to_units(
            x, norm, weights, [None] * len(weights), used=used, step=step, live=live
        )
        shadows, count = added_by_shadow(normalize(x, norm), step, weights, rows, last=True)
        return [out + shadow.astype(out.dtype) for out, shadow in zip(outs, shadows, strict=True)], count[
            None
        ]

    def inside(
        x: jax.Array,
        norm: Norm,
        weights: Sequence[Adaptable],
        used: UsedUnits | None,
        step: jax.Array,
        rows: FloatRows,
        live: jax.Array | None,
    ) -> tuple[list[jax.Array], jax.Array]:
        products, count = native_shadow.to_units(
            x.reshape(-1, x.shape[-1]),
            weights,
            step,
            rows.place,
            rows.rows,
            norm_scale=norm.scale,
            norm_eps=norm.eps,
            used=used,
            live=live,
        )
        shapes = [(*x.shape[:-1], *weight.shape[:-1]) for weight in weights]
        return [out.reshape(shape) for out, shape in zip(products, shapes, strict=True)], count

    operands = x, norm, list(weights), used, step, rows, live
    fused = norm.bias is None and _taken(weights)
    outs, count = natively(inside, beside, *operands) if fused else beside(*operands)
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
    live: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Product `[..., D]` of `h` `[..., *U]` with `weight` `[*U, D]`, plus `residual` if there is one, and the
    number of inputs with outliers, `[1]` int32."""
    units = len(weight.shape) - 1
    batch = h.shape[: h.ndim - units]

    def beside(
        h: jax.Array,
        weight: Weight,
        residual: jax.Array | None,
        used: UsedUnits | None,
        step: jax.Array,
        rows: FloatRows,
        live: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        out = linear.from_units(h, weight, residual=residual, used=used, step=step, live=live)
        seen = h if used is None else used.only(h, len(batch))
        (shadow,), count = added_by_shadow(seen.reshape(*batch, -1), step, [weight], rows, last=False)
        return out + shadow.astype(out.dtype), count[None]

    def inside(
        h: jax.Array,
        weight: Adaptable,
        residual: jax.Array | None,
        used: UsedUnits | None,
        step: jax.Array,
        rows: FloatRows,
        live: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        width = weight.shape[-1]
        add = None if residual is None else residual.reshape(-1, width).astype(h.dtype)
        flat = h.reshape(-1, int(rows.place.shape[0]))
        out, count = native_shadow.from_units(
            flat, weight, step, rows.place, rows.rows[0], residual=add, used=used, live=live
        )
        return out.reshape(*batch, width), count

    operands = h, weight, residual, used, step, rows, live
    out, count = natively(inside, beside, *operands) if _taken([weight]) else beside(*operands)
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
    live: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`linear.feed_forward` of `x` `[..., D]`, and the numbers of the D channels and of the F units with
    outliers, `[2]` int32; steps and rows are pairs, for both."""

    def apart(
        x: jax.Array,
        norm: Norm,
        weights: FeedForward,
        used: UsedUnits | None,
        steps: Steps,
        rows: tuple[FloatRows, FloatRows],
        live: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        first = [weights.up] if weights.gate is None else [weights.gate, weights.up]
        biases = [weights.up_bias] if weights.gate is None else [weights.gate_bias, weights.up_bias]
        products, outer = normed_to_units(x, norm, first, biases, steps[0], rows[0], used=used, live=live)
        hidden = activate(products[0], weights.activation)
        hidden = hidden if weights.gate is None else hidden * products[1]
        residual = x if add_input else None
        out, inner = from_units(
            hidden,
            weights.down,
            weights.down_bias,
            steps[1],
            rows[1],
            residual=residual,
            used=used,
            live=live,
        )
        return out, jnp.concatenate([outer, inner])

    def inside(
        x: jax.Array,
        norm: Norm,
        weights: FeedForward,
        used: UsedUnits | None,
        steps: Steps,
        rows: tuple[FloatRows, FloatRows],
        live: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        out, counts = native_shadow.feed_forward(
            x.reshape(-1, x.shape[-1]),
            weights.gate,  # pyright: ignore[reportArgumentType]: all are in blocks
            weights.up,  # pyright: ignore[reportArgumentType]
            weights.down,  # pyright: ignore[reportArgumentType]
            steps,
            (rows[0].place, rows[1].place),
            (rows[0].rows, rows[1].rows[0]),
            activation=weights.activation,
            norm_scale=norm.scale,
            norm_eps=norm.eps,
            residual=add_input,
            used=used,
            live=live,
        )
        return out.reshape(x.shape), counts

    operands = x, norm, weights, used, steps, rows, live
    fused = norm.bias is None and not weights.biased and _taken(weights.weights)
    return natively(inside, apart, *operands) if fused else apart(*operands)


def _taken(weights: Sequence[Weight]) -> bool:
    """Whether the native kernels can compute the shadow of all weights."""
    return all(in_blocks(each) and native_shadow.takes(each) for each in weights)  # pyright: ignore[reportArgumentType]


def _with_bias(out: jax.Array, bias: jax.Array | None) -> jax.Array:
    return out if bias is None else out + bias.astype(out.dtype)
