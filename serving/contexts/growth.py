"""What a context's chunks come to be when a call ends: how wide each is, by how much it was attended to."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxllm.kv.codecs import RAW
from jaxllm.kv.recompute import LOST
from jaxllm.kv.tolerance import RATIOS, allocate, chunk_mass, sightings
from serving.contexts.chunk_io import ChunkIO
from serving.contexts.options import ContextOptions
from serving.contexts.record import Record
from serving.request import Session, common_prefix
from serving.sliding import slid


def sinking(before: Record, chunk_io: ChunkIO, *, mass: np.ndarray, first: int, held: int) -> Record:
    """The record of a context that keeps its first chunk alone, with the attention that this got so far; the
    arguments are those of `grown`."""
    got, seen = _attended(before, chunk_io, mass=mass, first=first, held=held)
    return dataclasses.replace(
        before, bits=before.bits[:1], mass=tuple(got[:1].tolist()), seen=tuple(seen[:1].tolist())
    )


def grown(
    before: Record,
    chunk_io: ChunkIO,
    options: ContextOptions,
    *,
    tokens: Sequence[int],
    mass: np.ndarray,
    first: int,
    held: int,
) -> Record:
    """A context's record after a call (LLMS, section 3.2).

    Args:
      before: as it was.
      chunk_io: of its level.
      options: say how many bytes chunks may take.
      tokens: all of the context's now.
      mass: `[>= held]`, the attention that each position got in this call.
      first: the position of the first token that the call fed.
      held: tokens in the cache, of which all whole chunks are kept.

    Returns:
      The record with the widths that chunks are to have: none rises above what it is stored at.
    """
    got, seen = _attended(before, chunk_io, mass=mass, first=first, held=held)
    count = len(got)
    known = min(count, len(before.bits))
    if chunk_io.widths == (RAW,):
        bits = np.full(count, RAW)
    else:
        # What is gone does not come back by being written with more bits.
        most = np.full(count, max(RATIOS))
        most[:known] = [max(RATIOS) if each == LOST else each for each in before.bits[:known]]
        density = got / np.maximum(seen, 1)
        bits = allocate(density, options.ratio, newest=options.newest_chunks, most=most)
    return dataclasses.replace(
        before,
        tokens=tuple(tokens),
        bits=tuple(bits.tolist()),
        mass=tuple(got.tolist()),
        seen=tuple(seen.tolist()),
    )


def ended(
    before: Record,
    resident: Mapping[int, int],
    chunk_io: ChunkIO,
    options: ContextOptions,
    *,
    session: Session,
    tokens: Sequence[int],
    first: int,
) -> Record:
    """A context's record after a call that may have been interrupted anywhere: what its cache and its tokens
    agree on is kept, and where an error took the cache what chunks there were.

    Args:
      before: as it was.
      resident: of its chunks in memory, the width of each by number.
      session: the call's, with its cache, if that is there, and the tokens that this holds.
      chunk_io, options, tokens, first: see `grown`.
    """
    if session.cache is None:
        return _agreeing(before, tokens, chunk_io.chunk_tokens)
    return grown(
        before.beside(resident),
        chunk_io,
        options,
        tokens=tokens,
        mass=np.asarray(session.cache.mass)[0],
        first=first,
        held=_agreed(session.tokens, tokens),
    )


def slid_record(record: Record, *, chunk_tokens: int, most: int) -> Record:
    """What is left of a context that forgets its middle before a call: its first chunk and its newest tokens,
    `most` together, which are computed again where they stand then (see `serving.sliding`)."""
    tokens = slid(record.tokens, sink_tokens=chunk_tokens, most=most)
    first = {field: getattr(record, field)[:1] for field in ("bits", "mass", "seen", "files")}
    return dataclasses.replace(record, tokens=tuple(tokens), **first)


def most_bytes(chunk_io: ChunkIO, options: ContextOptions, chunks: int) -> int:
    """Of so many chunks of a context, whatever their widths come out as."""
    if chunk_io.widths == (RAW,):
        return chunks * chunk_io.chunk_bytes(RAW)
    # Levels take bytes by width, scales do not.
    scales = 2 * chunk_io.chunk_bytes(4) - chunk_io.chunk_bytes(8)
    levels = chunk_io.chunk_bytes(8) - scales
    return int(chunks * (scales + options.ratio * levels)) + 1


def _attended(
    before: Record, chunk_io: ChunkIO, *, mass: np.ndarray, first: int, held: int
) -> tuple[np.ndarray, np.ndarray]:
    """The attention that each whole chunk got so far, and that it could have got, `[N]` each."""
    size, cfg = chunk_io.chunk_tokens, chunk_io.runner.cfg
    count = held // size
    heads = [cfg.units(layer).kv_heads * cfg.group for layer in range(cfg.layers)]
    got = chunk_mass(mass, count, size)
    seen = sightings(first, held, count, size, heads=heads, windows=cfg.attention_windows)
    known = min(count, len(before.mass))
    got[:known] += before.mass[:known]
    seen[:known] += before.seen[:known]
    return got, seen


def _agreeing(before: Record, tokens: Sequence[int], chunk_tokens: int) -> Record:
    """The record of a context that has other tokens now, with those of its chunks that hold what is at their
    places still."""
    count = min(len(before.bits), _agreed(before.tokens, tokens) // chunk_tokens)
    kept = {field: getattr(before, field)[:count] for field in ("bits", "mass", "seen", "files")}
    return dataclasses.replace(before, tokens=tuple(tokens), **kept)


def _agreed(held: Sequence[int], tokens: Sequence[int]) -> int:
    """How many of the first tokens of two sequences are the same."""
    count = min(len(held), len(tokens))
    return count if list(held[:count]) == list(tokens[:count]) else common_prefix(held, tokens)
