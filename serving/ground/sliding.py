"""Drops the middle of a sequence that outgrows the window (attention sinks, arXiv 2309.17453).

The first tokens stay, because models put unused attention there, and the newest stay, which are fed again
at their new positions. So a cache always equals a prefill of its tokens, and a sequence that is stored,
lost and recomputed continues the same. Half of the window is kept: less than one token is fed again per
decoded token.
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sliding:
    """Options of continuing an answer past the window.

    Attributes:
      sink_tokens: number of first tokens that stay; less than half of the window.
    """

    sink_tokens: int


def slid(tokens: Sequence[int], *, sink_tokens: int, most: int) -> list[int]:
    """The first `sink_tokens` tokens and the newest ones, `most` together."""
    newest = max(0, most - sink_tokens)
    return [*tokens[:sink_tokens], *tokens[len(tokens) - newest :]]


def kept_tokens(window: int) -> int:
    """Number of tokens that stay when a sequence outgrows the window."""
    return window // 2
