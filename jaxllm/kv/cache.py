"""The key-value cache of one batch of sequences, and functions that write into it.

Per layer it is `[B, K, S, H]`: the kv head leads, so that a sub-model reads a prefix of heads, and attention
reads the tokens of one head contiguously. Layers of equal shape are stacked, `[n, B, K, S, H]`, so that a
loop over layers updates one array in place. An index along S is called a row of the cache. S is a cache
length that buckets exist for; a sequence that outgrows it moves into the next length with `grow`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import Axes
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.kernels import native, native_products

# Rows that `fork` copies at once.
_FORK_BLOCK = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Past:
    """Keys and values of one layer.

    Attributes:
      keys, values: `[B, K, S, H]`, or those of a stack of layers, `[n, B, K, S, H]`.
      slot: int32 scalar, the layer's index in the stack; None without one.
    """

    keys: jax.Array
    values: jax.Array
    slot: jax.Array | np.integer | None = None

    @property
    def capacity_tokens(self) -> int:
        """Positions that fit (S)."""
        return self.keys.shape[-2]

    @property
    def own(self) -> tuple[jax.Array, jax.Array]:
        """The layer's keys and values alone, `[B, K, S, H]`."""
        return self._own(self.keys), self._own(self.values)

    def written(self, at: "TokenPositions", keys: jax.Array, values: jax.Array) -> "Past":
        """With keys and values of new tokens `[B, K, T, H]` (see `TokenPositions.write`)."""
        new_keys, new_values = at.write(self.keys, keys, self.slot), at.write(self.values, values, self.slot)
        return Past(new_keys, new_values, self.slot)

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above, where a step that takes them is traced."""
        lead = "" if self.slot is None else "* "
        axes.check(jnp.floating, f"{lead}B K S H", keys=self.keys, values=self.values)
        axes.check(jnp.int32, "", slot=self.slot)

    def _own(self, rows: jax.Array) -> jax.Array:
        if self.slot is None:
            return rows
        return jax.lax.dynamic_index_in_dim(rows, self.slot, axis=0, keepdims=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers.

    Invariants: S is the same in all layers; in a sub-model K is each layer's own. Rows at positions >=
    `length` are never attended to.

    Attributes:
      keys, values: per stack of layers `[n, B, K, S, H]`; or without `places` per layer `[B, K, S, H]`.
      length: int32 scalar, number of tokens, the same for the whole batch.
      mass: `[B, S]` float32, the attention that each position got, summed over queries of all heads and
        layers; None if it is not counted. From the verification of a tree of M nodes until a path of it is
        kept it is `[B, 1 + M, S]`: entry 0 is the sequence's, entry 1 + n that of the queries of node n.
      places: per layer, its stack and its slot in it (see `stack_places`).
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    length: jax.Array
    mass: jax.Array | None = None
    places: tuple[tuple[int, int], ...] | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def capacity_tokens(self) -> int:
        """Positions that fit (S)."""
        return self.keys[0].shape[-2]

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.keys if self.places is None else self.places)

    def past(self, layer: int, number: jax.Array | int | None = None) -> Past:
        """Keys and values of a layer.

        Args:
          layer: its index, or that of a layer in the same stack.
          number: its index, int32 scalar, if it is known only at run time.
        """
        if self.places is None:
            assert number is None or isinstance(number, int)
            return Past(self.keys[layer], self.values[layer])
        stack, slot = self.places[layer]
        if isinstance(number, int) or number is None:
            slot = np.int32(slot if number is None else self.places[number][1])
        elif len(self.keys) == 1:
            slot = number
        else:
            slot = jnp.asarray([each for _, each in self.places], jnp.int32)[number]
        return Past(self.keys[stack], self.values[stack], slot)

    def with_past(self, layer: int, past: Past) -> "KVCache":
        """With other keys and values of a layer, from `past`."""
        stack = layer if self.places is None else self.places[layer][0]
        keys = tuple(past.keys if at == stack else each for at, each in enumerate(self.keys))
        values = tuple(past.values if at == stack else each for at, each in enumerate(self.values))
        return dataclasses.replace(self, keys=keys, values=values)

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above, where a step that takes the cache is traced."""
        lead = "" if self.places is None else "* "
        for stack, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            axes.check(jnp.floating, f"{lead}B K{stack} S H", keys=keys, values=values)
        by_node = self.mass is not None and self.mass.ndim == 3
        axes.check(jnp.float32, "B * S" if by_node else "B S", mass=self.mass)
        axes.check(jnp.int32, "", length=self.length)

    def uncounted(self) -> "KVCache":
        """The same cache with an attention mass of zero."""
        mass = np.zeros((self._batch, self.capacity_tokens), np.float32)
        return dataclasses.replace(self, mass=mass)  # pyright: ignore[reportArgumentType]: steps take it

    def counted_by_node(self, nodes: int) -> "KVCache":
        """The same cache with its mass by node: which nodes count is known after a verification."""
        if self.mass is None:
            return self
        mass = np.zeros((self.mass.shape[0], 1 + nodes, self.capacity_tokens), np.float32)
        mass[:, 0] = self.mass
        return dataclasses.replace(self, mass=mass)  # pyright: ignore[reportArgumentType]: steps take it

    @property
    def _batch(self) -> int:
        return self.keys[0].shape[-4]


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
    def padded(self) -> bool:
        """Whether some tokens may be padding: a token by itself is real."""
        return len(self.positions) > 1

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

    def write(self, rows: jax.Array, new: jax.Array, slot: jax.Array | np.integer | None = None) -> jax.Array:
        """Writes the valid tokens of `new` `[B, K, T, H]` at their rows; rows past S are dropped.

        Args:
          rows: `[B, K, S, H]`, or those of a stack of layers, `[n, B, K, S, H]`.
          new: keys or values.
          slot: the layer's index in the stack.

        Returns:
          The updated rows.
        """
        axes = Axes("write")
        self.check(axes)
        axes.check(jnp.floating, "B K S H" if slot is None else "* B K S H", rows=rows)
        axes.check(jnp.floating, "B K T H", new=new)
        if self.consecutive:
            return write_rows(rows, new, self.positions[0], self.valid, slot)
        real = jnp.arange(len(self.positions), dtype=jnp.int32) < self.valid
        # Row S does not exist: `mode="drop"` drops padding.
        at = jnp.where(real, self.rows, rows.shape[-2])
        new = new.astype(rows.dtype)
        if slot is None:
            return rows.at[:, :, at].set(new, mode="drop")
        # Indices on both sides of slices bring the tokens to the front.
        return rows.at[slot, :, :, at].set(new.transpose(2, 0, 1, 3), mode="drop")


def stack_places(cfg: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Per layer, the stack of its keys and values and its slot in it: layers with the same number of kv heads
    are a stack."""
    sizes: dict[int, int] = {}
    places = []
    for layer in range(cfg.layers):
        heads = cfg.units(layer).kv_heads
        slot = sizes.get(heads, 0)
        sizes[heads] = slot + 1
        places.append((list(sizes).index(heads), slot))
    return tuple(places)


def new_cache(
    cfg: ModelConfig,
    *,
    batch: int,
    tokens: int,
    dtype: jnp.dtype,
    mass: bool = False,
    stacked: bool = True,
) -> KVCache:
    """An empty cache for `tokens` positions, with or without their attention mass, and with equal layers in
    stacks, or each by itself. XLA copies a stack for each layer that a step writes outside of a loop."""
    places, shapes = stack_places(cfg), {}
    for layer, (stack, slot) in enumerate(places):
        own = (batch, cfg.units(layer).kv_heads, tokens, cfg.head_dim)
        shapes[stack if stacked else layer] = (slot + 1, *own) if stacked else own
    rows = _zeros([*shapes.values()] * 2, dtype)
    return KVCache(
        keys=tuple(rows[: len(shapes)]),
        values=tuple(rows[len(shapes) :]),
        length=jnp.zeros((), jnp.int32),
        mass=jnp.zeros((batch, tokens), jnp.float32) if mass else None,
        places=places if stacked else None,
    )


def _zeros(shapes: list[tuple[int, ...]], dtype: jnp.dtype) -> list[jax.Array]:
    """Arrays of zeros; on a CPU with native kernels their memory is taken as they fill."""

    def by_xla() -> list[jax.Array]:
        return [jnp.zeros(shape, dtype) for shape in shapes]

    if not native.kernels().native:
        return by_xla()
    return jax.lax.platform_dependent(cpu=lambda: native_products.zeros(shapes, dtype), default=by_xla)


def grow(cache: KVCache, tokens: int) -> KVCache:
    """The same sequences in a cache of `tokens` positions (at least as many as now)."""
    extra = tokens - cache.capacity_tokens
    if extra < 0:
        raise ConfigError(
            f"a cache of {cache.capacity_tokens} positions cannot shrink to {tokens}; ask for a longer cache"
        )

    def pad(rows: jax.Array) -> jax.Array:
        return jnp.pad(rows, [(0, 0)] * (rows.ndim - 2) + [(0, extra), (0, 0)])

    return dataclasses.replace(
        cache,
        keys=tuple(pad(rows) for rows in cache.keys),
        values=tuple(pad(rows) for rows in cache.values),
        mass=None if cache.mass is None else jnp.pad(cache.mass, ((0, 0), (0, extra))),
    )


def fork(cache: KVCache, empty: KVCache, tokens: jax.Array) -> KVCache:
    """The first `tokens` tokens of a cache, in an empty one of the same shapes, without their attention mass.

    Args:
      cache: stays as it is.
      empty: is written; the memory of its rows beyond the tokens is not touched, but for a few.
      tokens: int32 scalar, at most the cache's.
    """
    capacity = cache.capacity_tokens
    block = min(_FORK_BLOCK, capacity)

    def copied(i: jax.Array, to: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        # Of the last block, which may begin earlier, both sides begin at the same row.
        start = jnp.minimum(i * block, capacity - block)
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(
                into, jax.lax.dynamic_slice_in_dim(rows, start, block, axis=-2), start, axis=into.ndim - 2
            )
            for into, rows in zip(to, (*cache.keys, *cache.values), strict=True)
        )

    rows = jax.lax.fori_loop(0, (tokens + block - 1) // block, copied, (*empty.keys, *empty.values))
    half = len(cache.keys)
    return dataclasses.replace(empty, keys=rows[:half], values=rows[half:], length=tokens)


def write_rows(
    rows: jax.Array,
    new: jax.Array,
    start: jax.Array,
    valid: jax.Array,
    slot: jax.Array | np.integer | None = None,
) -> jax.Array:
    """Writes the first `valid` of `new` `[B, K, T, H]` at positions `start...` of `rows` `[B, K, S, H]`, or
    of layer `slot` of a stack `[n, B, K, S, H]`.

    Exactly those positions change, also when `start + T > S`: `dynamic_update_slice` would clamp the
    start and shift the chunk onto older rows, so the block that is replaced is read back, the valid
    rows replace theirs in it, and the block is written whole. Rows past S are
    dropped. A single row (T = 1) is written without all this: it must be valid and `start < S`.
    """
    axes = Axes("write_rows")
    axes.check(jnp.floating, "B K S H" if slot is None else "* B K S H", rows=rows)
    axes.check(jnp.floating, "B K T H", new=new)
    axes.check(jnp.int32, "", start=start, valid=valid)
    capacity, length = rows.shape[-2], new.shape[2]
    new = new.astype(rows.dtype)
    zero = np.int32(0)

    def put(block: jax.Array, at: jax.Array) -> jax.Array:
        if slot is None:
            return jax.lax.dynamic_update_slice(rows, block, (zero, zero, at, zero))
        return jax.lax.dynamic_update_slice(rows, block[None], (slot, zero, zero, at, zero))

    if length == 1:
        # One valid row always fits.
        return put(new, start)
    if length > capacity:
        # A chunk longer than the cache: only its first S rows can be valid.
        new, length = new[:, :, :capacity], capacity
    block_start = jnp.clip(start, 0, capacity - length)
    shift = start - block_start
    if slot is None:
        old = jax.lax.dynamic_slice_in_dim(rows, block_start, length, axis=2)
    else:
        old = jax.lax.dynamic_slice(rows, (slot, zero, zero, block_start, zero), (1, *new.shape))[0]
    # Row j of the block takes new[j - shift]: a slice at `length - shift` of [zeros | new].
    padded = jnp.concatenate([jnp.zeros_like(new), new], axis=2)
    shifted = jax.lax.dynamic_slice_in_dim(padded, length - shift, length, axis=2)
    index = jnp.arange(length, dtype=jnp.int32) - shift
    fresh = ((index >= 0) & (index < valid)).reshape(1, 1, length, 1)
    return put(jnp.where(fresh, shifted, old), block_start)
