"""Restores a context layer by layer, and runs tokens through each layer as soon as it is restored: those of
chunks that are computed again (LLMS, section 3.3), then those of the new prompt."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax

from jaxllm.kv.cache import KVCache
from jaxllm.kv.recompute import Restore
from serving.contexts.blobs import Stored
from serving.contexts.chunk_io import ChunkIO, LayerBlobs, require_sizes
from serving.request import Fed
from serving.runners.chunks import placed_chunks
from serving.runners.runner import PrefillChunk

# A layer -> its chunks as they are loaded. Called once per layer, in order; may wait for storage.
Arriving = Callable[[int], LayerBlobs]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewTokens:
    """Tokens of a call that are not in whole chunks of its context.

    Attributes:
      tokens: all from the first one behind the chunks on.
      chunks: that they are fed in; of these a pass feeds the first.
    """

    tokens: Sequence[int]
    chunks: Sequence[PrefillChunk]

    @property
    def fed(self) -> Sequence[int]:
        """Those of the first chunk."""
        return self.tokens[: self.chunks[0].tokens]


def layer_pass(
    chunk_io: ChunkIO,
    cache: KVCache,
    tokens: Sequence[int],
    plan: Restore,
    arriving: Arriving,
    new: NewTokens | None = None,
    *,
    first: int = 0,
) -> tuple[KVCache, Fed | None]:
    """Restores all layers.

    Args:
      chunk_io: of the context's level.
      cache: donated.
      tokens: of the context.
      plan: its computed chunks.
      arriving: of the other chunks.
      new: tokens to feed; None for none.
      first: position of the first of these.

    Returns:
      The cache, and what was fed.
    """
    runner, prefill = chunk_io.runner, chunk_io.runner.restored_prefill
    at = chunk_io.positions(plan.computed, plan.bucket) if plan.computed else None
    # Another thread's answer must not evict the weights of layers meanwhile.
    with runner.lock:
        x = None if at is None else chunk_io.embed(tokens, at)
        of_new = row = None
        if new is not None:
            ((ids, row),) = placed_chunks(new.fed, [new.chunks[0].tokens], first)
            of_new = runner.begin_layers(ids, row)
        try:
            for layer in range(chunk_io.layers):
                there = arriving(layer)
                if x is not None and at is not None:
                    x, cache = chunk_io.restore_layer(layer, x, at, cache, there)
                    there = {}
                if of_new is not None and row is not None:
                    of_new, cache = chunk_io.prefill_layer(layer, of_new, row, cache, there)
        except BaseException:
            # Buckets that were dispatched still read blobs in place, and the blobs end with this call.
            with contextlib.suppress(Exception):
                jax.block_until_ready((x, of_new))
            raise
        if new is None or prefill is None or of_new is None:
            return cache, None
        chunk = new.chunks[0]
        logits = prefill.logits(of_new, len(new.fed) - 1) if chunk.last else None
    return cache, Fed(first=first, chunk=chunk, rest=tuple(new.chunks[1:]), logits=logits)


class InPlace:
    """Memory of chunks that are read layer by layer, so that a chunk table can have their addresses before
    they are there.

    Attributes:
      chunks: by number.
    """

    def __init__(self, chunk_io: ChunkIO, bits: Mapping[int, int]) -> None:
        self.chunks: dict[int, Stored] = chunk_io.room(bits)

    def filled(self, arriving: Arriving) -> Arriving:
        """Writes each layer as it arrives; nothing is left to load.

        Raises:
          CheckpointError: a blob's size is not that of its width.
        """

        def fill(layer: int) -> LayerBlobs:
            there = arriving(layer)
            sizes = [self.chunks[chunk][1][layer].size for chunk in there]
            require_sizes(layer, list(there), [blob.size for _, blob in there.values()], sizes)
            for chunk, (_, blob) in there.items():
                self.chunks[chunk][1][layer][:] = blob
            return {}

        return fill
