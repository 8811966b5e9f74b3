"""Samples tokens from logits: penalties, filters and the draw, as pure functions over arrays.

`Sampling` has a request's options; `SamplerState` has them as arrays, so that one bucket serves every
request. Top-k and top-p find their threshold by bisection on the ordered bit patterns of
the logits instead of sorting the vocabulary: 32 counting passes, exact, and far cheaper than a sort
of 150k floats on a CPU. Tokens that tie with the last one kept are kept too.

Order, as in Hugging Face's logits processors: bias, penalties, temperature, top-k, top-p, min-p.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import Axes
from jaxllm.errors import ConfigError
from jaxllm.kernels import native, native_sampling

MAX_LOGIT_BIASES = 1024
MAX_BIAS = 1e6
# Stands for a token where the logits allow none to be chosen.
NO_TOKEN = -1
# Processors may flush smaller floats to 0.
_LEAST_TOP_P = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling options of a request. The default is greedy.

    Attributes:
      temperature: 0 is greedy; otherwise logits are divided by it.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the fewest most likely tokens whose probabilities reach it; 1 keeps all.
      min_p: drop tokens less likely than `min_p` times the most likely one.
      repetition_penalty: above 1 makes tokens of the prompt and the answer less likely (CTRL).
      presence_penalty: subtracted from the logits of tokens that are in the answer already.
      frequency_penalty: subtracted once for each occurrence of the token in the answer.
      logit_bias: (token id, added value) pairs; -inf forbids the token.
      seed: of the draw; the same seed gives the same answer. None lets the engine choose one.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0, 100, "0 (greedy) to 100")
        if not isinstance(self.top_k, int) or not 0 <= self.top_k < 1 << 31:
            raise ConfigError(f"top_k must be a whole number from 0 (off) up, got {self.top_k!r}")
        _check("top_p", self.top_p, 0, 1, "above 0 and at most 1 (off)")
        if self.top_p < _LEAST_TOP_P:
            raise ConfigError(
                f"top_p must be above 0, at least {_LEAST_TOP_P:.2g}, got {self.top_p!r}; for the most "
                "likely token use temperature 0"
            )
        _check("min_p", self.min_p, 0, 1, "0 (off) to 1")
        _check("repetition_penalty", self.repetition_penalty, 0.01, 100, "0.01 to 100 (1 is off)")
        _check("presence_penalty", self.presence_penalty, -100, 100, "-100 to 100 (0 is off)")
        _check("frequency_penalty", self.frequency_penalty, -100, 100, "-100 to 100 (0 is off)")
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise ConfigError(f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIASES}")
        for token, value in self.logit_bias:
            if not isinstance(token, int) or token < 0:
                raise ConfigError(f"logit_bias takes (token id, number) pairs, got {(token, value)}")
            if value != -math.inf:
                # With an infinite logit there is no finite distribution to draw from.
                allowed = f"{-MAX_BIAS:g} to {MAX_BIAS:g}, or -inf to forbid the token"
                _check(f"logit_bias of token {token}", value, -MAX_BIAS, MAX_BIAS, allowed)
        if self.seed is not None and not (isinstance(self.seed, int) and 0 <= self.seed < 1 << 64):
            raise ConfigError(f"seed must be a whole number in [0, 2**64), got {self.seed!r}")

    @property
    def penalizes(self) -> bool:
        """Whether any logit changes before a token is chosen."""
        neutral = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) == (1, 0, 0)
        return not neutral or bool(self.logit_bias)


def _check(name: str, value: float, low: float, high: float, allowed: str) -> None:
    valid = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not valid:
        raise ConfigError(f"{name} must be {allowed}, got {value!r}")


# Counts and number of tokens drawn (see `SamplerState`).
Progress = tuple[jax.Array, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplerState:
    """A request's sampling options as arrays, and the counts of its penalties.

    The key of a draw is a function of `seed` and `drawn`, so that neither the chunks of the prompt nor the
    number of tokens per dispatch change an answer.

    Attributes:
      temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty: `[]` float32.
      top_k: `[]` int32.
      penalized: `[]` bool, whether any penalty or bias changes a logit.
      bias: `[V]` float32.
      in_prompt: `[B, V]` bool, whether the prompt has each token; or one row for the whole batch.
      counts: `[B, V]` int32, how often the answer has each token.
      seed: `[2]` uint32.
      drawn: `[]` int32, number of tokens drawn so far.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    penalized: jax.Array
    bias: jax.Array
    in_prompt: jax.Array
    counts: jax.Array
    seed: jax.Array
    drawn: jax.Array

    @property
    def fixed(self) -> "SamplerState":
        """What no draw changes: without `counts` and `drawn`."""
        return dataclasses.replace(self, counts=None, drawn=None)  # pyright: ignore[reportArgumentType]

    @property
    def progress(self) -> Progress:
        """What each draw changes."""
        return self.counts, self.drawn

    def after(self, progress: Progress) -> "SamplerState":
        """With another progress."""
        counts, drawn = progress
        return dataclasses.replace(self, counts=counts, drawn=drawn)

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above, where a step that takes the state is traced."""
        axes.check(jnp.float32, "V", bias=self.bias)
        axes.check(jnp.bool_, "* V", in_prompt=self.in_prompt)
        axes.check(jnp.int32, "B V", counts=self.counts)
        axes.check(jnp.uint32, "2", seed=self.seed)
        axes.check(jnp.float32, "", temperature=self.temperature, top_p=self.top_p, min_p=self.min_p)
        axes.check(jnp.float32, "", repetition_penalty=self.repetition_penalty)
        axes.check(jnp.float32, "", presence_penalty=self.presence_penalty)
        axes.check(jnp.float32, "", frequency_penalty=self.frequency_penalty)
        axes.check(jnp.bool_, "", penalized=self.penalized)
        axes.check(jnp.int32, "", top_k=self.top_k, drawn=self.drawn)


def sampler_state(sampling: Sampling, prompt: Sequence[int], vocab_size: int, seed: int) -> SamplerState:
    """The state at the start of an answer to `prompt` (batch 1), made on the host.

    Raises:
      ConfigError: a bias names a token outside the vocabulary, or biases forbid every token.
    """
    bias = np.zeros(vocab_size, np.float32)
    for token, value in sampling.logit_bias:
        if token >= vocab_size:
            raise ConfigError(f"logit_bias names token {token}; the vocabulary has {vocab_size}")
        bias[token] += value
    if sampling.logit_bias and np.isneginf(bias).all():
        raise ConfigError("logit_bias forbids every token of the vocabulary; leave at least one")
    in_prompt = np.zeros((1, vocab_size), np.bool_)
    in_prompt[0, np.asarray(prompt, np.int64)] = True
    host = dict(
        temperature=np.float32(sampling.temperature),
        top_k=np.int32(min(sampling.top_k, vocab_size)),
        top_p=np.float32(sampling.top_p),
        min_p=np.float32(sampling.min_p),
        repetition_penalty=np.float32(sampling.repetition_penalty),
        presence_penalty=np.float32(sampling.presence_penalty),
        frequency_penalty=np.float32(sampling.frequency_penalty),
        penalized=np.bool_(sampling.penalizes),
        bias=bias,
        in_prompt=in_prompt,
        counts=np.zeros((1, vocab_size), np.int32),
        seed=np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32),
        drawn=np.int32(0),
    )
    # Host arrays: they are passed to the bucket, and nothing is dispatched here.
    return SamplerState(**cast(dict[str, jax.Array], host))


def sample(logits: jax.Array, state: SamplerState) -> tuple[jax.Array, SamplerState]:
    """Chooses a token for each sequence from `logits` `[B, V]` float32: ids `[B]` int32, and the new state.

    Logits with NaN or positive infinity, or with all tokens forbidden, give `NO_TOKEN`.
    """
    token = choose(logits, state)
    return token, chosen(state, token)


def chosen(state: SamplerState, token: jax.Array, draws: jax.Array | int = 1) -> SamplerState:
    """The state after `token` `[B]` was chosen; `draws`, an int32 scalar of 0 or 1, tells whether it was."""
    rows = jnp.arange(token.shape[0])
    counts = state.counts.at[rows, token].add(draws)
    return dataclasses.replace(state, counts=counts, drawn=state.drawn + draws)


def choose(logits: jax.Array, state: SamplerState) -> jax.Array:
    """The token of `sample`, `[B]` int32."""
    axes = Axes("sample")
    axes.check(jnp.float32, "B V", logits=logits)
    state.check(axes)

    def draw(logits: jax.Array) -> jax.Array:
        # Relative to the largest, so that division by a small temperature gives no positive infinity.
        logits = logits - jnp.max(logits, axis=-1, keepdims=True)
        kept = filtered(logits / state.temperature, state)
        return _if_finite(kept, largest(kept + gumbel_noise(state.seed, state.drawn, kept.shape)))

    def penalized(logits: jax.Array) -> jax.Array:
        logits = jax.lax.cond(state.penalized, penalize, lambda logits, _: logits, logits, state)
        return jax.lax.cond(state.temperature > 0, draw, likeliest, logits)

    # Most requests take the likeliest token of the logits as they are: no other branch may copy these.
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

    return _by_kernel(native_sampling.largest, in_two_passes, logits)


def gumbel_noise(seed: jax.Array, drawn: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Gumbel noise of a shape, float32: that of `jax.random.gumbel` with the threefry2x32 key `seed` `[2]`
    uint32 into which `drawn`, an int32 scalar, is folded."""

    def bits(seed: jax.Array, drawn: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), drawn)
        return jax.random.bits(key, shape, jnp.uint32)

    drawn_bits = _by_kernel(functools.partial(native_sampling.random_bits, shape=shape), bits, seed, drawn)
    # 23 of the bits are the fraction of a number in [1, 2).
    one = np.float32(1).view(np.uint32)
    uniform = jax.lax.bitcast_convert_type((drawn_bits >> np.uint32(9)) | one, jnp.float32) - 1
    return -jnp.log(-jnp.log(jnp.maximum(uniform, jnp.finfo(jnp.float32).tiny)))


def _by_kernel(
    kernel: Callable[..., jax.Array], plain: Callable[..., jax.Array], *operands: jax.Array
) -> jax.Array:
    """By the native kernel on a CPU that has it, else by XLA's own code."""
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
    """`[B, V]` logits, -inf for tokens that top-k, top-p and min-p drop."""
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

    return _keep_from(logits, _by_kernel(native_sampling.kth_largest, threshold, logits, k))


def keep_top_p(logits: jax.Array, p: jax.Array) -> jax.Array:
    """Keeps the fewest largest logits of each row of `[B, V]` whose probabilities sum to at least `p`, a
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
