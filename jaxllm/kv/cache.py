"""The key-value cache of one batch of sequences, and functions that write into it.

Per layer it is `[B, K, S, H]`: the kv head leads, so that a sub-model reads a prefix of heads, and attention
reads the tokens of one head contiguously. An index along S is called a row of the cache. S is a cache length
that buckets exist for; a sequence that outgrows it moves into the next length with `grow`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import Axes
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers.

    Invariants: S is the same in all layers; in a sub-model K is each layer's own. Rows at positions >=
    `length` are never attended to and hold finite numbers.

    Attributes:
      keys, values: per layer `[B, K, S, H]`.
      length: int32 scalar, number of tokens, the same for the whole batch.
      mass: `[B, S]` float32, the attention that each position got, summed over queries of all heads and
        layers; None if it is not counted. From the verification of a tree of M nodes until a path of it is
        kept it is `[B, 1 + M, S]`: entry 0 is the sequence's, entry 1 + n that of the queries of node n.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    length: jax.Array
    mass: jax.Array | None = None

    @property
    def capacity_tokens(self) -> int:
        """Positions that fit (S)."""
        return self.keys[0].shape[2]

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above, where a step that takes the cache is traced."""
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            axes.check(jnp.floating, f"B K{layer} S H", keys=keys, values=values)
        by_node = self.mass is not None and self.mass.ndim == 3
        axes.check(jnp.float32, "B * S" if by_node else "B S", mass=self.mass)
        axes.check(jnp.int32, "", length=self.length)

    def uncounted(self) -> "KVCache":
        """The same cache with an attention mass of zero."""
        mass = np.zeros((self.keys[0].shape[0], self.capacity_tokens), np.float32)
        return dataclasses.replace(self, mass=mass)  # pyright: ignore[reportArgumentType]: steps take it

    def counted_by_node(self, nodes: int) -> "KVCache":
        """The same cache with its mass by node: which nodes count is known after a verification."""
        if self.mass is None:
            return self
        mass = np.zeros((self.mass.shape[0], 1 + nodes, self.capacity_tokens), np.float32)
        mass[:, 0] = self.mass
        return dataclasses.replace(self, mass=mass)  # pyright: ignore[reportArgumentType]: steps take it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TreePositions:
    """Cache rows and attention mask of a token tree: one row per node after the sequence, at any depth.

    Attributes:
      base: int32 scalar, the row of the first node; every node attends to all rows before it.
      rows: `[T]` int32, rows of the new tokens, ascending.
      mask: `[T, M]` bool, which of the M rows from `base` on each new token attends to: its ancestors and
        itself.
    """

    base: jax.Array
    rows: jax.Array
    mask: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenPositions:
    """Positions of new tokens in a sequence, and their rows in its cache.

    Invariants: without a tree `positions` do not descend; the rows of real tokens differ.

    Attributes:
      positions: `[T]` int32, in the sequence (the rotary embedding uses them).
      valid: int32 scalar: the first `valid` tokens are real, the others padding.
      tree: rows and mask of a token tree; None: rows are positions, and a token attends to all positions
        before it.
      consecutive: whether the rows are consecutive, from the first position on.
    """

    positions: jax.Array
    valid: jax.Array
    tree: TreePositions | None = None
    consecutive: bool = dataclasses.field(metadata={"static": True}, default=False)

    @classmethod
    def after(cls, length: jax.Array, count: int, valid: jax.Array) -> "TokenPositions":
        """`count` consecutive positions after `length` tokens."""
        return cls(length + jnp.arange(count, dtype=jnp.int32), valid, consecutive=True)

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above, where a step that takes the positions is traced."""
        axes.check(jnp.int32, "T", positions=self.positions)
        axes.check(jnp.int32, "", valid=self.valid)
        if self.tree is not None:
            axes.check(jnp.int32, "", base=self.tree.base)
            axes.check(jnp.int32, "T", rows=self.tree.rows)
            axes.check(jnp.bool_, "T M", mask=self.tree.mask)

    @property
    def rows(self) -> jax.Array:
        """The rows `[T]` of the cache into which new tokens are written."""
        return self.positions if self.tree is None else self.tree.rows

    def visible(self, keys: int, window: int) -> jax.Array:
        """The attention mask `[T, keys]` bool of new tokens over the first `keys` rows, True = attend.

        With a `window` above 0 a token attends to the last `window` positions, its own included. Of a tree a
        node attends to its path, so that its k-th visible node is at position base + k.
        """
        row = jnp.arange(keys, dtype=jnp.int32)[None, :]
        stands = row
        if self.tree is None:
            before = row <= self.rows[:, None]
        else:
            mask, base = self.tree.mask, self.tree.base
            node = row - base
            inside = (node >= 0) & (node < mask.shape[1])
            at = jnp.broadcast_to(jnp.clip(node, 0, mask.shape[1] - 1), (len(self.rows), keys))
            before = (node < 0) | (inside & jnp.take_along_axis(mask, at, axis=1))
            depth = jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1
            stands = jnp.where(node < 0, row, base + jnp.take_along_axis(depth, at, axis=1))
        return before & (stands > self.positions[:, None] - window) if window else before

    def write(self, rows: jax.Array, new: jax.Array) -> jax.Array:
        """`rows` `[B, K, S, H]` with the valid tokens of `new` `[B, K, T, H]` written at their rows; rows
        past S are dropped."""
        axes = Axes("write")
        self.check(axes)
        axes.check(jnp.floating, "B K S H", rows=rows)
        axes.check(jnp.floating, "B K T H", new=new)
        if self.consecutive:
            return write_rows(rows, new, self.positions[0], self.valid)
        real = jnp.arange(len(self.positions), dtype=jnp.int32) < self.valid
        # Row S does not exist: `mode="drop"` drops padding.
        at = jnp.where(real, self.rows, rows.shape[2])
        return rows.at[:, :, at].set(new.astype(rows.dtype), mode="drop")


def new_cache(cfg: ModelConfig, *, batch: int, tokens: int, dtype: jnp.dtype, mass: bool = False) -> KVCache:
    """An empty cache for `tokens` positions, with or without their attention mass."""
    shapes = [(batch, cfg.units(layer).kv_heads, tokens, cfg.head_dim) for layer in range(cfg.layers)]
    return KVCache(
        keys=tuple(jnp.zeros(shape, dtype) for shape in shapes),
        values=tuple(jnp.zeros(shape, dtype) for shape in shapes),
        length=jnp.zeros((), jnp.int32),
        mass=jnp.zeros((batch, tokens), jnp.float32) if mass else None,
    )


def grow(cache: KVCache, tokens: int) -> KVCache:
    """The same sequences in a cache of `tokens` positions (at least as many as now)."""
    extra = tokens - cache.capacity_tokens
    if extra < 0:
        raise ConfigError(
            f"a cache of {cache.capacity_tokens} positions cannot shrink to {tokens}; ask for a longer cache"
        )

    def pad(rows: jax.Array) -> jax.Array:
        return jnp.pad(rows, ((0, 0), (0, 0), (0, extra), (0, 0)))

    return dataclasses.replace(
        cache,
        keys=tuple(pad(rows) for rows in cache.keys),
        values=tuple(pad(rows) for rows in cache.values),
        mass=None if cache.mass is None else jnp.pad(cache.mass, ((0, 0), (0, extra))),
    )


def write_rows(rows: jax.Array, new: jax.Array, start: jax.Array, valid: jax.Array) -> jax.Array:
    """Writes the first `valid` of `new` `[B, K, T, H]` at positions `start...` of `rows` `[B, K, S, H]`.

    Exactly those positions change, also when `start + T > S`: `dynamic_update_slice` would clamp the
    start and shift the chunk onto older rows, so the block that is replaced is read back, the valid
    rows replace theirs in it, and the block is written whole. Rows past S are
    dropped. A single row (T = 1) is written without all this: it must be valid and `start < S`.
    """
    axes = Axes("write_rows")
    axes.check(jnp.floating, "B K S H", rows=rows)
    axes.check(jnp.floating, "B K T H", new=new)
    axes.check(jnp.int32, "", start=start, valid=valid)
    capacity, length = rows.shape[2], new.shape[2]
    new = new.astype(rows.dtype)
    if length == 1:
        # One valid row always fits.
        return jax.lax.dynamic_update_slice_in_dim(rows, new, start, axis=2)
    if length > capacity:
        # A chunk longer than the cache: only its first S rows can be valid.
        new, length = new[:, :, :capacity], capacity
    block_start = jnp.clip(start, 0, capacity - length)
    shift = start - block_start
    old = jax.lax.dynamic_slice_in_dim(rows, block_start, length, axis=2)
    # Row j of the block takes new[j - shift]: a slice at `length - shift` of [zeros | new].
    padded = jnp.concatenate([jnp.zeros_like(new), new], axis=2)
    shifted = jax.lax.dynamic_slice_in_dim(padded, length - shift, length, axis=2)
    index = jnp.arange(length, dtype=jnp.int32) - shift
    fresh = ((index >= 0) & (index < valid)).reshape(1, 1, length, 1)
    block = jnp.where(fresh, shifted, old)
    return jax.lax.dynamic_update_slice_in_dim(rows, block, block_start, axis=2)
