"""Samples tokens from logits: penalties, filters and noise, as pure functions over arrays.

Options and their state are those of `jaxllm.sampling_state`. Top-k and top-p find their threshold by
bisection on the ordered bit patterns of the logits instead of sorting the vocabulary: 32 passes, exact, and
far cheaper than a sort of 150k floats on a CPU. Tokens that tie with the last kept one are kept, too.

Order, as in Hugging Face's logits processors: bias, penalties, temperature, top-k, top-p, min-p.

Exported programs choose by the same functions (`jaxllm.export.steps.exported`), so these use only
operations that every runtime of programs supports: no sorts and no scatters; of bit operations on integers
only exclusive or and shifts, in int32 words. On a CPU one native kernel draws the same tokens, but where two
are equal to the last bits of their noise.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import sampling_state
from jaxllm.axes import Axes, shaped
from jaxllm.kernels import native, native_attention
from jaxllm.sampling_state import MAX_BIAS as MAX_BIAS
from jaxllm.sampling_state import MAX_LOGIT_BIASES as MAX_LOGIT_BIASES
from jaxllm.sampling_state import NO_TOKEN, SamplerState, threefry
from jaxllm.sampling_state import Progress as Progress
from jaxllm.sampling_state import Sampling as Sampling
from jaxllm.sampling_state import sampler_state as sampler_state

# Applies a body `(bit, carry) -> carry` to 32 bits in turn.
Repeat = Callable[[Callable[[Any, jax.Array], jax.Array], jax.Array], jax.Array]

_ONE = np.float32(1).view(np.int32)
_TINY = np.finfo(np.float32).tiny
_MAGNITUDE = np.int32(0x7FFFFFFF)
# 2^31, the minimum of int32, down to 1.
BITS = (np.uint32(1) << np.arange(31, -1, -1, dtype=np.uint32)).view(np.int32)

# Steps accept it as a tree of arrays.
jax.tree_util.register_dataclass(SamplerState)


def sample(logits: jax.Array, state: SamplerState) -> tuple[jax.Array, SamplerState]:
    """Chooses a token for each sequence from `logits` `[B, V]` float32: ids `[B]` int32, and the new state.

    Logits with NaN or positive infinity, or with all tokens forbidden, give `NO_TOKEN`.
    """
    token = choose(logits, state)
    return token, chosen(state, token)


def chosen(state: SamplerState, token: jax.Array, draws: jax.Array | int = 1) -> SamplerState:
    """The state after `token` `[B]` was chosen; `draws`, an int32 scalar, is 1 if it was sampled, else 0."""
    rows = jnp.arange(token.shape[0])
    counts = state.counts.at[rows, token].add(draws)
    return dataclasses.replace(state, counts=counts, drawn=state.drawn + draws)


def choose(logits: jax.Array, state: SamplerState) -> jax.Array:
    """The token of `sample`, `[B]` int32."""
    axes = Axes("sample")
    axes.check(jnp.float32, "B V", logits=logits)
    state.check(axes)

    def penalized(logits: jax.Array) -> jax.Array:
        logits = jax.lax.cond(state.penalized, penalize, lambda logits, _: logits, logits, state)
        return jax.lax.cond(state.temperature > 0, lambda x: _by_kernel(kernel, drawn, x), likeliest, logits)

    def kernel(logits: jax.Array) -> jax.Array:
        floats = jnp.stack([state.temperature, state.top_p, state.min_p])
        return native_attention.draw(logits, floats, jnp.stack([state.top_k, state.drawn]), state.seed)

    def drawn(logits: jax.Array) -> jax.Array:
        # Relative to the largest, so that division by a small temperature yields no positive infinity.
        logits = logits - jnp.max(logits, axis=-1, keepdims=True)
        kept = filtered(logits / state.temperature, state)
        return _if_finite(kept, largest(kept + gumbel_noise(state.seed, state.drawn, kept.shape)))

    # Most requests are greedy on unchanged logits: no other branch may copy these.
    return jax.lax.cond(state.penalized | (state.temperature > 0), penalized, likeliest, logits)


def likeliest(logits: jax.Array) -> jax.Array:
    """The most likely token of each sequence, the first of equals, `[B]` int32, or `NO_TOKEN` (see
    `sample`)."""
    return _if_finite(logits, largest(logits))


def _if_finite(logits: jax.Array, token: jax.Array) -> jax.Array:
    # Only the chosen logit is checked: NaN and infinity are always the largest of their row, and once an
    # infinity is subtracted the others are NaN or -inf.
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return jnp.where(jnp.isfinite(chosen), token, NO_TOKEN)


def _by_kernel(
    kernel: Callable[..., jax.Array], plain: Callable[..., jax.Array], *operands: jax.Array
) -> jax.Array:
    """Runs the native kernel on a CPU that has it, else XLA's own code."""
    if not native.kernels().native:
        return plain(*operands)
    return jax.lax.platform_dependent(*operands, cpu=kernel, default=plain)


@shaped(logits="float B V")
def largest(logits: jax.Array, *, portable: bool = False) -> jax.Array:
    """The index of each row's largest value or NaN, the first of equals, as `jnp.argmax`: `[B]` int32.
    Without kernels if `portable`."""

    def in_two_passes(logits: jax.Array) -> jax.Array:
        # XLA:CPU vectorizes both passes; they take a tenth of the time of its argmax.
        top = jnp.max(logits, axis=-1, keepdims=True)
        index = jnp.arange(logits.shape[-1], dtype=jnp.int32)
        # NaN differs from itself.
        found = jnp.logical_or(logits == top, logits != logits)
        return jnp.min(jnp.where(found, index, logits.shape[-1] - 1), axis=-1)

    if portable:
        return in_two_passes(logits)
    return _by_kernel(native_attention.largest, in_two_passes, logits)


def gumbel_noise(seed: jax.Array, drawn: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Gumbel noise of a shape, float32, equal to `jax.random.gumbel` with a threefry2x32 key.

    Args:
      seed: `[2]` uint32, or the same bits as int32: the key.
      drawn: an int32 scalar that is folded into the key.
      shape: of the result.
    """
    words, zero = _words(seed), jnp.zeros(1, jnp.int32)
    key = threefry((words[:1], words[1:]), (zero, drawn[None]), _shifted)
    index = jnp.arange(math.prod(shape), dtype=jnp.int32)
    high, low = threefry(key, (jnp.zeros_like(index), index), _shifted)
    bits = (high ^ low).reshape(shape)
    # 23 of the bits are the fraction of a number in [1, 2).
    uniform = jax.lax.bitcast_convert_type(_shifted(bits, 9) + _ONE, jnp.float32) - 1
    return -jnp.log(-jnp.log(jnp.maximum(uniform, _TINY)))


@shaped(logits="float32 B V")
def penalize(logits: jax.Array, state: SamplerState) -> jax.Array:
    """Adds the bias and applies repetition, frequency and presence penalties to `[B, V]` logits."""
    return sampling_state.penalize(logits, state, jnp.where)


def filtered(
    logits: jax.Array, state: SamplerState, draws: jax.Array | bool = True, repeat: Repeat | None = None
) -> jax.Array:
    """`[B, V]` logits, -inf for tokens dropped by top-k, top-p and min-p; all of them if not `draws`, a
    bool scalar. See `keep_top_k` for `repeat`."""
    if repeat is None:
        axes = Axes("filtered")
        axes.check(jnp.float32, "B V", logits=logits)
        state.check(axes)
    top_k_on = draws & (state.top_k > 0) & (state.top_k < logits.shape[-1])
    logits = only_if(top_k_on, lambda x: keep_top_k(x, state.top_k, repeat), logits)
    logits = only_if(draws & (state.top_p < 1), lambda x: keep_top_p(x, state.top_p, repeat), logits)
    floor = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(state.min_p)
    return jnp.where(jnp.logical_or(logits >= floor, jnp.logical_not(draws)), logits, -jnp.inf)


def only_if(wanted: jax.Array, change: Callable[[jax.Array], jax.Array], logits: jax.Array) -> jax.Array:
    """Changed logits if `wanted`, a bool scalar."""
    return jax.lax.cond(wanted, change, lambda x: x, logits)


@shaped(logits="float32 B V", k="int32")
def keep_top_k(logits: jax.Array, k: jax.Array, repeat: Repeat | None = None) -> jax.Array:
    """Keeps the `k` largest logits of each row of `[B, V]`, and those equal to the k-th.

    Args:
      logits: `[B, V]` float32.
      k: int32 scalar.
      repeat: repeats a body for each bit; None for a loop.
    """
    # Counts are floats, which are exact for any vocabulary.
    ones, wanted = jnp.ones_like(logits), k.astype(jnp.float32)
    return _keep_from(logits, _threshold(logits, ones, wanted, repeat or by_loop))


@shaped(logits="float32 B V", p="float32")
def keep_top_p(logits: jax.Array, p: jax.Array, repeat: Repeat | None = None) -> jax.Array:
    """Keeps the fewest largest logits of each row of `[B, V]` whose total probability is at least `p`, a
    float32 scalar. See `keep_top_k` for `repeat`."""
    return _keep_from(logits, _threshold(logits, jax.nn.softmax(logits, axis=-1), p, repeat or by_loop))


def by_loop(body: Callable[[Any, jax.Array], jax.Array], start: jax.Array) -> jax.Array:
    """Repeats a body for each bit in a loop."""
    bits = jnp.asarray(BITS)
    return jax.lax.fori_loop(0, 32, lambda step, carry: body(bits[step], carry), start)


def _keep_from(logits: jax.Array, threshold: jax.Array) -> jax.Array:
    """Drops the logits of each row whose `ordered_bits` are under its threshold `[B]`."""
    return jnp.where(ordered_bits(logits) >= threshold[:, None], logits, -jnp.inf)


def _threshold(logits: jax.Array, shares: jax.Array, wanted: jax.Array, repeat: Repeat) -> jax.Array:
    """The highest threshold of each row, in `ordered_bits`, for which the `shares` `[B, V]` of the logits
    from it on sum to at least `wanted`. It is built bit by bit, from the highest."""
    ordered = ordered_bits(logits)

    def try_bit(bit: Any, threshold: jax.Array) -> jax.Array:
        # Begins at the minimum of int32; the first bit, 2^31, wraps around to 0.
        candidate = threshold + bit
        total = jnp.sum(jnp.where(ordered >= candidate[:, None], shares, 0.0), axis=-1)
        return jnp.where(total >= wanted, candidate, threshold)

    return repeat(try_bit, jnp.full(logits.shape[0], BITS[0], jnp.int32))


def ordered_bits(x: jax.Array) -> jax.Array:
    """int32 keys in the order of the float32 values: of negative ones all bits but the sign are inverted."""
    bits = _words(x)
    return bits ^ (_shifted(bits, 31) * _MAGNITUDE)


def _words(x: jax.Array) -> jax.Array:
    """The bits of numbers of 32 bits, as int32."""
    return x if x.dtype == jnp.int32 else jax.lax.bitcast_convert_type(x, jnp.int32)


def _shifted(word: jax.Array, bits: int) -> jax.Array:
    """Words shifted right, with zeros on the left: LiteRT fills signed ones with their sign."""
    unsigned = jax.lax.bitcast_convert_type(word, jnp.uint32)
    return _words(jax.lax.shift_right_logical(unsigned, jnp.full_like(unsigned, bits)))
