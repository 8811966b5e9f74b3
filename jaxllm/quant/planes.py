"""Takes parts of nested weights: the high planes, a 4-bit model that is part of an 8-bit one; and one matrix
of a stack."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxllm.quant.blocks import PANEL, BlockedArray, blocked_levels, levels_in_blocks
from jaxllm.quant.nested import NestedLevels, scale_parts
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
