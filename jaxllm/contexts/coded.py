"""Stored chunks that attention reads in place, before the rows of a cache.

The chunks' tokens are the first of the sequence; the cache has the tokens after them. Native attention
finds the chunks of a layer in a chunk table (`jaxllm.kernels.native`); XLA decodes them whenever it
attends.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm.axes import Axes
from jaxllm.contexts.codecs import ChunkFormat, ChunkShape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedPrefix:
    """The chunks before a cache.

    Attributes:
      tokens: int32 scalar, number of tokens of the attended chunks: a multiple of C; 0 for none.
      source: the handle of a chunk table, `[2]` uint32; or blobs of all layers by value, `[L, N, bytes]`
        uint8, of the size of the widest.
      form: codec and size of the chunks.
      bits: `[N]` int32, widths of blobs by value; None for blobs by address.
      mass: `[B, N]` float32, the attention mass of each chunk; by node like that of a cache (see
        `KVCache`); None if it is not counted.
      layer: int32 scalar, layer of the chunks; None for all.
    """

    tokens: jax.Array | np.integer
    source: jax.Array | np.ndarray
    form: ChunkFormat = dataclasses.field(metadata={"static": True})
    bits: jax.Array | np.ndarray | None = None
    mass: jax.Array | np.ndarray | None = None
    layer: jax.Array | np.integer | None = None

    @property
    def by_address(self) -> bool:
        """Whether the chunks are in a chunk table."""
        return self.bits is None

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above at trace time."""
        axes.check(jnp.int32, "", coded_tokens=self.tokens, coded_layer=self.layer)
        if self.by_address:
            Axes("coded").check(jnp.uint32, "n", handle=self.source)
        else:
            own = Axes("coded")
            own.check(jnp.uint8, "L N bytes", source=self.source)
            own.check(jnp.int32, "N", bits=self.bits)
        by_node = self.mass is not None and self.mass.ndim == 3
        axes.check(jnp.float32, "B * *" if by_node else "B *", coded_mass=self.mass)

    def of_layer(self, layer: jax.Array | int | np.integer) -> "QuantizedPrefix":
        """Chunks of one layer."""
        return dataclasses.replace(self, layer=jnp.asarray(layer, jnp.int32))

    def decoded(self, heads: int, width: int, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
        """The layer's keys and values by value, `[1, K, N·C, H]`, zeros after the last chunk.

        Args:
          heads: number of heads in the blobs (K).
          width: size of a head (H).
          dtype: dtype of the cache after them.
        """
        assert self.bits is not None
        assert self.layer is not None
        shape = ChunkShape(heads=heads, tokens=self.form.tokens, width=width, dtype=jnp.dtype(dtype).name)
        blobs = jax.lax.dynamic_index_in_dim(jnp.asarray(self.source), self.layer, keepdims=False)
        bits, parts = jnp.asarray(self.bits)[:, None, None, None], []
        for each, size in self.form.sizes(shape).items():
            parts.append((bits == each, self.form.codec.decode(blobs[:, :size], shape, each)))

        def joined(side: int) -> jax.Array:
            rows = jnp.zeros((len(blobs), heads, self.form.tokens, width), dtype)
            for chosen, pair in parts:
                rows = jnp.where(chosen, pair[side], rows)
            return rows.swapaxes(0, 1).reshape(1, heads, len(blobs) * self.form.tokens, width)

        return joined(0), joined(1)
