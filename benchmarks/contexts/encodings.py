"""Stores a context's chunks at several widths, and restores its cache from each."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.contexts.systems import OURS
from jaxllm.kv.cache import KVCache
from serving.contexts.chunk_io import ChunkIO
from serving.contexts.growth import grown_record
from serving.contexts.options import ContextOptions
from serving.contexts.record import Origin, Record
from serving.runners.runner import prefill_prompt

RAW = "raw"
EIGHT = "8 bit"
_FLAT = {EIGHT: 8, "4 bit": 4, "2 bit": 2}
_EMPTY = Record(
    name="",
    app="",
    origin=Origin(
        model="", level=100, adapter="", codec="raw", chunk_tokens=1, dtype="", heads=(), head_width=4
    ),
)


@dataclasses.dataclass(frozen=True)
class Stored:
    """A context that can be restored from several encodings.

    Attributes:
      chunk_io: of its engine.
      cache: as it was computed; all of its tokens are in whole chunks.
      widths: bits of each chunk, by encoding.
    """

    chunk_io: ChunkIO
    cache: KVCache
    widths: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, chunk_io: ChunkIO, tokens: list[int], ratios: Mapping[str, float], seed: int) -> "Stored":
        """Computes a context and the widths of its chunks.

        Args:
          chunk_io: of an engine that chooses widths.
          tokens: of the context; as many as fill whole chunks.
          ratios: by encoding, of the bytes of 8 bits; each is also there with its widths shuffled over the
            chunks but the newest.
          seed: of the shuffling.
        """
        raw = cls.raw(chunk_io, tokens)
        widths = {name: np.full(len(tokens) // chunk_io.chunk_tokens, bits) for name, bits in _FLAT.items()}
        for name, ratio in ratios.items():
            widths[name] = bits = density_widths(chunk_io, tokens, raw.cache, ratio)
            shuffled = np.random.default_rng(seed).permutation(bits[:-1])
            widths[f"{name}-shuffled"] = np.concatenate([shuffled, bits[-1:]])
        return cls(chunk_io, raw.cache, widths)

    @classmethod
    def raw(cls, chunk_io: ChunkIO, tokens: list[int]) -> "Stored":
        """Computes a context of whole chunks, without any widths."""
        runner = chunk_io.runner
        assert len(tokens) % chunk_io.chunk_tokens == 0
        _, cache = prefill_prompt(runner, runner.start(runner.options.context_tokens), tokens, 0)
        return cls(chunk_io, cache, {})

    @property
    def encodings(self) -> list[str]:
        """Names of all encodings, ours first."""
        return sorted([*self.widths, RAW], key=lambda name: not name.startswith(OURS))

    def restored(self, encoding: str) -> KVCache:
        """The cache as it is restored from an encoding."""
        if encoding == RAW:
            return copied(self.cache)
        coded = self.chunk_io.encode(self.cache, dict(enumerate(self.widths[encoding].tolist())))
        runner = self.chunk_io.runner
        cache = self.chunk_io.load(runner.start(runner.options.context_tokens), coded)
        jax.block_until_ready(cache.keys)
        return dataclasses.replace(cache, length=np.int32(len(coded) * self.chunk_io.chunk_tokens))

    def bytes_of(self, encoding: str) -> int:
        """Bytes of all chunks in an encoding."""
        if encoding == RAW:
            return sum(each.nbytes for each in (*self.cache.keys, *self.cache.values))
        return sum(self.chunk_io.chunk_bytes(bits) for bits in self.widths[encoding].tolist())


def density_widths(chunk_io: ChunkIO, tokens: list[int], cache: KVCache, ratio: float) -> np.ndarray:
    """Widths `[N]` of a context's chunks as ours chooses them by density, at a ratio of bytes."""
    record = grown_record(
        _EMPTY, chunk_io, ContextOptions(folder="", ratio=ratio),
        tokens=tokens, mass=np.asarray(cache.mass)[0], first=0, cached_tokens=len(tokens),
    )  # fmt: skip
    return np.array(record.bits)


def copied(cache: KVCache) -> KVCache:
    """A copy of a cache, for a dispatch that donates it."""
    return jax.tree.map(jnp.copy, cache)
