"""Rows of a cache at 8 bits: the levels of a head's numbers, and a scale of their own.

A row `[H + 4]` int8 has the levels, from -127 to 127, the exponent of the scale, and three zeros, since rows
are multiples of 4 bytes. Level 127 is 2 to the power of an eighth of the exponent. Runtimes of
exported programs widen such rows quickly, and scales apply to the scores of rows, not to their numbers.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.contexts import ROW_BYTES

_MOST = np.float32(127)
_STEP = np.float32(math.log(2) / 8)
_LEAST, _LOG_MOST = np.float32(2**-15.8), np.float32(math.log(_MOST))


def rounded(rows: jax.Array) -> jax.Array:
    """Rounds rows `[..., H]` to `[..., H + 4]` int8."""
    wide = rows.astype(jnp.float32)
    most = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    # Of a least magnitude, so that exponents are no less than -127; those above 127 are clipped.
    exponent = jnp.ceil(jnp.log(jnp.maximum(most, _LEAST)) * (1 / _STEP))
    exponent = jnp.minimum(exponent, _MOST)
    levels = jnp.clip(jnp.round(wide * jnp.exp(_LOG_MOST - exponent * _STEP)), -_MOST, _MOST)
    zeros = jnp.zeros((*wide.shape[:-1], ROW_BYTES - 1), jnp.float32)
    return jnp.concatenate([levels, exponent, zeros], axis=-1).astype(jnp.int8)


def widened(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The levels `[..., S, H + 4]` float32 of rows, exponents among them, and the scales `[..., 1, S]`."""
    wide = rows.astype(jnp.float32)
    *lead, count, width = wide.shape
    exponent = jax.lax.slice_in_dim(wide, width - ROW_BYTES, width - ROW_BYTES + 1, axis=-1)
    return wide, jnp.exp(exponent.reshape(*lead, 1, count) * _STEP - _LOG_MOST)
