"""Decodes under a grammar, with log-probabilities, or both (see `serving.decoding.Decoding`).

A grammar's mask goes into the sampler's bias, one token a dispatch, so that every runner and its buckets
serve as they are. Tokens that the grammar forces are fed together, as a prefill chunk. Log-probabilities need
the logits after each token, which a prefill of one token gives. Drafts are off: a tree's nodes have one bias.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.sampling_state import NO_TOKEN, SamplerState
from serving.guided.logprobs import TokenLogprob, token_logprob
from serving.guided.matcher import Matcher
from serving.runners.runner import Runner, prefill_prompt

# Longer runs of forced tokens are fed in several dispatches, so that text streams.
_MOST_FORCED = 64


class GuidedDecoding:
    """Decodes one answer token by token.

    Attributes:
      runner: of the model.
      logprobs: of the tokens so far; None if they were not asked for.
    """

    accepted = None

    def __init__(self, runner: Runner, matcher: Matcher | None, top_logprobs: int | None) -> None:
        """See the class; `matcher` follows the grammar, None for any text.

        Raises:
          ConfigError: log-probabilities are asked of a level that prefills in integers alone.
        """
        self.runner, self._matcher, self._top = runner, matcher, top_logprobs or 0
        self.logprobs: list[TokenLogprob] | None = None if top_logprobs is None else []
        if self.logprobs is not None and not self._feeds_floats(1):
            raise ConfigError(
                "log-probabilities need prefill in floats, and this engine prefills in integers alone; open "
                "it with --prefill auto or float"
            )

    @property
    def complete(self) -> bool:
        """See `Decoding`."""
        return self._matcher is not None and self._matcher.complete

    def cache_tokens(self, tokens: int) -> int:
        """See `Decoding`."""
        return tokens

    def limit(self, pace: int, remaining: int) -> int:
        """See `Decoding`: the forced tokens and one more, whatever the pace."""
        del pace
        if self._matcher is None or self.logprobs is not None:
            return 1
        limit = min(remaining, len(self._matcher.forced(_MOST_FORCED)) + 1)
        return limit if limit > 1 and self._feeds_floats(limit) else 1

    def first(self, logits: Any, sampler: SamplerState) -> tuple[np.ndarray, SamplerState]:
        """See `Decoding`: draws a token `[1]` from logits, and takes it."""
        row = None if self.logprobs is None else np.asarray(logits)[0]
        drawn, after = self.runner.sample(logits, self._masked(sampler))
        chosen = np.asarray(drawn)
        token = int(chosen[0])
        if self.logprobs is not None and row is not None and token != NO_TOKEN:
            self.logprobs.append(token_logprob(row, token, self._top))
        self._take(token)
        return chosen, _unmasked(after, sampler)

    def decode(
        self,
        token: Any,
        cache: Any,
        sampler: SamplerState,
        stop_ids: np.ndarray,
        limit: int,
        cached: Sequence[int],
    ) -> tuple[np.ndarray, int, Any, SamplerState]:
        """See `Decoding`."""
        forced = self._forced(limit - 1, sampler)
        if forced or self.logprobs is not None:
            fed = [int(np.asarray(token)[0]), *forced]
            logits, cache = prefill_prompt(self.runner, cache, fed, len(cached))
            if forced and self._matcher is not None:
                self._matcher.take(forced)
                sampler = _counted(sampler, forced)
                if self._matcher.complete:
                    # The cache is one token ahead, as after a stop string.
                    return np.array([forced], np.int32), len(forced), cache, sampler
            chosen, sampler = self.first(logits, sampler)
            return np.array([[*forced, *chosen.tolist()]], np.int32), len(forced) + 1, cache, sampler
        masked = self._masked(sampler)
        rows, _, cache, drawn = self.runner.decode(token, cache, masked, stop_ids, 1, cached)
        chosen = np.asarray(rows)[:, :1]
        self._take(int(chosen[0, 0]))
        return chosen, 1, cache, _unmasked(drawn, sampler)

    def _take(self, token: int) -> None:
        if self._matcher is not None and token != NO_TOKEN:
            self._matcher.take([token])

    def _forced(self, most: int, sampler: SamplerState) -> list[int]:
        """The next forced tokens, up to one that the bias forbids."""
        if self._matcher is None or most < 1 or self.logprobs is not None:
            return []
        forced = self._matcher.forced(most)
        forbidden = np.isneginf(np.asarray(sampler.bias)[forced])
        return forced[: int(forbidden.argmax())] if forbidden.any() else forced

    def _masked(self, sampler: SamplerState) -> SamplerState:
        """The sampler with the tokens forbidden that the grammar does not allow.

        Raises:
          ConfigError: the bias forbids all the others.
        """
        if self._matcher is None:
            return sampler
        allowed = self._matcher.allowed()
        bias = np.where(allowed, np.asarray(sampler.bias), np.float32(-np.inf))
        if np.isneginf(bias).all():
            some = np.flatnonzero(allowed)
            raise ConfigError(
                f"logit_bias forbids every token that the grammar allows here ({len(some)}, such as "
                f"{some[:4].tolist()}); allow one of them, or change the grammar"
            )
        masked: Any = {"bias": bias, "penalized": np.bool_(True)}
        return dataclasses.replace(sampler, **masked)

    def _feeds_floats(self, tokens: int) -> bool:
        """Whether so many tokens are prefilled in floats, as tokens are decoded."""
        return self.runner.prefill_chunks(tokens)[0].mode == "float"


def _unmasked(sampler: SamplerState, before: SamplerState) -> SamplerState:
    return dataclasses.replace(sampler, bias=before.bias, penalized=before.penalized)


def _counted(sampler: SamplerState, tokens: Sequence[int]) -> SamplerState:
    """The sampler after tokens that were not drawn, as if they had been."""
    counts = np.array(sampler.counts)
    np.add.at(counts[0], list(tokens), 1)
    drawn = np.int32(int(sampler.drawn) + len(tokens))
    progress: Any = (counts, drawn)
    return sampler.after(progress)
