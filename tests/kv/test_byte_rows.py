"""Rows at 8 bits."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.contexts import ROW_BYTES
from jaxllm.kv import byte_rows


@pytest.mark.parametrize("size", [0.05, 1.0, 3e4])
def test_a_row_errs_by_half_a_level_of_its_own_scale(size):
    rows = np.random.default_rng(0).normal(size=(2, 5, 16)).astype(np.float32)
    rows *= size * np.array([1, 0.01, 1, 1, 0.1], np.float32)[:, None] / 5
    stored = byte_rows.rounded(jnp.asarray(rows))
    assert stored.dtype == jnp.int8
    assert stored.shape == (2, 5, 16 + ROW_BYTES)
    levels, scales = byte_rows.widened(stored)
    found = np.asarray(levels)[..., :16] * np.swapaxes(np.asarray(scales), -1, -2)
    # A scale covers up to an eighth of an octave more than its row.
    step = 2 ** (1 / 8) * np.abs(rows).max(-1, keepdims=True) / 127
    assert (np.abs(found - rows) <= 0.51 * step).all()


def test_rows_beyond_the_scales_are_zero_or_clipped():
    rows = jnp.asarray([[0.0, 0.0], [1e-9, -1e-9], [1e9, -1e9]], jnp.float32)
    levels, scales = byte_rows.widened(byte_rows.rounded(rows))
    found = np.asarray(levels)[:, :2] * np.asarray(scales).T
    assert np.isfinite(np.asarray(scales)).all()
    assert not found[:2].any()
    assert found[2, 0] == -found[2, 1] > 2**15
