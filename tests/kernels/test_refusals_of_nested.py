"""Nested weights whose planes and scales do not fit are refused."""

from typing import Any

import numpy as np
import pytest

from tests.kernels.refusing import (
    COUNTS,
    DATA,
    FIT,
    GROUPED,
    I8,
    LIVE,
    NARROW,
    NOTHING,
    SCALE,
    STEPS,
    X,
    Y,
    ask,
    formats,
    refuse,
    zeros,
)
from tests.kernels.switching import needs_native
from tests.kernels.test_refusals import MISFIT, SEGMENT, UNITS, H

# Nested: two planes, and bytes as scales: 64 of a panel's floats, and 8 of each of 2 groups.
PLANE, PACKED = zeros(2, 3, 256, dtype=np.uint8), zeros(2, 80, dtype=np.uint8)
NESTED: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "a short low plane": ([PLANE, PACKED, PLANE[:1]], formats(4, 64)),
    "a flat low plane": ([PLANE, PACKED, PLANE.ravel()], formats(4, 64)),
    "a signed low plane": ([PLANE, PACKED, PLANE.view(I8)], formats(4, 64)),
    "a low plane of other scales": ([NARROW, GROUPED, NARROW], formats(4, 32)),
    "a low plane of 8 bits": ([DATA, SCALE, DATA], formats()),
    "scales of one group": ([PLANE, PACKED[:, :72], PLANE], formats(4, 64)),
    "scales of three groups": ([PLANE, zeros(2, 88, dtype=np.uint8), PLANE], formats(4, 64)),
    "floats alone": ([PLANE, PACKED[:, :64], PLANE], formats(4, 64)),
    "groups of 32": ([PLANE, PACKED, PLANE], formats(4, 32)),
    "two bits": ([PLANE[:, :, :128], PACKED, PLANE[:, :, :128]], formats(2, 64)),
    "eight bits": ([DATA, PACKED, NOTHING], formats(8, 64)),
    "fewer bits with a scale per output": ([PLANE, SCALE, NOTHING], formats(4, 0)),
}


@needs_native
@pytest.mark.parametrize(("weight", "form"), NESTED.values(), ids=NESTED)
def test_nested(weight, form):
    operands = [NOTHING, COUNTS, STEPS, *weight, NOTHING, NOTHING]
    refuse(FIT, "to_units", [Y], [X, LIVE], operands, **form, **UNITS)


@needs_native
def test_nested_reductions():
    plane, packed = zeros(1, 3, 2, 256, dtype=np.uint8), zeros(1, 2 * 80, dtype=np.uint8)
    for weight in (
        [plane, packed[:, :127], plane],
        [plane, packed[:, :144], plane],
        [plane, packed, plane[:, :2]],
        [plane[:, :, :, :128], packed, plane[:, :, :, :128]],
    ):
        operands = [*weight, NOTHING, NOTHING, COUNTS, STEPS]
        refuse(MISFIT, "from_units", Y, [H, LIVE, NOTHING], operands, **formats(4, 64), **SEGMENT)
    for low in (plane, NOTHING):
        operands = [plane, packed, low, NOTHING, NOTHING, COUNTS, STEPS]
        assert not ask("from_units", Y, [H, LIVE, NOTHING], operands, **formats(4, 64), **SEGMENT).any()
