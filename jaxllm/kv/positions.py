"""Positions of new tokens in a sequence, and the rows of its cache that they are written to."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import Axes


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
      mask: `[T, S]` bool, the rows that each token attends to besides its own, where the caller says so;
        without a tree.
    """

    positions: jax.Array
    valid: jax.Array
    tree: TreePositions | None = None
    consecutive: bool = dataclasses.field(metadata={"static": True}, default=False)
    mask: jax.Array | None = None

    @classmethod
    def after(cls, length: jax.Array, count: int, valid: jax.Array) -> "TokenPositions":
        """`count` consecutive positions after `length` tokens."""
        return cls(length + jnp.arange(count, dtype=jnp.int32), valid, consecutive=True)

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above, where a step that takes the positions is traced."""
        axes.check(jnp.int32, "T", positions=self.positions)
        axes.check(jnp.int32, "", valid=self.valid)
        axes.check(jnp.bool_, "T *", mask=self.mask)
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

    @property
    def used_rows(self) -> jax.Array:
        """How many rows of the cache real tokens may attend to, int32 scalar: those up to their last one."""
        return self.rows[jnp.maximum(self.valid, 1) - 1] + 1

    def visible(self, keys: int, window: int) -> jax.Array:
        """The attention mask `[T, keys]` bool of new tokens over the first `keys` rows, True = attend.

        With a `window` above 0 a token attends to the last `window` positions, its own included. Of a tree a
        node attends to its path, so that its k-th visible node is at position base + k.
        """
        row = jnp.arange(keys, dtype=jnp.int32)[None, :]
        if self.mask is not None:
            # Its own row, so that padding, which may attend to nothing, stays finite.
            before = self.mask[:, :keys] | (row == self.rows[:, None])
        elif self.tree is None:
            before = row <= self.rows[:, None]
        else:
            node, at = self._nodes(self.tree, keys)
            inside = (node >= 0) & (node < self.tree.mask.shape[1])
            before = (node < 0) | (inside & jnp.take_along_axis(self.tree.mask, at, axis=1))
        return before & (self.stands(keys) > self.positions[:, None] - window) if window else before

    def stands(self, keys: int) -> jax.Array:
        """Positions `[T or 1, keys]` int32 of the tokens in the first `keys` rows, for those that each new
        token attends to: of a tree its path, one behind the other."""
        row = jnp.arange(keys, dtype=jnp.int32)[None, :]
        if self.tree is None:
            return row
        node, at = self._nodes(self.tree, keys)
        depth = jnp.cumsum(self.tree.mask, axis=1, dtype=jnp.int32) - 1
        return jnp.where(node < 0, row, self.tree.base + jnp.take_along_axis(depth, at, axis=1))

    def _nodes(self, tree: TreePositions, keys: int) -> tuple[jax.Array, jax.Array]:
        """The nodes `[1, keys]` of a tree in the first `keys` rows, negative before the tree, and clipped to
        those that there are `[T, keys]`."""
        node = jnp.arange(keys, dtype=jnp.int32)[None, :] - tree.base
        at = jnp.clip(node, 0, tree.mask.shape[1] - 1)
        return node, jnp.broadcast_to(at, (len(tree.rows), keys))

    def write(
        self,
        rows: jax.Array,
        new: jax.Array,
        slot: jax.Array | np.integer | None = None,
        *,
        before: jax.Array | np.integer | None = None,
    ) -> jax.Array:
        """Writes the valid tokens of `new` `[B, K, T, H]` at their rows; rows past S are dropped.

        Args:
          rows: `[B, K, S, H]`, or those of a stack of layers, `[n, B, K, S, H]`.
          new: keys or values.
          slot: the layer's index in the stack.
          before: int32 scalar, tokens of the sequence before the first of `rows`; None for none.

        Returns:
          The updated rows.
        """
        axes = Axes("write")
        self.check(axes)
        axes.check(jnp.floating, "B K S H" if slot is None else "* B K S H", rows=rows)
        axes.check(jnp.floating, "B K T H", new=new)
        if self.consecutive:
            start = self.positions[0] if before is None else self.positions[0] - before
            return write_rows(rows, new, start, self.valid, slot)
        real = jnp.arange(len(self.positions), dtype=jnp.int32) < self.valid
        # Row S does not exist: `mode="drop"` drops padding.
        own = self.rows if before is None else self.rows - before
        at = jnp.where(real, own, rows.shape[-2])
        new = new.astype(rows.dtype)
        if slot is None:
            return rows.at[:, :, at].set(new, mode="drop")
        # Indices on both sides of slices bring the tokens to the front.
        return rows.at[slot, :, :, at].set(new.transpose(2, 0, 1, 3), mode="drop")


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
