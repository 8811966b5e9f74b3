"""The key-value cache of one sequence batch, and the ways to write into it.

Per layer `[B, K, S, H]`: the kv head leads, so a prefix of heads is a prefix of memory and attention
walks one head's tokens in a row. S is a cache-length bucket; a sequence that outgrows it moves into
the next one with `grow`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers.

    Invariants: `keys[l]`, `values[l]` are `[B, K, S, H]` with one S for all layers (and in a sub-model each
    layer's own K); rows at positions
    >= `length` (int32 scalar, shared by the batch) are never attended and hold finite numbers. `mass`
    `[B, S]` float32, where somebody asked for it, is how much each position was attended to, summed over
    queries of all heads and layers; while a tree of N nodes is read, and until a path of it is kept,
    `[B, 1 + N, S]`: that of the sequence, and of each node's queries.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    length: jax.Array
    mass: jax.Array | None = None

    @property
    def capacity_tokens(self) -> int:
        """Positions that fit (S)."""
        return self.keys[0].shape[2]

    def uncounted(self) -> "KVCache":
        """The same, and nothing was attended to yet."""
        mass = np.zeros((self.keys[0].shape[0], self.capacity_tokens), np.float32)
        return dataclasses.replace(self, mass=mass)  # pyright: ignore[reportArgumentType]: graphs take it

    def counted_by_node(self, nodes: int) -> "KVCache":
        """The same, ready for a tree: which of its nodes' queries count is not known before they are read."""
        if self.mass is None:
            return self
        mass = np.zeros((self.mass.shape[0], 1 + nodes, self.capacity_tokens), np.float32)
        mass[:, 0] = self.mass
        return dataclasses.replace(self, mass=mass)  # pyright: ignore[reportArgumentType]: graphs take it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TreeRows:
    """Where the nodes of a tree lie in a cache: behind a sequence, whatever their depth.

    Attributes:
      base: int32 scalar, the row of the first node; every token sees all rows before it.
      rows: `[T]` int32, of the new tokens, ascending.
      seen: `[T, N]` bool, which of the N rows from `base` on each new token sees, its own among them.
    """

    base: jax.Array
    rows: jax.Array
    seen: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Places:
    """Where new tokens stand in a sequence, and where they lie in its cache.

    Invariants: `positions` `[T]` int32 do not descend unless there is a tree; the rows of real tokens differ.

    Attributes:
      positions: in the sequence.
      valid: how many of the tokens, the first, are real: int32 scalar.
      tree: where they lie and what they see, if not at their positions and all that is before them.
      run: whether the rows follow one another, from the first position on.
    """

    positions: jax.Array
    valid: jax.Array
    tree: TreeRows | None = None
    run: bool = dataclasses.field(metadata={"static": True}, default=False)

    @classmethod
    def after(cls, length: jax.Array, count: int, valid: jax.Array) -> "Places":
        """`count` positions behind `length` tokens."""
        return cls(length + jnp.arange(count, dtype=jnp.int32), valid, run=True)

    @property
    def rows(self) -> jax.Array:
        """The rows `[T]` of the cache that new tokens are written to."""
        return self.positions if self.tree is None else self.tree.rows

    def visible(self, keys: int, window: int) -> jax.Array:
        """What each new token sees of `keys` rows, `[T, keys]` bool: with a `window` above 0 only the last so
        many positions, its own included (the nodes that a token sees of a tree are its path: each stands
        behind those before it)."""
        row = jnp.arange(keys, dtype=jnp.int32)[None, :]
        stands = row
        if self.tree is None:
            before = row <= self.rows[:, None]
        else:
            seen, base = self.tree.seen, self.tree.base
            node = row - base
            inside = (node >= 0) & (node < seen.shape[1])
            at = jnp.broadcast_to(jnp.clip(node, 0, seen.shape[1] - 1), (len(self.rows), keys))
            before = (node < 0) | (inside & jnp.take_along_axis(seen, at, axis=1))
            depth = jnp.cumsum(seen, axis=1, dtype=jnp.int32) - 1
            stands = jnp.where(node < 0, row, base + jnp.take_along_axis(depth, at, axis=1))
        return before & (stands > self.positions[:, None] - window) if window else before

    def write(self, rows: jax.Array, new: jax.Array) -> jax.Array:
        """`rows` `[B, K, S, H]` with the valid ones of `new` `[B, K, T, H]` where they lie; those past S are
        dropped."""
        if self.run:
            return write_rows(rows, new, self.positions[0], self.valid)
        real = jnp.arange(len(self.positions), dtype=jnp.int32) < self.valid
        # What is dropped aims behind the last row.
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
    rows are laid over it at their true place, and the block is written whole. Rows past S are
    dropped. A single row (T = 1) is written without all this: it must be valid and `start < S`.
    """
    capacity, length = rows.shape[2], new.shape[2]
    new = new.astype(rows.dtype)
    if length == 1:
        # One row cannot straddle the end.
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
