"""Quantized weights in the order of the native kernels: blocks of 16 outputs × 32 inputs.

Within a block the four inputs of an output are adjacent, `[8, 16, 4]` (inputs by four, outputs, inputs),
the operand of byte-product instructions on x86 and Arm. At 4 bits two quarters of four inputs share their
bytes: `[4, 16, 4]`, the low nibbles first, stored plus 8. At 2 bits four quarters do: `[2, 16, 4]`, the
lowest bits first, as codes 0 to 3 for the levels -3, -1, 1 and 3.

Minima of groups are stored after the scales of each panel and group, in one array.

A nested weight (see `nested.py`) has two planes of blocks at 4 bits, its high one and its low one.

Blocks are stored output panel by output panel if units are outputs, and input block by input block if units
are inputs. In both cases the first n units are the first bytes of the buffer, so that a sub-model uses a
prefix of it (`take_units` in `parts.py`) without a copy.
"""

import dataclasses
from typing import Literal, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.quant.formats import QArray, Shaped, pack, packed_parts, unpack
from jaxllm.quant.nested import (
    NESTED_GROUP,
    NestedLevels,
    high_of,
    low_of,
    nest,
    pack_scales,
    unpack_scales,
)

PANEL = 16
BLOCK = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockedArray(Shaped):
    """A quantized weight of logical `shape`, in blocks.

    Invariants, with P = ceil(outputs/16) panels, B = ceil(inputs/32) blocks, and group 0 or a multiple
    of 32:

    - axis -1 (the last axis is contracted, all others together are outputs): `data` `[P, B, bits·64]`;
      `scale` float32 `[16·P]`, or float16 `[P, groups, 16]`.
    - axis -2 (`[R, C]` or `[K, R, C]`: R, and K, are contracted): `data` `[K, B, P, bits·64]` with B of one
      of the K; `scale` float32 `[K, 16·P]`, or float16 `[K, groups, P, 16]`.

    With a minimum per group (4 bits) `scale` has another axis before the last, `[P, groups, 2, 16]` or `[K,
    groups, P, 2, 16]`: first the scales, then the minima (see `QArray`).

    `data` is int8 for 8 bits and uint8 for fewer. Buffers may have more units than `shape`.

    A nested weight has `bits` 4, `group` 64, its high plane as `data`, its low plane, of the same shape, as
    `low`, and packed scales `[P, 64 + 8·groups]` or `[K, 64·P + 8·P·groups]` uint8. Without `low` it is
    only its high plane.
    """

    data: jax.Array
    scale: jax.Array
    bits: int = dataclasses.field(metadata={"static": True})
    group: int = dataclasses.field(metadata={"static": True})
    axis: int = dataclasses.field(metadata={"static": True})
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    low: jax.Array | None = None

    @property
    def nested(self) -> bool:
        """Whether this is a nested weight, or its high plane."""
        return self.scale.dtype == np.uint8

    @property
    def minima(self) -> bool:
        """Whether groups have minima."""
        return self.scale.ndim == (4 if self.axis == -1 else 5)


def blocked_shapes(
    shape: tuple[int, ...], *, bits: int, group: int, axis: int, nested: bool = False, minima: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of data (of each plane of a nested weight) and scales of a weight of `shape` in blocks."""
    if axis == -1:
        outputs, inputs, lead = int(np.prod(shape[:-1], dtype=object)), shape[-1], ()
    else:
        outputs, inputs, lead = shape[-1], shape[-2], (shape[0] if len(shape) == 3 else 1,)
    panels, blocks = -(-outputs // PANEL), -(-inputs // BLOCK)
    groups = -(-inputs // group) if group else 0
    if nested:
        data = (panels, blocks, bits * 64) if axis == -1 else (*lead, blocks, panels, bits * 64)
        each = 64 + 8 * groups
        return data, (panels, each) if axis == -1 else (*lead, panels * each)
    of_group = (2, PANEL) if minima else (PANEL,)
    if axis == -1:
        return (panels, blocks, bits * 64), (panels, groups, *of_group) if group else (panels * PANEL,)
    data = (*lead, blocks, panels, bits * 64)
    return data, (*lead, groups, panels, *of_group) if group else (*lead, panels * PANEL)


def to_blocks(weight: QArray) -> BlockedArray:
    """Converts a weight of host arrays to the order of the native kernels.

    Padding outputs have scale zero; padding inputs meet activations that are zero.
    """
    if weight.minimum is not None:
        # Minima are placed like scales.
        both = [
            dataclasses.replace(weight, minimum=None, scale=each) for each in (weight.scale, weight.minimum)
        ]
        first, second = map(to_blocks, both)
        scale = np.stack([np.asarray(first.scale), np.asarray(second.scale)], axis=-2)
        return dataclasses.replace(first, scale=cast(jax.Array, scale))
    levels = unpack(np.asarray(weight.data), weight.columns, weight.bits, np.int8)
    # [K, outputs, inputs] and [K, outputs, groups].
    stack, scales = (_by_outputs(each, weight.axis) for each in (levels, np.asarray(weight.scale)))
    scales = _padded(scales, PANEL, 1)
    if not weight.group:
        scales = scales[..., 0]
    elif weight.axis == -1:
        scales = scales.reshape(1, -1, PANEL, scales.shape[-1]).swapaxes(-1, -2)
    else:
        scales = scales.swapaxes(-1, -2).reshape(len(stack), scales.shape[-1], -1, PANEL)
    scale = scales[0] if weight.axis == -1 else scales
    return BlockedArray(
        data=_plane(stack, weight.bits, weight.axis),
        scale=cast(jax.Array, np.ascontiguousarray(scale)),
        bits=weight.bits,
        group=weight.group,
        axis=weight.axis,
        shape=weight.shape,
    )


def _by_outputs(weight: np.ndarray, axis: int) -> np.ndarray:
    """A weight `[..., R, C]`, or its scales, as `[K, outputs, inputs]`; K is 1 if units are outputs."""
    if axis == -1:
        return weight.reshape(1, -1, weight.shape[-1])
    return weight.reshape(-1, *weight.shape[-2:]).swapaxes(-1, -2)


def _plane(stack: np.ndarray, bits: int, axis: int) -> jax.Array:
    """The data of levels `[K, outputs, inputs]`, a host array until it is placed."""

    def pack_blocks(matrix: np.ndarray) -> np.ndarray:
        """Levels `[16·P, 32·B]` int8 -> `[P, B, bits·64]`."""
        panels, blocks = matrix.shape[0] // PANEL, matrix.shape[1] // BLOCK
        quarters = matrix.reshape(panels, PANEL, blocks, 8, 4).transpose(0, 2, 3, 1, 4)
        if bits != 8:
            # Quarters that share a byte follow one another.
            quarters = packed_parts(quarters.reshape(panels, blocks, -1, 8 // bits, PANEL, 4), bits, 3)
        return quarters.reshape(panels, blocks, -1)

    packed = [pack_blocks(_padded(matrix, PANEL, BLOCK)) for matrix in stack]
    data = packed[0] if axis == -1 else np.stack([each.transpose(1, 0, 2) for each in packed])
    return cast(jax.Array, np.ascontiguousarray(data))


def nested_blocks(weight: np.ndarray, axis: Literal[-1, -2]) -> BlockedArray:
    """Quantizes a float weight as a nested one (see `nested.py`), on the host.

    Args:
      weight: `[..., R, C]` floats, finite.
      axis: contracted axis of the product.

    Raises:
      ConfigError: the weight has values that are not finite.
    """
    stack = _by_outputs(np.asarray(weight, np.float32), axis)
    return levels_in_blocks(nest(stack), weight.shape, axis)


def levels_in_blocks(found: NestedLevels, shape: tuple[int, ...], axis: Literal[-1, -2]) -> BlockedArray:
    """Nested levels `[K, outputs, inputs]` of a weight of `shape` in blocks; K is 1 if units are outputs."""
    channel, factor = _padded(found.channel, PANEL, 1), _padded(found.factor, PANEL, 1)
    # [K, P, 16] and [K, groups, P, 16].
    channel = channel.reshape(len(channel), -1, PANEL)
    factor = factor.transpose(0, 2, 1).reshape(len(factor), factor.shape[-1], -1, PANEL)
    if axis == -1:
        # Each panel's scales are together: [P, 64 + 8·groups].
        scale = pack_scales(channel[0][:, None], factor[0].transpose(1, 0, 2)[:, :, None])
    else:
        scale = pack_scales(channel, factor)
    return BlockedArray(
        data=_plane(high_of(found.levels), 4, axis),
        scale=cast(jax.Array, np.ascontiguousarray(scale)),
        bits=4,
        group=NESTED_GROUP,
        axis=axis,
        shape=shape,
        low=_plane(low_of(found.levels), 4, axis),
    )


def from_blocks(weight: BlockedArray) -> QArray:
    """The inverse of `to_blocks`, for host arrays: for devices without native kernels. A nested weight
    becomes one of 8 bits, its high plane one of 4, in groups with float32 scales."""
    levels, scale = np.asarray(blocked_levels(weight)), np.asarray(blocked_scales(weight))
    minimum = blocked_minima(weight)
    bits = weight.bits if weight.low is None else 8
    return QArray(
        data=cast(jax.Array, pack(levels, bits)),
        scale=scale,  # pyright: ignore[reportArgumentType]
        bits=bits,
        group=weight.group,
        axis=weight.axis,
        columns=weight.shape[-1],
        minimum=None if minimum is None else np.asarray(minimum),  # pyright: ignore[reportArgumentType]
    )


def blocked_levels(weight: BlockedArray) -> jax.Array:
    """The weight's integer levels, int8 of its shape. Host arrays stay on the host."""
    levels = _plane_levels(weight, weight.data)
    if weight.low is None:
        return levels
    return levels * np.int8(16) + _plane_levels(weight, weight.low)


def _plane_levels(weight: BlockedArray, data: jax.Array) -> jax.Array:
    if weight.axis == -1:
        rows = _unpack(data, weight.bits)
        rows = rows.reshape(-1, rows.shape[-1])
        return rows[: _count(weight.shape[:-1]), : weight.shape[-1]].reshape(weight.shape)
    # [K, B, P, ...] -> [K, P, 16, inputs] -> [K, inputs, outputs].
    stack = _unpack(data.transpose(0, 2, 1, 3), weight.bits)
    stack = stack.reshape(stack.shape[0], -1, stack.shape[-1]).transpose(0, 2, 1)
    lead, (rows, columns) = weight.shape[:-2], weight.shape[-2:]
    return stack[: lead[0] if lead else 1, :rows, :columns].reshape(weight.shape)


def blocked_scales(weight: BlockedArray) -> jax.Array:
    """Scales of the weight's rank, as `QArray` has them."""
    scale, shape, group = weight.scale, weight.shape, weight.group
    if weight.minima:
        return blocked_scales(_alone(weight, 0))
    if weight.nested:
        # As halves are laid out: [P, groups, 16] or [K, groups, P, 16].
        scale = _nested_scales(weight)
    if weight.axis == -1:
        if group:
            scale = scale.transpose(0, 2, 1)
        rows = scale.reshape(-1, scale.shape[-1] if group else 1)[: _count(shape[:-1])]
        return rows.reshape(*shape[:-1], rows.shape[-1])
    stack = scale.reshape(scale.shape[0], scale.shape[1] if group else 1, -1)
    lead, rows = shape[:-2], -(-shape[-2] // group) if group else 1
    return stack[: lead[0] if lead else 1, :rows, : shape[-1]].reshape(*lead, rows, shape[-1])


def blocked_minima(weight: BlockedArray) -> jax.Array | None:
    """Minima of the weight's rank, as `QArray` has them; None without."""
    return blocked_scales(_alone(weight, 1)) if weight.minima else None


def _alone(weight: BlockedArray, which: int) -> BlockedArray:
    """The weight with only its scales (0), or its minima in their place (1)."""
    return dataclasses.replace(weight, scale=weight.scale[..., which, :])


def _nested_scales(weight: BlockedArray, packed: jax.Array | None = None) -> jax.Array:
    """Scales of a nested weight, or of some panels if its units are outputs: `[P, groups, 16]` or
    `[K, groups, P, 16]` float32."""
    packed = weight.scale if packed is None else packed
    panels = 1 if weight.axis == -1 else weight.data.shape[-2]
    scale = unpack_scales(packed, panels)
    if weight.axis == -1:
        scale = scale[..., 0, :]
    return scale if weight.low is not None else scale * np.float32(16)


def take_blocked_rows(weight: BlockedArray, rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Rows of a matrix `[R, C]` that is contracted along its last axis; no other rows are read.

    Args:
      weight: the matrix, `axis` -1.
      rows: indices of any shape, in range.

    Returns:
      Levels `[*rows.shape, C]` int8, scales `[*rows.shape, groups]`, and minima of that shape or None.
    """
    panel, lane = rows // PANEL, rows % PANEL
    columns = weight.shape[-1]

    def levels_of(plane: jax.Array) -> jax.Array:
        # [P, B, quarters, 16, 4] at (panel, :, :, lane): the indexed axes come first.
        data = plane.reshape(*plane.shape[:2], -1, PANEL, 4)[panel, :, :, lane]
        if weight.bits != 8:
            data = _levels_of_bytes(data, weight.bits, axis=-2)
        return data.reshape(*rows.shape, -1)[..., :columns]

    levels = levels_of(weight.data)
    if weight.low is not None:
        levels = levels * np.int8(16) + levels_of(weight.low)
    if weight.nested:
        every = _nested_scales(weight, weight.scale[panel])
        return levels, jnp.take_along_axis(every, lane[..., None, None], axis=-1)[..., 0], None
    if weight.minima:
        return levels, weight.scale[panel, :, 0, lane], weight.scale[panel, :, 1, lane]
    return levels, weight.scale[panel, :, lane] if weight.group else weight.scale[rows][..., None], None


def take_blocked_inputs(weight: BlockedArray, index: jax.Array) -> jax.Array:
    """The weights of some inputs as floats `[N, outputs]` float32; no other blocks are read.

    Args:
      index: `[N]` integers in range, counted over all contracted axes together.
    """
    last = weight.axis == -1
    length = weight.shape[-1] if last else weight.shape[-2]
    stack, inner = index // length, index % length

    def levels_of(plane: jax.Array) -> jax.Array:
        # [N, P, bits·64] -> [N, P, 16 outputs, 32 inputs] -> the selected input of each block.
        blocks = plane[:, inner // BLOCK].swapaxes(0, 1) if last else plane[stack, inner // BLOCK]
        wide = _unpack(blocks[:, :, None], weight.bits)
        return jnp.take_along_axis(wide, (inner % BLOCK)[:, None, None, None], axis=-1)[..., 0]

    levels = levels_of(weight.data)
    if weight.low is not None:
        levels = levels * np.int8(16) + levels_of(weight.low)
    if weight.nested:
        every, group = _nested_scales(weight), inner // weight.group
        scale = every[:, group].swapaxes(0, 1) if last else every[stack, group]
    elif not weight.group:
        scale = weight.scale.reshape(1 if last else len(weight.scale), -1, PANEL)[stack]
    elif last:
        scale = weight.scale[:, inner // weight.group].swapaxes(0, 1)
    else:
        scale = weight.scale[stack, inner // weight.group]
    outputs = _count(weight.shape[:-1]) if last else weight.shape[-1]
    scale = scale.astype(jnp.float32)
    if weight.minima:
        scale, minimum = scale[..., 0, :], scale[..., 1, :]
        rows = (levels.astype(jnp.float32) + np.float32(8)) * scale + minimum
    else:
        rows = levels.astype(jnp.float32) * scale
    return rows.reshape(len(index), -1)[:, :outputs]


def _count(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _padded(matrix: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The matrix with its last two axes zero-padded at the end to multiples of `rows` and `columns`."""
    pad = [(0, 0)] * (matrix.ndim - 2) + [(0, -matrix.shape[-2] % rows), (0, -matrix.shape[-1] % columns)]
    return np.pad(matrix, pad) if any(after for _, after in pad) else matrix


def _unpack(data: jax.Array, bits: int) -> jax.Array:
    """Blocks `[..., B, bits·64]` -> levels `[..., 16, 32·B]`, with blocks as the second-to-last axis."""
    quarters = data.reshape(*data.shape[:-1], -1, PANEL, 4)
    if bits != 8:
        quarters = _levels_of_bytes(quarters, bits, axis=-3)
    # [..., B, 8, 16, 4] -> [..., 16, B, 8, 4]
    lead = tuple(range(quarters.ndim - 4))
    b = len(lead)
    moved = quarters.transpose(*lead, b + 2, b, b + 1, b + 3)
    return moved.reshape(*moved.shape[: b + 1], -1)


def _levels_of_bytes(data: jax.Array, bits: int, axis: int) -> jax.Array:
    """Unpacks quarters along `axis`. At 4 bits a quarter of bytes becomes two of levels: its low nibbles,
    then its high nibbles, minus 8. At 2 bits it becomes four, lowest bits first: level = 2 · code - 3."""
    xp = np if isinstance(data, np.ndarray) else jnp
    parts = [(data >> np.uint8(shift)) & np.uint8((1 << bits) - 1) for shift in range(0, 8, bits)]
    together = xp.stack(parts, axis=axis)
    axis += data.ndim
    shape = (*data.shape[:axis], len(parts) * data.shape[axis], *data.shape[axis + 1 :])
    stored = together.reshape(shape).astype(np.int8)
    levels = stored - np.int8(8) if bits == 4 else stored * np.int8(2) - np.int8(3)
    return cast(jax.Array, levels)
