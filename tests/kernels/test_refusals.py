"""Graphs whose products have shapes that disagree end in an error, never in a read beyond a buffer.

The package never makes such graphs. Exported ones and other people's callers may.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.kernels import native
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
    placed,
    refuse,
    unadapted,
    zeros,
)
from tests.kernels.switching import fall_back, needs_native

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
    options = dict(eps=F32(0), units=np.int64(1), **USED, **placed(*[0, 0, 0] * len(results)))
    refuse(part, "to_units", results, unadapted(operands), **form, **options)


LEFT, RIGHT = zeros(2, 20), zeros(2, 70)
TWO = np.array([1, 2], I32)
# The same sides in one buffer, and where they begin.
BUFFER, LEFT_AT, RIGHT_AT = zeros(7 + 40 + 140), 7, 47
BOTH = [COUNTS, BUFFER, BUFFER]
FAR = np.iinfo(np.int64).max
MISPLACED = "an adapter does not fit"
ADAPTERS: dict[str, tuple[str, list[Any], tuple[int, ...]]] = {
    "a left side alone": (MISPLACED, [COUNTS, LEFT, NOTHING], (0, 0, 2)),
    "a right side alone": (MISPLACED, [COUNTS, NOTHING, RIGHT], (0, 0, 2)),
    "fewer units": (MISPLACED, [COUNTS, zeros(2, 19), RIGHT], (0, 0, 2)),
    "narrower": (MISPLACED, [COUNTS, LEFT, zeros(2, 69)], (0, 0, 2)),
    "halves on the left": (MISPLACED, [COUNTS, LEFT.astype(F16), RIGHT], (0, 0, 2)),
    "halves on the right": (MISPLACED, [COUNTS, LEFT, RIGHT.astype(F16)], (0, 0, 2)),
    "a rank more": (MISPLACED, [COUNTS, LEFT, RIGHT], (0, 0, 3)),
    "a rank more on the right": (MISPLACED, [COUNTS, zeros(3, 20), RIGHT], (0, 0, 3)),
    "ranks without end": (MISPLACED, BOTH, (LEFT_AT, RIGHT_AT, FAR)),
    # Times 20 units it is 0 in 64 bits.
    "ranks that overflow": (MISPLACED, BOTH, (LEFT_AT, RIGHT_AT, 1 << 62)),
    "ranks below none": (MISPLACED, BOTH, (LEFT_AT, RIGHT_AT, -2)),
    "a left side before the buffer": (MISPLACED, BOTH, (-1, RIGHT_AT, 2)),
    "a right side before the buffer": (MISPLACED, BOTH, (LEFT_AT, -1, 2)),
    "a left side that ends behind it": (MISPLACED, BOTH, (148, RIGHT_AT, 2)),
    "a right side that ends behind it": (MISPLACED, BOTH, (LEFT_AT, RIGHT_AT + 1, 2)),
    "a left side that begins at its end": (MISPLACED, BOTH, (len(BUFFER), RIGHT_AT, 2)),
    "a right side that begins behind it": (MISPLACED, BOTH, (LEFT_AT, len(BUFFER) + 1, 2)),
    "a left side far away": (MISPLACED, BOTH, (FAR, RIGHT_AT, 2)),
    "a right side far away": (MISPLACED, BOTH, (LEFT_AT, FAR, 2)),
    "a part missing": ("each weight needs", [COUNTS, LEFT], (0, 0, 2)),
    "no places": ("each weight needs", BOTH, ()),
    "two places": ("each weight needs", BOTH, (LEFT_AT, RIGHT_AT)),
    "places of two": ("each weight needs", BOTH, (LEFT_AT, RIGHT_AT, 2, LEFT_AT, RIGHT_AT, 2)),
}


@needs_native
@pytest.mark.parametrize(("part", "operands", "places"), ADAPTERS.values(), ids=ADAPTERS)
def test_adapters(part, operands, places):
    counts, *sides = operands
    options = dict(eps=F32(0), units=np.int64(1), **USED, **placed(*places))
    refuse(part, "to_units", [Y], [X, NOTHING, counts, STEPS, *UP, *sides], **formats(), **options)


COUNTED: dict[str, tuple[str, Any, dict[str, int]]] = {
    "a rank below zero": (MISPLACED, np.array([1, -1], I32), {}),
    "a rank from nowhere": (MISPLACED, TWO, {"rank_at": 2}),
    "a rank from before": (MISPLACED, TWO, {"rank_at": -1}),
    "more units than there are": ("a count is", TWO, {"units_at": 1}),
    "no units": ("a count is", TWO * np.int32(0), {}),
    "units from nowhere": ("a count is", TWO, {"units_at": -1}),
    "float counts": ("a count is", TWO.astype(F32), {}),
    "units of no outputs": ("do not divide", COUNTS, {"units": 3}),
    "no number of units": ("a count is", COUNTS, {"units": 0}),
}


@needs_native
@pytest.mark.parametrize(("part", "counts", "change"), COUNTED.values(), ids=COUNTED)
def test_counts(part, counts, change):
    places = {
        name: np.int64(value) for name, value in {"units": 1, "units_at": 0, "rank_at": 1, **change}.items()
    }
    operands = [X, NOTHING, counts, STEPS, *UP, BUFFER, BUFFER]
    options = dict(eps=F32(0), **places, **placed(LEFT_AT, RIGHT_AT, 2))
    refuse(part, "to_units", [Y], operands, **formats(), **options)


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
    weight = operands[1:3]
    operands = [operands[0], *weight, NOTHING, NOTHING, *operands[3:], COUNTS, STEPS]
    options = dict(segments=np.int64(segments), stacked=segments != 1, **USED, **placed(0, 0, 0))
    refuse(part, "from_units", Y, operands, **form, **options)


@needs_native
@pytest.mark.parametrize("places", [(), (LEFT_AT, RIGHT_AT), (48, 0, 2), (0, 148, 2), (0, 0, 3)])
def test_adapters_of_reductions(places):
    """Left sides are along the 70 inputs."""
    operands = [H, REDUCTION, REDUCTION_SCALE, BUFFER, BUFFER, NOTHING, COUNTS, STEPS]
    options = dict(segments=np.int64(1), stacked=False, **USED, **placed(*places))
    refuse(MISPLACED, "from_units", Y, operands, **formats(), **options)


# A block of 20 neurons over 70: the units above, and their reduction.
DOWN, DOWN_SCALE = zeros(1, 1, 5, 512, dtype=I8), zeros(1, 80)
BLOCK = [X, NOTHING, *UP, *UP, DOWN, DOWN_SCALE]


def block(at: int, value: Any) -> list[Any]:
    return [*BLOCK[:at], value, *BLOCK[at + 1 :]]


FEED_FORWARD: dict[str, tuple[str, Any, list[Any], dict[str, Any]]] = {
    "short gate": (FIT, X, block(2, DATA[:1]), {}),
    "short scales of the gate": (FIT, X, block(3, SCALE[:16]), {}),
    "short up": (FIT, X, block(4, DATA[:, :2]), {}),
    "no up": (FIT, X, block(4, DATA[:0]), {}),
    "short down": (FIT, X, block(6, DOWN[:, :, :4]), {}),
    "short scales of down": (FIT, X, block(7, zeros(1, 64)), {}),
    "units as inputs": (FIT, X, block(6, DATA), {}),
    "more units": (FIT, X, BLOCK, {"units": np.int64(33)}),
    "no units": ("at least one unit", X, BLOCK, {"units": np.int64(0)}),
    "negative units": ("at least one unit", X, BLOCK, {"units": np.int64(-20)}),
    "endless units": (FIT, X, BLOCK, {"units": np.int64(1 << 62)}),
    "another result": ("another shape", zeros(4, 71), BLOCK, {}),
    "short norm": ("norm's scale", X, block(1, zeros(69)), {}),
}


@needs_native
@pytest.mark.parametrize(("part", "result", "operands", "change"), FEED_FORWARD.values(), ids=FEED_FORWARD)
def test_feed_forward(part, result, operands, change):
    attributes = dict(units=np.int64(20), activation=np.int64(0), residual=True, eps=F32(0), **USED)
    attributes |= formats() | placed(*[0] * 9)
    refuse(part, "feed_forward", result, unadapted(operands), **(attributes | change))


@needs_native
@pytest.mark.parametrize("at", range(3))
def test_adapters_of_feed_forward(at):
    attributes = dict(units=np.int64(20), activation=np.int64(0), residual=True, eps=F32(0), **USED)
    operands = unadapted(BLOCK)
    operands[4 + 4 * at + 2 : 4 + 4 * at + 4] = [BUFFER, BUFFER]
    places = [0] * 9
    places[3 * at : 3 * at + 3] = [LEFT_AT, RIGHT_AT + 1, 2]
    refuse(MISPLACED, "feed_forward", X, operands, **formats(), **attributes, **placed(*places))
    refuse("three weights", "feed_forward", X, operands, **formats(), **attributes, **placed(*places[:8]))


@needs_native
@pytest.mark.parametrize("step", [0, -1, np.nan, np.inf, 1e-38, 1e38])
def test_steps(step):
    """What is no step, by value and by shape, for all that takes one."""
    none = placed(0, 0, 0) | USED
    units = dict(eps=F32(0), units=np.int64(1)) | formats() | none
    parts = [*UP, NOTHING, NOTHING]
    for steps in (np.array([step], F32), zeros(2), np.ones(1, F16)):
        refuse("steps must be", "to_units", [Y], [X, NOTHING, COUNTS, steps, *parts], **units)
        operands = [H, REDUCTION, REDUCTION_SCALE, NOTHING, NOTHING, NOTHING, COUNTS, steps]
        options = dict(segments=np.int64(1), stacked=False) | formats() | none
        refuse("steps must be", "from_units", Y, operands, **options)
    operands = unadapted(BLOCK)
    options = dict(units=np.int64(20), activation=np.int64(0), residual=True, eps=F32(0), **USED)
    for steps in (np.array([1, step], F32), np.array([step, 1], F32), np.ones(1, F32)):
        operands[3] = steps
        refuse("steps must be", "feed_forward", X, operands, **options, **formats(), **placed(*[0] * 9))


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
    "narrow rows": ("at least one row", X, [X.astype(F16), zeros(70), X]),
    "another result": ("another shape", Y, [X, zeros(70), X]),
    "no norm": ("norm's scale", X, [X, NOTHING, X]),
    "short norm": ("norm's scale", X, [X, zeros(69), X]),
    "no residual": ("the residual", X, [X, zeros(70), NOTHING]),
    "short residual": ("the residual", X, [X, zeros(70), X[:3]]),
}


@needs_native
@pytest.mark.parametrize(("part", "result", "operands"), NORMED.values(), ids=NORMED)
def test_add_normed(part, result, operands):
    refuse(part, "add_normed", result, operands, eps=F32(0))


@needs_native
def test_what_fits_is_computed():
    """The shapes above are refused for what is said of them, not for something else."""
    attributes = dict(eps=F32(0), units=np.int64(20), units_at=np.int64(0), rank_at=np.int64(1))
    # More ranks than an adapter has are all that it has.
    for ranks in (0, 2, 3):
        counts = np.array([1, ranks], I32)
        for sides, places in (([LEFT, RIGHT], (0, 0, 2)), ([BUFFER, BUFFER], (LEFT_AT, RIGHT_AT, 2))):
            operands = [X, NOTHING, counts, STEPS, *UP, *sides]
            outs = ask("to_units", [Y], operands, **formats(), **attributes, **placed(*places))
            assert outs[0].shape == (4, 20)
    attributes = dict(segments=np.int64(1), stacked=False, units_at=np.int64(0), rank_at=np.int64(1))
    for sides, places in (([RIGHT, LEFT], (0, 0, 2)), ([BUFFER, BUFFER], (LEFT_AT, LEFT_AT + 140, 2))):
        operands = [H, REDUCTION, REDUCTION_SCALE, *sides, Y, TWO, STEPS]
        out = ask("from_units", Y, operands, **formats(), **attributes, **placed(*places))
        assert out.shape == (4, 20)
    operands = [HEADS, STACK, STACK_SCALE, NOTHING, NOTHING, NOTHING, COUNTS, STEPS]
    attributes = dict(segments=np.int64(3), stacked=True, **USED, **placed(0, 0, 0))
    assert ask("from_units", Y, operands, **formats(4, 32), **attributes).shape == (4, 20)
    attributes = dict(units=np.int64(20), activation=np.int64(0), residual=True, eps=F32(0), **USED)
    operands = unadapted(BLOCK)
    for at in range(3):
        operands[4 + 4 * at + 2 : 4 + 4 * at + 4] = [BUFFER, BUFFER]
    for places in ((0, 0, 0), (LEFT_AT, RIGHT_AT, 2)):
        out = ask("feed_forward", X, operands, **formats(), **attributes, **placed(*places * 3))
        assert out.shape == (4, 70)
    operands = [zeros(4, 70, dtype=I8), DATA]
    assert ask("integer_product", zeros(4, 20, dtype=I32), operands).shape == (4, 20)


def test_kernels_that_are_not_there(monkeypatch):
    """The door says so itself, instead of a graph with a name that XLA does not know."""
    weight = weight_of(np.random.default_rng(0), (20, 70), (8, 0), -1)
    fall_back(monkeypatch)
    with pytest.raises(ConfigError, match="no native kernels in this process"):
        native.to_units(jnp.asarray(X), [weight])
    assert native.threads() == 1
    assert native.busy_ns() == 0
