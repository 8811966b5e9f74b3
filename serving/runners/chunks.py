"""Splits prompts into chunks of the lengths that have buckets."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxllm.kv.cache import TokenPositions

# Fixed cost of a chunk, in tokens of prefill: on a CPU each chunk reads all weights once, which costs about
# as much as computing this many rows.
_PASS_TOKENS = 24


def plan_chunks(tokens: int, lengths: Sequence[int]) -> list[int]:
    """Chunk lengths that cover `tokens` at minimum cost (see `prompt_cost`); only the last is padded."""
    longest = max(lengths)
    # All but a tail shorter than two longest chunks is split into longest chunks.
    head = max(0, (tokens - longest) // longest)
    return [longest] * head + list(_cheapest(tokens - head * longest, tuple(sorted(lengths))))


def padded(tokens: Sequence[int], length: int) -> tuple[np.ndarray, int]:
    """A `[1, length]` int32 row of `tokens`, padded with zeros, and the number of tokens."""
    row = np.zeros((1, length), np.int32)
    row[0, : len(tokens)] = tokens
    return row, len(tokens)


def placed_chunks(
    tokens: Sequence[int], lengths: Sequence[int], at: int
) -> "list[tuple[np.ndarray, TokenPositions]]":
    """Tokens that begin at position `at`, in chunks of `lengths`: rows `[T]` int32, padded, and their
    positions."""
    # Imported here: devices that only run exported programs have no JAX.
    from jaxllm.kv.cache import TokenPositions

    found, position = [], 0
    for length in lengths:
        row, valid = padded(tokens[position : position + length], length)
        positions = np.arange(at + position, at + position + length, dtype=np.int32)
        found.append((row[0], TokenPositions(positions, np.int32(valid), consecutive=True)))  # pyright: ignore
        position += valid
    return found


def prompt_cost(tokens: int, lengths: Sequence[int], *, exact: bool) -> int:
    """The cost of prefilling `tokens` in chunks, in tokens: their tokens, padding included unless chunks are
    `exact`, and a constant per chunk for the read of the weights."""
    plan = plan_chunks(tokens, lengths)
    return (tokens if exact else sum(plan)) + _PASS_TOKENS * len(plan)


def _chunk_cost(plan: Sequence[int]) -> int:
    return sum(plan) + _PASS_TOKENS * len(plan)


@functools.lru_cache(maxsize=4096)
def _cheapest(tokens: int, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Descending chunk lengths of minimum cost for a tail of `tokens`."""
    best = None
    for length in lengths:
        rest = tokens - length
        if rest <= 0:
            plan = (length,)
        else:
            tail = _cheapest(rest, tuple(c for c in lengths if c <= length))
            plan = (length, *tail)
        cost = _chunk_cost(plan)
        if best is None or cost < best[0]:
            best = (cost, plan)
    assert best is not None
    return best[1]
