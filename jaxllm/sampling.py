"""Samples tokens from logits: penalties, filters and sampling, as pure functions over arrays.

Options and their state are those of `jaxllm.sampling_state`. Top-k and top-p find their threshold by
bisection on the ordered bit patterns of the logits instead of sorting the vocabulary: 32 counting passes,
exact, and far cheaper than a sort of 150k floats on a CPU. Tokens that tie with the last kept one are kept,
too.

Order, as in Hugging Face's logits processors: bias, penalties, temperature, top-k, top-p, min-p.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import Axes
from jaxllm.kernels import native, native_attention
from jaxllm.sampling_state import MAX_BIAS as MAX_BIAS
from jaxllm.sampling_state import MAX_LOGIT_BIASES as MAX_LOGIT_BIASES
from jaxllm.sampling_state import NO_TOKEN, SamplerState
from jaxllm.sampling_state import Progress as Progress
from jaxllm.sampling_state import Sampling as Sampling
from jaxllm.sampling_state import sampler_state as sampler_state

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

    def draw(logits: jax.Array) -> jax.Array:
        # Relative to the largest, so that division by a small temperature yields no positive infinity.
        logits = logits - jnp.max(logits, axis=-1, keepdims=True)
        kept = filtered(logits / state.temperature, state)
        return _if_finite(kept, largest(kept + gumbel_noise(state.seed, state.drawn, kept.shape)))

    def penalized(logits: jax.Array) -> jax.Array:
        logits = jax.lax.cond(state.penalized, penalize, lambda logits, _: logits, logits, state)
        return jax.lax.cond(state.temperature > 0, draw, likeliest, logits)

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


def largest(logits: jax.Array) -> jax.Array:
    """The index of each row's largest value or NaN, the first of equals, as `jnp.argmax`: `[B]` int32."""
    Axes("largest").check(jnp.floating, "B V", logits=logits)

    def in_two_passes(logits: jax.Array) -> jax.Array:
        # XLA:CPU vectorizes both passes; they take a tenth of the time of its argmax.
        top = jnp.max(logits, axis=-1, keepdims=True)
        index = jnp.arange(logits.shape[-1], dtype=jnp.int32)
        return jnp.min(jnp.where((logits == top) | jnp.isnan(logits), index, logits.shape[-1]), axis=-1)

    return _by_kernel(native_attention.largest, in_two_passes, logits)


def gumbel_noise(seed: jax.Array, drawn: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Gumbel noise of a shape, float32, equal to `jax.random.gumbel` with the threefry2x32 key `seed` `[2]`
    uint32 into which `drawn`, an int32 scalar, is folded."""

    def bits(seed: jax.Array, drawn: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), drawn)
        return jax.random.bits(key, shape, jnp.uint32)

    drawn_bits = _by_kernel(functools.partial(native_attention.random_bits, shape=shape), bits, seed, drawn)
    # 23 of the bits are the fraction of a number in [1, 2).
    one = np.float32(1).view(np.uint32)
    uniform = jax.lax.bitcast_convert_type((drawn_bits >> np.uint32(9)) | one, jnp.float32) - 1
    return -jnp.log(-jnp.log(jnp.maximum(uniform, jnp.finfo(jnp.float32).tiny)))


def _by_kernel(
    kernel: Callable[..., jax.Array], plain: Callable[..., jax.Array], *operands: jax.Array
) -> jax.Array:
    """Runs the native kernel on a CPU that has it, else XLA's own code."""
    if not native.kernels().native:
        return plain(*operands)
    return jax.lax.platform_dependent(*operands, cpu=kernel, default=plain)


def penalize(logits: jax.Array, state: SamplerState) -> jax.Array:
    """Adds the bias and applies repetition, frequency and presence penalties to `[B, V]` logits."""
    axes = Axes("penalize")
    axes.check(jnp.float32, "B V", logits=logits)
    state.check(axes)
    logits = logits + state.bias
    in_answer = state.counts > 0
    repeated = jnp.where(logits > 0, logits / state.repetition_penalty, logits * state.repetition_penalty)
    logits = jnp.where(state.in_prompt | in_answer, repeated, logits)
    logits = logits - state.frequency_penalty * state.counts.astype(jnp.float32)
    return logits - state.presence_penalty * in_answer.astype(jnp.float32)


def filtered(logits: jax.Array, state: SamplerState) -> jax.Array:
    """`[B, V]` logits, -inf for tokens dropped by top-k, top-p and min-p."""
    axes = Axes("filtered")
    axes.check(jnp.float32, "B V", logits=logits)
    state.check(axes)
    vocab = logits.shape[-1]
    top_k_on = (state.top_k > 0) & (state.top_k < vocab)
    logits = jax.lax.cond(top_k_on, lambda x: keep_top_k(x, state.top_k), lambda x: x, logits)
    logits = jax.lax.cond(state.top_p < 1, lambda x: keep_top_p(x, state.top_p), lambda x: x, logits)
    floor = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(state.min_p)
    return jnp.where(logits >= floor, logits, -jnp.inf)


def keep_top_k(logits: jax.Array, k: jax.Array) -> jax.Array:
    """Keeps the `k` largest logits of each row of `[B, V]`, and those equal to the k-th; `k` is an int32
    scalar."""
    axes = Axes("keep_top_k")
    axes.check(jnp.float32, "B V", logits=logits)
    axes.check(jnp.int32, "", k=k)

    def threshold(logits: jax.Array, k: jax.Array) -> jax.Array:
        return _threshold(logits, lambda kept: jnp.sum(kept, axis=-1, dtype=jnp.int32) >= k)

    return _keep_from(logits, _by_kernel(native_attention.kth_largest, threshold, logits, k))


def keep_top_p(logits: jax.Array, p: jax.Array) -> jax.Array:
    """Keeps the fewest largest logits of each row of `[B, V]` whose total probability is at least `p`, a
    float32 scalar."""
    axes = Axes("keep_top_p")
    axes.check(jnp.float32, "B V", logits=logits)
    axes.check(jnp.float32, "", p=p)
    probabilities = jax.nn.softmax(logits, axis=-1)

    def enough(kept: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(kept, probabilities, 0.0), axis=-1) >= p

    return _keep_from(logits, _threshold(logits, enough))


def _keep_from(logits: jax.Array, threshold: jax.Array) -> jax.Array:
    """Drops the logits of each row whose `ordered_bits` are under its threshold `[B]`."""
    return jnp.where(ordered_bits(logits) >= threshold[:, None], logits, -jnp.inf)


def _threshold(logits: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The highest threshold of each row, in `ordered_bits`, for which the logits from it on are `enough`.

    `enough` maps a `[B, V]` mask to `[B]` bool and must stay true as the mask grows. The threshold is
    built bit by bit, from the highest.
    """
    ordered = ordered_bits(logits)

    def try_bit(step: jax.Array, threshold: jax.Array) -> jax.Array:
        bit = jnp.left_shift(np.uint32(1), np.uint32(31) - step.astype(jnp.uint32))
        candidate = threshold | bit
        return jnp.where(enough(ordered >= candidate[:, None]), candidate, threshold)

    return jax.lax.fori_loop(0, 32, try_bit, jnp.zeros(logits.shape[0], jnp.uint32))


def ordered_bits(x: jax.Array) -> jax.Array:
    """uint32 keys in the order of the float32 values."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    negative = bits >> np.uint32(31) == 1
    return jnp.where(negative, ~bits, bits | np.uint32(1 << 31))
