"""Takes the high planes of nested weights: a 4-bit model that is part of an 8-bit one."""

import dataclasses
from collections.abc import Mapping

from jaxllm.quant.blocks import BlockedArray
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
