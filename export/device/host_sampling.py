"""Samples tokens in NumPy as `jaxllm.sampling` does in compiled steps: the same penalties, filters and noise.

Random bits are those of `jax.random` with the same key, so that a seed gives the answer of the live
service, except where sums or logarithms, which two libraries round differently, decide between tokens.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxllm.sampling_state import NO_TOKEN, SamplerState, penalize, threefry
from jaxllm.speculation.token_tree import TokenTree

_ONE = np.float32(1).view(np.int32)
_TINY = np.finfo(np.float32).tiny


def sample(logits: np.ndarray, state: SamplerState) -> tuple[int, SamplerState]:
    """Chooses a token from `logits` `[V]` float32.

    Returns:
      The token, `NO_TOKEN` if the logits are not finite or all tokens are forbidden; and the next state.
    """
    token = choose(logits, state)
    counts = np.array(state.counts)
    counts[0, token] += 1
    drawn = np.int32(int(state.drawn) + 1)
    return token, dataclasses.replace(state, counts=counts, drawn=drawn)  # pyright: ignore[reportArgumentType]


def choose(logits: np.ndarray, state: SamplerState) -> int:
    """The token of `sample`."""
    logits = np.asarray(logits, np.float32)
    # Logits may be infinite, or no numbers: then no token is chosen.
    with np.errstate(all="ignore"):
        if bool(state.penalized):
            logits = penalize(logits, state, np.where)[0]
        if float(state.temperature) <= 0:
            return _if_finite(logits, int(logits.argmax()))
        # Relative to the largest, so that division by a small temperature gives no positive infinity.
        kept = filtered((logits - logits.max()) / np.float32(state.temperature), state)
        # Noise is most of the work, and independent per token: only for the remaining tokens.
        left = np.flatnonzero(kept != -np.inf)
        if not len(left):
            return NO_TOKEN
        noise = gumbel_noise(np.asarray(state.seed), int(state.drawn), left)
        return _if_finite(kept, int(left[(kept[left] + noise).argmax()]))


def filtered(logits: np.ndarray, state: SamplerState) -> np.ndarray:
    """Returns `[V]` logits, -inf for tokens that top-k, top-p and min-p drop; ties with the last retained
    token are retained."""
    top_k, top_p = int(state.top_k), np.float32(state.top_p)
    if 0 < top_k < len(logits):
        least = np.partition(logits, -top_k)[-top_k]
        logits = np.where(logits >= least, logits, -np.inf).astype(np.float32)
    if top_p < 1:
        # What top-k dropped has no share.
        left = np.sort(logits[logits != -np.inf])[::-1]
        shares = np.exp(left - logits.max())
        last = np.searchsorted(np.cumsum(shares / shares.sum()), top_p)
        if len(left):
            logits = np.where(logits >= left[min(last, len(left) - 1)], logits, -np.inf)
    if float(state.min_p) > 0:
        floor = logits.max() + np.log(np.float32(state.min_p))
        logits = np.where(logits >= floor, logits, -np.inf)
    return logits.astype(np.float32)


def gumbel_noise(seed: np.ndarray, drawn: int, tokens: np.ndarray) -> np.ndarray:
    """Gumbel noise `[n]` float32 of `tokens` `[n]` (see `jaxllm.sampling.gumbel_noise`); `seed` is `[2]`
    uint32."""
    uniform = (_shifted(random_bits(seed, drawn, tokens), 9) + _ONE).view(np.float32) - np.float32(1)
    return -np.log(-np.log(np.maximum(uniform, _TINY)))


def random_bits(seed: np.ndarray, drawn: int, tokens: np.ndarray) -> np.ndarray:
    """Random words `[n]` int32 of `tokens` `[n]`: those of `jax.random.bits`."""
    words, zero = seed.view(np.int32), np.zeros(1, np.int32)
    key = threefry((words[:1], words[1:]), (zero, np.array([drawn], np.int32)), _shifted)
    high, low = threefry(key, (zero, tokens.astype(np.int32)), _shifted)
    return high ^ low


def _shifted(word: np.ndarray, bits: int) -> np.ndarray:
    return (word.view(np.uint32) >> np.uint32(bits)).view(np.int32)


def _if_finite(logits: np.ndarray, token: int) -> int:
    return token if np.isfinite(logits[token]) else NO_TOKEN


class HostChooser:
    """Draws tokens without JAX, and compiles nothing."""

    def prepare(self, trees: Iterable[int] = ()) -> None:
        """Does nothing."""
        del trees

    def next_token(self, logits: Any, sampler: SamplerState) -> tuple[np.ndarray, SamplerState]:
        """See `TokenChooser`."""
        token, sampler = sample(np.asarray(logits)[0], sampler)
        return np.array([token], np.int32), sampler

    def of_tree(self, tree: TokenTree, logits: Any, sampler: SamplerState) -> np.ndarray:
        """See `TokenChooser`."""
        rows, chosen = np.asarray(logits), np.zeros(tree.room, np.int32)
        tokens, said = np.asarray(tree.tokens), np.array(tree.ancestors)
        # The root's token is counted already.
        said[:, 0] = False
        for node in range(int(tree.count)):
            counts = np.array(sampler.counts)
            np.add.at(counts[0], tokens[said[node]], 1)
            drawn = np.int32(int(sampler.drawn) + int(np.asarray(tree.depths)[node]))
            state = dataclasses.replace(sampler, counts=counts, drawn=drawn)  # pyright: ignore
            chosen[node] = choose(rows[node], state)
        return chosen
