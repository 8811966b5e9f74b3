"""Chunks of contexts whose model has state layers: keys and values of the attention layers as they are, and a
last chunk with the states.

A state is of all tokens so far. The last chunk has the states after the context's last call, and the rows of
the attention layers behind the last whole chunk: with it a context goes on exactly where it ended. All layers
of a chunk are one blob, cut from a cache and put into one on the host, for no chunk is computed between
others.
"""

import dataclasses
from collections.abc import Iterator, Mapping

import jax
import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.kv.cache import KVCache
from jaxllm.kv.codecs import RAW, STATE, ChunkShape
from jaxllm.kv.states import states_bytes
from jaxllm.kv.tolerance import KEPT
from serving.contexts.blobs import Stored
from serving.contexts.chunk_io import ChunkIO
from serving.runners.level_runner import LevelRunner
from serving.runners.runner import PrefillChunk


class StateChunkIO(ChunkIO):
    """Loads and encodes chunks of contexts of a model with state layers (see `ChunkIO`)."""

    def __init__(self, runner: LevelRunner, kept: Mapping[int, float] = KEPT) -> None:
        """See `ChunkIO`."""
        self.runner, self._form, self.kept = runner, runner.options.chunk_format, kept
        cfg, options = runner.cfg, runner.options
        self.chunk_tokens = self._form.tokens
        attending = [layer for layer in range(cfg.layers) if not cfg.is_state(layer)]
        self.heads = tuple(cfg.units(layer).kv_heads for layer in attending)
        self.head_width = cfg.head_dim
        shapes = [
            ChunkShape(heads=each, tokens=self.chunk_tokens, width=cfg.head_dim, dtype=options.cache_dtype)
            for each in self.heads
        ]
        self.reference_bytes = sum(each.reference_bytes for each in shapes)
        rows = sum(each.raw_bytes for each in shapes)
        self._chunk_bytes = {RAW: rows, STATE: rows + states_bytes(cfg)}
        self.layer_bytes = {bits: [size] for bits, size in self._chunk_bytes.items()}

    @property
    def layers(self) -> int:
        """Blobs of a chunk."""
        return 1

    @property
    def computes(self) -> bool:
        """See `ChunkIO`."""
        return False

    @property
    def state_bytes(self) -> int:
        """See `ChunkIO`."""
        return self._chunk_bytes[STATE]

    @property
    def coded(self) -> bool:
        """See `ChunkIO`."""
        return False

    def feeds(self, chunk: PrefillChunk) -> bool:
        """See `ChunkIO`."""
        del chunk
        return False

    def load(self, cache: KVCache, chunks: Mapping[int, Stored]) -> KVCache:
        """Puts chunks into a cache, at their positions, and its states (see `ChunkIO`).

        Raises:
          CheckpointError: a blob's size is not that of its width.
        """
        if not chunks:
            return cache
        arrays = [np.zeros(each.shape, each.dtype) for each in _rows_of(cache)]
        states = [np.zeros(each.shape, each.dtype) for each in jax.tree.leaves(cache.states)]
        for number, (bits, (blob,)) in chunks.items():
            if blob.size != self._chunk_bytes[bits]:
                raise CheckpointError(
                    f"chunk {number} has {blob.size} bytes, and should have {self._chunk_bytes[bits]}"
                )
            for piece, into in self._pieces(blob, bits, number, arrays, states):
                into[...] = piece.view(into.dtype).reshape(-1, *into.shape[1:])[: len(into)]
        half = len(cache.keys)
        placed = jax.device_put(arrays)
        structure = jax.tree.structure(cache.states)
        return dataclasses.replace(
            cache, keys=tuple(placed[:half]), values=tuple(placed[half:]),
            states=jax.tree.unflatten(structure, jax.device_put(states)),
        )  # fmt: skip

    def encode(
        self,
        cache: KVCache,
        chunks: Mapping[int, int],
        stored: Mapping[int, Stored] | None = None,
        *,
        into: Mapping[int, Stored] | None = None,
    ) -> Mapping[int, Stored]:
        """Cuts chunks of a context out of a cache (see `ChunkIO`)."""
        del stored
        found = self.room(chunks) if into is None else into
        arrays = [np.asarray(each) for each in _rows_of(cache)]
        states = [np.asarray(each) for each in jax.tree.leaves(cache.states)]
        for number, bits in chunks.items():
            blob = found[number][1][0]
            for piece, rows in self._pieces(blob, bits, number, arrays, states):
                taken = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
                piece[: taken.size] = taken
                piece[taken.size :] = 0
        return found

    def rehearse(self) -> None:
        """Does nothing: there are no buckets of it."""

    def _pieces(
        self, blob: np.ndarray, bits: int, number: int, rows: list[np.ndarray], states: list[np.ndarray]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The parts of a chunk's blob, and where each is in the keys and values of a cache, with positions
        first, or in its states. Behind the end of a cache there is nothing."""
        at, first = 0, number * self.chunk_tokens
        for each in rows:
            view = np.moveaxis(each, -2, 0)[first : first + self.chunk_tokens]
            size = self.chunk_tokens * each.nbytes // each.shape[-2]
            yield blob[at : at + size], view
            at += size
        for each in states if bits == STATE else ():
            yield blob[at : at + each.nbytes], each
            at += each.nbytes
        assert at == blob.size


def chunk_io_of(runner: LevelRunner, kept: Mapping[int, float] = KEPT) -> ChunkIO:
    """What chunks of a level are loaded and encoded by."""
    return (ChunkIO if runner.cfg.states is None else StateChunkIO)(runner, kept)


def _rows_of(cache: KVCache) -> list[jax.Array]:
    """Keys and values of all attention layers, in stacks `[n, 1, K, S, H]`."""
    assert cache.places is not None
    return [*cache.keys, *cache.values]
