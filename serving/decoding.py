"""Decodes further tokens: plain blocks (`PlainDecoding`), with drafts (`serving.speculation`), or under a
grammar (`serving.guided`)."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from jaxllm.sampling_state import SamplerState
from serving.guided.logprobs import TokenLogprob
from serving.runners.runner import Runner

# A dispatch decodes as many tokens as fit this time, so that text streams, a cancel takes effect soon, and
# few tokens are discarded after a stop string; a small model still gets whole blocks.
_DISPATCH_MS = 50.0


class Decoding(Protocol):
    """A way to decode further tokens after a prefill. Without a grammar every way gives the same tokens as
    the runner alone.

    Attributes:
      runner: of the model whose tokens they are.
      complete: whether the answer has ended though no token says so: its grammar allows nothing more.
      logprobs: of the tokens so far; None if they were not asked for.
      accepted: number of the first tokens of the last `decode` that were drafted and accepted; None where it
        verified no drafts.
    """

    @property
    def runner(self) -> Runner: ...  # noqa: D102

    @property
    def complete(self) -> bool: ...  # noqa: D102

    @property
    def logprobs(self) -> list[TokenLogprob] | None: ...  # noqa: D102

    @property
    def accepted(self) -> int | None: ...  # noqa: D102

    def cache_tokens(self, tokens: int) -> int:
        """Positions that a cache should have for a sequence of so many tokens."""
        ...

    def limit(self, pace: int, remaining: int) -> int:
        """The number of tokens to ask `decode` for (see `Runner.decode_limit`)."""
        ...

    def first(self, logits: Any, sampler: SamplerState) -> tuple[Any, SamplerState]:
        """Draws the first token `[1]` from the logits after the prompt (see `Runner.sample`)."""
        ...

    def decode(
        self,
        token: Any,
        cache: Any,
        sampler: SamplerState,
        stop_ids: np.ndarray,
        limit: int,
        cached: Sequence[int],
    ) -> tuple[Any, Any, Any, SamplerState]:
        """Runs one dispatch (see `Runner.decode`); `cached` are the tokens in the cache."""
        ...


class PlainDecoding:
    """Decodes without drafts (see `Decoding`)."""

    complete, logprobs, accepted = False, None, None

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def cache_tokens(self, tokens: int) -> int:
        """See `Decoding`."""
        return tokens

    def limit(self, pace: int, remaining: int) -> int:
        """See `Decoding`."""
        return self.runner.decode_limit(pace, remaining)

    def first(self, logits: Any, sampler: SamplerState) -> tuple[Any, SamplerState]:
        """See `Decoding`."""
        return self.runner.sample(logits, sampler)

    def decode(
        self,
        token: Any,
        cache: Any,
        sampler: SamplerState,
        stop_ids: np.ndarray,
        limit: int,
        cached: Sequence[int],
    ) -> tuple[Any, Any, Any, SamplerState]:
        """See `Decoding`."""
        return self.runner.decode(token, cache, sampler, stop_ids, limit, cached)


def pace(tpot_ms: float) -> int:
    """The number of tokens of a dispatch, given the time per token."""
    return max(1, int(_DISPATCH_MS / max(tpot_ms, 1e-3)))
