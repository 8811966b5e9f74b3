"""Encodes chunks of keys and values at 8, 4 and 2 bits, or raw, and decodes them.

A chunk is C tokens of one layer: keys and values `[K, C, H]`. A codec encodes N chunks as blobs `[N, bytes]`.
A blob has levels and scales, so that it can be stored and decoded by itself. Quantization is linear and
asymmetric: x ≈ `low + scale·level`, with one float16 `low` and `scale` per

- `channel`: channel of a chunk, keys and values (LLMS, section 3.2);
- `kivi`: channel for keys, whose outliers stay in their channels, token for values (arXiv 2402.02750);
- `rotated`: token, after a Hadamard transform of each head spread outliers over its channels (QuaRot, arXiv
  2404.00456).

`CODECS` is the registry; a `ChunkFormat` is the choice of one service. `tolerance.py` chooses the bits of
chunks.
"""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import Axes
from jaxllm.errors import ConfigError

# Bits of a stored value, best first; `RAW` stores the floats of the cache.
RAW = 0
WIDTHS = (8, 4, 2)

Sharing = Literal["channel", "token"]

# The smallest normal float16, and the relative error of rounding to float16. The range of a group is widened
# by both: after rounding it still spans all values, and subnormal numbers, which processors may flush, do not
# matter.
_TINY = np.float32(2.0**-14)
_ROUNDING = np.float32(2.0**-10)
_MOST = np.float32(np.finfo(np.float16).max)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkShape:
    """One layer of a chunk.

    Attributes:
      heads: kv heads (K).
      tokens: of a chunk (C).
      width: of a head (H), a multiple of 4.
      dtype: of the cache, by NumPy's name.
    """

    heads: int
    tokens: int
    width: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if min(self.heads, self.tokens, self.width) < 1 or self.width % 4:
            raise ConfigError(
                f"chunks of {self.heads} heads, {self.tokens} tokens and width {self.width} cannot be "
                "packed; heads must be a multiple of 4 wide"
            )

    @property
    def values(self) -> int:
        """Number of elements of a chunk's keys, equal to that of its values."""
        return self.heads * self.tokens * self.width

    @property
    def raw_bytes(self) -> int:
        """Bytes of keys and values in the cache's dtype."""
        return 2 * self.values * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Codec:
    """A codec: how values share scales, and whether they are rotated first.

    Attributes:
      keys, values: "channel": the tokens of a channel share one low and scale; "token": the channels of a
        token do.
      rotated: whether the channels of each head go through a Hadamard transform first.
    """

    keys: Sharing
    values: Sharing
    rotated: bool = False

    def blob_bytes(self, shape: ChunkShape, bits: int) -> int:
        """Bytes of the blob of one chunk."""
        _check_bits(bits)
        if bits == RAW:
            return shape.raw_bytes
        return sum(_part_bytes(shape, sharing, bits) for sharing in (self.keys, self.values))

    def encode(self, keys: jax.Array, values: jax.Array, shape: ChunkShape, bits: int) -> jax.Array:
        """Encodes chunks as blobs.

        Args:
          keys, values: `[N, K, C, H]` finite floats; values beyond float16's range saturate.
          shape: of each chunk.
          bits: a width, or `RAW`.

        Returns:
          uint8 `[N, blob_bytes]`. The error of a decoded value is at most half its scale, and the scale is at
          most 1.002·(highest - lowest + |lowest|/500)/(2^bits - 1) + 1/8192 over the values that share it.
        """
        _check_bits(bits)
        axes = Axes("encode", K=shape.heads, C=shape.tokens, H=shape.width)
        axes.check(jnp.floating, "N K C H", keys=keys, values=values)
        if bits == RAW:
            parts = [_bytes_of(part.astype(shape.dtype)) for part in (keys, values)]
        else:
            parts = [
                _encode_part(self._turned(keys), self.keys, bits),
                _encode_part(self._turned(values), self.values, bits),
            ]
        return jnp.concatenate(parts, axis=-1)

    def decode(self, blobs: jax.Array, shape: ChunkShape, bits: int) -> tuple[jax.Array, jax.Array]:
        """Decodes blobs `[N, blob_bytes]` of `encode` to keys and values `[N, K, C, H]` in the cache's
        dtype."""
        Axes("decode", bytes=self.blob_bytes(shape, bits)).check(jnp.uint8, "N bytes", blobs=blobs)
        if bits == RAW:
            rows = jax.lax.bitcast_convert_type(
                blobs.reshape(len(blobs), 2, shape.heads, shape.tokens, shape.width, -1),
                jnp.dtype(shape.dtype),
            )
            return rows[:, 0], rows[:, 1]
        split = _part_bytes(shape, self.keys, bits)
        keys = _decode_part(blobs[:, :split], shape, self.keys, bits)
        values = _decode_part(blobs[:, split:], shape, self.values, bits)
        return self._turned(keys).astype(shape.dtype), self._turned(values).astype(shape.dtype)

    def _turned(self, rows: jax.Array) -> jax.Array:
        """Keys or values in float32, Hadamard-transformed if `rotated`; the transform is its own inverse."""
        wide = rows.astype(jnp.float32)
        return wide @ hadamard(rows.shape[-1]) if self.rotated else wide


CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        "channel": Codec("channel", "channel"),
        "kivi": Codec("channel", "token"),
        "rotated": Codec("token", "token", rotated=True),
    }
)


@dataclasses.dataclass(frozen=True)
class ChunkFormat:
    """The format of a service's stored chunks.

    Attributes:
      codec: encodes them.
      widths: bits that chunks may have.
      tokens: of a chunk (C).
    """

    codec: Codec
    widths: tuple[int, ...]
    tokens: int

    @classmethod
    def named(cls, name: str, tokens: int) -> "ChunkFormat":
        """The format of a codec by name; "raw" stores the floats of the cache.

        Raises:
          ConfigError: there is no such codec.
        """
        if name == "raw":
            return cls(CODECS["channel"], (RAW,), tokens)
        return cls(find_codec(name), WIDTHS, tokens)

    def sizes(self, shape: ChunkShape) -> dict[int, int]:
        """Bytes of one layer of a chunk, by width."""
        return {bits: self.codec.blob_bytes(shape, bits) for bits in self.widths}

    def first_heads(self, blobs: np.ndarray, shape: ChunkShape, bits: int, heads: int) -> np.ndarray:
        """Cuts blobs `[N, bytes]` of chunks of `shape` to their first `heads` kv heads."""
        if heads == shape.heads:
            return blobs
        if bits == RAW:
            sizes = [shape.raw_bytes // 2] * 2
        else:
            by = [_shared(shape, sharing) for sharing in (self.codec.keys, self.codec.values)]
            sizes = [size for each in by for size in (shape.values * bits // 8, *(2 * math.prod(each),) * 2)]
        parts = np.split(blobs, np.cumsum(sizes)[:-1], axis=1)
        # Heads lead in every part: levels, lows, scales, of keys and of values.
        return np.concatenate([part[:, : part.shape[1] // shape.heads * heads] for part in parts], axis=1)


def find_codec(name: str) -> Codec:
    """The codec of a name.

    Raises:
      ConfigError: there is no codec of this name.
    """
    if name not in CODECS:
        raise ConfigError(f"no codec {name!r:.80}; there are {', '.join(CODECS)}")
    return CODECS[name]


def hadamard(width: int) -> np.ndarray:
    """An orthonormal symmetric matrix `[width, width]` float32: Hadamard blocks of the largest power of two
    that divides `width`."""
    block = width & -width
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.kron(np.eye(width // block, dtype=np.float32), matrix / np.float32(math.sqrt(block)))


def _check_bits(bits: int) -> None:
    if bits not in (RAW, *WIDTHS):
        raise ConfigError(f"chunks are stored at {WIDTHS} bits or raw ({RAW}), got {bits!r}")


def _shared(shape: ChunkShape, sharing: Sharing) -> tuple[int, int, int]:
    """Shape of the lows, and of the scales, of one chunk's keys or values."""
    if sharing == "channel":
        return shape.heads, 1, shape.width
    return shape.heads, shape.tokens, 1


def _part_bytes(shape: ChunkShape, sharing: Sharing, bits: int) -> int:
    return shape.values * bits // 8 + 2 * 2 * math.prod(_shared(shape, sharing))


def _encode_part(rows: jax.Array, sharing: Sharing, bits: int) -> jax.Array:
    """Levels, lows and scales of keys or values `[N, K, C, H]`, concatenated as bytes."""
    axis = -2 if sharing == "channel" else -1
    most = np.float32(2**bits - 1)
    rows = jnp.clip(rows, -_MOST, _MOST)
    least, highest = rows.min(axis, keepdims=True), rows.max(axis, keepdims=True)
    low = jnp.maximum(least - jnp.abs(least) * _ROUNDING - _TINY, -_MOST).astype(jnp.float16)
    base = low.astype(jnp.float32)
    scale = jnp.maximum((highest - base) / most * (1 + _ROUNDING), _TINY).astype(jnp.float16)
    levels = jnp.clip(jnp.round((rows - base) / scale.astype(jnp.float32)), 0, most).astype(jnp.uint8)
    return jnp.concatenate([_packed(levels, bits), _bytes_of(low), _bytes_of(scale)], axis=-1)


def _decode_part(blobs: jax.Array, shape: ChunkShape, sharing: Sharing, bits: int) -> jax.Array:
    """Keys or values `[N, K, C, H]` float32."""
    size = shape.values * bits // 8
    levels = _unpacked(blobs[:, :size].reshape(len(blobs), shape.heads, shape.tokens, -1), bits)
    pairs = blobs[:, size:].reshape(len(blobs), 2, *_shared(shape, sharing), 2)
    factors = jax.lax.bitcast_convert_type(pairs, jnp.float16).astype(jnp.float32)
    return factors[:, 0] + factors[:, 1] * levels.astype(jnp.float32)


def _packed(levels: jax.Array, bits: int) -> jax.Array:
    """Levels `[N, K, C, H]` uint8 as bytes `[N, ...]`.

    The lowest bits of a head's bytes are its first channels, the next bits the following channels, so that
    unpacking reads contiguous streams without interleaving.
    """
    planes = jnp.split(levels, 8 // bits, axis=-1)
    together = planes[0]
    for index, plane in enumerate(planes[1:], start=1):
        together = together | (plane << np.uint8(index * bits))
    return together.reshape(len(levels), -1)


def _unpacked(data: jax.Array, bits: int) -> jax.Array:
    """Levels `[N, K, C, H]` uint8 of bytes `[N, K, C, H·bits/8]`."""
    mask = np.uint8(2**bits - 1)
    return jnp.concatenate([(data >> np.uint8(shift)) & mask for shift in range(0, 8, bits)], axis=-1)


def _bytes_of(rows: jax.Array) -> jax.Array:
    """The bytes `[N, ...]` of an array, in the machine's byte order."""
    return jax.lax.bitcast_convert_type(rows, jnp.uint8).reshape(len(rows), -1)
