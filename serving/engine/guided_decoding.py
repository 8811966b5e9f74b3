"""Decodes under a grammar, with log-probabilities, or both."""

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.sampling_state import NO_TOKEN, SamplerState
from jaxllm.serving.engine.decoding import Decoding, TokenLogprob, counted
from jaxllm.serving.runners.runner import BatchRow, DecodedRow, prefill_prompt

if TYPE_CHECKING:
    from jaxllm.serving.engine.decoding import AnyMatcher

# Longer runs of forced tokens are fed in several dispatches, so that text streams.
_MOST_FORCED = 64
# Shares of tokens whose masks are nested in the one before, by whether that allows most tokens, before any
# are known; of how many tokens they count as the mean, and the least weight of another token.
_FIRST_SHARES = {True: 0.9, False: 0.5}
_FIRST_COUNT, _WEIGHT = 12, 0.03
# Times relative to a dispatch of one token: of each further one until it is known, and at most (else a wrong
# one would never be measured again), and of a draft with its verification.
_FURTHER, _MOST_FURTHER, _DRAFTED = 0.8, 0.9, 1.3


class GuidedDecoding(Decoding):
    """Decodes one answer under a grammar, with log-probabilities, or both.

    A mask is added to the sampler's bias, so that all runners and buckets work unchanged. Where a runner can,
    it asks for the mask after each token itself, between the tokens of a block (see `Runner.can_guide`).
    Elsewhere, in batches and with drafts, several tokens are sampled under one mask where the next masks are
    likely to be nested in it (see `Matcher.offer`), such as within a string, and cut where they are not; but
    states cannot be rolled back. Forced tokens are fed together as a prefill chunk; a thought is decoded in
    blocks. Log-probabilities require the logits after each token, from a prefill of one token.
    """

    def __init__(self, free: Decoding, matcher: "AnyMatcher | None", top_logprobs: int | None) -> None:
        """See the class.

        Args:
          free: decodes a thought and tokens that share a mask.
          matcher: the grammar's; None for any text.
          top_logprobs: see `GenerationConfig`.

        Raises:
          ConfigError: log-probabilities are requested from a level with int8 prefill only.
        """
        super().__init__(free.runner)
        self._free, self.matcher, self._top = free, matcher, top_logprobs or 0
        # Drafts are off in a dispatch with other answers.
        self._plain = Decoding(free.runner)
        self.logprobs = None if top_logprobs is None else []
        self._cannot_rollback = self.runner.cfg.states is not None
        self._chances = None if self._cannot_rollback else Chances()
        # Whether the next tokens are sampled together, or each under its own mask within one dispatch, and
        # whether that was possible after the last dispatch.
        self._together, self._guided, self._can_guide = False, False, False
        self._began_s = 0.0
        # The socket of the process that follows the answer, and a channel of the runner's kernels to it.
        self._channel: tuple[Any, Any] = None, None
        # The sampler before the dispatch; whether its bias forbids a token, once known.
        self._before: SamplerState | None = None
        self._forbids: bool | None = None
        if self.logprobs is not None and not self._feeds_floats(1):
            raise ConfigError(
                "log-probabilities need prefill in floats, and this engine prefills in integers alone; open "
                "it with --prefill auto or float"
            )

    def cache_tokens(self, tokens: int) -> int:
        """See `Decoding`."""
        return self._free.cache_tokens(tokens)

    def limit(self, pace: int, remaining: int) -> int:
        """See `Decoding`: in a thought as in a free answer; else the tokens that are worth sampling together,
        or the forced tokens plus one, regardless of the pace."""
        return self._limit(self._free, pace, remaining)

    def _limit(self, free: Decoding, pace: int, remaining: int) -> int:
        self._began_s, self._together, self._guided = time.perf_counter(), False, False
        if self.matcher is None or self.logprobs is not None:
            return 1
        if self.matcher.unbounded:
            most = self.matcher.most_unbounded or remaining
            self._together = not self._cannot_rollback
            return free.limit(pace, min(remaining, most)) if self._together else 1
        forced = len(self.matcher.forced(_MOST_FORCED))
        if self._chances is not None:
            self._chances.followed(self.matcher.nested)
        if forced or self.matcher.complete:
            return min(remaining, forced + 1) if self._jumps(forced) else 1
        most = free.limit(pace, remaining)
        if free is self._free and self._can_guide:
            self._guided = True
            return most
        if self._chances is None:
            return 1
        worth = self._chances.tokens(self.matcher.wide, most, one_pass=free.one_pass)
        self._together = worth > 1
        return worth

    def first(self, logits: Any, sampler: SamplerState) -> tuple[np.ndarray, SamplerState]:
        """See `Decoding`: samples a token `[1]` from logits and advances the grammar."""
        row = None if self.logprobs is None else np.asarray(logits)[0]
        sampled, after = self.runner.sample(logits, self._masked(sampler))
        chosen = np.asarray(sampled)
        token = int(chosen[0])
        if self.logprobs is not None and row is not None and token != NO_TOKEN:
            self.logprobs.append(token_logprob(row, token, self._top))
        self._take(token)
        return chosen, _unmasked(after, sampler)

    def decode(self, row: BatchRow, cached: Sequence[int]) -> DecodedRow:
        """See `Decoding`."""
        can_guide = self._can_guide_after(row)
        if self._guided and can_guide:
            return self._decode_guided(row, len(cached))
        self._can_guide = can_guide
        if self._together:
            return self.kept(self._free.decode(self._asked(row, len(cached)), cached))
        cache, sampler, at = row.cache, row.sampler, len(cached)
        forced = self._forced(row.limit - 1, sampler)
        if not forced and self.logprobs is None:
            return self.kept(self.runner.decode(self._asked(row, at)))
        fed = [int(np.asarray(row.token)[0])]
        if forced and self._cannot_rollback:
            # The states are not rolled back over the last token, so that it is always fed alone.
            cache = prefill_prompt(self.runner, cache, fed, at)[1]
            fed, at = [], at + 1
        logits, cache = prefill_prompt(self.runner, cache, [*fed, *forced], at)
        if forced and self.matcher is not None:
            self.matcher.take(forced)
            sampler = counted(sampler, forced)
            if self.matcher.complete:
                # The cache is one token ahead, as after a stop string.
                return DecodedRow(forced, cache, sampler)
        chosen, sampler = self.first(logits, sampler)
        return DecodedRow([*forced, *chosen.tolist()], cache, sampler)

    def _can_guide_after(self, row: BatchRow) -> bool:
        """Whether the next masks come from the grammar's process alone, and the runner can ask for them."""
        matcher = self.matcher
        if matcher is None or self.logprobs is not None or type(self._free) is not Decoding:
            return False
        if matcher.left is None or matcher.channel is None or not self.runner.can_guide(row.cache):
            return False
        # A mask could leave no token. The bias is the same for the whole answer.
        if self._forbids is None:
            self._forbids = bool(np.isneginf(np.asarray(row.sampler.bias)).any())
        return not self._forbids

    def _decode_guided(self, row: BatchRow, cached: int) -> DecodedRow:
        """Decodes tokens whose masks the runner asks for, up to one after which the grammar has more to
        tell."""
        # Here, because devices without JAX have grammars, too.
        from jaxllm.kernels.native_masks import MaskChannel
        from jaxllm.serving.buckets.guided import Guide

        matcher = self.matcher
        assert matcher is not None
        assert matcher.channel is not None
        assert matcher.left is not None
        if self._channel[0] is not matcher.channel:
            # Each token needs its own mask where states cannot be rolled back.
            plain = b"" if self._cannot_rollback else matcher.plain
            self._channel = matcher.channel, MaskChannel(matcher.channel.fileno(), plain)
        guide = Guide(self._channel[1].operand, matcher.left, matcher.allowed())
        cache, before = dataclasses.replace(row.cache, length=np.int32(cached)), _kept_progress(row.sampler)
        found = self.runner.decode(dataclasses.replace(row, cache=cache, guide=guide))
        if NO_TOKEN in found.tokens:
            return found
        kept = matcher.offer(found.tokens, self._jumps, followed=found.followed, asked=found.asked)
        return _cut(found, kept, before)

    @property
    def batchable(self) -> bool:
        """See `Decoding`: where the mask is there, and needs no logits."""
        return self.logprobs is None and self.matcher is not None and self.matcher.ready

    def batch_limit(self, pace: int, remaining: int) -> int:
        """See `Decoding`."""
        return self._limit(self._plain, pace, remaining)

    def batch_row(self, row: BatchRow, cached: Sequence[int]) -> BatchRow | None:
        """See `Decoding`: forced tokens are fed in a dispatch of their own."""
        forces = not self._together and self._forced(row.limit - 1, row.sampler)
        return None if forces else self._asked(row, len(cached))

    def kept(self, found: DecodedRow) -> DecodedRow:
        """See `Decoding`: of tokens that were sampled together those before the grammar cuts them, or a
        thought ends."""
        matcher, tokens, before = self.matcher, found.tokens, self._before
        assert matcher is not None
        assert before is not None, "`kept` before `batch_row`"
        found = dataclasses.replace(found, sampler=_unmasked(found.sampler, before))
        unbounded, kept = matcher.unbounded, 1
        if not self._together:
            self._take(tokens[0])
        elif NO_TOKEN in tokens:
            return found
        else:
            kept = matcher.offer(tokens, self._jumps)
        if self._chances is not None and not unbounded:
            self._chances.sampled(kept, len(tokens), time.perf_counter() - self._began_s)
        return _cut(found, kept, before)

    def _asked(self, row: BatchRow, cached: int) -> BatchRow:
        """The arguments of a dispatch under a mask."""
        self._before = _kept_progress(row.sampler) if self._together else row.sampler
        # The cache may be ahead of what was kept.
        cache = dataclasses.replace(row.cache, length=np.int32(cached))
        limit = row.limit if self._together else 1
        return dataclasses.replace(row, cache=cache, sampler=self._masked(row.sampler), limit=limit)

    def _take(self, token: int) -> None:
        if self.matcher is not None and token != NO_TOKEN:
            self.matcher.take([token])

    def _forced(self, most: int, sampler: SamplerState) -> list[int]:
        """The next forced tokens, up to one that the bias forbids."""
        if self.matcher is None or most < 1 or self.logprobs is not None:
            return []
        forced = self.matcher.forced(most)
        forced = forced if self._jumps(len(forced)) else []
        forbidden = np.isneginf(np.asarray(sampler.bias)[forced])
        return forced[: int(forbidden.argmax())] if forbidden.any() else forced

    def _masked(self, sampler: SamplerState) -> SamplerState:
        """The sampler with all tokens masked that the grammar does not allow."""
        if self.matcher is None:
            return sampler
        allowed = self.matcher.allowed()
        bias = np.where(allowed, np.asarray(sampler.bias), np.float32(-np.inf))
        if bias.max() == -np.inf:
            some = np.flatnonzero(allowed)
            raise ConfigError(
                f"logit_bias forbids every token that the grammar allows here ({len(some)}, such as "
                f"{some[:4].tolist()}); allow one of them, or change the grammar"
            )
        masked: Any = {"bias": bias, "penalized": np.bool_(True)}
        return dataclasses.replace(sampler, **masked)

    def _jumps(self, forced: int) -> bool:
        """Whether so many forced tokens are fed as a chunk, which rounds otherwise than decoding."""
        return forced > 0 and self._feeds_floats(min(forced, _MOST_FORCED) + 1)

    def _feeds_floats(self, tokens: int) -> bool:
        return self.runner.prefill_chunks(tokens)[0].mode == "float"


class Chances:
    """How many tokens are worth sampling under one mask, by the shares of masks that were nested in the one
    before and the times of dispatches."""

    def __init__(self) -> None:
        # Where most tokens are allowed, and elsewhere.
        self._shares = dict(_FIRST_SHARES)
        self._counts = dict.fromkeys(_FIRST_SHARES, _FIRST_COUNT)
        # Where the last token was sampled, and whether the mask after it has not come yet.
        self._wide, self._awaits = False, False
        # Time of a dispatch of one token, 0 until it is known, and that of each further token relative to it.
        self._first_s, self._further = 0.0, _FURTHER

    def tokens(self, wide: bool, most: int, *, one_pass: bool) -> int:
        """Number of tokens to sample in the next dispatch, at least 1 and at most `most`.

        Args:
          wide: whether the mask allows most tokens.
          most: limit of the dispatch.
          one_pass: see `Decoding`.
        """
        self._wide = wide
        first, further = (_DRAFTED, 0.0) if one_pass else (1.0, min(self._further, _MOST_FURTHER))
        # A token is used if all masks before it were nested.
        more = np.arange(most)
        rates = np.cumsum(self._shares[wide] ** more) / np.where(more, first + further * more, 1.0)
        return int(rates.argmax()) + 1

    def followed(self, nested: bool) -> None:
        """Learns whether the mask after the last token is nested."""
        if self._awaits:
            self._learn(nested)
        self._awaits = False

    def sampled(self, kept: int, tokens: int, took_s: float) -> None:
        """Learns from `tokens` tokens of one dispatch, of which the first `kept` were used."""
        for _ in range(kept - 1):
            self._learn(True)
        self._awaits = kept == tokens
        if not self._awaits:
            self._learn(False)
        if tokens == 1:
            self._first_s = _mean(self._first_s, took_s)
        elif took_s > self._first_s > 0:
            self._further = _mean(self._further, (took_s / self._first_s - 1) / (tokens - 1))

    def _learn(self, nested: bool) -> None:
        wide = self._wide
        self._counts[wide] += 1
        self._shares[wide] += max(_WEIGHT, 1 / self._counts[wide]) * (nested - self._shares[wide])


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


def _mean(before: float, value: float) -> float:
    return before + 0.2 * (value - before) if before else value


def _kept_progress(sampler: SamplerState) -> SamplerState:
    """The sampler with copies of the arrays that a dispatch takes, which what is cut needs."""
    progress: Any = (np.array(sampler.counts), np.array(sampler.drawn))
    return sampler.after(progress)


def _cut(found: DecodedRow, kept: int, before: SamplerState) -> DecodedRow:
    """The first tokens of a dispatch; `before` is the sampler before it."""
    tokens, accepted = found.tokens[:kept], found.accepted
    if kept == len(found.tokens):
        return found
    # The attention mass of what is cut stays: so few tokens hardly change it.
    accepted = None if accepted is None else min(accepted, kept)
    return DecodedRow(tokens, found.cache, counted(before, tokens), accepted)


def _unmasked(sampler: SamplerState, before: SamplerState) -> SamplerState:
    return dataclasses.replace(sampler, bias=before.bias, penalized=before.penalized)
