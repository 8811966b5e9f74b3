"""Samples tokens as `jaxllm.sampling` does, by operations that every runtime of programs supports.

The penalties, filters, ties and random bits are the same, so that a seed gives the same answer except where
the rounding of a sum or a logarithm decides. There are no sorts, scatters, AND or OR: of bit operations
LiteRT has only exclusive or and shifts. Words are int32, which wrap around. One sequence at a time.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import Axes
from jaxllm.export.folder_format.signature import DRAWN, OPTIONS, PENALIZED, SEED, TOP_K
from jaxllm.sampling_state import NO_TOKEN

# Applies a body `(bit, carry) -> carry` to 32 bits in turn.
Repeat = Callable[[Callable[[Any, jax.Array], jax.Array], jax.Array], jax.Array]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.int32(0x1BD11BDA)
_ONE = np.float32(1).view(np.int32)
_TINY = np.finfo(np.float32).tiny
_MAGNITUDE = np.int32(0x7FFFFFFF)
# 2^31, the minimum of int32, down to 1.
_BITS = (np.uint32(1) << np.arange(31, -1, -1, dtype=np.uint32)).view(np.int32)


def by_loop(body: Callable[[Any, jax.Array], jax.Array], start: jax.Array) -> jax.Array:
    """Repeats a body for each bit in a loop, for runtimes with loops."""
    bits = jnp.asarray(_BITS)
    return jax.lax.fori_loop(0, 32, lambda step, carry: body(bits[step], carry), start)


def one_by_one(body: Callable[[Any, jax.Array], jax.Array], start: jax.Array) -> jax.Array:
    """Repeats a body for each bit without a loop."""
    for bit in _BITS:
        start = body(bit, start)
    return start


def choose(
    logits: jax.Array, controls: Mapping[str, jax.Array], counts: jax.Array, done: Any, repeat: Repeat
) -> jax.Array:
    """Returns the next token `[1]` int32, or `NO_TOKEN` (see `jaxllm.sampling.sample`).

    Args:
      logits: `[1, V]` float32.
      controls: see `jaxllm.export.folder_format.signature`.
      counts: `[1, V]` int32, number of each token in the answer so far.
      done: int32 scalar, number of tokens sampled since `controls` were made.
      repeat: `by_loop` or `one_by_one`.
    """
    axes = Axes("choose")
    axes.check(jnp.float32, "1 V", logits=logits)
    axes.check(jnp.int32, "1 V", counts=counts)
    options = dict(zip(OPTIONS, controls["options"], strict=True))
    draw_facts, top_k = controls["draw"], controls["draw"][TOP_K]
    drawn = draw_facts[DRAWN] + done
    penalizes, draws = draw_facts[PENALIZED] > 0, options["temperature"] > 0

    def penalized(logits: jax.Array) -> jax.Array:
        logits = logits + controls["bias"][None]
        in_answer, penalty = counts > 0, options["repetition_penalty"]
        repeated = jnp.where(logits > 0, logits / penalty, logits * penalty)
        logits = jnp.where(jnp.logical_or(controls["in_prompt"], in_answer), repeated, logits)
        logits = logits - options["frequency_penalty"] * counts.astype(jnp.float32)
        return logits - options["presence_penalty"] * in_answer.astype(jnp.float32)

    def noised(logits: jax.Array) -> jax.Array:
        return logits + gumbel_noise(draw_facts[SEED], drawn, logits.shape[-1])[None]

    # Branches are not nested: LiteRT's converter gives inner ones wrong constants.
    logits = _only_if(penalizes, penalized, logits)
    # Relative to the largest, so that division by a small temperature gives no positive infinity.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / options["temperature"]
    logits = jnp.where(draws, scaled, logits)
    some = draws & (top_k > 0) & (top_k < logits.shape[-1])
    logits = _only_if(some, lambda x: keep_top_k(x, top_k, repeat), logits)
    some = draws & (options["top_p"] < 1)
    logits = _only_if(some, lambda x: keep_top_p(x, options["top_p"], repeat), logits)
    floor = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(options["min_p"])
    logits = jnp.where(jnp.logical_or(logits >= floor, ~draws), logits, -jnp.inf)
    return if_finite(logits, largest(_only_if(draws, noised, logits)))


def _only_if(wanted: jax.Array, change: Callable[[jax.Array], jax.Array], logits: jax.Array) -> jax.Array:
    return jax.lax.cond(wanted, change, lambda x: x, logits)


def keep_top_k(logits: jax.Array, k: jax.Array, repeat: Repeat) -> jax.Array:
    """See `jaxllm.sampling.keep_top_k`."""
    # Counts are floats, which are exact for any vocabulary.
    return _keep_enough(logits, jnp.ones_like(logits), k.astype(jnp.float32), repeat)


def keep_top_p(logits: jax.Array, p: jax.Array, repeat: Repeat) -> jax.Array:
    """See `jaxllm.sampling.keep_top_p`."""
    shares = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    return _keep_enough(logits, shares / jnp.sum(shares, axis=-1, keepdims=True), p, repeat)


def _keep_enough(logits: jax.Array, shares: jax.Array, wanted: jax.Array, repeat: Repeat) -> jax.Array:
    """Returns the minimum set of largest logits `[1, V]` whose `shares` sum to at least `wanted`; -inf for
    the others."""
    bits = jax.lax.bitcast_convert_type(logits, jnp.int32)
    # Integers in the order of the floats: of negative ones all bits but the sign are inverted.
    keys = bits ^ (_shifted(bits, 31) * _MAGNITUDE)

    def try_bit(bit: Any, threshold: jax.Array) -> jax.Array:
        # Begins at the minimum of int32; the first step, 2^31, wraps around to 0.
        candidate = threshold + bit
        enough = jnp.sum(jnp.where(keys >= candidate, shares, 0.0)) >= wanted
        return jnp.where(enough, candidate, threshold)

    threshold = repeat(try_bit, jnp.full((), -(1 << 31), jnp.int32))
    return jnp.where(keys >= threshold, logits, -jnp.inf)


def largest(logits: jax.Array) -> jax.Array:
    """The index of the largest value or NaN of each row, the first of equals, `[1]` int32."""
    top = jnp.max(logits, axis=-1, keepdims=True)
    count = logits.shape[-1]
    index = jnp.arange(count, dtype=jnp.int32)[None]
    # NaN differs from itself.
    found = jnp.where(jnp.logical_or(logits == top, logits != logits), index, count - 1)
    return jnp.min(found, axis=-1)


def if_finite(logits: jax.Array, token: jax.Array) -> jax.Array:
    """Returns `token` `[1]`, or `NO_TOKEN` if its logit is not finite."""
    index = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None]
    chosen = jnp.max(jnp.where(index == token[:, None], logits, -jnp.inf), axis=-1)
    return jnp.where(jnp.abs(chosen) < jnp.inf, token, NO_TOKEN)


def gumbel_noise(seed: jax.Array, drawn: jax.Array, count: int) -> jax.Array:
    """Returns Gumbel noise `[count]` float32 (see `jaxllm.sampling.gumbel_noise`); `seed` is `[2]` int32,
    the words of the key in memory order."""
    zero = jnp.zeros(1, jnp.int32)
    key = threefry((seed[:1], seed[1:]), (zero, drawn[None]))
    index = jnp.arange(count, dtype=jnp.int32)
    high, low = threefry(key, (jnp.zeros_like(index), index))
    # The 23 bits of a fraction, under the exponent of numbers in [1, 2).
    bits = _shifted(high ^ low, 9) + _ONE
    uniform = jax.lax.bitcast_convert_type(bits, jnp.float32) - 1
    return -jnp.log(-jnp.log(jnp.maximum(uniform, _TINY)))


def threefry(
    key: tuple[jax.Array, jax.Array], block: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011).

    Args:
      key: two words `[1]` int32.
      block: the two words `[n]` int32 of each counter.

    Returns:
      Both words of each block.
    """
    words = (*key, key[0] ^ key[1] ^ _PARITY)
    high, low = block[0] + words[0], block[1] + words[1]
    for step in range(5):
        for bits in _ROTATIONS[step % 2]:
            high = high + low
            low = high ^ _rotated(low, bits)
        high = high + words[(step + 1) % 3]
        low = low + words[(step + 2) % 3] + np.int32(step + 1)
    return high, low


def _rotated(word: jax.Array, bits: int) -> jax.Array:
    """Rotates words left: the two parts have no bit in common, so that their sum is their union."""
    return word * np.int32(1 << bits) + _shifted(word, 32 - bits)


def _shifted(word: jax.Array, bits: int) -> jax.Array:
    """Words shifted right, with zeros on the left: LiteRT fills signed ones with their sign."""
    unsigned = jax.lax.bitcast_convert_type(word, jnp.uint32)
    shifted = jax.lax.shift_right_logical(unsigned, jnp.full_like(unsigned, bits))
    return jax.lax.bitcast_convert_type(shifted, jnp.int32)
