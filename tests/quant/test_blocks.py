"""The kernels' order of a weight: its bytes by hand, its inverse, and what its padding holds."""

import dataclasses

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.quant import QArray, blocked_shapes, dequantize, from_blocks, quantize, to_blocks
from jaxllm.quant.blocks import blocked_levels, blocked_scales, take_blocked_rows
from jaxllm.quant.formats import pack
from tests.quant.plain import levels_of, step_of, wide

WIDTHS = [(8, 0), (8, 32), (8, 64), (4, 32), (4, 64), (2, 32), (2, 64)]
every_width = pytest.mark.parametrize(("bits", "group"), WIDTHS, ids=str)
every_axis = pytest.mark.parametrize("axis", [-1, -2])
SHAPES = [(1, 1), (16, 32), (17, 33), (70, 65), (3, 20, 40), (2, 40, 20)]


def quantized(shape, bits, group, axis, seed=0) -> QArray:
    weight = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return quantize(weight, bits=bits, axis=axis, group=group)


def counted(shape, bits, axis) -> QArray:
    """Levels that tell places apart: 8 bits `16·r + c` (mod 256), 4 bits `r + 3·c` (mod 16)."""
    row, column = np.indices(shape)
    if bits == 8:
        data = (16 * row + column).astype(np.uint8).view(np.int8)
        scale = np.ones((shape[0], 1) if axis == -1 else (1, shape[1]), np.float32)
        return QArray(data=data, scale=scale, bits=8, group=0, axis=axis, columns=shape[1])
    data = pack((row + 3 * column) % 16 - 8, 4)
    groups = (shape[0], -(-shape[1] // 32)) if axis == -1 else (-(-shape[0] // 32), shape[1])
    scale = np.ones(groups, np.float16)
    return QArray(data=data, scale=scale, bits=4, group=32, axis=axis, columns=shape[1])


# Bytes


def test_bytes_of_a_block():
    """16 outputs × 32 inputs: four inputs of output 0, of output 1, ...; then the next four inputs."""
    got = to_blocks(counted((16, 32), 8, -1)).data
    assert got.shape == (1, 1, 512)
    block = got.view(np.uint8)[0, 0]
    assert block[:8].tolist() == [0, 1, 2, 3, 16, 17, 18, 19]
    assert block[60:68].tolist() == [240, 241, 242, 243, 4, 5, 6, 7]
    assert block[-4:].tolist() == [12, 13, 14, 15]  # 16·15 + 28... mod 256
    # The same matrix as inputs × outputs is the same block.
    turned = counted((16, 32), 8, -1)
    turned = dataclasses.replace(turned, data=turned.data.T, scale=turned.scale.T, axis=-2, columns=16)
    np.testing.assert_array_equal(to_blocks(turned).data.reshape(-1), got.reshape(-1))


def test_bytes_of_a_narrow_block():
    """Low nibbles hold inputs 0-3 and high ones 4-7, stored plus 8; then inputs 8-15."""
    got = to_blocks(counted((16, 32), 4, -1)).data
    assert got.shape == (1, 1, 256)
    assert got.dtype == np.uint8
    low = [(row + 3 * column) % 16 for row in (0, 1) for column in range(4)]
    high = [(row + 3 * column) % 16 for row in (0, 1) for column in range(4, 8)]
    assert got[0, 0, :8].tolist() == [a | b << 4 for a, b in zip(low, high, strict=True)]
    assert got[0, 0, 64] == (3 * 8) % 16 | (3 * 12) % 16 << 4


def test_order_of_blocks():
    """Panel by panel where units are outputs, input block by input block where they are inputs."""
    shape = (33, 70)  # 3 panels × 3 blocks, or 2 blocks × 5 panels
    outputs, inputs = to_blocks(counted(shape, 8, -1)), to_blocks(counted(shape, 8, -2))
    assert outputs.data.shape == (3, 3, 512)
    assert outputs.data.view(np.uint8)[2, 1, 0] == 16 * 32 % 256 + 32
    assert inputs.data.shape == (1, 2, 5, 512)
    assert inputs.data.view(np.uint8)[0, 1, 3, 0] == 16 * 32 % 256 + 48


# Both ways


@every_width
@every_axis
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_stand_for_the_same_weight(shape, axis, bits, group):
    weight = quantized(shape, bits, group, axis)
    blocked = to_blocks(weight)
    shapes = blocked_shapes(shape, bits=bits, group=group, axis=axis)
    chex.assert_shape([blocked.data, blocked.scale], shapes)
    types = [np.int8 if bits == 8 else np.uint8, np.float16 if group else np.float32]
    chex.assert_type([blocked.data, blocked.scale], types)
    assert blocked.data.flags.c_contiguous
    assert blocked.scale.flags.c_contiguous
    np.testing.assert_array_equal(levels_of(blocked), levels_of(weight))
    np.testing.assert_array_equal(step_of(blocked), step_of(weight))
    np.testing.assert_array_equal(blocked_levels(blocked), levels_of(weight))
    np.testing.assert_array_equal(blocked_scales(blocked), weight.scale)
    # Arrays, and in the structure of the tree all else: bits, group, axis and columns.
    chex.assert_trees_all_equal(from_blocks(blocked), weight, strict=True)


@every_width
@every_axis
def test_padding_weighs_nothing(axis, bits, group):
    """Outputs and inputs that are not there are zeros (8 in a nibble), whatever is read of them."""
    weight = quantized((2, 20, 40) if axis == -2 else (20, 40), bits, group, axis)
    blocked = to_blocks(weight)
    # Everything that the blocks hold, as if it were all part of the weight.
    if axis == -1:
        whole = dataclasses.replace(blocked, shape=(32, 64), group=0, scale=np.ones(32, np.float32))
        inside = np.s_[:20, :40]
    else:
        whole = dataclasses.replace(blocked, shape=(2, 32, 48), group=0, scale=np.ones((2, 48), np.float32))
        inside = np.s_[:, :20, :40]
    levels = levels_of(whole)
    np.testing.assert_array_equal(levels[inside], levels_of(weight))
    # No level of two bits is zero: padding inputs meet activations that are.
    padding = -1 if bits == 2 else 0
    levels[inside] = padding
    assert np.all(levels == padding)
    assert np.count_nonzero(blocked.scale) == np.count_nonzero(weight.scale)


@every_axis
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_minima_stand_behind_the_scales_of_their_panel(shape, axis):
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32) + np.float32(0.5)
    stored = quantize(weight, bits=4, axis=axis, group=32, minima=True)
    blocked = to_blocks(stored)
    shapes = blocked_shapes(shape, bits=4, group=32, axis=axis, minima=True)
    chex.assert_shape([blocked.data, blocked.scale], shapes)
    assert blocked.minima
    np.testing.assert_array_equal(wide(blocked), wide(stored))
    np.testing.assert_allclose(np.asarray(dequantize(blocked, jnp.float32)), wide(stored), rtol=1e-6)
    chex.assert_trees_all_equal(from_blocks(blocked), stored, strict=True)
    # All 16 levels lie between a group's smallest and largest weight, but for clipping and halves.
    spread = np.max(weight, axis=axis) - np.min(weight, axis=axis)
    assert np.all(np.abs(wide(stored) - weight) <= np.expand_dims(spread, axis) * 0.12 + 1e-3)


# Parts


def test_rows_of_blocks_with_minima():
    weight = quantize(
        np.random.default_rng(0).random((37, 70), np.float32), bits=4, axis=-1, group=32, minima=True
    )
    rows = np.array([36, 0, 16], np.int32)
    _, scale, minimum = take_blocked_rows(to_blocks(weight), rows)
    np.testing.assert_array_equal(scale, weight.scale[rows])
    np.testing.assert_array_equal(minimum, weight.minimum[rows])
