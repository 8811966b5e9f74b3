"""Activation functions, norms, rotary embedding and attention, as pure functions over arrays."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from jaxllm.axes import BATCH_AXES, UNIT_AXES
from jaxllm.config import Activation, RopeConfig
from jaxllm.kernels import native, native_attention
from jaxllm.kernels.native import Operand, TableArray
from jaxllm.kernels.native_call import UsedUnits, value
from jaxllm.kv import byte_rows
from jaxllm.kv.cache import Past, TokenPositions
from jaxllm.kv.states import Source, SourceKV

if TYPE_CHECKING:
    from jaxllm.contexts.coded import QuantizedPrefix

# Attention over only a prefix of a cache, for programs on CPUs, which call no native kernels.
#
# Shapes are static in XLA: each of a few lengths is a branch, and the shortest one with all used rows is
# computed. There is another reason for a branch: XLA fuses nothing with it. Without one, its fusions write a
# step's new rows once more for attention, into copies of the whole cache.


# Each length has a branch, which costs compile time: most steps of programs have one token.
_TOKEN_LENGTHS, _CHUNK_LENGTHS, _SHORTEST = 8, 4, 64

# (queries, keys [B, K, n, H], values, mask [..., n]) -> outputs in the shape of the queries.
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def prefix_lengths(capacity: int, tokens: int) -> tuple[int, ...]:
    """Lengths of prefixes of a cache of `capacity` rows for so many queries, ascending; the last is the
    whole."""
    parts = _TOKEN_LENGTHS if tokens == 1 else _CHUNK_LENGTHS
    lengths = [capacity * part // parts for part in range(1, parts)]
    return (*(each for each in lengths if each >= _SHORTEST), capacity)


def over_used_prefix(
    attend: Attend, q: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array, used: jax.Array
) -> jax.Array:
    """Attends to the shortest of `prefix_lengths` that contains the used rows.

    Args:
      attend: attention over any number of rows.
      q: queries `[B, T, ...]`.
      keys, values: `[B, K, S, H]`.
      visible: `[..., S]`, mask of the rows, or biases of their scores; rows from `used` on are masked.
      used: int32 scalar, at most S: number of rows that may be attended to.
    """
    lengths = prefix_lengths(keys.shape[2], q.shape[1])
    if len(lengths) == 1:
        return attend(q, keys, values, visible)

    def of(length: int) -> Attend:
        return lambda q, keys, values, visible: attend(
            q, keys[:, :, :length], values[:, :, :length], visible[..., :length]
        )

    shortest = sum((used > each).astype(jnp.int32) for each in lengths[:-1])
    return jax.lax.switch(shortest, [of(each) for each in lengths], q, keys, values, visible)


# Softmax is computed in float32 for any dtype of the activations.

# Large but finite: a query with all keys masked must give a uniform softmax, not NaN.
MASKED = -1e30
# Constants of the activation `clamped_swiglu` (gpt-oss).
CLAMP, CLAMPED_SLOPE = 7.0, 1.702


def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """The feed-forward non-linearity named `activation`."""
    if activation == "silu":
        return jax.nn.silu(x)
    if activation == "relu":
        return jax.nn.relu(x)
    return jax.nn.gelu(x, approximate=activation == "gelu_tanh")


def gated(gate: jax.Array, up: jax.Array, activation: Activation) -> jax.Array:
    """Activation of a gated feed-forward block, from its first products."""
    if activation != "clamped_swiglu":
        return activate(gate, activation) * up
    gate, up = jnp.minimum(gate, CLAMP), jnp.clip(up, -CLAMP, CLAMP)
    return (up + 1) * (gate * jax.nn.sigmoid(gate * np.asarray(CLAMPED_SLOPE, gate.dtype)))


def inverse_frequencies(rope: RopeConfig) -> tuple[np.ndarray, float]:
    """Returns inverse frequencies `[dim/2]` float32 and the factor that scales cos and sin.

    Follows Hugging Face's conventions for each scaling kind, so checkpoints behave as trained.
    """
    exponent = np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim
    frequencies = rope.theta**-exponent
    if rope.kind in ("linear", "proportional"):
        frequencies = frequencies / rope.factor
    if rope.kind == "proportional":
        frequencies[rope.rotated_dim // 2 :] = 0
    elif rope.kind == "llama3":
        frequencies = _llama3(frequencies, rope)
    elif rope.kind == "yarn":
        frequencies = _yarn(frequencies, rope)
    if rope.factors:
        frequencies = frequencies / np.asarray(rope.factors)
    return frequencies.astype(np.float32), rope.attention_factor


def _llama3(frequencies: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Interpolates long wavelengths, keeps short ones, and blends those between linearly."""
    turns = rope.original_window_tokens * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / rope.factor


def _yarn(frequencies: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """NTK-by-parts interpolation (arXiv 2309.00071, section 3.2)."""

    def dimension(turns: float) -> float:
        window = rope.original_window_tokens
        return rope.dim * math.log(window / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    high = high + 0.001 if low == high else high
    interpolated = np.clip((np.arange(rope.dim // 2) - low) / (high - low), 0.0, 1.0)
    return (1 - interpolated) * frequencies + interpolated * frequencies / rope.factor


def rotary_cos_sin(positions: jax.Array, rope: RopeConfig) -> tuple[jax.Array, jax.Array]:
    """cos and sin `[..., T, dim/2]` float32 at `positions` `[..., T]` int32."""
    frequencies, factor = inverse_frequencies(rope)
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first 2·R dimensions of `x` `[B, T, ..., H]`, halves paired (x[i], x[i+R]).

    `cos`, `sin` are `[T, R]`, or `[B, T, R]` if sequences of the batch differ in their positions.
    """
    half = cos.shape[-1]
    lead = (cos.shape[0] if cos.ndim == 3 else 1, cos.shape[-2], 1, 2 * half)
    # Of both halves at once: runtimes of exported programs start fewer operations.
    turns = jnp.concatenate([cos, cos], axis=-1).reshape(lead)
    # A product, since some accelerators have no negation.
    across = jnp.concatenate([sin * np.float32(-1), sin], axis=-1).reshape(lead)
    heads = x.reshape(*x.shape[:2], -1, x.shape[-1])
    first, second = heads[..., :half], heads[..., half : 2 * half]
    straight = heads if half * 2 == x.shape[-1] else heads[..., : 2 * half]
    swapped = jnp.concatenate([second, first], axis=-1).astype(jnp.float32)
    turned = (straight.astype(jnp.float32) * turns + swapped * across).astype(x.dtype)
    if half * 2 != x.shape[-1]:
        turned = jnp.concatenate([turned, heads[..., 2 * half :]], axis=-1)
    return turned.reshape(x.shape)


def causal_mask(positions: jax.Array, keys: int, window: int) -> jax.Array:
    """True where the query at `positions[t]` may attend key position s: `[T, keys]` bool.

    `window` 0 is full causal attention; w > 0 allows the last w positions, with the query's own.
    """
    return TokenPositions(positions, jnp.asarray(len(positions), jnp.int32)).visible(keys, window)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    *,
    scale: float,
    softcap: float = 0.0,
    sink_logits: jax.Array | None = None,
) -> jax.Array:
    """Grouped-query attention.

    Args:
      q: queries `[B, T, K, G, H]`.
      k, v: keys and values `[B, K, S, H]`.
      mask: `[T, S]` or `[B, T, S]` bool, True = attend; or float32, added to scores `[B, K·G, T, S]`
        (relative positions), with 1 for axes that share it, `MASKED` for keys that are not attended to.
      softcap: bound of scores by tanh when positive (Gemma 2).
      sink_logits: `[K, G]` float32, additional logits in the denominator of a head's softmax without a
        value (gpt-oss); None for none.

    Returns:
      `[B, T, K, G, H]` in q's dtype.
    """
    options = AttentionOptions(scale=scale, softcap=softcap, sink_logits=sink_logits)
    return attention_by(options)(q, k, v, mask)


def attention_by(options: "AttentionOptions") -> Attend:
    """`attention` with these options."""
    return lambda q, k, v, mask: _weighted(v, _weights(q, k, mask, options), q)


# Arrays of one sequence have four dimensions here: accelerators of phones take no more.


def _attend_apart(
    q: jax.Array,
    past: tuple[jax.Array, jax.Array],
    fresh: tuple[jax.Array, jax.Array],
    mask: jax.Array,
    options: "AttentionOptions",
) -> jax.Array:
    """Attention over keys and values of a cache and of new tokens, which are nowhere side by side."""
    parts = [_scores(q, keys) for keys, _ in (past, fresh)]
    weights = _masked(jnp.concatenate(parts, axis=-1), q, mask, options)
    rows = past[0].shape[2]
    return _weighted(past[1], weights[..., :rows], q) + _weighted(fresh[1], weights[..., rows:], q)


def _attend_narrow(q: jax.Array, past: Past, mask: jax.Array, options: "AttentionOptions") -> jax.Array:
    """Attention over a cache that is not widened as a whole: products are of its dtype, or of levels (see
    `jaxllm.kv.byte_rows`)."""
    keys, values = past.own
    if keys.dtype == jnp.int8:
        (keys, key_scales), (values, value_scales) = byte_rows.widened(keys), byte_rows.widened(values)
        scores = _scores(q, keys) * key_scales
        return _weighted(values, _masked(scores, q, mask, options).reshape(scores.shape) * value_scales, q)
    # Scaled before the product, so that scores stay in range.
    narrow, own = (q * np.float32(options.scale)).astype(keys.dtype), dataclasses.replace(options, scale=1.0)
    return _weighted(values, _weights(narrow, keys, mask, own), narrow).astype(q.dtype)


def _by_head(q: jax.Array) -> jax.Array:
    """Queries `[B, T, K, G, H]` of each kv head, `[B, K, G·T, H]`: they share its keys, so that there is one
    product for each."""
    batch, new, kv_heads, group, width = q.shape
    heads = q.reshape(batch, new, kv_heads * group, width).transpose(0, 2, 1, 3)
    return heads.reshape(batch, kv_heads, group * new, width)


def _weights(q: jax.Array, k: jax.Array, mask: jax.Array, options: "AttentionOptions") -> jax.Array:
    """Attention weights `[B, K·G, T, S]` float32."""
    return _masked(_scores(q, k), q, mask, options)


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """Products of queries and keys `[B, K, G·T, S]` float32; what rows have behind the keys is ignored."""
    heads, wide = _by_head(q), None if q.dtype == jnp.float16 else jnp.float32
    if more := k.shape[-1] - q.shape[-1]:
        heads = jnp.concatenate([heads, jnp.zeros((*heads.shape[:-1], more), q.dtype)], axis=-1)
    scores = jnp.einsum("bkrh,bksh->bkrs", heads, k.astype(q.dtype), preferred_element_type=wide)
    return scores.astype(jnp.float32)


def _masked(scores: jax.Array, q: jax.Array, mask: jax.Array, options: "AttentionOptions") -> jax.Array:
    """Attention weights `[B, K·G, T, S]` of the scores of queries."""
    batch, new, kv_heads, group, _ = q.shape
    scores = scores.reshape(batch, kv_heads * group, new, -1) * np.float32(options.scale)
    if options.softcap:
        scores = jnp.tanh(scores / np.float32(options.softcap)) * np.float32(options.softcap)
    # Masked by addition, not `where`: runtimes of exported programs have fast kernels only for addition. A
    # score vanishes in float32 rounding when added to MASKED, so the result is the same.
    if mask.dtype != jnp.bool_:
        return _softmax(scores + mask, options.sink_logits)
    bias = jnp.where(mask, np.float32(0), np.float32(MASKED))
    return _softmax(scores + (bias[:, None] if mask.ndim == 3 else bias[None, None]), options.sink_logits)


def _softmax(scores: jax.Array, sink_logits: jax.Array | None) -> jax.Array:
    """Computes the softmax of `[B, K·G, T, S]` over S, with sink logits `[K, G]` that are left out of the
    result."""
    if sink_logits is None:
        return jax.nn.softmax(scores, axis=-1)
    sinks = sink_logits.astype(scores.dtype).reshape(1, -1, 1, 1)
    beside = jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([scores, beside], axis=-1), axis=-1)[..., :-1]


def _weighted(v: jax.Array, weights: jax.Array, q: jax.Array) -> jax.Array:
    """The sum of values `[B, K, S, H]` by attention weights, in the shape and dtype of the queries."""
    batch, new, kv_heads, group, width = q.shape
    weights = weights.astype(q.dtype).reshape(batch, kv_heads, group * new, -1)
    out = jnp.einsum("bkrs,bksh->bkrh", weights, v.astype(q.dtype))[..., :width]
    return out.reshape(batch, kv_heads * group, new, width).transpose(0, 2, 1, 3).reshape(q.shape)


class Heads(NamedTuple):
    """Inputs of attention from new tokens, not yet rotated.

    Attributes:
      q: queries `[B, T, K, G, H]`.
      k, v: keys and values `[B, T, K, H]`.
      sink_logits: see `attention`; None for none.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    sink_logits: jax.Array | None = None

    def of_sequence(self, number: int) -> "Heads":
        """Inputs of one sequence of the batch."""
        q, k, v = (each[number : number + 1] for each in self[:3])
        return Heads(q, k, v, self.sink_logits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Options of attention that differ between layers.

    Attributes:
      scale, softcap: see `attention`.
      window: see `causal_mask`.
      bias: `[K, G, distances]` float32, added to scores by the distance of the key before its query (see
        `native_attention.attention`); None for none.
      sink_logits: see `attention`.
    """

    scale: float
    softcap: float = 0.0
    window: int = 0
    bias: jax.Array | None = None
    sink_logits: jax.Array | None = None


def cached_attention(
    new: Heads,
    rotary: tuple[jax.Array, jax.Array] | None,
    past: Past,
    mask: jax.Array,
    at: TokenPositions,
    mass: jax.Array | None = None,
    *,
    options: AttentionOptions,
    used: UsedUnits | None = None,
) -> tuple[jax.Array, Past, jax.Array | None]:
    """Rotates queries and new keys, writes new keys and values into a layer's cache, and attends over it.

    The native kernel reads only the positions in use; XLA, whose shapes are static, reads the whole cache.

    Args:
      new: queries, and keys and values to write; sink logits are those of `options`.
      rotary: cos and sin `[T, R]` of `rotary_cos_sin`; None without rotary embedding.
      mask: `[T, S]` bool, `at.visible` with the same window; after coded chunks only its shape matters.
      at: positions of the new tokens in the cache, and the number of valid ones; others are not written.
      mass: attention mass to add to, float32: `[B, S]`, summed over queries; or for a token tree `[B, 1 +
        T, S]`, per new token, after an entry 0 that stays unchanged; or None.
      used: number of used kv heads among the K; None for all. Outputs of the other heads are undefined, and
        they add nothing to the mass.

    Returns:
      Outputs `[B, T, K, G, H]` in q's dtype (undefined for padding), the updated keys and values, and the
      updated mass.
    """
    (q, k, v, _), window = new, options.window
    if not q.size:
        return q, past, mass

    def by_kernel(q: jax.Array, past: Past, mass: jax.Array | None):
        wide = jnp.float32
        chunks, coded = None, past.coded
        if coded is not None:
            assert coded.layer is not None
            parts = (coded.source, coded.layer, coded.tokens, coded.mass)
            chunks = native_attention.ChunksAt(*parts)  # pyright: ignore[reportArgumentType]
        out, keys, values, mass, coded_mass = native_attention.attention(
            q.astype(wide),
            k.astype(wide),
            v.astype(wide),
            rotary,
            past.keys,
            past.values,
            at.positions,
            at.valid,
            mass,
            slot=past.slot,
            tree=None if at.tree is None else (at.tree.rows, at.tree.base, at.tree.mask),
            scale=options.scale,
            softcap=options.softcap,
            window=window,
            used=used,
            chunks=chunks,
            bias=options.bias,
            sink_logits=options.sink_logits,
        )
        coded = None if coded is None else dataclasses.replace(coded, mass=coded_mass)
        past = dataclasses.replace(past, keys=keys, values=values, coded=coded)
        return out.astype(q.dtype), past, mass

    def by_xla(q: jax.Array, past: Past, mass: jax.Array | None, *, branches: bool = False):
        turned = k if rotary is None else rotate(k, *rotary)
        q = q if rotary is None else rotate(q, *rotary)
        fresh = turned.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        if at.apart:
            out = _attend_apart(q, past.own, fresh, mask, options)
            return out, dataclasses.replace(past, keys=fresh[0], values=fresh[1]), mass
        if past.keys.dtype == jnp.int8:
            fresh = jnp.split(byte_rows.rounded(jnp.concatenate(fresh, axis=1)), 2, axis=1)
        past = past.written(at, *fresh)
        keys, values = past.own
        coded, visible = past.coded, mask
        if coded is not None:
            front = coded.decoded(keys.shape[1], keys.shape[3], keys.dtype)
            keys, values = (jnp.concatenate(pair, axis=2) for pair in zip(front, (keys, values), strict=True))
            visible = _behind_chunks(at, coded, front[0].shape[2], mask.shape[1], window)
        if options.bias is not None:
            visible = _biased(options.bias, at, visible)
        # Few queries have fewer scores to widen than the cache has numbers.
        if keys.dtype == jnp.int8 or (at.narrow and q.shape[1] * q.shape[3] < q.shape[4]):
            return _attend_narrow(q, past, visible, options), past, mass
        if branches:
            return over_used_prefix(attention_by(options), q, keys, values, visible, at.used_rows), past, mass
        weights = _weights(q, keys, visible, options)
        if mass is not None:
            real = jnp.arange(q.shape[1], dtype=jnp.int32) < at.valid
            seen = jnp.where(real[None, None, :, None], weights, 0.0)
            if used is not None:
                grouped = seen.reshape(q.shape[0], q.shape[2], q.shape[3], *seen.shape[2:])
                seen = used.only(grouped, 1).reshape(seen.shape)
            by_node = mass.ndim == 3
            seen = seen.sum(1) if by_node else seen.sum((1, 2))

            def counted(mass: jax.Array, seen: jax.Array) -> jax.Array:
                return mass.at[:, 1:].add(seen) if by_node else mass + seen

            mass = counted(mass, seen[..., seen.shape[-1] - mask.shape[1] :])
            if coded is not None and coded.mass is not None:
                of_chunks = seen[..., : seen.shape[-1] - mask.shape[1]]
                of_chunks = of_chunks.reshape(*of_chunks.shape[:-1], -1, coded.form.tokens).sum(-1)
                coded = dataclasses.replace(coded, mass=counted(jnp.asarray(coded.mass), of_chunks))
                past = dataclasses.replace(past, coded=coded)
        return _weighted(values, weights, q), past, mass

    by_address = past.coded is not None and past.coded.by_address
    if past.coded is not None and not by_address:
        return by_xla(q, past, mass)
    if native.kernels().branches and mass is None:
        branching = functools.partial(by_xla, branches=True)
        return jax.lax.platform_dependent(q, past, mass, cpu=branching, default=by_xla)
    if not native.kernels().native or past.keys.dtype not in (jnp.float32, jnp.float16):
        return by_xla(q, past, mass)
    if by_address or (used is not None and isinstance(used.counts, TableArray)):
        return by_kernel(q, past, mass)
    return jax.lax.platform_dependent(q, past, mass, cpu=by_kernel, default=by_xla)


def source_attention(
    q: jax.Array,
    source: Source,
    at: TokenPositions,
    *,
    scale: float,
    used: UsedUnits | None = None,
) -> tuple[jax.Array, Source]:
    """Attends to a source from a layer of the decoder.

    The native kernel reads only the source's tokens; XLA, whose shapes are static, reads all of its rows.

    Args:
      q: queries `[B, T, K, G, H]`.
      source: source of the layer; the native kernel reads its rows like those of a cache.
      at: positions of the queries' tokens, and the number of valid ones.
      used: see `cached_attention`.

    Returns:
      Outputs `[B, T, K, G, H]` in q's dtype, and the same source.
    """

    def by_kernel(q: jax.Array, source: Any):
        # Nothing is written, and a query attends to the rows up to its own: that of the last token.
        count = jnp.maximum(source.length, 1)
        rows = jnp.broadcast_to(count - 1, at.positions.shape)
        # Nodes of a tree are summed like single tokens.
        tree = None if at.tree is None else (rows, count, jnp.zeros((len(rows), 1), jnp.bool_))
        out, keys, values, *_ = native_attention.attention(
            q.astype(jnp.float32), None, None, None, source.keys, source.values, rows, at.valid,
            slot=source.layer, scale=scale, tree=tree, used=used,
        )  # fmt: skip
        return out.astype(q.dtype), dataclasses.replace(source, keys=keys, values=values)

    def by_xla(q: jax.Array, source: Source):
        return attention(q, *source.own, source.mask, scale=scale), source

    by_address = isinstance(source, SourceKV) and source.keys.dtype in (jnp.float32, jnp.float16)
    if not (native.kernels().native and by_address):
        return by_xla(q, source)
    return jax.lax.platform_dependent(q, source, cpu=by_kernel, default=by_xla)


def _biased(bias: jax.Array, at: TokenPositions, visible: jax.Array) -> jax.Array:
    """Bias of scores `[1, K·G, T, S]` float32 (see `attention`), from `AttentionOptions.bias` and the
    mask `[T, S]`."""
    last = bias.shape[-1] - 1
    distance = at.positions[:, None] - at.stands(visible.shape[1])
    of_key = bias[:, :, last - jnp.clip(distance, 0, last)]
    of_head = of_key.reshape(1, -1, *of_key.shape[2:])
    return of_head + jnp.where(visible, np.float32(0), np.float32(MASKED))


def _behind_chunks(
    at: TokenPositions, coded: "QuantizedPrefix", front: int, capacity: int, window: int
) -> jax.Array:
    """Returns the mask `[T, front + capacity]` over the rows of chunks, valid up to `coded.tokens`, and
    those of the cache after them."""
    visible, row = at.visible(front + capacity, window), jnp.arange(front, dtype=jnp.int32)
    behind = jax.lax.dynamic_slice_in_dim(visible, coded.tokens, capacity, axis=1)
    return jnp.concatenate([visible[:, :front] & (row < coded.tokens), behind], axis=1)


# Norms over the last axis; statistics are computed in float32 for any dtype of the activations.


# More sequences run in a loop: each unrolled one takes seconds to compile.
_MOST_UNROLLED = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Norm:
    """Norm over the last axis: layer norm if there is a `bias`, else root-mean-square norm."""

    scale: Operand
    bias: Operand | None
    eps: float = dataclasses.field(metadata={"static": True})


def normalize(x: jax.Array, norm: Norm, *, batch_invariant: bool = False) -> jax.Array:
    """`norm` of `x` `[..., D]`; for `batch_invariant` see `by_sequence`."""
    scale, bias = value(norm.scale), None if norm.bias is None else value(norm.bias)

    def normed(x: jax.Array) -> jax.Array:
        return rms_norm(x, scale, norm.eps) if bias is None else layer_norm(x, scale, bias, norm.eps)

    return by_sequence(normed, x, batch_invariant=batch_invariant)


def by_sequence(function: Callable[..., jax.Array], *arrays: jax.Array, batch_invariant: bool) -> jax.Array:
    """Applies `function` to arrays `[B, ...]`; if `batch_invariant`, to each of the B sequences separately.

    XLA orders sums, and approximates functions, by the shape of their operands: a separate sequence gets
    bit for bit its results without a batch.
    """
    batch = arrays[0].shape[0]
    if not batch_invariant or batch == 1:
        return function(*arrays)
    if batch > _MOST_UNROLLED:
        return jax.lax.map(lambda each: function(*(array[None] for array in each))[0], arrays)
    each = [function(*(array[row : row + 1] for array in arrays)) for row in range(batch)]
    return jnp.concatenate(each, axis=0)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis; `scale` `[D]`."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale.astype(jnp.float32)).astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Layer norm over the last axis; `scale`, `bias` `[D]`."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


# Says how activations are divided over the devices of a mesh.
#
# Without constraints XLA's partitioner may follow the parameters instead, which are divided too, and gather
# the whole batch on every device. The rules are data: per kind of activation, the mesh axes of each of its
# axes.


RULES = {
    "residual": (BATCH_AXES,),  # [B, T, D]
    "logits": (BATCH_AXES, None, UNIT_AXES),  # [B, T, V]
}


def constrained(x: jax.Array, kind: str) -> jax.Array:
    """Returns `x`, sharded by `RULES`, in a mesh (`jax.set_mesh`) that has these axes; axes that do not
    divide evenly are replicated."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size <= 1:
        return x
    free = {name for name, of in zip(mesh.axis_names, mesh.axis_types, strict=True) if of == AxisType.Auto}
    parts: list[tuple[str, ...] | None] = []
    for size, axes in zip(x.shape, RULES[kind], strict=False):
        own = tuple(axis for axis in axes or () if axis in free)
        divides = size % math.prod(mesh.shape[axis] for axis in own) == 0
        parts.append(own if own and divides else None)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*parts)) if any(parts) else x
