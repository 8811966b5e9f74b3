"""Computes in numpy and float64 what the native kernels must give, and bounds of their error.

A product's activations are rounded to 8 bits, one scale for each 256 inputs of a row, whose two largest may
have more levels. In float32 this rounding is exact, so what is left is the rounding of float sums: `ULPS` of
the sum of magnitudes. Where the kernels' input is only known with an error (behind a norm, or a first
product), a value may land on the other side of a tie: `rounded` says which ones, and their whole step counts.

For many rows, kernels may first widen narrower weights to 8 bits of one scale per output and span, which
rounds the weights once more (`widened`): a row is computed with the one or the other.
"""

from typing import NamedTuple

import numpy as np
import scipy.special

from jaxllm.quant import BlockedArray
from tests.quant.plain import levels_of, minimum_of, step_of, wide

SPAN, OUTLIERS, MOST_LEVELS = 256, 2, 127 * 128
# A sum of 8 groups and of some spans, each scaled twice: a dozen roundings of 2**-24.
ULPS = 1.2e-6
# Under this, activations count as zero.
TINY = 1e-30
# Slopes of all activations are less, and their approximations err by less than this part of the input.
SLOPE, ACTIVATION_ERROR = 1.13, 1e-6


class Known(NamedTuple):
    """Values and how far off a kernel may be, both float64."""

    value: np.ndarray
    error: np.ndarray


def known(x: np.ndarray) -> Known:
    """What is known to the bit."""
    return Known(x.astype(np.float64), np.zeros(x.shape))


def accept(got: np.ndarray, *candidates: Known) -> None:
    """Raises AssertionError unless each row of `got` is one of the candidates'."""
    assert got.dtype == np.float32
    fits = []
    for each in candidates:
        assert got.shape == each.value.shape
        off = np.abs(got.astype(np.float64) - each.value) - each.error
        fits.append(np.all(off <= 0, axis=-1))
    wrong = ~np.any(fits, axis=0)
    if wrong.any():
        row = int(np.argmax(wrong))
        worst = int(np.argmax(off[row]))
        raise AssertionError(
            f"{np.count_nonzero(wrong)} of {len(wrong)} rows; at {row, worst}: {got[row, worst]}, expected "
            + " or ".join(f"{each.value[row, worst]} ± {each.error[row, worst]}" for each in candidates)
        )


def rounded(x: Known, segments: int = 1) -> Known:
    """Activations `[M, segments · length]` as the kernels see them."""
    shape = (len(x.value), segments, -1)
    value, error = np.zeros_like(x.value).reshape(shape), np.zeros_like(x.value).reshape(shape)
    for at in range(0, value.shape[-1], SPAN):
        part = np.s_[..., at : at + SPAN]
        v, e = x.value.reshape(shape)[part], x.error.reshape(shape)[part]
        top, most, least = (_top(each) for each in (np.abs(v), np.abs(v) + e, np.maximum(np.abs(v) - e, 0)))
        levels, step = _levels(v, top), _step(top)
        bounds = [
            _levels(v + sign * e, np.clip(end, TINY / 128, None)) for sign in (-1, 1) for end in (least, most)
        ]
        value[part] = levels * step
        error[part] = step * np.abs(np.stack(bounds) - levels).max(0) * np.any(e) + (
            np.maximum(np.abs(levels) * (_step(most) - step), np.abs(levels) * (step - _step(least)))
        )
    return Known(value.reshape(x.value.shape), error.reshape(x.value.shape))


def _top(magnitudes: np.ndarray) -> np.ndarray:
    """What has 127 levels: the largest behind the outliers, unless these would have too many; 0 for zeros."""
    ordered = np.sort(magnitudes.astype(np.float32), -1)
    most = ordered[..., -1:]
    few = ordered.shape[-1] <= OUTLIERS
    behind = np.zeros_like(most) if few else ordered[..., -OUTLIERS - 1, None]
    return np.where(most >= np.float32(TINY), np.maximum(behind, most / np.float32(128)), 0)


def _levels(x: np.ndarray, top: np.ndarray) -> np.ndarray:
    """To whole numbers, in float32, as every processor does it."""
    factor = np.float32(127) / np.where(top > 0, top, 1).astype(np.float32)
    steps = np.clip(x.astype(np.float32) * factor, -MOST_LEVELS, MOST_LEVELS)
    rounded = np.where(
        np.abs(steps) > 127, np.trunc(steps + np.copysign(np.float32(0.5), steps)), np.rint(steps)
    )
    return np.where(top > 0, rounded, 0).astype(np.float64)


def _step(top: np.ndarray) -> np.ndarray:
    return (top.astype(np.float32) / np.float32(127)).astype(np.float64)


def matrix(weight: BlockedArray, *, widened: bool = False) -> np.ndarray:
    """The weight as `[inputs, outputs]`, float64."""
    dense = _widened(weight) if widened else wide(weight)
    return dense.reshape(-1, dense.shape[-1]).T if weight.axis == -1 else dense.reshape(-1, dense.shape[-1])


def _widened(weight: BlockedArray) -> np.ndarray:
    """Levels times group scale over the span's largest, in 16-bit fixed point, rounded to a byte."""
    assert weight.bits < 8
    assert weight.group
    both = weight.low is not None
    top = 127 if both else 8 if weight.bits == 4 else 3
    # Contracted axis last; spans begin anew in each kv head's inputs.
    levels, steps = (np.moveaxis(each, weight.axis, -1) for each in (levels_of(weight), step_of(weight)))
    out = np.zeros(levels.shape)
    for at in range(0, levels.shape[-1], SPAN):
        part = np.s_[..., at : at + SPAN]
        scale = steps[part].astype(np.float32)
        most = np.maximum(np.abs(scale).max(-1, keepdims=True), np.float32(TINY))
        factor = scale * (np.float32(127 / top) / most)
        fixed = np.rint(factor * np.float32(32767 if both else 128)).astype(np.int64)
        wider = (levels[part] * 256 * fixed + (1 << 14)) >> 15
        if both:
            wider = np.minimum(wider + 128, 32767) >> 8
        out[part] = wider * (most * np.float32(top / 127)).astype(np.float64)
    return np.moveaxis(out, -1, weight.axis)


def product(
    x: Known, weight: BlockedArray, *, kernels: str, segments: int = 1, widened: bool = False
) -> Known:
    """`x` `[M, inputs]` times a weight."""
    dense = matrix(weight, widened=widened)
    room = np.abs(dense)
    minimum = minimum_of(weight)
    if minimum is not None:
        # Steps and minima are summed apart, and may be far larger than what is left of them.
        both = np.abs(wide(weight) - minimum) + np.abs(minimum)
        room = both.reshape(-1, both.shape[-1])
        room = room.T if weight.axis == -1 else room
    if kernels == "xla":
        # Some hundred products, summed in float32 in any order.
        return Known(x.value @ dense, x.error @ room + 4 * ULPS * (np.abs(x.value) @ room) + TINY)
    x = rounded(x, segments)
    return Known(x.value @ dense, x.error @ room + ULPS * (np.abs(x.value) @ room) + TINY)


def reads(weight: BlockedArray) -> tuple[bool, ...]:
    """Whether native kernels may read a row's weights as they are stored, or widened."""
    return (False, True) if weight.bits < 8 and weight.group and not weight.minima else (False,)


def normed(x: np.ndarray, scale: np.ndarray, eps: float) -> Known:
    """RMS norm of rows."""
    wide_x = x.astype(np.float64)
    value = wide_x / np.sqrt(np.square(wide_x).mean(-1, keepdims=True) + eps) * scale
    return Known(value, 2e-6 * np.abs(value))


def activated(x: np.ndarray, activation: str) -> np.ndarray:
    """The feed-forward non-linearities, float64."""
    match activation:
        case "silu":
            return x * scipy.special.expit(x)
        case "relu":
            return np.maximum(x, 0)
        case "gelu":
            return x * scipy.special.ndtr(x)
        case _:
            return x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def feed_forward(
    x: Known,
    gate: BlockedArray | None,
    up: BlockedArray,
    down: BlockedArray,
    *,
    activation: str,
    kernels: str,
    widened: bool = False,
) -> Known:
    """`down(activation(gate(x)) · up(x))`, or without a gate `down(activation(up(x)))`."""
    first = product(x, up if gate is None else gate, kernels=kernels, widened=widened)
    value = activated(first.value, activation)
    error = SLOPE * first.error + ACTIVATION_ERROR * np.abs(first.value)
    if gate is not None:
        second = product(x, up, kernels=kernels, widened=widened)
        error = error * (np.abs(second.value) + second.error) + np.abs(value) * second.error
        value = value * second.value
    hidden = Known(value, error + 1e-7 * np.abs(value))
    return product(hidden, down, kernels=kernels, widened=widened)


def plus(sum_: Known, addend: np.ndarray) -> Known:
    """A residual added at the end, or before the sums."""
    room = np.abs(sum_.value) + np.abs(addend)
    return Known(sum_.value + addend, sum_.error + ULPS * room)


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rows `[B, T, ..., H]` whose first `2 · R` dimensions turn in pairs (i, i + R), by `[T, R]`; float64."""
    half = cos.shape[-1]
    lead = (1, len(cos), *(1,) * (x.ndim - 3), half)
    cos, sin, x = cos.reshape(lead), sin.reshape(lead), x.astype(np.float64)
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = [first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]]
    return np.concatenate(turned, axis=-1)


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    positions: np.ndarray,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sink_logits: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Causal attention of `[B, T, K, G, H]` at positions `[T]` over `[B, K, S, H]`, float64, and what each
    query attends to each key `[B, K, T, G, seen]`."""
    q, k, v = (each.astype(np.float64) for each in (q, k, v))
    seen = min(int(positions[-1]) + 1, k.shape[2])
    k, v = k[:, :, :seen], v[:, :, :seen]
    scores = np.einsum("btkgh,bksh->bktgs", q, k) * scale
    if softcap:
        scores = np.tanh(scores / softcap) * softcap
    query, key = positions[:, None], np.arange(seen)
    mask = key <= query
    if window:
        mask &= key > query - window
    scores = np.where(mask[:, None, :], scores, -np.inf)
    top = np.max(scores, -1, keepdims=True, initial=-1e300)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if sink_logits is not None:
        total = total + np.exp(sink_logits.astype(np.float64)[:, None, :, None] - top)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return np.einsum("bktgs,bksh->btkgh", weights, v), weights
