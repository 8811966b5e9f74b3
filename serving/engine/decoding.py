"""Decodes further tokens: plain blocks, with drafts (`jaxllm.serving.speculation`), or under a grammar, with
log-probabilities."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.sampling_state import NO_TOKEN, SamplerState
from jaxllm.serving.runners.runner import BatchRow, DecodedRow, Runner, prefill_prompt

if TYPE_CHECKING:
    from jaxllm.serving.guided.compiler import Matcher
    from jaxllm.serving.guided.thought import ThoughtMatcher

    AnyMatcher = Matcher | ThoughtMatcher

# As OpenAI's interface.
MAX_TOP_LOGPROBS = 20
# A dispatch decodes as many tokens as fit this time, so that text streams, a cancel takes effect soon, and
# few tokens are discarded after a stop string; small models still decode whole blocks.
_DISPATCH_MS = 50.0
# Longer runs of forced tokens are fed in several dispatches, so that text streams.
_MOST_FORCED = 64


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """A token and its log-probability (natural, of the model's own logits).

    Attributes:
      top: the likeliest tokens and theirs, likeliest first.
      rank: 1 plus the number of likelier tokens, of scored texts; 0 if unknown.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


class Decoding:
    """Decodes plain blocks after a prefill. Subclasses yield the same tokens in other ways, except where a
    grammar restricts them.

    Attributes:
      matcher: state of the answer's grammar; None without one. A step waits until it is ready, unless the
        decoding waits itself.
      logprobs: log-probabilities of the tokens so far; None if not requested.
      waits: whether it waits for its matcher itself, while the device computes.
    """

    matcher: "AnyMatcher | None" = None
    logprobs: list[TokenLogprob] | None = None
    waits = False

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    @property
    def ready(self) -> bool:
        """Whether the next step can begin without waiting for a grammar."""
        return self.matcher is None or self.waits or self.matcher.ready

    def cache_tokens(self, tokens: int) -> int:
        """Cache positions required for a sequence of `tokens` tokens."""
        return tokens

    def limit(self, pace: int, remaining: int) -> int:
        """The `limit` of the next `decode` (see `Runner.decode_limit`)."""
        return self.runner.decode_limit(pace, remaining)

    def first(self, logits: Any, sampler: SamplerState) -> tuple[Any, SamplerState]:
        """Samples the first token `[1]` from the logits after the prompt (see `Runner.sample`)."""
        return self.runner.sample(logits, sampler)

    def decode(self, row: BatchRow, cached: Sequence[int]) -> DecodedRow:
        """Runs one dispatch (see `Runner.decode`); `cached` are the tokens in the row's cache."""
        del cached
        return self.runner.decode(row)


class GuidedDecoding(Decoding):
    """Decodes one answer under a grammar, with log-probabilities, or both.

    A grammar's mask is added to the sampler's bias, one token per dispatch, so that all runners and buckets
    work unchanged. Where the prefill of one token costs no more than its decoding, it begins before the mask
    is there. Forced tokens are fed together as a prefill chunk; a thought needs no masks, and is decoded in
    blocks. Log-probabilities require the logits after each token, from a prefill of one token. Drafts are
    off: the nodes of a tree share one bias.
    """

    def __init__(self, runner: Runner, matcher: "AnyMatcher | None", top_logprobs: int | None) -> None:
        """See the class; `matcher` is the grammar's, None for any text.

        Raises:
          ConfigError: log-probabilities are requested from a level with int8 prefill only.
        """
        super().__init__(runner)
        self.matcher, self._top = matcher, top_logprobs or 0
        self.logprobs = None if top_logprobs is None else []
        exact = getattr(runner.options, "exact_chunks", False)
        self.waits = matcher is not None and exact and self._feeds_floats(1)
        if self.logprobs is not None and not self._feeds_floats(1):
            raise ConfigError(
                "log-probabilities need prefill in floats, and this engine prefills in integers alone; open "
                "it with --prefill auto or float"
            )

    def limit(self, pace: int, remaining: int) -> int:
        """See `Decoding`: the forced tokens plus one, regardless of the pace; in a thought as in a free
        answer."""
        if self.matcher is None or self.logprobs is not None:
            return 1
        if self.matcher.unbounded:
            # States cannot be rolled back to the end of a thought.
            most = self.matcher.most_unbounded or remaining
            one = self.runner.cfg.states is not None
            return 1 if one else self.runner.decode_limit(pace, min(remaining, most))
        if self.waits and not self.matcher.soon():
            return min(remaining, _MOST_FORCED + 1)
        limit = min(remaining, len(self.matcher.forced(_MOST_FORCED)) + 1)
        return limit if limit > 1 and self._feeds_floats(limit) else 1

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
        """See `Decoding`. No tokens if the grammar turns out to allow none after the last one."""
        if self.matcher is not None and self.matcher.unbounded and self.logprobs is None:
            return self._decode_unbounded(row, cached)
        cache, sampler, at = row.cache, row.sampler, len(cached)
        fed, logits = [int(np.asarray(row.token)[0])], None
        if self.waits and self.matcher is not None and not self.matcher.ready:
            # The mask is computed meanwhile.
            logits, cache = prefill_prompt(self.runner, cache, fed, at)
            fed, at = [], at + 1
        if self.matcher is not None and self.matcher.complete:
            # Found after the step began. The last token is cached, as others are.
            cache = prefill_prompt(self.runner, cache, fed, at)[1] if fed else cache
            return DecodedRow([], cache, sampler)
        forced = self._forced(row.limit - 1, sampler)
        if forced or logits is not None or self.logprobs is not None:
            if fed := [*fed, *forced]:
                logits, cache = prefill_prompt(self.runner, cache, fed, at)
            if forced and self.matcher is not None:
                self.matcher.take(forced)
                sampler = counted(sampler, forced)
                if self.matcher.complete:
                    # The cache is one token ahead, as after a stop string.
                    return DecodedRow(forced, cache, sampler)
            chosen, sampler = self.first(logits, sampler)
            return DecodedRow([*forced, *chosen.tolist()], cache, sampler)
        cache = dataclasses.replace(cache, length=np.int32(at))
        found = self.runner.decode(
            dataclasses.replace(row, cache=cache, sampler=self._masked(sampler), limit=1)
        )
        self._take(found.tokens[0])
        return dataclasses.replace(found, sampler=_unmasked(found.sampler, sampler))

    def _decode_unbounded(self, row: BatchRow, cached: Sequence[int]) -> DecodedRow:
        """Decodes a block of a thought, up to its end."""
        matcher: Any = self.matcher
        # The dispatch may take the arrays.
        counts, drawn = np.array(row.sampler.counts), np.array(row.sampler.drawn)
        cache = dataclasses.replace(row.cache, length=np.int32(len(cached)))
        masked = dataclasses.replace(row, cache=cache, sampler=self._masked(row.sampler))
        found = self.runner.decode(masked)
        tokens, sampler = found.tokens, _unmasked(found.sampler, row.sampler)
        if NO_TOKEN in tokens or (kept := matcher.take_unbounded(tokens)) == len(tokens):
            return dataclasses.replace(found, sampler=sampler)
        progress: Any = (counts, drawn)
        return DecodedRow(tokens[:kept], found.cache, counted(sampler.after(progress), tokens[:kept]))

    def _take(self, token: int) -> None:
        if self.matcher is not None and token != NO_TOKEN:
            self.matcher.take([token])

    def _forced(self, most: int, sampler: SamplerState) -> list[int]:
        """The next forced tokens, up to one that the bias forbids."""
        if self.matcher is None or most < 1 or self.logprobs is not None:
            return []
        forced = self.matcher.forced(most)
        forbidden = np.isneginf(np.asarray(sampler.bias)[forced])
        return forced[: int(forbidden.argmax())] if forbidden.any() else forced

    def _masked(self, sampler: SamplerState) -> SamplerState:
        """The sampler with all tokens masked that the grammar does not allow."""
        if self.matcher is None:
            return sampler
        allowed = self.matcher.allowed()
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
        return self.runner.prefill_chunks(tokens)[0].mode == "float"


def pace(tpot_ms: float) -> int:
    """Tokens per dispatch for a time per token."""
    return max(1, int(_DISPATCH_MS / max(tpot_ms, 1e-3)))


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


def _unmasked(sampler: SamplerState, before: SamplerState) -> SamplerState:
    return dataclasses.replace(sampler, bias=before.bias, penalized=before.penalized)


def counted(sampler: SamplerState, tokens: Sequence[int] | np.ndarray) -> SamplerState:
    """The sampler after tokens that were not sampled, as if they had been."""
    counts = np.array(sampler.counts)
    np.add.at(counts[0], list(tokens), 1)
    drawn = np.int32(int(sampler.drawn) + len(tokens))
    progress: Any = (counts, drawn)
    return sampler.after(progress)
