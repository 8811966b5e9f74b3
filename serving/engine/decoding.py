"""Decodes further tokens in plain blocks; drafts are in `jaxllm.serving.speculation`, grammars and
log-probabilities in `guided_decoding`."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.sampling_state import SamplerState
from jaxllm.serving.runners.runner import BatchRow, DecodedRow, Runner

if TYPE_CHECKING:
    from jaxllm.serving.guided.matcher import Matcher
    from jaxllm.serving.guided.thought import ThoughtMatcher

    AnyMatcher = Matcher | ThoughtMatcher

# As OpenAI's interface.
MAX_TOP_LOGPROBS = 20
# A dispatch decodes as many tokens as fit this time, so that text streams, a cancel takes effect soon, and
# few tokens are discarded after a stop string; small models still decode whole blocks.
_DISPATCH_MS = 50.0


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
      matcher: state of the answer's grammar; None without one. A step waits until it is ready.
      logprobs: log-probabilities of the tokens so far; None if not requested.
      one_pass: whether all tokens of a dispatch cost one pass over the weights, as those of a draft do.
    """

    matcher: "AnyMatcher | None" = None
    logprobs: list[TokenLogprob] | None = None
    one_pass = False

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    @property
    def ready(self) -> bool:
        """Whether the next step can begin without waiting long for a grammar."""
        return self.matcher is None or self.matcher.soon()

    @property
    def batchable(self) -> bool:
        """Whether its next tokens can be decoded in one dispatch with those of other answers."""
        return True

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

    def batch_limit(self, pace: int, remaining: int) -> int:
        """As `limit`, of a dispatch with other answers."""
        return self.runner.decode_limit(pace, remaining)

    def batch_row(self, row: BatchRow, cached: Sequence[int]) -> BatchRow | None:
        """The row of a dispatch with other answers, after `batch_limit`; None if it needs `decode`."""
        del cached
        return row

    def kept(self, found: DecodedRow) -> DecodedRow:
        """What is used of a dispatch of `batch_row`."""
        return found


def pace(tpot_ms: float) -> int:
    """Tokens per dispatch for a time per token."""
    return max(1, int(_DISPATCH_MS / max(tpot_ms, 1e-3)))


def counted(sampler: SamplerState, tokens: Sequence[int] | np.ndarray) -> SamplerState:
    """The sampler after tokens that were not sampled, as if they had been."""
    counts = np.array(sampler.counts)
    np.add.at(counts[0], list(tokens), 1)
    drawn = np.int32(int(sampler.drawn) + len(tokens))
    progress: Any = (counts, drawn)
    return sampler.after(progress)
