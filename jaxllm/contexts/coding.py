"""Packs keys and values into bytes, and unpacks them: the arrays of `codecs`, in compiled steps."""

import math

import jax
import jax.numpy as jnp
import numpy as np

# The smallest normal float16, and the relative error of rounding to float16. The range of a group is widened
# by both: after rounding it still spans all values, and subnormal numbers, which processors may flush, do not
# matter.
_TINY = np.float32(2.0**-14)
_ROUNDING = np.float32(2.0**-10)
_MOST = np.float32(np.finfo(np.float16).max)


def hadamard_transform(rows: jax.Array) -> jax.Array:
    """`rows @ hadamard(H)` of float32 `[..., H]`, by sums and differences of pairs.

    The order of additions in a product depends on compiler and shape, while stored bytes must be equal in
    every program and in the native kernels.
    """
    block = rows.shape[-1] & -rows.shape[-1]
    found = rows
    for half in (1 << stage for stage in range(block.bit_length() - 1)):
        pairs = found.reshape(-1, rows.shape[-1] // (2 * half), 2, half)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        found = jnp.stack([first + second, first - second], axis=2)
    return found.reshape(rows.shape) * (np.float32(1) / np.sqrt(np.float32(block)))


def encode_part(rows: jax.Array, axis: int, bits: int) -> jax.Array:
    """Codes, lows and scales of keys or values `[N, K, C, H]`, concatenated as bytes; the values along
    `axis` share a low and a scale."""
    codes, low, scale = quantized_part(rows, axis, np.float32(2**bits - 1))
    return jnp.concatenate([_packed(codes.astype(jnp.uint8), bits), bytes_of(low), bytes_of(scale)], axis=-1)


def quantized_part(
    rows: jax.Array, axis: int, most: jax.Array | np.float32
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes `[N, K, C, H]` float32, and float16 lows and scales shared along `axis`, for keys or values
    `[N, K, C, H]` float32; `most` is the highest code."""
    rows = jnp.clip(rows, -_MOST, _MOST)
    least, highest = rows.min(axis, keepdims=True), rows.max(axis, keepdims=True)
    low = jnp.maximum(least - jnp.abs(least) * _ROUNDING - _TINY, -_MOST).astype(jnp.float16)
    base = low.astype(jnp.float32)
    scale = jnp.maximum((highest - base) / most * (1 + _ROUNDING), _TINY).astype(jnp.float16)
    codes = jnp.clip(jnp.round((rows - base) / scale.astype(jnp.float32)), 0, most)
    return codes, low, scale


def decode_part(
    blobs: jax.Array, shape: tuple[int, int, int], shared: tuple[int, int, int], bits: int
) -> jax.Array:
    """Keys or values `[N, K, C, H]` float32 from bytes of `encode_part`; `shape` is `K, C, H`, and `shared`
    that of lows and scales."""
    size = math.prod(shape) * bits // 8
    codes = _unpacked(blobs[:, :size].reshape(len(blobs), *shape[:2], -1), bits)
    pairs = blobs[:, size:].reshape(len(blobs), 2, *shared, 2)
    factors = jax.lax.bitcast_convert_type(pairs, jnp.float16).astype(jnp.float32)
    return factors[:, 0] + factors[:, 1] * codes.astype(jnp.float32)


def _packed(codes: jax.Array, bits: int) -> jax.Array:
    """Codes `[N, K, C, H]` uint8 as bytes `[N, ...]`.

    The lowest bits of a head's bytes are its first channels, the next bits the following channels, so that
    unpacking reads contiguous streams without interleaving.
    """
    planes = jnp.split(codes, 8 // bits, axis=-1)
    together = planes[0]
    for index, plane in enumerate(planes[1:], start=1):
        together = together | (plane << np.uint8(index * bits))
    return together.reshape(len(codes), -1)


def _unpacked(data: jax.Array, bits: int) -> jax.Array:
    """Codes `[N, K, C, H]` uint8 of bytes `[N, K, C, H·bits/8]`."""
    mask = np.uint8(2**bits - 1)
    return jnp.concatenate([(data >> np.uint8(shift)) & mask for shift in range(0, 8, bits)], axis=-1)


def bytes_of(rows: jax.Array) -> jax.Array:
    """The bytes `[N, ...]` of an array, in the machine's byte order."""
    return jax.lax.bitcast_convert_type(rows, jnp.uint8).reshape(len(rows), -1)
