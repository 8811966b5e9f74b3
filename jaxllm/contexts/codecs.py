"""Encodes chunks of keys and values at 8, 4 and 2 bits, or raw, and decodes them.

A chunk is C tokens of one layer: keys and values `[K, C, H]`. A codec encodes N chunks as blobs `[N,
bytes]`. A blob has codes and scales, so that it can be stored and decoded separately. Quantization is
linear and asymmetric: x ≈ `low + scale·code`, with one float16 `low` and `scale` per

- `channel`: channel of a chunk, keys and values (LLMS, section 3.2);
- `token`: token of a chunk, keys and values;
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
from typing import TYPE_CHECKING, Literal

import numpy as np

from jaxllm.axes import Axes
from jaxllm.errors import ConfigError
from jaxllm.registry import Registry

if TYPE_CHECKING:
    import jax

# Reference size of ratios: 8 bits, with a float16 low and scale per channel of 16 tokens. It is the same for
# every codec and chunk length, so that equal ratios are equal bytes.
_REFERENCE_BITS = 8 + 2 * 16 / 16
# Bits of a stored value, best first; `RAW` stores the floats of the cache.
RAW = 0
WIDTHS = (8, 4, 2)
# Width of the last chunk of a context whose model has state layers: the states, and the rows after the last
# whole chunk, unquantized.
STATE = 1

Sharing = Literal["channel", "token"]
# The axis of `[N, K, C, H]` along which values share a low and a scale.
AXES: Mapping[Sharing, int] = MappingProxyType({"channel": -2, "token": -1})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkShape:
    """One layer of a chunk.

    Attributes:
      heads: kv heads (K); 0 of a layer without attention at this level, whose chunks are empty.
      tokens: number of tokens of a chunk (C).
      width: width of a head (H), a multiple of 4.
      dtype: dtype of the cache, by NumPy's name.
    """

    heads: int
    tokens: int
    width: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.heads < 0 or min(self.tokens, self.width) < 1 or self.width % 4:
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
        return 2 * self.values * _itemsize(self.dtype)

    @property
    def reference_bytes(self) -> int:
        """Bytes by which ratios are counted: of as many tokens at 8 bits by the codec "channel" in chunks of
        16 tokens, scales included."""
        # Whole bytes, for heads are a multiple of 4 wide.
        return int(2 * self.values * _REFERENCE_BITS / 8)


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

    def encode(self, keys: "jax.Array", values: "jax.Array", shape: ChunkShape, bits: int) -> "jax.Array":
        """Encodes chunks as blobs.

        Args:
          keys, values: `[N, K, C, H]` finite floats; values beyond float16's range saturate.
          shape: shape of each chunk.
          bits: a width, or `RAW`.

        Returns:
          uint8 `[N, blob_bytes]`. The error of a decoded value is at most half its scale, and the scale is at
          most 1.002·(highest - lowest + |lowest|/500)/(2^bits - 1) + 1/8192 over the values that share it.
        """
        # Imported here: devices that only run exported programs have no JAX.
        import jax.numpy as jnp

        from jaxllm.contexts.coding import bytes_of, encode_part

        _check_bits(bits)
        axes = Axes("encode", K=shape.heads, C=shape.tokens, H=shape.width)
        axes.check(jnp.floating, "N K C H", keys=keys, values=values)
        if not shape.heads:
            return jnp.zeros((len(keys), 0), jnp.uint8)
        if bits == RAW:
            parts = [bytes_of(part.astype(shape.dtype)) for part in (keys, values)]
        else:
            parts = [
                encode_part(self.transformed(keys), AXES[self.keys], bits),
                encode_part(self.transformed(values), AXES[self.values], bits),
            ]
        return jnp.concatenate(parts, axis=-1)

    def decode(self, blobs: "jax.Array", shape: ChunkShape, bits: int) -> "tuple[jax.Array, jax.Array]":
        """Decodes blobs `[N, blob_bytes]` of `encode` to keys and values `[N, K, C, H]` in the cache's
        dtype."""
        # Imported here: devices that only run exported programs have no JAX.
        import jax
        import jax.numpy as jnp

        from jaxllm.contexts.coding import decode_part

        Axes("decode", bytes=self.blob_bytes(shape, bits)).check(np.uint8, "N bytes", blobs=blobs)
        if not shape.heads:
            rows = jnp.zeros((len(blobs), 0, shape.tokens, shape.width), shape.dtype)
            return rows, rows
        if bits == RAW:
            rows = jax.lax.bitcast_convert_type(
                blobs.reshape(len(blobs), 2, shape.heads, shape.tokens, shape.width, -1),
                jnp.dtype(shape.dtype),
            )
            return rows[:, 0], rows[:, 1]
        split = _part_bytes(shape, self.keys, bits)
        sizes = (shape.heads, shape.tokens, shape.width)
        keys = decode_part(blobs[:, :split], sizes, _shared(shape, self.keys), bits)
        values = decode_part(blobs[:, split:], sizes, _shared(shape, self.values), bits)
        return self.transformed(keys).astype(shape.dtype), self.transformed(values).astype(shape.dtype)

    def transformed(self, rows: "jax.Array") -> "jax.Array":
        """Keys or values in float32, Hadamard-transformed if `rotated`; the transform is its own inverse."""
        # Imported here: devices that only run exported programs have no JAX.
        from jaxllm.contexts.coding import hadamard_transform

        wide = rows.astype(np.float32)
        return hadamard_transform(wide) if self.rotated else wide


CODECS: Registry[Codec] = Registry(
    "jaxllm.codecs",
    {
        "channel": Codec("channel", "channel"),
        "token": Codec("token", "token"),
        "kivi": Codec("channel", "token"),
        "rotated": Codec("token", "token", rotated=True),
    },
)


@dataclasses.dataclass(frozen=True)
class ChunkFormat:
    """The format of a service's stored chunks.

    Attributes:
      codec: codec of the chunks.
      widths: allowed bits of chunks.
      tokens: tokens of a chunk (C).
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
        # Heads lead in every part: codes, lows, scales, of keys and of values.
        return np.concatenate([part[:, : part.shape[1] // shape.heads * heads] for part in parts], axis=1)


def find_codec(name: str) -> Codec:
    """The codec with a name.

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


def _itemsize(dtype: str) -> int:
    """Bytes of a number; NumPy does not know bfloat16."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
