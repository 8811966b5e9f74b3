"""Products with a shadow whose shapes disagree end in an error, never in a read beyond a buffer."""

from typing import Any

import numpy as np
import pytest

from tests.kernels.refusing import (
    COUNTS,
    F16,
    F32,
    GROUPED,
    I32,
    NARROW,
    NOTHING,
    UP,
    USED,
    X,
    Y,
    ask,
    formats,
    placed,
    refuse,
    unadapted,
    zeros,
)
from tests.kernels.switching import needs_native
from tests.kernels.test_refusals import BLOCK, REDUCTION, REDUCTION_SCALE, H

STEP, PLACE, ROWS, COUNT = np.ones(1, F32), zeros(70, dtype=I32), zeros(3, 20, dtype=F16), zeros(1, dtype=I32)
MISFIT = "a shadow does not fit"
# Of the product of 70 inputs and 20 outputs: its step, its shadow's operands, where the count goes.
SHADOWS: dict[str, tuple[Any, list[Any], Any]] = {
    "no step": (zeros(0), [PLACE, ROWS], COUNT),
    "few places": (STEP, [PLACE[:69], ROWS], COUNT),
    "float places": (STEP, [PLACE.astype(F32), ROWS], COUNT),
    "wide rows": (STEP, [PLACE, ROWS.astype(F32)], COUNT),
    "short rows": (STEP, [PLACE, ROWS[:, :19]], COUNT),
    "flat rows": (STEP, [PLACE, ROWS[0]], COUNT),
    "two counts": (STEP, [PLACE, ROWS], zeros(2, dtype=I32)),
    "a float count": (STEP, [PLACE, ROWS], zeros(1)),
}
UNITS = dict(eps=F32(0), units=np.int64(1)) | USED | placed(0, 0, 0)
SEGMENT = dict(segments=np.int64(1), stacked=False) | USED | placed(0, 0, 0)


def outwards(step: Any, shadow: list[Any]) -> list[Any]:
    return [X, NOTHING, COUNTS, step, *UP, NOTHING, NOTHING, *shadow]


def inwards(step: Any, shadow: list[Any]) -> list[Any]:
    return [H, REDUCTION, REDUCTION_SCALE, NOTHING, NOTHING, NOTHING, COUNTS, step, *shadow]


@needs_native
@pytest.mark.parametrize(("step", "shadow", "count"), SHADOWS.values(), ids=SHADOWS)
def test_products(step, shadow, count):
    refuse(MISFIT, "to_units", [Y, count], outwards(step, shadow), **formats(), **UNITS)
    refuse(MISFIT, "from_units", [Y, count], inwards(step, shadow), **formats(), **SEGMENT)


@needs_native
def test_parts_that_are_missing():
    for results, shadow in (([Y], [PLACE, ROWS]), ([Y, COUNT], []), ([Y, COUNT], [PLACE])):
        refuse("each weight needs", "to_units", results, outwards(STEP, shadow), **formats(), **UNITS)
        refuse(MISFIT, "from_units", results, inwards(STEP, shadow), **formats(), **SEGMENT)


@needs_native
def test_other_weights():
    """Only those of 8 bits with a scale per output have a shadow inside."""
    operands = [X, NOTHING, COUNTS, STEP, NARROW, GROUPED, NOTHING, NOTHING, PLACE, ROWS]
    refuse(MISFIT, "to_units", [Y, COUNT], operands, **formats(4, 32), **UNITS)


INNER, DOWN_ROWS, COUNTS_OF_BLOCK = zeros(20, dtype=I32), zeros(2, 70, dtype=F16), zeros(2, dtype=I32)
SHADOW_OF_BLOCK = [PLACE, ROWS, ROWS, INNER, DOWN_ROWS]


@needs_native
def test_blocks():
    attributes = dict(units=np.int64(20), activation=np.int64(0), residual=True, eps=F32(0), **USED)
    attributes |= formats() | placed(*[0] * 9)
    operands = unadapted(BLOCK)
    operands[3] = np.ones(2, F32)
    for at, value in enumerate((PLACE[:69], ROWS[:, :19], ROWS.astype(F32), INNER[:19], DOWN_ROWS[:, :69])):
        shadow = [*SHADOW_OF_BLOCK[:at], value, *SHADOW_OF_BLOCK[at + 1 :]]
        refuse(MISFIT, "feed_forward", [X, COUNTS_OF_BLOCK], [*operands, *shadow], **attributes)
    whole = [*operands, *SHADOW_OF_BLOCK]
    refuse(MISFIT, "feed_forward", [X, COUNT], whole, **attributes)
    refuse("three weights", "feed_forward", [X], whole, **attributes)
    refuse("three weights", "feed_forward", [X, COUNTS_OF_BLOCK], operands, **attributes)


@needs_native
def test_what_fits_is_computed():
    """Places that no row has are the weight's own."""
    far = np.where(np.arange(70) % 2, np.iinfo(I32).max, np.iinfo(I32).min).astype(I32)
    for place in (PLACE, far):
        beyond = np.full((4, 70), 300, F32)
        operands = [beyond, *outwards(STEP, [place, ROWS])[1:]]
        _, count = ask("to_units", [Y, COUNT], operands, **formats(), **UNITS)
        assert count == 70
        operands = [beyond, *inwards(STEP, [place, ROWS])[1:]]
        _, count = ask("from_units", [Y, COUNT], operands, **formats(), **SEGMENT)
        assert count == 70
