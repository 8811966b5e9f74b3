"""Keys and values of a source: what an encoder-decoder's layers attend to besides their own tokens.

They are projected once per prompt from what the encoder said, and stay as they are while the cache grows.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import Axes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SourceKV:
    """Keys and values of a source in all layers of the decoder.

    Attributes:
      keys, values: `[L, B, K, R, H]`, for sources of up to R tokens.
      length: int32 scalar, number of tokens of the source; rows from there on are never attended to.
      layer: int32 scalar, the layer that attends (see `in_layer`); None for all.
    """

    keys: jax.Array
    values: jax.Array
    length: jax.Array
    layer: jax.Array | np.integer | None = None

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit (R)."""
        return self.keys.shape[-2]

    @property
    def mask(self) -> jax.Array:
        """`[1, R]` bool, True for the source's tokens."""
        return jnp.arange(self.capacity_tokens, dtype=jnp.int32)[None, :] < self.length

    def in_layer(self, layer: jax.Array | int | None) -> "SourceKV":
        """As one layer attends to it; with None that of all layers."""
        number = np.int32(layer) if isinstance(layer, int) else layer
        return dataclasses.replace(self, layer=number)

    @property
    def own(self) -> tuple[jax.Array, jax.Array]:
        """Keys and values of the layer that attends, `[B, K, R, H]`."""
        assert self.layer is not None
        return tuple(  # pyright: ignore[reportReturnType]: two of them
            jax.lax.dynamic_index_in_dim(rows, self.layer, axis=0, keepdims=False)
            for rows in (self.keys, self.values)
        )

    def with_layer(
        self, layer: jax.Array | np.integer | int, keys: jax.Array, values: jax.Array
    ) -> "SourceKV":
        """With keys and values `[B, K, T, H]` of the first T tokens in a layer; T is at most R."""
        number, zero = np.int32(layer) if isinstance(layer, int) else layer, np.int32(0)
        at = (number, zero, zero, zero, zero)

        def put(rows: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(rows, new[None].astype(rows.dtype), at)

        return dataclasses.replace(self, keys=put(self.keys, keys), values=put(self.values, values))

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above, where a step that takes them is traced."""
        axes.check(jnp.floating, "* B * R H", keys=self.keys, values=self.values)
        axes.check(jnp.int32, "", length=self.length, layer=self.layer)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SourceLayers:
    """A `SourceKV` whose layers are arrays of their own, as exported programs have them.

    Attributes:
      keys, values: per layer `[B, K, R, H]`; empty arrays until they are written.
      length: see `SourceKV`.
      layer: the layer that attends (see `SourceKV`).
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    length: jax.Array
    layer: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def capacity_tokens(self) -> int:
        """See `SourceKV`."""
        return self.keys[0].shape[-2]

    @property
    def mask(self) -> jax.Array:
        """See `SourceKV`."""
        return jnp.arange(self.capacity_tokens, dtype=jnp.int32)[None, :] < self.length

    def in_layer(self, layer: Any) -> "SourceLayers":
        """See `SourceKV`."""
        return dataclasses.replace(self, layer=layer)

    @property
    def own(self) -> tuple[jax.Array, jax.Array]:
        """See `SourceKV`."""
        assert self.layer is not None
        return self.keys[self.layer], self.values[self.layer]

    def with_layer(self, layer: Any, keys: jax.Array, values: jax.Array) -> "SourceLayers":
        """With keys and values `[B, K, T, H]` as those of a layer, for sources of up to T tokens."""

        def put(rows: tuple[jax.Array, ...], new: jax.Array) -> tuple[jax.Array, ...]:
            return (*rows[:layer], new, *rows[layer + 1 :])

        return dataclasses.replace(self, keys=put(self.keys, keys), values=put(self.values, values))

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above, where a step that takes them is traced."""
        for keys, values in zip(self.keys, self.values, strict=True):
            axes.check(jnp.floating, "B * R H", keys=keys, values=values)
        axes.check(jnp.int32, "", length=self.length)


Source = SourceKV | SourceLayers


def no_source(shape: tuple[int, ...], dtype: jnp.dtype) -> SourceKV:
    """Room for a source, `[L, B, K, R, H]`."""
    return SourceKV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32))
