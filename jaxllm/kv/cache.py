"""The key-value cache of one batch of sequences: positions, and functions that write into it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm.axes import Axes
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.kernels import native, native_products
from jaxllm.kv.states import STATES, Source, States, no_source, no_states
from jaxllm.layer_configs import kv_layer, layer_config, shares_kv

if TYPE_CHECKING:
    from jaxllm.contexts.coded import QuantizedPrefix


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TreePositions:
    """Cache rows and attention mask of a token tree: one row per node after the sequence, at any depth.

    Attributes:
      base: int32 scalar, the row of the first node; every node attends to all rows before it.
      rows: `[T]` int32, rows of the new tokens, ascending.
      mask: `[T, M]` bool, rows among the M from `base` on that each new token attends to: its ancestors and
        itself.
    """

    base: jax.Array
    rows: jax.Array
    mask: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenPositions:
    """Positions of new tokens in a sequence, and their rows in its cache.

    Invariants: without a tree `positions` do not descend; the rows of valid tokens differ.

    Attributes:
      positions: `[T]` int32, in the sequence (the rotary embedding uses them).
      valid: int32 scalar: the first `valid` tokens are valid, the others padding.
      tree: rows and mask of a token tree; None: rows are positions, and a token attends to all positions
        before it.
      consecutive: whether the rows are consecutive, from the first position on.
      mask: `[T, S]` bool, the rows that each token attends to, in place of those up to its own; without a
        tree.
      roomy: whether consecutive rows exist for all T tokens, so that padding is written as well: nothing
        attends to it before other tokens replace it.
      apart: whether keys and values of the new tokens take the cache's place in the results, and are not
        written; the mask then is of the cache's rows, followed by the new tokens.
      narrow: whether products of few queries with keys and values are computed in the cache's dtype, for
        runtimes that widen a cache slowly.
    """

    positions: jax.Array
    valid: jax.Array
    tree: TreePositions | None = None
    consecutive: bool = dataclasses.field(metadata={"static": True}, default=False)
    mask: jax.Array | None = None
    roomy: bool = dataclasses.field(metadata={"static": True}, default=False)
    apart: bool = dataclasses.field(metadata={"static": True}, default=False)
    narrow: bool = dataclasses.field(metadata={"static": True}, default=False)

    @classmethod
    def after(cls, length: jax.Array, count: int, valid: jax.Array) -> "TokenPositions":
        """`count` consecutive positions after `length` tokens."""
        return cls(length + jnp.arange(count, dtype=jnp.int32), valid, consecutive=True)

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above at trace time."""
        axes.check(jnp.int32, "T", positions=self.positions)
        axes.check(jnp.int32, "", valid=self.valid)
        axes.check(jnp.bool_, "T *", mask=self.mask)
        if self.tree is not None:
            axes.check(jnp.int32, "", base=self.tree.base)
            axes.check(jnp.int32, "T", rows=self.tree.rows)
            axes.check(jnp.bool_, "T M", mask=self.tree.mask)

    @property
    def padded(self) -> bool:
        """Whether some tokens may be padding: a single token is valid."""
        return len(self.positions) > 1

    @property
    def rows(self) -> jax.Array:
        """The rows `[T]` of the cache into which new tokens are written."""
        return self.positions if self.tree is None else self.tree.rows

    @property
    def used_rows(self) -> jax.Array:
        """Number of cache rows that valid tokens may attend to, int32 scalar: those up to their last one."""
        return self.rows[jnp.maximum(self.valid, 1) - 1] + 1

    def visible(self, keys: int, window: int) -> jax.Array:
        """The attention mask `[T, keys]` bool of new tokens over the first `keys` rows, True = attend.

        With a `window` above 0 a token attends to the last `window` positions, including its own. In a tree
        a node attends to its path, so that its k-th visible node is at position base + k.
        """
        row = jnp.arange(keys, dtype=jnp.int32)[None, :]
        if self.mask is not None:
            before = self.mask
        elif self.tree is None:
            before = row <= self.rows[:, None]
        else:
            node, at = self._nodes(self.tree, keys)
            inside = (node >= 0) & (node < self.tree.mask.shape[1])
            before = (node < 0) | (inside & jnp.take_along_axis(self.tree.mask, at, axis=1))
        return before & (self.stands(keys) > self.positions[:, None] - window) if window else before

    def stands(self, keys: int) -> jax.Array:
        """Positions `[T or 1, keys]` int32 of the tokens in the first `keys` rows, for those that each new
        token attends to: in a tree the consecutive nodes of its path."""
        row = jnp.arange(keys, dtype=jnp.int32)[None, :]
        if self.tree is None:
            return row
        node, at = self._nodes(self.tree, keys)
        depth = jnp.cumsum(self.tree.mask, axis=1, dtype=jnp.int32) - 1
        return jnp.where(node < 0, row, self.tree.base + jnp.take_along_axis(depth, at, axis=1))

    def _nodes(self, tree: TreePositions, keys: int) -> tuple[jax.Array, jax.Array]:
        """The nodes `[1, keys]` of a tree in the first `keys` rows, negative before the tree, and clipped to
        existing ones `[T, keys]`."""
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
          slot: the layer's index in the stack.
          before: int32 scalar, tokens of the sequence before the first of `rows`; None for none.

        Returns:
          The updated rows.
        """
        axes = Axes("write")
        self.check(axes)
        axes.check(_kind(rows), "B K S H" if slot is None else "* B K S H", rows=rows)
        axes.check(_kind(rows), "B K T H", new=new)
        if self.consecutive:
            start = self.positions[0] if before is None else self.positions[0] - before
            return write_rows(rows, new, start, None if self.roomy else self.valid, slot)
        real = jnp.arange(len(self.positions), dtype=jnp.int32) < self.valid
        # Row S does not exist: `mode="drop"` drops padding.
        own = self.rows if before is None else self.rows - before
        at = jnp.where(real, own, rows.shape[-2])
        new = new.astype(rows.dtype)
        if slot is None:
            return rows.at[:, :, at].set(new, mode="drop")
        # Indices on both sides of slices bring the tokens to the front.
        return rows.at[slot, :, :, at].set(new.transpose(2, 0, 1, 3), mode="drop")


def _kind(rows: Any) -> Any:
    """The numbers of rows: floats of any width, or bytes (see `jaxllm.kv.byte_rows`)."""
    return jnp.int8 if getattr(rows, "dtype", None) == jnp.int8 else jnp.floating


def write_rows(
    rows: jax.Array,
    new: jax.Array,
    start: jax.Array,
    valid: jax.Array | None,
    slot: jax.Array | np.integer | None = None,
) -> jax.Array:
    """Writes the first `valid` of `new` `[B, K, T, H]` at positions `start...` of `rows` `[B, K, S, H]`, or
    of layer `slot` of a stack `[n, B, K, S, H]`.

    Exactly those positions change, even if `start + T > S`: `dynamic_update_slice` would clamp the start
    and shift the chunk onto older rows, so the replaced block is read back, the valid rows are merged into
    it, and the block is written whole. Rows past S are dropped. A single row (T = 1) is written directly:
    it must be valid and `start < S`. So are all rows if `valid` is None: `start + T <= S`.
    """
    axes = Axes("write_rows")
    axes.check(_kind(rows), "B K S H" if slot is None else "* B K S H", rows=rows)
    axes.check(_kind(rows), "B K T H", new=new)
    axes.check(jnp.int32, "", start=start, valid=valid)
    capacity, length = rows.shape[-2], new.shape[2]
    # Few runtimes select between float16 numbers.
    new = new.astype(jnp.float32 if rows.dtype == jnp.float16 else rows.dtype)
    zero = np.int32(0)
    # Exported programs would add the axis's length to a negative start.
    update = functools.partial(jax.lax.dynamic_update_slice, allow_negative_indices=False)

    def put(block: jax.Array, at: jax.Array) -> jax.Array:
        block = block.astype(rows.dtype)
        if slot is None:
            return update(rows, block, (zero, zero, at, zero))
        return update(rows, block[None], (slot, zero, zero, at, zero))

    if length == 1 or valid is None:
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
    return put(jnp.where(fresh, shifted, old.astype(new.dtype)), block_start)


# The key-value cache of one batch of sequences, and functions that write into it.
#
# Per layer it is `[B, K, S, H]`: the kv head leads, so that a sub-model reads a prefix of heads, and
# attention reads the tokens of one head contiguously. Layers of equal shape are stacked, `[n, B, K, S, H]`,
# so that a loop over layers updates one array in place. An index along S is called a row of the cache. S is
# a cache length that buckets exist for; a sequence that outgrows it moves into the next length with `grow`.


# Number of rows that `fork` copies at once.
_FORK_BLOCK = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Past:
    """Keys and values of one layer.

    Attributes:
      keys, values: `[B, K, S, H]`, or those of a stack of layers, `[n, B, K, S, H]`.
      slot: int32 scalar, the layer's index in the stack; None without one.
      coded: chunks of the tokens before these rows; None: row 0 is the sequence's first token.
      source: keys and values of the source that the layer also attends to, in an encoder-decoder.
    """

    keys: jax.Array
    values: jax.Array
    slot: jax.Array | np.integer | None = None
    coded: "QuantizedPrefix | None" = None
    source: Source | None = None

    @property
    def capacity_tokens(self) -> int:
        """Number of positions (S)."""
        return self.keys.shape[-2]

    @property
    def own(self) -> tuple[jax.Array, jax.Array]:
        """Only the layer's keys and values, `[B, K, S, H]`."""
        if self.slot is None:
            return self.keys, self.values
        index = functools.partial(jax.lax.dynamic_index_in_dim, index=self.slot, keepdims=False)
        return index(self.keys), index(self.values)

    def written(self, at: TokenPositions, keys: jax.Array, values: jax.Array) -> "Past":
        """With keys and values of new tokens `[B, K, T, H]` (see `TokenPositions.write`)."""
        before = None if self.coded is None else self.coded.tokens
        write = functools.partial(at.write, slot=self.slot, before=before)
        return dataclasses.replace(self, keys=write(self.keys, keys), values=write(self.values, values))

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above at trace time."""
        lead = "" if self.slot is None else "* "
        head = "W" if self.keys.dtype == jnp.int8 else "H"
        axes.check(_kind(self.keys), f"{lead}B K S {head}", keys=self.keys, values=self.values)
        axes.check(jnp.int32, "", slot=self.slot)
        if self.coded is not None:
            self.coded.check(axes)
        if self.source is not None:
            self.source.check(axes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers.

    Invariants: S is the same in all layers; in a sub-model K differs by layer. Rows at positions >=
    `length` are never attended to.

    Attributes:
      keys, values: per stack of layers `[n, B, K, S, H]`; or without `places` per layer `[B, K, S, H]`.
      length: int32 scalar, number of tokens, the same for the whole batch.
      mass: `[B, S]` float32, the attention mass of each position, summed over queries of all heads and
        layers; None if it is not counted. From the verification of a tree of M nodes until a path of it is
        kept it is `[B, 1 + M, S]`: entry 0 is the sequence's, entry 1 + n that of the queries of node n.
      places: per layer, its stack and its slot in it (see `stack_places`); always present with states.
      coded: chunks of the first tokens. Row r is then that of token `coded.tokens` + r, and `length`
        includes the chunks' tokens. None: there can be none.
      source: keys and values of an encoder-decoder's source; None in other models.
      states: states of state layers, after the last fed token; None in other models.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    length: jax.Array
    mass: jax.Array | None = None
    places: tuple[tuple[int, int], ...] | None = dataclasses.field(default=None, metadata={"static": True})
    coded: "QuantizedPrefix | None" = None
    source: Source | None = None
    states: States | None = None

    @property
    def capacity_tokens(self) -> int:
        """Number of positions (S), besides those of coded chunks."""
        return self.keys[0].shape[-2]

    @property
    def coded_tokens(self) -> int:
        """Tokens in coded chunks, for the host: waits until the cache is computed."""
        return 0 if self.coded is None else int(np.asarray(self.coded.tokens))

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.keys if self.places is None else self.places)

    def past(self, layer: int, number: jax.Array | int | None = None) -> Past:
        """Keys and values of a layer.

        Args:
          layer: index of the layer, or of one in the same stack.
          number: index of the layer, int32 scalar, if known only at run time.
        """
        source = None if self.source is None else self.source.in_layer(layer if number is None else number)
        if self.places is None:
            assert number is None or isinstance(number, int)
            coded = None if self.coded is None else self.coded.of_layer(layer)
            return Past(self.keys[layer], self.values[layer], coded=coded, source=source)
        stack, slot = self.places[layer][0], self._slot(layer, number)
        coded = None if self.coded is None else self.coded.of_layer(layer if number is None else number)
        return Past(self.keys[stack], self.values[stack], slot, coded, source)

    def state(self, layer: int, number: jax.Array | int | None, at: TokenPositions) -> States:
        """The state of a state layer before tokens, zeros before those that begin at 0; for the other
        arguments see `past`."""
        assert self.states is not None
        return self.states.of_slot(self._slot(layer, number), at.positions[0] == 0)

    def with_state(self, layer: int, number: jax.Array | int | None, state: States) -> "KVCache":
        """With another state of a state layer."""
        assert self.states is not None
        return dataclasses.replace(self, states=self.states.with_slot(self._slot(layer, number), state))

    def _slot(self, layer: int, number: jax.Array | int | None) -> jax.Array | np.integer:
        """The slot of a layer in its stack (see `past`)."""
        assert self.places is not None
        if isinstance(number, int) or number is None:
            return np.int32(self.places[layer if number is None else number][1])
        if all(place == (0, own) for own, place in enumerate(self.places)):
            return number
        return jnp.asarray([each for _, each in self.places], jnp.int32)[number]

    def with_past(self, layer: int, past: Past) -> "KVCache":
        """With other keys and values of a layer, from `past`."""
        stack = layer if self.places is None else self.places[layer][0]
        keys = tuple(past.keys if at == stack else each for at, each in enumerate(self.keys))
        values = tuple(past.values if at == stack else each for at, each in enumerate(self.values))
        coded = self.coded
        if coded is not None and past.coded is not None:
            # All of it: a dispatch with a donated layer's past also uses its part of the chunks.
            coded = dataclasses.replace(past.coded, layer=coded.layer)
        source = self.source if past.source is None else past.source.in_layer(None)
        return dataclasses.replace(self, keys=keys, values=values, coded=coded, source=source)

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above at trace time."""
        lead = "" if self.places is None else "* "
        widths = {rows.shape[-1] for rows in self.keys}
        for stack, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            # Rows at 8 bits are wider.
            head = "H" if len(widths) == 1 and keys.dtype != jnp.int8 else f"H{stack}"
            axes.check(_kind(keys), f"{lead}B K{stack} S {head}", keys=keys, values=values)
        by_node = self.mass is not None and self.mass.ndim == 3
        axes.check(jnp.float32, "B * S" if by_node else "B S", mass=self.mass)
        axes.check(jnp.int32, "", length=self.length)
        if self.coded is not None:
            self.coded.check(axes)
        if self.source is not None:
            self.source.check(axes)
        if self.states is not None:
            self.states.check(axes)

    def uncounted(self) -> "KVCache":
        """The same cache with an attention mass of zero."""

        def zeros(mass: jax.Array | np.ndarray | None) -> np.ndarray:
            count = self.capacity_tokens if mass is None else mass.shape[-1]
            return np.zeros((self._batch, count), np.float32)

        return self.with_mass(zeros)

    def at_rest(self) -> "KVCache":
        """The same cache with an attention mass of zero, if it counts one, for the next request: how many
        tokens its coded chunks have is known to the host from here on. Waits until the cache is computed."""
        cache = self if self.mass is None else self.uncounted()
        if cache.coded is None:
            return cache
        coded = dataclasses.replace(cache.coded, tokens=np.int32(cache.coded_tokens))
        return dataclasses.replace(cache, coded=coded)

    def behind(self, chunks: np.ndarray, tokens: np.integer) -> "KVCache":
        """The same rows, for later tokens after other coded chunks, with zero attention mass.

        Args:
          chunks: see `QuantizedPrefix.source`.
        """
        before = self.coded
        assert before is not None
        # Constructed directly: `replace` takes several times as long, and dominates a switch.
        mass = None if before.mass is None else np.zeros((self._batch, before.mass.shape[-1]), np.float32)
        coded = type(before)(tokens, chunks, before.form, before.bits, mass, before.layer)
        own = np.zeros((self._batch, self.capacity_tokens), np.float32)
        return KVCache(self.keys, self.values, tokens, own, self.places, coded, self.source, self.states)  # pyright: ignore

    def counted_by_node(self, nodes: int) -> "KVCache":
        """The same cache with its mass by node: which nodes count is known after a verification."""
        if self.mass is None:
            return self

        def by_node(mass: jax.Array | np.ndarray | None) -> np.ndarray:
            assert mass is not None
            wide = np.zeros((mass.shape[0], 1 + nodes, mass.shape[-1]), np.float32)
            wide[:, 0] = mass
            return wide

        return self.with_mass(by_node)

    def with_mass(self, change: Callable[[Any], Any]) -> "KVCache":
        """With another mass of its rows and of its chunks, from theirs, or from None."""
        coded = self.coded
        if coded is not None and coded.mass is not None:
            coded = dataclasses.replace(coded, mass=change(coded.mass))
        return dataclasses.replace(self, mass=change(self.mass), coded=coded)

    @property
    def _batch(self) -> int:
        return self.keys[0].shape[-4]


def stack_places(cfg: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Per layer, the stack of its keys and values and its slot in it: layers with the same number and size
    of kv heads are a stack. State layers are the stack `STATES`; a layer that shares those of another has
    its place."""
    sizes: dict[tuple[int, int], int] = {}
    places: list[tuple[int, int]] = []
    for layer in range(cfg.layers):
        if cfg.is_state(layer):
            places.append((STATES, sum(cfg.state_layers[:layer])))
            continue
        if shares_kv(cfg, layer):
            places.append(places[kv_layer(cfg, layer)])
            continue
        heads = cfg.units(layer).kv_heads, layer_config(cfg, layer).head_dim
        slot = sizes.get(heads, 0)
        sizes[heads] = slot + 1
        places.append((list(sizes).index(heads), slot))
    return tuple(places)


def new_cache(
    cfg: ModelConfig,
    *,
    batch: int,
    tokens: int,
    dtype: DTypeLike,
    mass: bool = False,
    stacked: bool = True,
    coded: "QuantizedPrefix | None" = None,
    source_tokens: int = 0,
) -> KVCache:
    """An empty cache for `tokens` positions, with or without their attention mass, after coded chunks, if
    any, and with equal layers in stacks, or separate. XLA copies a stack for each layer that a step writes
    outside of a loop. The cache of an encoder-decoder has room for a source of `source_tokens`; the caches
    of models with state layers, or with mixed ones, are always in stacks."""
    places, shapes = stack_places(cfg), {}
    stacked = stacked or cfg.states is not None or cfg.mixed is not None
    for layer, (stack, slot) in enumerate(places):
        if stack == STATES or shares_kv(cfg, layer):
            continue
        own = (batch, cfg.units(layer).kv_heads, tokens, layer_config(cfg, layer).head_dim)
        shapes[stack if stacked else layer] = (slot + 1, *own) if stacked else own
    rows = _zeros([*shapes.values()] * 2, dtype)
    return KVCache(
        keys=tuple(rows[: len(shapes)]),
        values=tuple(rows[len(shapes) :]),
        length=jnp.zeros((), jnp.int32),
        mass=jnp.zeros((batch, tokens), jnp.float32) if mass else None,
        places=places if stacked else None,
        coded=coded,
        source=None if cfg.encoder is None else no_source(cfg, batch, source_tokens or tokens, dtype),
        states=None if cfg.states is None else no_states(cfg, batch),
    )


def _zeros(shapes: list[tuple[int, ...]], dtype: DTypeLike) -> list[jax.Array]:
    """Arrays of zeros; on a CPU with native kernels their memory is committed as they fill."""

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
      cache: cache; unchanged.
      empty: cache to write; of its rows beyond the tokens only a few are touched.
      tokens: int32 scalar, at most the cache's, and at least those of its coded chunks, which are shared.
    """
    capacity = cache.capacity_tokens
    block = min(_FORK_BLOCK, capacity)

    def copied(i: jax.Array, to: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        # Clamp the start of the last block equally on both sides.
        start = jnp.minimum(i * block, capacity - block)
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(
                into, jax.lax.dynamic_slice_in_dim(rows, start, block, axis=-2), start, axis=into.ndim - 2
            )
            for into, rows in zip(to, (*cache.keys, *cache.values), strict=True)
        )

    count, coded = tokens, empty.coded
    if cache.coded is not None and coded is not None:
        count = tokens - cache.coded.tokens
        coded = dataclasses.replace(cache.coded, mass=coded.mass)
    rows = jax.lax.fori_loop(0, (count + block - 1) // block, copied, (*empty.keys, *empty.values))
    half = len(cache.keys)
    return dataclasses.replace(empty, keys=rows[:half], values=rows[half:], length=tokens, coded=coded)
