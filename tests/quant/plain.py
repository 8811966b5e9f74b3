"""Computes the values of stored weights in numpy and float64, without the code under test."""

from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.quant import Bfloat16Bits, BlockedArray, QArray


def wide(weight: Any) -> np.ndarray:
    """The weight as floats `[..., R, C]`."""
    if isinstance(weight, Bfloat16Bits):
        return np.asarray(weight.bits).view(ml_dtypes.bfloat16).astype(np.float64)
    if isinstance(weight, QArray | BlockedArray):
        minimum = minimum_of(weight)
        if minimum is not None:
            return (levels_of(weight) + 8) * step_of(weight) + minimum
        return levels_of(weight) * step_of(weight)
    return np.asarray(weight).astype(np.float64)


def levels_of(weight: QArray | BlockedArray) -> np.ndarray:
    """The whole numbers of a quantized weight, int64 of its shape."""
    if isinstance(weight, BlockedArray):
        high = _blocked_levels(weight, weight.data)
        return high if weight.low is None else 16 * high + _blocked_levels(weight, weight.low)
    data = np.asarray(weight.data)
    if weight.bits == 8:
        return data.astype(np.int64)
    if weight.bits == 2:
        codes = np.concatenate([data & 3, data >> 2 & 3, data >> 4 & 3, data >> 6], axis=-1)
        return 2 * codes[..., : weight.columns].astype(np.int64) - 3
    nibbles = np.concatenate([data & 15, data >> 4], axis=-1)
    return nibbles[..., : weight.columns].astype(np.int64) - 8


def step_of(weight: QArray | BlockedArray) -> np.ndarray:
    """The scale of every element, float64, of the weight's shape."""
    if isinstance(weight, BlockedArray) and weight.nested:
        return _nested_steps(weight)
    scale = np.asarray(weight.scale).astype(np.float64)
    if isinstance(weight, BlockedArray):
        return _blocked_steps(weight, scale[..., 0, :] if weight.minima else scale)
    return _spread(weight, scale)


def minimum_of(weight: QArray | BlockedArray) -> np.ndarray | None:
    """The minimum of every element's group, as `step_of`; None of a weight without."""
    if isinstance(weight, BlockedArray):
        scale = np.asarray(weight.scale).astype(np.float64)
        return _blocked_steps(weight, scale[..., 1, :]) if weight.minima else None
    if weight.minimum is None:
        return None
    return _spread(weight, np.asarray(weight.minimum).astype(np.float64))


def _spread(weight: QArray, scale: np.ndarray) -> np.ndarray:
    """What groups have, for every element."""
    if weight.group:
        scale = np.repeat(scale, weight.group, axis=weight.axis)
        scale = np.take(scale, np.arange(weight.shape[weight.axis]), axis=weight.axis)
    return np.broadcast_to(scale, weight.shape)


def _places(weight: BlockedArray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Segment, input and output of every element of the weight, each of its shape."""
    index = np.indices(weight.shape)
    if weight.axis == -1:
        outputs = np.ravel_multi_index(tuple(index[:-1]), weight.shape[:-1])
        return np.zeros_like(outputs), index[-1], outputs
    return index[0] if weight.ndim == 3 else np.zeros_like(index[0]), index[-2], index[-1]


def _blocked_levels(weight: BlockedArray, plane: Any) -> np.ndarray:
    """Element by element: four inputs of an output are adjacent, then the other outputs of the panel, then
    the other inputs of the block; at 4 bits two quarters of four inputs share their bytes, at 2 bits four."""
    data = np.asarray(plane)
    segment, row, column = _places(weight)
    panel, lane, block, within = column // 16, column % 16, row // 32, row % 32
    quarter, four = within // 4, within % 4
    byte_row = quarter * weight.bits // 8
    at = byte_row * 64 + lane * 4 + four
    byte = data[panel, block, at] if weight.axis == -1 else data[segment, block, panel, at]
    if weight.bits == 8:
        return byte.astype(np.int64)
    if weight.bits == 2:
        return 2 * (byte >> (2 * (quarter % 4)) & 3).astype(np.int64) - 3
    return np.where(quarter % 2, byte >> 4, byte & 15).astype(np.int64) - 8


def _nested_steps(weight: BlockedArray) -> np.ndarray:
    """A float of the output times the factor of its group: of each panel together where units are outputs, of
    each segment where they are inputs."""
    channel, factor = nested_scales(weight)
    whole = np.float32(1) if weight.low is not None else np.float32(16)
    return (factor * (channel * whole)).astype(np.float64)


def nested_scales(weight: BlockedArray) -> tuple[np.ndarray, np.ndarray]:
    """Of every element of a nested weight its output's float and its group's factor, both float32."""
    segment, row, column = _places(weight)
    panel, lane, group = column // 16, column % 16, row // weight.group
    packed = np.asarray(weight.scale)
    panels = 1 if weight.axis == -1 else weight.data.shape[2]
    part, within = (panel, 0) if weight.axis == -1 else (segment, panel)
    channel = np.ascontiguousarray(packed[:, : 64 * panels]).view(np.float32)[part, within * 16 + lane]
    byte = packed[part, 64 * panels + (group * panels + within) * 8 + lane % 8]
    code = np.where(lane // 8, byte >> 4, byte & 15).astype(np.float32)
    return channel, np.where(code < 8, code - 16, code)


def _blocked_steps(weight: BlockedArray, scale: np.ndarray) -> np.ndarray:
    segment, row, column = _places(weight)
    if not weight.group:
        return scale[column] if weight.axis == -1 else scale[segment, column]
    panel, lane, group = column // 16, column % 16, row // weight.group
    return scale[panel, group, lane] if weight.axis == -1 else scale[segment, group, panel, lane]
