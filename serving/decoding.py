"""Decoding as engines do it: token by token (`PlainDecoding`), or with drafts (`serving.speculation`)."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from jaxllm.sampling import SamplerState
from serving.runners.runner import Runner

# A dispatch decodes as many tokens as fit this time, so that text flows, a cancel is obeyed soon, and
# little is thrown away behind a stop string; a small model still gets whole blocks.
_DISPATCH_MS = 50.0


class Decoding(Protocol):
    """One way to further tokens behind a prefilled prompt. The tokens are the runner's, whatever the way.

    Attributes:
      runner: whose tokens they are.
    """

    @property
    def runner(self) -> Runner: ...  # noqa: D102

    def cache_tokens(self, tokens: int) -> int:
        """Positions that a cache should have for a sequence of so many tokens."""
        ...

    def limit(self, pace: int, remaining: int) -> int:
        """How many tokens `decode` should be asked for (see `Runner.decode_limit`)."""
        ...

    def decode(
        self,
        token: Any,
        cache: Any,
        sampler: SamplerState,
        stop_ids: np.ndarray,
        limit: int,
        held: Sequence[int],
    ) -> tuple[Any, Any, Any, SamplerState]:
        """One dispatch (see `Runner.decode`)."""
        ...


class PlainDecoding:
    """Decodes without drafts (see `Decoding`)."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def cache_tokens(self, tokens: int) -> int:
        """See `Decoding`."""
        return tokens

    def limit(self, pace: int, remaining: int) -> int:
        """See `Decoding`."""
        return self.runner.decode_limit(pace, remaining)

    def decode(
        self,
        token: Any,
        cache: Any,
        sampler: SamplerState,
        stop_ids: np.ndarray,
        limit: int,
        held: Sequence[int],
    ) -> tuple[Any, Any, Any, SamplerState]:
        """See `Decoding`."""
        return self.runner.decode(token, cache, sampler, stop_ids, limit, held)


def pace(tpot_ms: float) -> int:
    """How many tokens take as long as a user should wait for the next words."""
    return max(1, int(_DISPATCH_MS / max(tpot_ms, 1e-3)))
