"""Going on where a sequence outgrows the window: its middle is forgotten (attention sinks, arXiv 2309.17453).

The first tokens stay, for that is where attention goes that has nowhere else to go, and the newest, which are
fed again where they come to stand. So a cache always holds what a prefill of its tokens gives, and nothing
remembers what was forgotten: a sequence that is stored, lost and computed again goes on as it would have.
Half of the window is kept, so that feeding again takes less than one token for each that is decoded.
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sliding:
    """How an answer goes on past the window.

    Attributes:
      sink_tokens: the first tokens of the sequence, which stay; fewer than half of the window.
    """

    sink_tokens: int


def slid(tokens: Sequence[int], *, sink_tokens: int, most: int) -> list[int]:
    """The first `sink_tokens` tokens and the newest ones, `most` together."""
    newest = max(0, most - sink_tokens)
    return [*tokens[:sink_tokens], *tokens[len(tokens) - newest :]]


def kept_tokens(window: int) -> int:
    """How many tokens stay of a sequence that outgrows a window."""
    return window // 2
