"""The native kernels of attention and of the caches that it reads, as calls for graphs (see `native`)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.kernels.native import optional, target, unit_counts
from jaxllm.used_units import UsedUnits


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table: tuple[jax.Array, jax.Array] | None,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    mass: jax.Array | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    used: UsedUnits | None = None,
    tree: tuple[jax.Array, jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Turns queries `[B, T, K, G, H]` and new keys `[B, T, K, H]` float32 by a rotary `table` (cos, sin
    `[T, R]`), writes the first `valid` new keys and values into the cache `[B, K, S, H]` (float32 or float16)
    at ascending `positions` `[T]` int32, and attends causally over it: `[B, T, K, G, H]` and the cache, in
    place.

    To a `mass` `[B, S]` float32 what the valid queries attend to each position is added; of a tree it may be
    `[B, 1 + T, S]`, where each token's goes to a row of its own behind the first. Of the K heads those
    that are used are written and attended to; the results of others are anything. In a `tree` new tokens go
    to other rows than their positions (`[T]` int32, ascending), and see all rows before a base (int32 scalar)
    and of the N from there on what they are told (`[T, N]` bool).
    """
    seen = optional(mass)
    counts, places = unit_counts(used)
    nothing = (positions, jnp.zeros((0,), jnp.int32), jnp.zeros((0,), jnp.bool_))
    rows, base, told = nothing if tree is None else tree
    results = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (q, keys, values, seen)]
    call = jax.ffi.ffi_call(target("attention"), results, input_output_aliases={5: 1, 6: 2, 7: 3})
    cos, sin = (None, None) if table is None else table
    out, keys, values, seen = call(
        q,
        k,
        v,
        optional(cos),
        optional(sin),
        keys,
        values,
        seen,
        rows,
        positions,
        valid,
        base,
        told,
        counts,
        scale=np.float32(scale),
        softcap=np.float32(softcap),
        window=np.int64(window),
        heads_at=places["units_at"],
    )
    return out, keys, values, None if mass is None else seen


def load_chunks(
    pasts: Sequence[tuple[jax.Array, jax.Array]],
    extents: jax.Array,
    bits: jax.Array,
    *,
    tokens: int,
    keys_by_token: bool,
    values_by_token: bool,
    rotated: bool,
    used: Sequence[UsedUnits | None] = (),
) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """Decodes chunks of `tokens` tokens into the caches of some layers, in place.

    Chunk i of layer l is read from this process's memory at `extents[l, i]` (uint32 `[L, N, 3]`: the lower
    half of its address, the upper, and its bytes, which must be those of its width), a blob of
    `jaxllm.kv.codecs` with levels of `bits[i]` (int32 `[N]`; 0 for rows as they are, negative for no chunk),
    and goes to `pasts[l]`, keys and values `[1, K, S, H]`; S and H are those of all
    layers. Of the K heads a layer's blobs have those that are used, or all. Whoever calls the graph sees to
    it that the blobs are there, and whole, until it has run.
    """
    counts, places = zip(*[unit_counts(each) for each in used or [None] * len(pasts)], strict=True)
    flat = [rows for past in pasts for rows in past]
    results = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in flat]
    aliases = {3 + place: place for place in range(len(flat))}
    call = jax.ffi.ffi_call(target("load_chunks"), results, input_output_aliases=aliases)
    loaded = call(
        extents,
        bits,
        # The same of all layers: that of the model.
        counts[0],
        *flat,
        tokens=np.int64(tokens),
        keys_by_token=keys_by_token,
        values_by_token=values_by_token,
        rotated=rotated,
        heads_at=np.array([each["units_at"] for each in places], np.int64),
    )
    return tuple(zip(loaded[::2], loaded[1::2], strict=True))


def document_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Causal attention inside documents of queries `[B, T, K, G, H]` and keys and values `[B, T, K, H]`
    float32, where `starts` `[B, T]` int32 is where a token's document begins: `[B, T, K, G, H]`, and the
    logarithm of the sum of exponentials of each query's scores `[B, T, K, G]`."""
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
    """Gradients of `q`, `k` and `v` from that of `out`; `out` and `lse` are `document_attention`'s."""
    results = [jax.ShapeDtypeStruct(each.shape, jnp.float32) for each in (q, k, v)]
    call = jax.ffi.ffi_call(target("document_attention_gradients"), results)
    dq, dk, dv = call(q, k, v, starts, out, lse, dout, scale=np.float32(scale))
    return dq, dk, dv
