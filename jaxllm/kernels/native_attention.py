"""Calls of the native kernels for attention, caches and sampling, for compiled steps."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.kernels.native import target
from jaxllm.kernels.native_call import UsedUnits, call, count_operand, counts_operand, optional


class ChunksAt(NamedTuple):
    """Chunks of one layer, by address.

    Attributes:
      table: `[2]` uint32, the handle of a table (see `jaxllm.kernels.native`).
      layer: int32 scalar, index in the table.
      tokens: int32 scalar, number of tokens of the chunks that are attended to: full chunks.
      mass: `[B, n]` float32, mass to add the attention of valid queries to each chunk to; for a tree `[B, 1
        + T, n]`, as that of `attention`; or None.
    """

    table: jax.Array
    layer: jax.Array
    tokens: jax.Array
    mass: jax.Array | None


def attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    rotary: tuple[jax.Array, jax.Array] | None,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    mass: jax.Array | None = None,
    *,
    slot: jax.Array | np.integer | None = None,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    used: UsedUnits | None = None,
    tree: tuple[jax.Array, jax.Array, jax.Array] | None = None,
    chunks: ChunksAt | None = None,
    bias: jax.Array | None = None,
    sink_logits: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Rotates queries and new keys, writes new keys and values into the cache, and attends over it.

    Args:
      q: queries `[B, T, K, G, H]` float32.
      k, v: new keys and values `[B, T, K, H]` float32; or None: nothing is written, and tokens attend to
        the cache as it is.
      rotary: cos and sin `[T, R]`, or None.
      keys, values: the cache `[B, K, S, H]`, or a stack of them `[n, B, K, S, H]`, float32 or float16;
        updated in place.
      positions: `[T]` int32, ascending.
      valid: int32 scalar; the first `valid` tokens are valid, the others are neither written nor counted.
      mass: `[B, S]` float32, mass to add the attention of valid queries to; for a tree `[B, 1 + T, S]`,
        with that of token t in entry 1 + t; or None.
      slot: int32 scalar, index in the stack; None without one.
      scale, softcap, window: see `jaxllm.nn.layers.cached_attention`.
      used: number of kv heads among the K that are written and attended to; outputs of the others are
        undefined.
      tree: rows of the new tokens `[T]` int32, ascending; the base row, int32 scalar: all rows before it
        are attended to; and the mask `[T, N]` bool of the N rows from the base on for each token.
      chunks: chunks of the tokens before the cache's, of a single sequence; rows, positions and the base
        count from the first of them. None for none.
      bias: `[K, G, distances]` float32, added to scores by the distance of the key before its query: the
        last entry for the query's own position, the first for all farther than the others. None for none;
        not together with `softcap`.
      sink_logits: `[K, G]` float32, an additional logit in the denominator of each head's softmax, without
        a value; None for none.

    Returns:
      Outputs `[B, T, K, G, H]` float32, undefined for tokens of a single sequence that are not valid; keys,
      values and mass; and the mass of chunks.
    """
    seen = optional(mass)
    nothing = (positions, jnp.zeros((0,), jnp.int32), jnp.zeros((0,), jnp.bool_))
    rows, base, mask = nothing if tree is None else tree
    cos, sin = (None, None) if rotary is None else rotary
    none = (jnp.zeros((0,), jnp.uint32), jnp.zeros((0,), jnp.int32), jnp.zeros((0,), jnp.int32), None)
    handle, layer, coded_tokens, coded_mass = none if chunks is None else chunks
    coded_seen = optional(coded_mass)
    out, keys, values, seen, coded_seen = call(
        "attention",
        [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (q, keys, values, seen, coded_seen)],
        (
            q, optional(k), optional(v), optional(cos), optional(sin), keys, values, seen,
            count_operand(slot), rows, positions, valid, base, mask, handle, layer, coded_tokens,
            coded_seen, optional(bias), optional(sink_logits),
        ),
        (counts_operand(used),),
        aliases={5: 1, 6: 2, 7: 3, 17: 4},
        scale=np.float32(scale),
        softcap=np.float32(softcap),
        window=np.int64(window),
        heads_at=np.int64(-1 if used is None else used.column),
    )  # fmt: skip
    return out, keys, values, None if mass is None else seen, None if coded_mass is None else coded_seen


def row_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rotary: tuple[jax.Array, jax.Array] | None,
    caches: Sequence[tuple[jax.Array, jax.Array]],
    positions: jax.Array,
    written: jax.Array,
    *,
    slot: jax.Array | np.integer | None = None,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    heads: jax.Array | None = None,
    sink_logits: jax.Array | None = None,
) -> tuple[jax.Array, tuple[tuple[jax.Array, jax.Array], ...]]:
    """`attention` of one token of each of R sequences, all in one call; each comes out as alone.

    Args:
      q: queries `[R, 1, K, G, H]` float32.
      k, v: new keys and values `[R, 1, K, H]` float32.
      rotary: cos and sin `[R, rotary]`, or None.
      caches: keys and values of each sequence, of batch 1 and any length; updated in place.
      positions: `[R]` int32, also the rows of the caches.
      written: `[R]` int32, 0 for a sequence that is left out: its cache stays, and its outputs are zeros.
      slot, scale, softcap, window, sink_logits: see `attention`.
      heads: `[R]` int32, number of used kv heads of each; None for all.

    Returns:
      Outputs `[R, 1, K, G, H]` float32, and the caches.
    """
    flat = [rows for cache in caches for rows in cache]
    results = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (q[:, 0], *flat)]
    aliases = {10 + place: 1 + place for place in range(len(flat))}
    cos, sin = (None, None) if rotary is None else rotary
    kernel = jax.ffi.ffi_call(target("row_attention"), results, input_output_aliases=aliases)
    out, *kept = kernel(
        q[:, 0], k[:, 0], v[:, 0], optional(cos), optional(sin), positions, written, count_operand(slot),
        count_operand(heads), optional(sink_logits), *flat,
        scale=np.float32(scale), softcap=np.float32(softcap), window=np.int64(window),
    )  # fmt: skip
    return out[:, None], tuple(zip(kept[::2], kept[1::2], strict=True))


def load_chunks(
    caches: Sequence[tuple[jax.Array, jax.Array]],
    stacks: Sequence[int],
    slots: jax.Array | np.ndarray,
    extents: jax.Array,
    bits: jax.Array,
    counts: jax.Array | None = None,
    *,
    tokens: int,
    keys_by_token: bool,
    values_by_token: bool,
    rotated: bool,
) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """Decodes chunks of `tokens` tokens into the caches of some layers, in place.

    The caller must keep the blobs in memory, unchanged, until the dispatch has ended.

    Args:
      caches: keys and values of stacks of layers, `[n, 1, K, S, H]`; S and H are the same for all.
      stacks: index of each layer's stack.
      slots: `[L]` int32, index of each layer in its stack.
      extents: `[L, N, 3]` uint32, for chunk i of layer l the lower and the upper half of its address in
        this process, and its size in bytes, which must be that of its width: a blob of
        `jaxllm.contexts.codecs`.
      bits: `[N]` int32, width of each chunk; 0 for raw floats, negative for no chunk.
      counts: `[L]` int32, number of kv heads among the K in a layer's blobs; None for all.
      tokens: number of tokens of a chunk (C).
      keys_by_token, values_by_token, rotated: see `jaxllm.contexts.codecs.Codec`.
    """
    flat = [rows for cache in caches for rows in cache]
    results = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in flat]
    aliases = {4 + place: place for place in range(len(flat))}
    kernel = jax.ffi.ffi_call(target("load_chunks"), results, input_output_aliases=aliases)
    loaded = kernel(
        extents,
        bits,
        jnp.asarray(slots),
        count_operand(counts),
        *flat,
        tokens=np.int64(tokens),
        keys_by_token=keys_by_token,
        values_by_token=values_by_token,
        rotated=rotated,
        stacks=np.array(stacks, np.int64),
    )
    return tuple(zip(loaded[::2], loaded[1::2], strict=True))


def document_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Causal attention within documents.

    Args:
      q: queries `[B, T, K, G, H]` float32.
      k, v: keys and values `[B, T, K, H]` float32.
      starts: `[B, T]` int32, per token the index of its document's beginning.

    Returns:
      Outputs `[B, T, K, G, H]`, and the log-sum-exp of each query's scores `[B, T, K, G]`.
    """
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (q.shape, q.shape[:-1])]
    call = jax.ffi.ffi_call(target("document_attention"), results)
    out, lse = call(q, k, v, starts, scale=np.float32(scale))
    return out, lse


def document_attention_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns gradients of `q`, `k` and `v`, given the gradient of `out`; `out` and `lse` are those of
    `document_attention`."""
    results = [jax.ShapeDtypeStruct(each.shape, jnp.float32) for each in (q, k, v)]
    call = jax.ffi.ffi_call(target("document_attention_gradients"), results)
    dq, dk, dv = call(q, k, v, starts, out, lse, dout, scale=np.float32(scale))
    return dq, dk, dv


# The kernels that choose tokens (see `jaxllm.sampling`); all may be mapped over by `jax.vmap`.


def largest(x: jax.Array) -> jax.Array:
    """The index of each row's largest value or NaN, the first of equals, for `x` `[M, V]` float32: `[M]`
    int32."""
    return _call("largest", jax.ShapeDtypeStruct(x.shape[:1], jnp.int32), x)


def draw(logits: jax.Array, floats: jax.Array, ints: jax.Array, seed: jax.Array) -> jax.Array:
    """A token sampled from each row of `logits` `[M, V]` float32, `[M]` int32; -1 for a row whose largest is
    not finite. Each row's random numbers are those of `sampling.gumbel_noise` for all rows.

    Args:
      logits: see above.
      floats: `[3]` float32: temperature, over 0, top_p and min_p.
      ints: `[2]` int32: top_k, and the number that is folded into the key.
      seed: `[2]` uint32, the key.
    """
    return _call("draw", jax.ShapeDtypeStruct(logits.shape[:1], jnp.int32), logits, floats, ints, seed)


def _call(name: str, result: jax.ShapeDtypeStruct, *operands: jax.Array) -> Any:
    return jax.ffi.ffi_call(target(name), result, vmap_method="broadcast_all")(*operands)
