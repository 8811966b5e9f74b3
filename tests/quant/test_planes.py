"""Levels of nested weights by outputs, and back into blocks."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.quant import dequantize, nested_blocks
from jaxllm.quant.parts import by_outputs, levels_by_outputs, with_levels

SHAPES = [((40, 100), -1), ((3, 32, 64), -1), ((96, 40), -2), ((3, 80, 50), -2)]


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_levels_go_out_and_back(shape: tuple[int, ...], axis: int) -> None:
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    blocks = nested_blocks(weight, axis)  # pyright: ignore[reportArgumentType]
    levels, scale = levels_by_outputs(blocks)
    whole = np.asarray(dequantize(blocks, jnp.dtype(jnp.float32)))
    np.testing.assert_array_equal(by_outputs(whole, axis), levels * scale)
    again = with_levels(blocks, levels)
    for field in ("data", "low", "scale"):
        np.testing.assert_array_equal(getattr(again, field), getattr(blocks, field))
    assert dataclasses.replace(again, data=None, low=None, scale=None) == dataclasses.replace(
        blocks, data=None, low=None, scale=None
    )
    others = np.random.default_rng(1).integers(-128, 120, levels.shape).astype(np.int8)
    np.testing.assert_array_equal(levels_by_outputs(with_levels(blocks, others))[0], others)
