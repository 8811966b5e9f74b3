"""Makes a context's record after a call: chooses the width of each chunk by its density."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxllm.contexts.codecs import RAW, STATE, WIDTHS
from jaxllm.contexts.recompute import LOST
from jaxllm.contexts.tolerance import allocate, chunk_mass, sightings
from jaxllm.errors import ConfigError
from jaxllm.kv.cache import KVCache
from jaxllm.serving.contexts.chunk_io import ChunkIO
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.contexts.record import Record
from jaxllm.serving.engine.request import Session, common_prefix, slid

# Tolerance for products of ratios and bytes just below an integer.
_ROUNDING = 1e-6


def sink_record(
    before: Record, chunk_io: ChunkIO, *, mass: np.ndarray, first: int, cached_tokens: int
) -> Record:
    """The record of a context that keeps only its first chunk, with its attention so far; arguments as for
    `grown_record`."""
    got, seen = _attended(before, chunk_io, mass=mass, first=first, cached_tokens=cached_tokens)
    return dataclasses.replace(
        before, bits=before.bits[:1], mass=tuple(got[:1].tolist()), seen=tuple(seen[:1].tolist())
    )


def grown_record(
    before: Record,
    chunk_io: ChunkIO,
    options: ContextOptions,
    *,
    tokens: Sequence[int],
    mass: np.ndarray,
    first: int,
    cached_tokens: int,
) -> Record:
    """A context's record after a call (LLMS, section 3.2).

    Args:
      before: the record before the call.
      chunk_io: `ChunkIO` of the context's level.
      options: limits of chunks' bytes.
      tokens: all tokens of the context now.
      mass: `[>= cached_tokens]`, attention mass of each position in this call.
      first: position of the first token that the call fed.
      cached_tokens: number of tokens in the cache; all of their whole chunks are stored.

    Returns:
      The record with the new widths of chunks, none above its stored width.
    """
    got, seen = _attended(before, chunk_io, mass=mass, first=first, cached_tokens=cached_tokens)
    count = len(got)
    known = min(count, len(before.bits))
    if chunk_io.widths == (RAW,):
        bits = np.full(count, RAW)
    else:
        # More bits do not restore what fewer bits lost.
        most = np.full(count, max(WIDTHS))
        most[:known] = [max(WIDTHS) if each == LOST else each for each in before.bits[:known]]
        bits = _widths(chunk_io, options, got / np.maximum(seen, 1), most)
    return dataclasses.replace(
        before,
        tokens=tuple(tokens),
        bits=tuple(bits.tolist()),
        mass=tuple(got.tolist()),
        seen=tuple(seen.tolist()),
    )


def ended_record(
    before: Record,
    resident: Mapping[int, int],
    chunk_io: ChunkIO,
    options: ContextOptions,
    *,
    session: Session,
    tokens: Sequence[int],
    first: int,
) -> Record:
    """A context's record after a call that may have been interrupted anywhere.

    Keeps the chunks of the common prefix of the cache and `tokens`; without a cache (lost by an error), the
    earlier chunks that still agree with `tokens`.

    Args:
      before: the record before the call.
      resident: width of each chunk in memory, by number.
      session: session of the call, with its cache, if there is one, and the tokens in it.
      chunk_io, options, tokens, first: see `grown_record`.
    """
    if session.cache is None:
        return agreeing_record(before, tokens, chunk_io.chunk_tokens)
    if session.state_tokens is not None:
        return _record_with_states(before, tokens, session, chunk_io.chunk_tokens)
    return grown_record(
        before.beside(resident),
        chunk_io,
        options,
        tokens=tokens,
        mass=position_mass(session.cache, chunk_io.chunk_tokens),
        first=first,
        cached_tokens=_agreed(session.tokens, tokens),
    )


def _record_with_states(before: Record, tokens: Sequence[int], session: Session, chunk_tokens: int) -> Record:
    """A context's record after a call of a model with state layers. If the states have consumed more than its
    tokens, as after a stop string, the stored states stay, and the next call continues from them."""
    count = session.state_tokens
    if not count or len(session.tokens) != count or session.tokens != list(tokens[:count]):
        return agreeing_record(before, tokens, chunk_tokens)
    bits = (*[RAW] * (count // chunk_tokens), STATE)
    none = (0.0,) * len(bits)
    return dataclasses.replace(
        before, tokens=tuple(tokens), bits=bits, mass=none, seen=none, state_tokens=count
    )


def slid_record(record: Record, *, chunk_tokens: int, most: int) -> Record:
    """The record after dropping the middle of a context before a call: its first chunk and its newest
    tokens, `most` together. The newest are recomputed at their new positions (see
    `jaxllm.serving.engine.request`)."""
    tokens = slid(record.tokens, sink_tokens=chunk_tokens, most=most)
    if record.state_tokens:
        return dataclasses.replace(record.cut(0), tokens=tuple(tokens))
    first = {field: getattr(record, field)[:1] for field in ("bits", "mass", "seen", "files")}
    return dataclasses.replace(record, tokens=tuple(tokens), **first)


def position_mass(cache: KVCache, chunk_tokens: int) -> np.ndarray:
    """The attention mass of each position, `[>= tokens]`; that of a coded chunk is spread evenly."""
    mass, front = np.asarray(cache.mass)[0], cache.coded_tokens // chunk_tokens
    if not front:
        return mass
    assert cache.coded is not None
    chunks = np.asarray(cache.coded.mass)[0, :front] / chunk_tokens
    return np.concatenate([np.repeat(chunks, chunk_tokens), mass])


def most_bytes(chunk_io: ChunkIO, options: ContextOptions, chunks: int) -> int:
    """The maximum bytes of `chunks` chunks of a context, for any widths."""
    if chunk_io.widths == (RAW,):
        return chunks * chunk_io.chunk_bytes(RAW) + chunk_io.state_bytes
    wanted = int(options.ratio * chunk_io.reference_bytes * chunks + _ROUNDING)
    return min(wanted, chunks * max(chunk_io.chunk_bytes(bits) for bits in WIDTHS))


def least_ratio(chunk_io: ChunkIO) -> float:
    """The ratio of chunks at their narrowest; 0 for a codec with one width, which ignores ratios."""
    if chunk_io.widths == (RAW,):
        return 0.0
    return chunk_io.chunk_bytes(min(WIDTHS)) / chunk_io.reference_bytes


def require_ratio(chunk_io: ChunkIO, options: ContextOptions) -> None:
    """Checks that chunks can be as small as the options' ratio.

    Raises:
      ConfigError: they are larger at their narrowest.
    """
    least = least_ratio(chunk_io)
    # Ratios have few digits: 0.4 is not exactly two fifths.
    if options.ratio < least - _ROUNDING:
        raise ConfigError(
            f"a ratio of {options.ratio} is less than {least:.4g}, which chunks take at {min(WIDTHS)} bits "
            "with their scales; raise the ratio, take longer chunks (EngineOptions.kv_chunk_tokens), whose "
            "scales are shared by more tokens, or another codec"
        )


def _widths(
    chunk_io: ChunkIO, options: ContextOptions, density: np.ndarray, most: np.ndarray | None = None
) -> np.ndarray:
    """Bits of chunks by density (see `allocate`)."""
    return allocate(
        density,
        most_bytes(chunk_io, options, len(density)),
        sizes={width: chunk_io.chunk_bytes(width) for width in WIDTHS},
        newest=options.newest_chunks,
        kept=chunk_io.kept,
        most=most,
    )


def _attended(
    before: Record, chunk_io: ChunkIO, *, mass: np.ndarray, first: int, cached_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """The attention mass of each whole chunk so far, and its maximum possible mass, `[chunks]` each."""
    size, cfg = chunk_io.chunk_tokens, chunk_io.runner.cfg
    count = cached_tokens // size
    heads = [cfg.units(layer).kv_heads * cfg.group for layer in range(cfg.layers)]
    got = chunk_mass(mass, count, size)
    seen = sightings(first, cached_tokens, count, size, heads=heads, windows=cfg.attention_windows)
    known = min(count, len(before.mass))
    got[:known] += before.mass[:known]
    seen[:known] += before.seen[:known]
    return got, seen


def agreeing_record(before: Record, tokens: Sequence[int], chunk_tokens: int) -> Record:
    """The record of a context after its tokens changed, with the chunks whose tokens are the same."""
    common = _agreed(before.tokens, tokens)
    if before.state_tokens:
        kept = before if common >= before.state_tokens else before.cut(0)
        return dataclasses.replace(kept, tokens=tuple(tokens))
    count = min(len(before.bits), common // chunk_tokens)
    kept = {field: getattr(before, field)[:count] for field in ("bits", "mass", "seen", "files")}
    return dataclasses.replace(before, tokens=tuple(tokens), **kept)


def _agreed(cached: Sequence[int], tokens: Sequence[int]) -> int:
    """The length of the common prefix of two sequences."""
    count = min(len(cached), len(tokens))
    return count if list(cached[:count]) == list(tokens[:count]) else common_prefix(cached, tokens)
