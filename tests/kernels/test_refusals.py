"""Graphs whose products have shapes that disagree end in an error, never in a read beyond a buffer.

The package never makes such graphs. Exported ones and other people's callers may.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.kernels import native, native_products
from tests.kernels.drawing import weight_of
from tests.kernels.refusing import (
    COUNTS,
    DATA,
    F16,
    F32,
    FIT,
    GROUPED,
    I8,
    I32,
    LIVE,
    NARROW,
    NOTHING,
    ROW,
    SCALE,
    STEPS,
    UP,
    USED,
    X,
    Y,
    ask,
    formats,
    inwards,
    outwards,
    refuse,
    unadapted,
    zeros,
)
from tests.kernels.switching import fall_back, needs_native

UNITS = dict(eps=F32(0), units=np.int64(1), shadowed=False, **USED)
SEGMENT = dict(segments=np.int64(1), stacked=False, **USED)
NEURONS = dict(units=np.int64(20), activation=np.int64(0), residual=True, eps=F32(0), **USED)
TO_UNITS: dict[str, tuple[str, Any, list[Any], dict[str, Any]]] = {
    "few inputs": (FIT, [Y], [zeros(4, 64), NOTHING, DATA, SCALE], formats()),
    "many inputs": (FIT, [Y], [zeros(4, 97), NOTHING, DATA, SCALE], formats()),
    "many outputs": (FIT, [zeros(4, 33)], [X, NOTHING, DATA, SCALE], formats()),
    "short data": (FIT, [Y], [X, NOTHING, DATA[:1], SCALE], formats()),
    "flat data": (FIT, [Y], [X, NOTHING, DATA.reshape(-1), SCALE], formats()),
    "short blocks": (FIT, [Y], [X, NOTHING, DATA[:, :, :256], SCALE], formats()),
    "short scales": (FIT, [Y], [X, NOTHING, DATA, SCALE[:31]], formats()),
    "scales of the units alone": (FIT, [Y], [X, NOTHING, DATA, SCALE[:20]], formats()),
    "long scales": (FIT, [Y], [X, NOTHING, DATA, zeros(33)], formats()),
    "narrow scales": (FIT, [Y], [X, NOTHING, DATA, SCALE.astype(F16)], formats()),
    "whole numbers as scales": (FIT, [Y], [X, NOTHING, DATA, SCALE.astype(I32)], formats()),
    "unsigned bytes": (FIT, [Y], [X, NOTHING, DATA.view(np.uint8), SCALE], formats()),
    "bytes as nibbles": (FIT, [Y], [X, NOTHING, DATA, SCALE], formats(4)),
    "nibbles as bytes": (FIT, [Y], [X, NOTHING, NARROW, GROUPED], formats(8, 32)),
    "three bits": (FIT, [Y], [X, NOTHING, DATA, SCALE], formats(3)),
    "no bits": (FIT, [Y], [X, NOTHING, zeros(2, 3, 0, dtype=I8), SCALE], formats(0)),
    "many bits": (FIT, [Y], [X, NOTHING, DATA, SCALE], formats(1 << 40)),
    "negative bits": (FIT, [Y], [X, NOTHING, DATA, SCALE], formats(-8)),
    "odd groups": (FIT, [Y], [X, NOTHING, NARROW, GROUPED], formats(4, 16)),
    "negative groups": (FIT, [Y], [X, NOTHING, NARROW, GROUPED], formats(4, -32)),
    "wide scales of groups": (FIT, [Y], [X, NOTHING, NARROW, GROUPED.astype(F32)], formats(4, 32)),
    "groups too few": (FIT, [Y], [X, NOTHING, NARROW, GROUPED[:, :2]], formats(4, 32)),
    "groups of 64 as of 32": (FIT, [Y], [X, NOTHING, NARROW, GROUPED], formats(4, 64)),
    "narrow activations": (ROW, [Y], [X.astype(F16), NOTHING, DATA, SCALE], formats()),
    "a scalar as activations": (ROW, [Y], [zeros(), NOTHING, DATA, SCALE], formats()),
    "no activations": (ROW, [Y], [zeros(4, 0), NOTHING, DATA, SCALE], formats()),
    "other rows": ("other rows", [zeros(5, 20)], [X, NOTHING, DATA, SCALE], formats()),
    "results of another type": ("other rows", [Y.astype(F16)], [X, NOTHING, DATA, SCALE], formats()),
    "short norm": ("norm's scale", [Y], [X, zeros(69), DATA, SCALE], formats()),
    "narrow norm": ("norm's scale", [Y], [X, zeros(70, dtype=F16), DATA, SCALE], formats()),
    "no weights": ("each weight needs", [Y], [X, NOTHING], formats()),
    "a result too many": ("each weight needs", [Y, Y], [X, NOTHING, DATA, SCALE], formats()),
    "nine weights": ("each weight needs", [Y] * 9, [X, NOTHING, *[DATA, SCALE] * 9], formats()),
    "a wrong second weight": (FIT, [Y, Y], [X, NOTHING, DATA, SCALE, DATA[:, :2], SCALE], formats()),
}


@needs_native
@pytest.mark.parametrize(("part", "results", "operands", "form"), TO_UNITS.values(), ids=TO_UNITS)
def test_to_units(part, results, operands, form):
    x, *others = operands
    refuse(part, "to_units", results, [x, LIVE], outwards(*others), **form, **UNITS)


@needs_native
def test_to_units_of_missing_parts():
    for operands in ([], [NOTHING, COUNTS, STEPS], outwards(NOTHING, *UP)[:-1]):
        refuse("each weight needs", "to_units", [Y], [X, LIVE], operands, **formats(), **UNITS)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Wrong number of arguments"):
        ask("to_units", [Y], [X], **formats(), **UNITS, columns=np.zeros(0, np.int64))


LEFT, RIGHT = zeros(2, 20), zeros(2, 70)
ALL = np.array([1, 1, 2], I32)
MISFIT_OF_ADAPTERS = "an adapter does not fit"
# Of a weight of 20 units and 70 inputs; the same with the sides exchanged is that of its reduction.
ADAPTERS: dict[str, tuple[Any, Any]] = {
    "a left side alone": (LEFT, NOTHING),
    "a right side alone": (NOTHING, RIGHT),
    "a right side without ranks": (LEFT, RIGHT[:0]),
    "fewer units": (zeros(2, 19), RIGHT),
    "more units": (zeros(2, 21), RIGHT),
    "narrower": (LEFT, zeros(2, 69)),
    "wider": (LEFT, zeros(2, 71)),
    "halves on the left": (LEFT.astype(F16), RIGHT),
    "halves on the right": (LEFT, RIGHT.astype(F16)),
    "a rank more": (zeros(3, 20), RIGHT),
    "a rank more on the right": (LEFT, zeros(3, 70)),
    "ranks last": (LEFT.T, RIGHT),
    "ranks last on the right": (LEFT, RIGHT.T),
    "a flat left side": (LEFT.ravel(), RIGHT),
    "flat sides": (LEFT.ravel(), RIGHT.ravel()),
}


@needs_native
@pytest.mark.parametrize(("left", "right"), ADAPTERS.values(), ids=ADAPTERS)
def test_adapters(left, right):
    operands = [NOTHING, COUNTS, STEPS, *UP, NOTHING, left, right]
    refuse(MISFIT_OF_ADAPTERS, "to_units", [Y], [X, LIVE], operands, **formats(), **UNITS)
    operands = [REDUCTION, REDUCTION_SCALE, NOTHING, right, left, COUNTS, STEPS]
    refuse(MISFIT_OF_ADAPTERS, "from_units", Y, [H, LIVE, NOTHING], operands, **formats(), **SEGMENT)
    for at in range(3):
        operands = outwards(*BLOCK)
        operands[6 + 5 * at : 8 + 5 * at] = [left, right]
        refuse(MISFIT_OF_ADAPTERS, "feed_forward", X, [X, LIVE], operands, **formats(), **NEURONS)


@needs_native
@pytest.mark.parametrize("counts", [[1, 1, -1], [1, 1, -(1 << 31)], [1, 1]], ids=str)
def test_ranks(counts):
    """Fewer than none, and none among the counts. Without an adapter nobody asks for them."""
    counts, both = np.array(counts, I32), [LEFT, RIGHT]
    first = {"units": np.int64(1), "units_at": np.int64(0)}
    for sides, ask_of in ((both, refuse), ([NOTHING] * 2, lambda _, *call, **more: ask(*call, **more))):
        operands = [NOTHING, counts, STEPS, *UP, NOTHING, *sides]
        ask_of(MISFIT_OF_ADAPTERS, "to_units", [Y], [X, LIVE], operands, **formats(), **(UNITS | first))
        operands = [REDUCTION, REDUCTION_SCALE, NOTHING, *sides[::-1], counts, STEPS]
        options = SEGMENT | {"units_at": np.int64(0)}
        ask_of(MISFIT_OF_ADAPTERS, "from_units", Y, [H, LIVE, NOTHING], operands, **formats(), **options)
        operands = outwards(*BLOCK)
        operands[1], operands[11:13] = counts, sides
        options = NEURONS | {"units_at": np.int64(1)}
        ask_of(MISFIT_OF_ADAPTERS, "feed_forward", X, [X, LIVE], operands, **formats(), **options)


COUNTED: dict[str, tuple[str, Any, dict[str, int]]] = {
    "more units than there are": ("a count is", ALL, {"units_at": 2}),
    "no units": ("a count is", ALL * np.int32(0), {}),
    "fewer than no units": ("a count is", -ALL, {}),
    "units from nowhere": ("a count is", ALL, {"units_at": -1}),
    "units from behind": ("a count is", ALL, {"units_at": 3}),
    "float counts": ("a count is", ALL.astype(F32), {}),
    "units of no outputs": ("do not divide", COUNTS, {"units": 3}),
    "no number of units": ("a count is", COUNTS, {"units": 0}),
}


@needs_native
@pytest.mark.parametrize(("part", "counts", "change"), COUNTED.values(), ids=COUNTED)
def test_counts(part, counts, change):
    numbers = {name: np.int64(value) for name, value in {"units": 1, "units_at": 0, **change}.items()}
    operands = [NOTHING, counts, STEPS, *UP, NOTHING, LEFT, RIGHT]
    refuse(part, "to_units", [Y], [X, LIVE], operands, **formats(), **(UNITS | numbers))


@needs_native
@pytest.mark.parametrize(
    ("counts", "at"), [([1, 0, 1], 1), ([1, 71, 1], 1), ([1, -1, 1], 1), ([1, 1, 1], 3), ([1, 1, 1], -1)]
)
def test_counts_of_inputs_and_of_neurons(counts, at):
    at, counts = {"units_at": np.int64(at)}, np.array(counts, I32)
    for each in (counts, counts.astype(F32)):
        operands = inwards(REDUCTION, REDUCTION_SCALE)
        operands[5] = each
        refuse("a count is", "from_units", Y, [H, LIVE, NOTHING], operands, **formats(), **(SEGMENT | at))
        operands = outwards(*BLOCK)
        operands[1] = each
        refuse("a count is", "feed_forward", X, [X, LIVE], operands, **formats(), **(NEURONS | at))


LIVES = {"none": 0, "fewer than none": -1, "a row more": 5, "two": [1, 1], "a float": np.float32(2)}


@needs_native
@pytest.mark.parametrize("live", LIVES.values(), ids=LIVES)
def test_live(live):
    """How many rows are computed, of all products."""
    live, part = np.asarray(live, None if isinstance(live, F32) else I32), "the number of rows is"
    refuse(part, "to_units", [Y], [X, live], outwards(NOTHING, *UP), **formats(), **UNITS)
    reduction = inwards(REDUCTION, REDUCTION_SCALE)
    refuse(part, "from_units", Y, [H, live, NOTHING], reduction, **formats(), **SEGMENT)
    refuse(part, "feed_forward", X, [X, live], outwards(*BLOCK), **formats(), **NEURONS)
    refuse(part, "add_normed", X, [X, X, live], [zeros(70)], eps=F32(0))


# 70 inputs × 20 outputs in one segment, or three segments of 40.
REDUCTION, REDUCTION_SCALE = zeros(1, 3, 2, 512, dtype=I8), zeros(1, 32)
STACK, STACK_SCALE = zeros(3, 2, 2, 256, dtype=np.uint8), zeros(3, 2, 2, 16, dtype=F16)
H, HEADS = zeros(4, 70), zeros(4, 120)
SEGMENTS = "do not divide into segments"
MISFIT = "the weight's shape does not fit"
FROM_UNITS: dict[str, tuple[str, list[Any], dict[str, Any], int]] = {
    "many inputs": (MISFIT, [zeros(4, 97), REDUCTION, REDUCTION_SCALE, NOTHING], formats(), 1),
    "many outputs": (MISFIT, [H, REDUCTION[:, :, :1], REDUCTION_SCALE[:, :16], NOTHING], formats(), 1),
    "flat data": (MISFIT, [H, REDUCTION[0], REDUCTION_SCALE, NOTHING], formats(), 1),
    "short scales": (MISFIT, [H, REDUCTION, REDUCTION_SCALE[:, :20], NOTHING], formats(), 1),
    "long scales": (MISFIT, [H, REDUCTION, zeros(2, 32), NOTHING], formats(), 1),
    "no scales": (MISFIT, [H, REDUCTION, NOTHING, NOTHING], formats(), 1),
    "no data": (MISFIT, [H, REDUCTION[:0], REDUCTION_SCALE, NOTHING], formats(), 1),
    "no panels": (MISFIT, [H, REDUCTION[:, :, :0], REDUCTION_SCALE, NOTHING], formats(), 1),
    "no blocks": (MISFIT, [H, REDUCTION[:, :0], REDUCTION_SCALE, NOTHING], formats(), 1),
    "wide scales of groups": (MISFIT, [HEADS, STACK, STACK_SCALE.astype(F32), NOTHING], formats(4, 32), 3),
    "groups too few": (MISFIT, [HEADS, STACK, STACK_SCALE[:, :1], NOTHING], formats(4, 32), 3),
    "groups too many": (MISFIT, [HEADS, STACK, zeros(3, 3, 2, 16, dtype=F16), NOTHING], formats(4, 32), 3),
    "scales of no groups": (MISFIT, [HEADS, STACK, NOTHING.astype(F16), NOTHING], formats(4, 32), 3),
    "segments too many": (MISFIT, [zeros(4, 160), STACK, STACK_SCALE, NOTHING], formats(4, 32), 4),
    "longer segments": (MISFIT, [zeros(4, 195), STACK, STACK_SCALE, NOTHING], formats(4, 32), 3),
    "shorter segments": (MISFIT, [zeros(4, 96), STACK, STACK_SCALE, NOTHING], formats(4, 32), 3),
    "one long segment": (MISFIT, [HEADS, STACK, STACK_SCALE, NOTHING], formats(4, 32), 1),
    "no segments": (SEGMENTS, [HEADS, STACK, STACK_SCALE, NOTHING], formats(4, 32), 0),
    "negative segments": (SEGMENTS, [HEADS, STACK, STACK_SCALE, NOTHING], formats(4, 32), -3),
    "segments that do not divide": (SEGMENTS, [HEADS, STACK, STACK_SCALE, NOTHING], formats(4, 32), 7),
    "endless segments": (SEGMENTS, [HEADS, STACK, STACK_SCALE, NOTHING], formats(4, 32), 1 << 62),
    "short residual": ("the residual", [H, REDUCTION, REDUCTION_SCALE, zeros(4, 19)], formats(), 1),
    "one row of a residual": ("the residual", [H, REDUCTION, REDUCTION_SCALE, zeros(20)], formats(), 1),
    "narrow residual": ("the residual", [H, REDUCTION, REDUCTION_SCALE, Y.astype(F16)], formats(), 1),
    "other rows": ("other rows", [zeros(3, 70), REDUCTION, REDUCTION_SCALE, NOTHING], formats(), 1),
}


@needs_native
@pytest.mark.parametrize(("part", "operands", "form", "segments"), FROM_UNITS.values(), ids=FROM_UNITS)
def test_from_units(part, operands, form, segments):
    h, *weight, residual = operands
    options = SEGMENT | dict(segments=np.int64(segments), stacked=segments != 1)
    refuse(part, "from_units", Y, [h, LIVE, residual], inwards(*weight), **form, **options)


@needs_native
def test_from_units_of_missing_parts():
    operands = inwards(REDUCTION, REDUCTION_SCALE)
    for wrong in (operands[:-1], [*operands, NOTHING]):
        refuse("a product needs", "from_units", Y, [H, LIVE, NOTHING], wrong, **formats(), **SEGMENT)
    operands, several = inwards(STACK, STACK_SCALE), SEGMENT | {"segments": np.int64(3)}
    refuse(SEGMENTS, "from_units", Y, [HEADS, LIVE, NOTHING], operands, **formats(4, 32), **several)
    for h in (H.astype(F16), zeros(), zeros(4, 0)):
        refuse(ROW, "from_units", Y, [h, LIVE, NOTHING], operands, **formats(4, 32), **SEGMENT)
    narrow = [H, LIVE, NOTHING], inwards(REDUCTION, REDUCTION_SCALE)
    refuse("other rows", "from_units", Y.astype(F16), *narrow, **formats(), **SEGMENT)


# A block of 20 neurons over 70: no norm, the units above, and their reduction.
DOWN, DOWN_SCALE = zeros(1, 1, 5, 512, dtype=I8), zeros(1, 80)
BLOCK = [NOTHING, *UP, *UP, DOWN, DOWN_SCALE]


def block(at: int, value: Any) -> list[Any]:
    return [*BLOCK[:at], value, *BLOCK[at + 1 :]]


FEED_FORWARD: dict[str, tuple[str, Any, list[Any], dict[str, Any]]] = {
    "short gate": (FIT, X, block(1, DATA[:1]), {}),
    "short scales of the gate": (FIT, X, block(2, SCALE[:16]), {}),
    "short up": (FIT, X, block(3, DATA[:, :2]), {}),
    "no up": (FIT, X, block(3, DATA[:0]), {}),
    "short down": (FIT, X, block(5, DOWN[:, :, :4]), {}),
    "short scales of down": (FIT, X, block(6, zeros(1, 64)), {}),
    "units as inputs": (FIT, X, block(5, DATA), {}),
    "more units": (FIT, X, BLOCK, {"units": np.int64(33)}),
    "no units": ("at least one unit", X, BLOCK, {"units": np.int64(0)}),
    "negative units": ("at least one unit", X, BLOCK, {"units": np.int64(-20)}),
    "endless units": (FIT, X, BLOCK, {"units": np.int64(1 << 62)}),
    "another result": ("another shape", zeros(4, 71), BLOCK, {}),
    "short norm": ("norm's scale", X, block(0, zeros(69)), {}),
}


@needs_native
@pytest.mark.parametrize(("part", "result", "operands", "change"), FEED_FORWARD.values(), ids=FEED_FORWARD)
def test_feed_forward(part, result, operands, change):
    refuse(part, "feed_forward", result, [X, LIVE], outwards(*operands), **formats(), **(NEURONS | change))


@needs_native
def test_feed_forward_of_missing_parts():
    operands = outwards(*BLOCK)
    for wrong in (operands[:-1], [*operands, NOTHING], operands[:11]):
        refuse("three weights", "feed_forward", X, [X, LIVE], wrong, **formats(), **NEURONS)
    for x in (X.astype(F16), zeros(), zeros(4, 0)):
        refuse(ROW, "feed_forward", X, [x, LIVE], operands, **formats(), **NEURONS)
    refuse("another shape", "feed_forward", X.astype(F16), [X, LIVE], operands, **formats(), **NEURONS)


@needs_native
@pytest.mark.parametrize("step", [0, -1, np.nan, np.inf, 1e-38, 1e38])
def test_steps(step):
    """What is no step, by value and by shape, for all that takes one."""
    for steps in (np.array([step], F32), zeros(2), np.ones(1, F16)):
        operands = [NOTHING, COUNTS, steps, *unadapted(UP)]
        refuse("steps must be", "to_units", [Y], [X, LIVE], operands, **formats(), **UNITS)
        operands = [*unadapted([REDUCTION, REDUCTION_SCALE]), COUNTS, steps]
        refuse("steps must be", "from_units", Y, [H, LIVE, NOTHING], operands, **formats(), **SEGMENT)
    operands = outwards(*BLOCK)
    for steps in (np.array([1, step], F32), np.array([step, 1], F32), np.ones(1, F32)):
        operands[2] = steps
        refuse("steps must be", "feed_forward", X, [X, LIVE], operands, **formats(), **NEURONS)


INTEGERS = {
    "floats": ("int8", zeros(4, 20, dtype=I32), [X, DATA]),
    "few inputs": (MISFIT, zeros(4, 20, dtype=I32), [zeros(4, 64, dtype=I8), DATA]),
    "nibbles": (MISFIT, zeros(4, 20, dtype=I32), [zeros(4, 70, dtype=I8), NARROW]),
    "many outputs": (MISFIT, zeros(4, 33, dtype=I32), [zeros(4, 70, dtype=I8), DATA]),
    "float results": ("int32", Y, [zeros(4, 70, dtype=I8), DATA]),
}


@needs_native
@pytest.mark.parametrize(("part", "result", "operands"), INTEGERS.values(), ids=INTEGERS)
def test_integer_product(part, result, operands):
    refuse(part, "integer_product", result, operands)


NORMED = {
    "narrow rows": ("at least one row", X, [X.astype(F16), X], zeros(70)),
    "another result": ("another shape", Y, [X, X], zeros(70)),
    "halves as a result": ("another shape", X.astype(F16), [X, X], zeros(70)),
    "no norm": ("norm's scale", X, [X, X], NOTHING),
    "short norm": ("norm's scale", X, [X, X], zeros(69)),
    "no residual": ("the residual", X, [X, NOTHING], zeros(70)),
    "short residual": ("the residual", X, [X, X[:3]], zeros(70)),
}


@needs_native
@pytest.mark.parametrize(("part", "result", "buffers", "scale"), NORMED.values(), ids=NORMED)
def test_add_normed(part, result, buffers, scale):
    refuse(part, "add_normed", result, [*buffers, LIVE], [scale], eps=F32(0))


@needs_native
def test_add_normed_of_missing_parts():
    for operands in ([], [zeros(70)] * 2):
        refuse("an operand is missing", "add_normed", X, [X, X, LIVE], operands, eps=F32(0))


@needs_native
def test_what_fits_is_computed():
    """The shapes above are refused for what is said of them, not for something else."""
    attributes = UNITS | dict(units=np.int64(20), units_at=np.int64(0))
    # More ranks than an adapter has are all that it has.
    for ranks, live in ((0, LIVE), (2, np.int32(1)), (3, np.array([4], I32))):
        operands = [NOTHING, np.array([1, 1, ranks], I32), STEPS, *UP, NOTHING, LEFT, RIGHT]
        assert ask("to_units", [Y], [X, live], operands, **formats(), **attributes)[0].shape == (4, 20)
        operands = [REDUCTION, REDUCTION_SCALE, NOTHING, RIGHT, LEFT, np.array([1, 70, ranks], I32), STEPS]
        options = SEGMENT | dict(units_at=np.int64(1))
        assert ask("from_units", Y, [H, live, Y], operands, **formats(), **options).shape == (4, 20)
        operands = outwards(*BLOCK)
        operands[1] = np.array([1, 20, ranks], I32)
        for at in range(3):
            operands[6 + 5 * at : 8 + 5 * at] = [LEFT, RIGHT]
        options = NEURONS | dict(units_at=np.int64(1))
        assert ask("feed_forward", X, [X, live], operands, **formats(), **options).shape == (4, 70)
        assert ask("add_normed", X, [X, X, live], [zeros(70)], eps=F32(0)).shape == (4, 70)
    several = SEGMENT | dict(segments=np.int64(3), stacked=True)
    stacked = [HEADS, LIVE, NOTHING], inwards(STACK, STACK_SCALE)
    assert ask("from_units", Y, *stacked, **formats(4, 32), **several).shape == (4, 20)
    operands = [zeros(4, 70, dtype=I8), DATA]
    assert ask("integer_product", zeros(4, 20, dtype=I32), operands).shape == (4, 20)


def test_kernels_that_are_not_there(monkeypatch):
    """The door says so itself, instead of a graph with a name that XLA does not know."""
    weight = weight_of(np.random.default_rng(0), (20, 70), (8, 0), -1)
    fall_back(monkeypatch)
    with pytest.raises(ConfigError, match="no native kernels in this process"):
        native_products.to_units(jnp.asarray(X), [weight])
    assert native.threads() == 1
    assert native.busy_ns() == 0
