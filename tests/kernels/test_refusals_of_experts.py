"""Mixtures of experts whose shapes or indices disagree end in an error, never in a read beyond a buffer."""

from typing import Any

import numpy as np
import pytest

from tests.kernels.refusing import (
    DATA,
    F16,
    F32,
    I32,
    NARROW,
    NOTHING,
    ROW,
    SCALE,
    UP,
    X,
    ask,
    refuse,
    zeros,
)
from tests.kernels.switching import needs_native
from tests.kernels.test_refusals import DOWN, DOWN_SCALE, LEFT, RIGHT

pytestmark = needs_native

# 4 tokens of width 70 choose 2 of 3 experts.
ROUTER = zeros(3, 70)
ROUTED = [zeros(4, 3), zeros(4, 2), zeros(4, 2, dtype=I32)]
ROUTE = dict(eps=F32(0), normalized=True)
ROUTES: dict[str, tuple[str, list[Any], Any, list[Any]]] = {
    "no router": ("an operand is missing", ROUTED, X, [NOTHING]),
    "two routers": ("an operand is missing", ROUTED, X, [NOTHING, ROUTER, ROUTER, ROUTER]),
    "narrow activations": (ROW, ROUTED, X.astype(F16), [NOTHING, ROUTER, NOTHING]),
    "no activations": (ROW, ROUTED, zeros(4, 0), [NOTHING, ROUTER, NOTHING]),
    "a narrow router": ("a router must be", ROUTED, X, [NOTHING, ROUTER.astype(F16), NOTHING]),
    "a flat router": ("a router must be", ROUTED, X, [NOTHING, ROUTER.ravel(), NOTHING]),
    "a router of fewer inputs": ("a router must be", ROUTED, X, [NOTHING, ROUTER[:, :69], NOTHING]),
    "a router of no experts": ("a router must be", ROUTED, X, [NOTHING, ROUTER[:0], NOTHING]),
    "short norm": ("norm's scale", ROUTED, X, [zeros(69), ROUTER, NOTHING]),
    "a bias of four experts": ("a router's bias", ROUTED, X, [NOTHING, ROUTER, zeros(4)]),
    "a narrow bias": ("a router's bias", ROUTED, X, [NOTHING, ROUTER, zeros(3, dtype=F16)]),
    "other logits": ("other shapes", [zeros(5, 3), *ROUTED[1:]], X, [NOTHING, ROUTER, NOTHING]),
    "narrow logits": ("other shapes", [zeros(4, 3, dtype=F16), *ROUTED[1:]], X, [NOTHING, ROUTER, NOTHING]),
    "weights of other rows": (
        "other shapes", [ROUTED[0], zeros(3, 2), ROUTED[2]], X, [NOTHING, ROUTER, NOTHING]
    ),
    "more choices than experts": (
        "other shapes", [ROUTED[0], zeros(4, 4), zeros(4, 4, dtype=I32)], X, [NOTHING, ROUTER, NOTHING]
    ),
    "fewer ids": ("other shapes", [*ROUTED[:2], zeros(4, 1, dtype=I32)], X, [NOTHING, ROUTER, NOTHING]),
    "float ids": ("other shapes", [*ROUTED[:2], zeros(4, 2)], X, [NOTHING, ROUTER, NOTHING]),
}  # fmt: skip


@pytest.mark.parametrize(("part", "results", "x", "operands"), ROUTES.values(), ids=ROUTES)
def test_route(part, results, x, operands):
    refuse(part, "route", results, [x], operands, **ROUTE)


# Three tiles of at most 2 of the 4 tokens, of 2 experts of 20 neurons; 5 visits.
TOKENS = np.array([[0, 1], [2, 3], [1, 0]], I32)
EXPERTS, SIZES, COUNT = np.array([0, 1, 1], I32), np.array([2, 2, 1], I32), np.int32(3)
TILES = dict(tokens=TOKENS, experts=EXPERTS, sizes=SIZES, count=COUNT)
VISITS = zeros(5, 70)
EXPERT = [*UP, NOTHING, *UP, NOTHING, DOWN, DOWN_SCALE, NOTHING]
SIDES = [NOTHING] * 6
WIDTHS = dict(bits=np.array([8, 8]), groups=np.array([0, 0]))
EXPERTS_OPTIONS = dict(units=np.int64(20), activation=np.int64(0), eps=F32(0), **WIDTHS)
OPERANDS = [NOTHING, *SIDES, *EXPERT, *EXPERT]
OUTSIDE = "a tile lies outside"


def but(at: int, *values: Any) -> list[Any]:
    return [*OPERANDS[:at], *values, *OPERANDS[at + len(values) :]]


TILED: dict[str, dict[str, Any]] = {
    "a token behind the last": {"tokens": TOKENS + np.int32(1)},
    "a token before the first": {"tokens": TOKENS - np.int32(1)},
    "float tokens": {"tokens": TOKENS.astype(F32)},
    "an expert behind the last": {"experts": EXPERTS + np.int32(1)},
    "an expert before the first": {"experts": EXPERTS - np.int32(1)},
    "fewer experts than tiles": {"experts": EXPERTS[:2]},
    "an empty tile": {"sizes": np.array([2, 0, 1], I32)},
    "a tile below zero": {"sizes": np.array([2, -1, 1], I32)},
    "a tile of more than fit": {"sizes": np.array([3, 1, 1], I32)},
    "more visits than rows": {"sizes": np.array([2, 2, 2], I32)},
    "fewer sizes than tiles": {"sizes": SIZES[:2]},
    "more tiles than there are": {"count": np.int32(4)},
    "fewer tiles than none": {"count": np.int32(-1)},
    "two counts": {"count": zeros(2, dtype=I32)},
    "a float count": {"count": F32(1)},
}


@pytest.mark.parametrize("change", TILED.values(), ids=TILED)
def test_tiles(change):
    refuse(OUTSIDE, "experts", VISITS, [X, *(TILES | change).values()], OPERANDS, **EXPERTS_OPTIONS)


MIXED: dict[str, tuple[str, Any, Any, list[Any], dict[str, Any]]] = {
    "narrow activations": (ROW, VISITS, X.astype(F16), OPERANDS, {}),
    "another width": ("another width", zeros(5, 69), X, OPERANDS, {}),
    "halves as results": ("another width", VISITS.astype(F16), X, OPERANDS, {}),
    "short norm": ("norm's scale", VISITS, X, but(0, zeros(69)), {}),
    "a part missing": ("each expert needs", VISITS, X, OPERANDS[:-1], {}),
    "a part too many": ("each expert needs", VISITS, X, [*OPERANDS, NOTHING], {}),
    "widths of one": ("each expert needs", VISITS, X, OPERANDS, {"bits": np.array([8])}),
    "groups of one": ("each expert needs", VISITS, X, OPERANDS, {"groups": np.array([0])}),
    "no units": ("each expert needs", VISITS, X, OPERANDS, {"units": np.int64(0)}),
    "more units": ("shape does not fit", VISITS, X, OPERANDS, {"units": np.int64(33)}),
    "a short gate": ("shape does not fit", VISITS, X, but(7, DATA[:1]), {}),
    "a short up of the second": ("shape does not fit", VISITS, X, but(19, DATA[:, :2]), {}),
    "a short down": ("shape does not fit", VISITS, X, but(13, DOWN[:, :, :4]), {}),
    "short scales": ("shape does not fit", VISITS, X, but(8, SCALE[:31]), {}),
    "nibbles": ("shape does not fit", VISITS, X, but(7, NARROW), {}),
    "four bits of the second": ("shape does not fit", VISITS, X, OPERANDS, {"bits": np.array([8, 4])}),
}


@pytest.mark.parametrize(("part", "result", "x", "operands", "change"), MIXED.values(), ids=MIXED)
def test_experts(part, result, x, operands, change):
    refuse(part, "experts", result, [x, *TILES.values()], operands, **(EXPERTS_OPTIONS | change))


BOTH = [np.stack([each] * 2) for each in (LEFT, RIGHT)]
ADAPTERS = {
    "a left side alone": (BOTH[0], NOTHING),
    "a right side alone": (NOTHING, BOTH[1]),
    "sides of one expert": (LEFT, RIGHT),
    "sides of one of two": (BOTH[0][:1], BOTH[1][:1]),
    "sides of three": (zeros(3, 2, 20), zeros(3, 2, 70)),
    "a rank more": (zeros(2, 3, 20), BOTH[1]),
    "fewer units": (BOTH[0][:, :, :19], BOTH[1]),
    "narrower": (BOTH[0], BOTH[1][:, :, :69]),
    "halves": (BOTH[0].astype(F16), BOTH[1]),
}


@pytest.mark.parametrize(("left", "right"), ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize("matrix", range(3))
def test_adapters(matrix, left, right):
    operands = but(1 + 2 * matrix, left, right)
    refuse("an adapter does not fit", "experts", VISITS, [X, *TILES.values()], operands, **EXPERTS_OPTIONS)


# 4 tokens sum 2 of 5 visits each.
PLACES, WEIGHTS = zeros(4, 2, dtype=I32), zeros(4, 2)
SUMS: dict[str, tuple[str, Any, list[Any]]] = {
    "narrow visits": ("visits must be", X, [VISITS.astype(F16), PLACES, WEIGHTS, NOTHING]),
    "no visits": ("visits must be", X, [VISITS[:0], PLACES, WEIGHTS, NOTHING]),
    "another width": ("another width", zeros(4, 69), [VISITS, PLACES, WEIGHTS, NOTHING]),
    "halves as results": ("another width", X.astype(F16), [VISITS, PLACES, WEIGHTS, NOTHING]),
    "fewer weights": ("have other shapes", X, [VISITS, PLACES, WEIGHTS[:3], NOTHING]),
    "fewer places": ("have other shapes", X, [VISITS, PLACES[:3], WEIGHTS, NOTHING]),
    "float places": ("have other shapes", X, [VISITS, WEIGHTS, WEIGHTS, NOTHING]),
    "a place behind the last": ("outside of the visits", X, [VISITS, PLACES + I32(5), WEIGHTS, NOTHING]),
    "a place before the first": ("outside of the visits", X, [VISITS, PLACES - I32(1), WEIGHTS, NOTHING]),
    "short residual": ("the residual", X, [VISITS, PLACES, WEIGHTS, X[:3]]),
    "narrow residual": ("the residual", X, [VISITS, PLACES, WEIGHTS, X.astype(F16)]),
}


@pytest.mark.parametrize(("part", "result", "buffers"), SUMS.values(), ids=SUMS)
def test_sums(part, result, buffers):
    refuse(part, "sum_visits", result, buffers)


def test_what_fits_is_computed():
    for bias in (NOTHING, zeros(3)):
        assert ask("route", ROUTED, [X], [zeros(70), ROUTER, bias], **ROUTE)[0].shape == (4, 3)
    for operands in (OPERANDS, but(1, *BOTH, *BOTH, *BOTH)):
        out = ask("experts", VISITS, [X, *TILES.values()], operands, **EXPERTS_OPTIONS)
        assert out.shape == (5, 70)
    assert ask("sum_visits", X, [VISITS, PLACES, WEIGHTS, X]).shape == (4, 70)
