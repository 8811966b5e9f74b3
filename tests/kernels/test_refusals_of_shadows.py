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
    LIVE,
    NARROW,
    NOTHING,
    UP,
    X,
    Y,
    ask,
    formats,
    outwards,
    refuse,
    unadapted,
    zeros,
)
from tests.kernels.switching import needs_native
from tests.kernels.test_refusals import BLOCK, NEURONS, REDUCTION, REDUCTION_SCALE, SEGMENT, UNITS, H

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
SHADOWED = UNITS | {"shadowed": True}


def to_units(step: Any, shadow: list[Any]) -> list[Any]:
    return [NOTHING, COUNTS, step, *unadapted(UP), *shadow]


def from_units(step: Any, shadow: list[Any]) -> list[Any]:
    return [*unadapted([REDUCTION, REDUCTION_SCALE]), COUNTS, step, *shadow]


@needs_native
@pytest.mark.parametrize(("step", "shadow", "count"), SHADOWS.values(), ids=SHADOWS)
def test_products(step, shadow, count):
    operands = to_units(step, shadow)
    refuse(MISFIT, "to_units", [Y, count], [X, LIVE], operands, **formats(), **SHADOWED)
    operands = from_units(step, shadow)
    refuse(MISFIT, "from_units", [Y, count], [H, LIVE, NOTHING], operands, **formats(), **SEGMENT)


@needs_native
def test_parts_that_are_missing():
    """Of to_units an attribute says whether there is a shadow, of others their number of operands."""
    units, segment = formats() | SHADOWED, formats() | SEGMENT
    for results, shadow in (([Y], [PLACE, ROWS]), ([Y, COUNT], []), ([Y, COUNT], [PLACE])):
        refuse("each weight needs", "to_units", results, [X, LIVE], to_units(STEP, shadow), **units)
        buffers = [H, LIVE, NOTHING]
        refuse("a product needs", "from_units", results, buffers, from_units(STEP, shadow), **segment)
    whole = to_units(STEP, [PLACE, ROWS])
    for results in ([Y], [Y, COUNT]):
        refuse("each weight needs", "to_units", results, [X, LIVE], whole, **(units | {"shadowed": False}))


@needs_native
def test_other_weights():
    """Only those of 8 bits with a scale per output have a shadow inside."""
    operands = [NOTHING, COUNTS, STEP, NARROW, GROUPED, NOTHING, NOTHING, NOTHING, PLACE, ROWS]
    refuse(MISFIT, "to_units", [Y, COUNT], [X, LIVE], operands, **formats(4, 32), **SHADOWED)


INNER, DOWN_ROWS, COUNTS_OF_BLOCK = zeros(20, dtype=I32), zeros(2, 70, dtype=F16), zeros(2, dtype=I32)
SHADOW_OF_BLOCK = [PLACE, ROWS, ROWS, INNER, DOWN_ROWS]


@needs_native
def test_blocks():
    attributes = NEURONS | formats()
    operands = outwards(*BLOCK)
    operands[2] = np.ones(2, F32)
    for at, value in enumerate((PLACE[:69], ROWS[:, :19], ROWS.astype(F32), INNER[:19], DOWN_ROWS[:, :69])):
        shadow = [*SHADOW_OF_BLOCK[:at], value, *SHADOW_OF_BLOCK[at + 1 :]]
        refuse(MISFIT, "feed_forward", [X, COUNTS_OF_BLOCK], [X, LIVE], [*operands, *shadow], **attributes)
    whole = [*operands, *SHADOW_OF_BLOCK]
    refuse(MISFIT, "feed_forward", [X, COUNT], [X, LIVE], whole, **attributes)
    refuse("three weights", "feed_forward", [X], [X, LIVE], whole, **attributes)
    refuse("three weights", "feed_forward", [X, COUNTS_OF_BLOCK], [X, LIVE], operands, **attributes)


@needs_native
def test_what_fits_is_computed():
    """Places that no row has are the weight's own."""
    far = np.where(np.arange(70) % 2, np.iinfo(I32).max, np.iinfo(I32).min).astype(I32)
    beyond = np.full((4, 70), 300, F32)
    for place in (PLACE, far):
        operands = to_units(STEP, [place, ROWS])
        _, count = ask("to_units", [Y, COUNT], [beyond, LIVE], operands, **formats(), **SHADOWED)
        assert count == 70
        operands, buffers = from_units(STEP, [place, ROWS]), [beyond, LIVE, NOTHING]
        _, count = ask("from_units", [Y, COUNT], buffers, operands, **formats(), **SEGMENT)
        assert count == 70
