"""Computes log-probabilities of tokens from a model's logits."""

import dataclasses

import numpy as np

from jaxllm.errors import ConfigError

# As OpenAI's interface.
MAX_TOP_LOGPROBS = 20


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """A token and its log-probability (natural, of the model's own logits).

    Attributes:
      token: its id.
      logprob: its log-probability.
      top: the likeliest tokens and theirs, likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def require_top_logprobs(count: int | None) -> None:
    """Checks a number of most likely tokens.

    Raises:
      ConfigError: it is no whole number in [0, MAX_TOP_LOGPROBS].
    """
    if count is None:
        return
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MAX_TOP_LOGPROBS:
        raise ConfigError(
            f"top_logprobs must be a whole number from 0 to {MAX_TOP_LOGPROBS}, or None; got {count!r}"
        )


def token_logprob(logits: np.ndarray, token: int, top: int) -> TokenLogprob:
    """The log-probability of a token and those of the likeliest ones.

    Args:
      logits: `[V]` float32, all finite or -inf, before bias, penalties and temperature.
      token: id of the token.
      top: number of most likely tokens; of equal ones those of lower ids.
    """
    largest = logits.max()
    shift = float(largest) + float(np.log(np.exp(logits - largest).sum(dtype=np.float64)))
    likeliest = []
    if top:
        least = np.partition(logits, -top)[-top] if top < len(logits) else logits.min()
        candidates = np.flatnonzero(logits >= least)
        likeliest = candidates[np.argsort(-logits[candidates], kind="stable")][:top].tolist()
    return TokenLogprob(
        token, float(logits[token]) - shift, tuple((each, float(logits[each]) - shift) for each in likeliest)
    )
