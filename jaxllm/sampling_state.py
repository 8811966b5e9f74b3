"""Options of sampling, the sampler's state, and what samplers in JAX and in NumPy share.

`Sampling` has a request's options; `SamplerState` has them as arrays, so that one bucket serves every
request. This module imports no JAX, for devices without it; `jaxllm.sampling`, which samples with them in
compiled steps, registers the state with JAX.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.axes import Axes
from jaxllm.errors import ConfigError
from jaxllm.layer_configs import require_float
from jaxllm.options import check_options, option

if TYPE_CHECKING:
    import jax

MAX_LOGIT_BIASES = 1024
MAX_BIAS = 1e6
# Options that a model's files may recommend as defaults.
MODEL_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Options that are float32 scalars of a sampler's state.
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
# Placeholder token if the logits allow none.
NO_TOKEN = -1
# Of Threefry-2x32.
_ROTATIONS, _PARITY = ((13, 15, 26, 6), (17, 29, 16, 24)), np.int32(0x1BD11BDA)
# Processors may flush smaller floats to 0.
_LEAST_TOP_P = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling options of a request. The default is greedy.

    Attributes:
      temperature: divisor of logits; 0 is greedy.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the fewest most likely tokens whose total probability reaches it; 1 keeps all.
      min_p: drop tokens less likely than `min_p` times the most likely one.
      repetition_penalty: above 1 makes tokens of the prompt and the answer less likely (CTRL).
      presence_penalty: subtracted from the logits of tokens that are already in the answer.
      frequency_penalty: subtracted once for each occurrence of the token in the answer.
      logit_bias: (token id, added value) pairs; -inf forbids the token.
      seed: sampling seed; the same seed gives the same answer. None lets the engine choose one.
    """

    temperature: float = option(0.0, low=0, high=100)
    top_k: int = option(0, low=0, high=(1 << 31) - 1)
    top_p: float = option(1.0, low=0, high=1)
    min_p: float = option(0.0, low=0, high=1)
    repetition_penalty: float = option(1.0, low=0.01, high=100)
    presence_penalty: float = option(0.0, low=-100, high=100)
    frequency_penalty: float = option(0.0, low=-100, high=100)
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = option(None, low=0, high=(1 << 64) - 1)

    def __post_init__(self) -> None:
        check_options(self)
        if self.top_p < _LEAST_TOP_P:
            raise ConfigError(
                f"top_p must be above 0, at least {_LEAST_TOP_P:.2g}, got {self.top_p!r}; for the most "
                "likely token use temperature 0"
            )
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise ConfigError(f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIASES}")
        for token, value in self.logit_bias:
            if not isinstance(token, int) or token < 0:
                raise ConfigError(f"logit_bias takes (token id, number) pairs, got {(token, value)}")
            if value != -math.inf:
                # An infinite logit leaves no finite distribution to sample from; -inf forbids the token.
                name = f"logit_bias of token {token} (or -inf to forbid it)"
                require_float(name, value, least=-MAX_BIAS, most=MAX_BIAS)

    @property
    def penalizes(self) -> bool:
        """Whether any logit changes before a token is chosen."""
        neutral = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) == (1, 0, 0)
        return not neutral or bool(self.logit_bias)

    @property
    def filters(self) -> bool:
        """Whether unlikely tokens are dropped before one is sampled."""
        return self.temperature > 0 and (self.top_k, self.top_p, self.min_p) != (0, 1, 0)


# Counts and number of sampled tokens (see `SamplerState`).
Progress = tuple["jax.Array", "jax.Array"]


@dataclasses.dataclass(frozen=True)
class SamplerState:
    """A request's sampling options as arrays, and the counts of its penalties.

    The key of a sample is a function of `seed` and `drawn`, so that neither the chunks of the prompt nor the
    number of tokens per dispatch change an answer.

    Attributes:
      temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty: `[]` float32.
      top_k: `[]` int32.
      penalized: `[]` bool, whether any penalty or bias changes a logit.
      bias: `[V]` float32.
      in_prompt: `[B, V]` bool, whether the prompt has each token; or one row for the whole batch.
      counts: `[B, V]` int32, number of occurrences of each token in the answer.
      seed: `[2]` uint32.
      drawn: `[]` int32, number of tokens sampled so far.
    """

    temperature: "jax.Array"
    top_k: "jax.Array"
    top_p: "jax.Array"
    min_p: "jax.Array"
    repetition_penalty: "jax.Array"
    presence_penalty: "jax.Array"
    frequency_penalty: "jax.Array"
    penalized: "jax.Array"
    bias: "jax.Array"
    in_prompt: "jax.Array"
    counts: "jax.Array"
    seed: "jax.Array"
    drawn: "jax.Array"

    @property
    def fixed(self) -> "SamplerState":
        """The constant part: without `counts` and `drawn`."""
        return dataclasses.replace(self, counts=None, drawn=None)  # pyright: ignore[reportArgumentType]

    @property
    def progress(self) -> Progress:
        """The part that changes with each sample."""
        return self.counts, self.drawn

    def after(self, progress: Progress) -> "SamplerState":
        """With another progress."""
        counts, drawn = progress
        return dataclasses.replace(self, counts=counts, drawn=drawn)

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above at trace time."""
        axes.check(np.float32, "V", bias=self.bias)
        axes.check(np.bool_, "* V", in_prompt=self.in_prompt)
        axes.check(np.int32, "B V", counts=self.counts)
        axes.check(np.uint32, "2", seed=self.seed)
        axes.check(np.float32, "", **{name: getattr(self, name) for name in NUMBERS})
        axes.check(np.bool_, "", penalized=self.penalized)
        axes.check(np.int32, "", top_k=self.top_k, drawn=self.drawn)


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
    host: dict[str, Any] = dict(
        **{name: np.float32(getattr(sampling, name)) for name in NUMBERS},
        top_k=np.int32(min(sampling.top_k, vocab_size)),
        penalized=np.bool_(sampling.penalizes),
        bias=bias,
        in_prompt=in_prompt,
        counts=np.zeros((1, vocab_size), np.int32),
        seed=np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32),
        drawn=np.int32(0),
    )
    # Host arrays: they are passed to the bucket, and nothing is dispatched here.
    return SamplerState(**host)


def penalize(logits: Any, state: SamplerState, where: Callable[..., Any]) -> Any:
    """Adds the bias and applies repetition, frequency and presence penalties to `[B, V]` float32 logits;
    `where` is that of NumPy or JAX, like the arrays."""
    logits = logits + state.bias
    in_answer, penalty = state.counts > 0, state.repetition_penalty
    repeated = where(logits > 0, logits / penalty, logits * penalty)
    logits = where(state.in_prompt | in_answer, repeated, logits)
    logits = logits - state.frequency_penalty * state.counts.astype(np.float32)
    return logits - state.presence_penalty * in_answer.astype(np.float32)


def threefry(
    key: tuple[Any, Any], block: tuple[Any, Any], shifted: Callable[[Any, int], Any]
) -> tuple[Any, Any]:
    """Threefry-2x32 with 20 rounds (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011), in
    int32 words of NumPy or JAX, which wrap around.

    Args:
      key: two words `[1]`.
      block: the two words `[n]` of each counter.
      shifted: shifts words right by a number of bits, with zeros on the left.

    Returns:
      Both words of each block.
    """
    words = (*key, key[0] ^ key[1] ^ _PARITY)
    high, low = block[0] + words[0], block[1] + words[1]
    for step in range(5):
        for bits in _ROTATIONS[step % 2]:
            high = high + low
            # Rotated left: the two parts have no bit in common, so that their sum is their union.
            low = high ^ (low * np.int32(1 << bits) + shifted(low, 32 - bits))
        high = high + words[(step + 1) % 3]
        low = low + words[(step + 2) % 3] + np.int32(step + 1)
    return high, low
