"""Takes parts of nested weights: the high planes, a 4-bit model that is part of an 8-bit one; and one matrix
of a stack."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxllm.quant.blocks import PANEL, BlockedArray, blocked_levels, blocked_scales, levels_in_blocks
from jaxllm.quant.nested import FACTORS, NestedLevels, scale_parts
from jaxllm.quant.weights import Adapted, Apart, Narrowed, Weight


def high_plane(weight: Weight) -> Weight:
    """A weight that reads the high plane alone where it is nested; nothing is copied."""
    if isinstance(weight, BlockedArray):
        return dataclasses.replace(weight, low=None)
    if isinstance(weight, Adapted):
        return Adapted(high_plane(weight.base), weight.left, weight.right)
    if isinstance(weight, Narrowed):
        return Narrowed(high_plane(weight.stack), weight.rows)
    if isinstance(weight, Apart):
        return Apart(tuple(map(high_plane, weight.matrices)))
    return weight


def high_planes(params: Mapping[str, Weight]) -> dict[str, Weight]:
    """`high_plane` of all parameters."""
    return {name: high_plane(weight) for name, weight in params.items()}


def nested_entry(stack: BlockedArray, index: int) -> BlockedArray:
    """One matrix of a nested stack `[n, R, C]` of host arrays: the same levels and scales, bit for bit."""
    count, rows, columns = stack.shape
    levels = np.asarray(blocked_levels(stack))[index]
    if stack.axis == -1:
        outputs = count * rows
        channel, factor = (np.asarray(each)[:, :, 0] for each in scale_parts(stack.scale, 1))
        channels = channel.reshape(-1)[:outputs].reshape(count, rows, 1)[index]
        factors = factor.transpose(0, 2, 1).reshape(len(factor) * PANEL, -1)[:outputs]
        factors = factors.reshape(count, rows, -1)[index]
        found = NestedLevels(levels[None], channels[None], factors[None])
        return levels_in_blocks(found, (rows, columns), -1)
    channel, factor = (np.asarray(each)[index] for each in scale_parts(stack.scale, stack.data.shape[-2]))
    channels = channel.reshape(-1)[:columns, None]
    factors = factor.reshape(len(factor), -1).T[:columns]
    found = NestedLevels(levels.T[None], channels[None], factors[None])
    return levels_in_blocks(found, (rows, columns), -2)


def by_outputs(weight: np.ndarray, axis: int) -> np.ndarray:
    """A weight `[..., R, C]` as `[outputs, inputs]`: all that a product contracts is its inputs."""
    rows = weight.reshape(-1, weight.shape[-1])
    return rows if axis == -1 else rows.T


def levels_by_outputs(weight: BlockedArray) -> tuple[np.ndarray, np.ndarray]:
    """Levels of a nested weight of host arrays and the scale of each, int8 and float32, as `by_outputs`."""
    levels, scale = np.asarray(blocked_levels(weight)), np.asarray(blocked_scales(weight))
    scale = np.repeat(scale, weight.group, axis=weight.axis)
    scale = np.take(scale, np.arange(levels.shape[weight.axis]), axis=weight.axis)
    return by_outputs(levels, weight.axis), by_outputs(scale, weight.axis)


def with_levels(weight: BlockedArray, levels: np.ndarray) -> BlockedArray:
    """A nested weight of host arrays with other levels, in the order of `levels_by_outputs`, and its own
    scales."""
    lead = (1,) if weight.axis == -1 else weight.shape[:-2] or (1,)
    inputs = weight.shape[weight.axis]
    # [K, outputs, inputs].
    stack = levels.reshape(len(levels), *lead, inputs).swapaxes(0, 1)
    groups = -(-inputs // weight.group)
    none = NestedLevels(
        levels=stack,
        channel=np.ones((*stack.shape[:2], 1), np.float32),
        factor=np.full((*stack.shape[:2], groups), FACTORS[-1], np.int8),
    )
    axis = -1 if weight.axis == -1 else -2
    return dataclasses.replace(levels_in_blocks(none, weight.shape, axis), scale=weight.scale)
