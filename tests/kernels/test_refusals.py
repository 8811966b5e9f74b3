"""Calls of kernels that disagree in one thing end in an error, never in a read beyond a buffer.

The package never makes such calls. Exported graphs and other people's callers may. Each handler is called as
it computes, and then with one array that is shorter, missing, of another type or of other numbers, a result
that is larger, or another attribute: all of them are refused, but those that are listed.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.kernels import native, native_products
from tests.kernels.drawing import weight_of
from tests.kernels.refusing import COUNTS as NO_COUNTS
from tests.kernels.refusing import DATA, F16, F32, I8, I32, NOTHING, SCALE, X, Y, ask, zeros
from tests.kernels.switching import fall_back, needs_native

U8, U32, I64 = np.uint8, np.uint32, np.int64
OTHER_TYPES = {
    "float32": F16, "float16": F32, "int32": F32, "uint32": I32, "int8": U8, "uint8": I8, "bool": I8,
}  # fmt: skip
# What is none where it is empty.
OPTIONAL = "live none, norm none, counts none, steps none, residual none, low none"


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that computes.

    Attributes:
      handler: its name.
      results: arrays of the shapes of its results, or the names of the buffers whose shapes they have.
      buffers: its first arrays.
      operands: those that may be entries of a weight table; None where none may.
      attributes: static arguments.
      said: a part of each kind of message that the changes lead to.
      taken: names of changes that are legal, besides those of `OPTIONAL`.
      wrong: further changes, each of one or more arrays and attributes, that are refused.
      together: arrays that are also changed both in the same way.
      like: name of a call; what both have the same is changed there.
    """

    handler: str
    results: dict[str, Any]
    buffers: dict[str, Any]
    operands: dict[str, Any] | None
    attributes: dict[str, Any]
    said: str = ""
    taken: str = ""
    wrong: Sequence[dict[str, Any]] = ()
    together: Sequence[tuple[str, str]] = ()
    like: str = ""

    def ask(self) -> None:
        results = [self.buffers[each] if isinstance(each, str) else each for each in self.results.values()]
        operands = None if self.operands is None else [*self.operands.values()]
        buffers = [*self.buffers.values()]
        jax.block_until_ready(ask(self.handler, results, buffers, operands, **self.attributes))

    def but(self, change: dict[str, Any]) -> "Call":
        parts = {part: dict(getattr(self, part) or {}) for part in PARTS_OF_CALLS}
        for name, value in change.items():
            part = next((each for each in PARTS_OF_CALLS if name in parts[each]), "operands")
            parts[part][name] = value
            if value is None:
                del parts[part][name]
        return dataclasses.replace(self, **parts if self.operands else parts | {"operands": self.operands})

    def given(self) -> dict[str, Any]:
        return self.buffers | (self.operands or {}) | self.results | self.attributes

    def changes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Changes of one thing, by their names."""
        given, known = self.given(), CALLS[self.like].given() if self.like else {}
        for name, array in (self.buffers | (self.operands or {})).items():
            for change, other in others(array) if known.get(name) is not array else ():
                yield f"{name} {change}", {name: other}
        for one, two in self.together:
            for (change, first), (_, second) in zip(others(given[one]), others(given[two]), strict=True):
                yield f"{one} and {two} {change}", {one: first, two: second}
        if self.operands:
            yield "an operand more", {"surplus": NOTHING}
            yield "an operand less", {[*self.operands][-1]: None}
        if "live" in given and not known:
            yield "live of no row", {"live": I32(0)}
            yield "live of two", {"live": np.ones(2, I32)}
        for name, array in self.results.items():
            array = given[array] if isinstance(array, str) else array
            if array.size and not known:
                yield f"{name} type", {name: array.astype(OTHER_TYPES[array.dtype.name])}
                for axis in range(array.ndim):
                    yield f"{name} more {axis}", {name: np.append(array, array.take([0], axis), axis)}
        for name, value in self.attributes.items():
            if isinstance(value, I64) and name != "activation" and known.get(name) != value:
                for other in {-1, 0, 3, 1 << 62} - {int(value)}:
                    yield f"{name} {other}", {name: I64(other)}
        for number, change in enumerate(self.wrong):
            yield f"wrong {number}", change


PARTS_OF_CALLS = ("attributes", "results", "buffers", "operands")


def others(array: Any) -> Iterator[tuple[str, Any]]:
    """What an array may be instead, by name."""
    array = np.asarray(array)
    if array.size == 0:
        return
    yield "none", np.zeros(0, array.dtype)
    yield "type", array.astype(OTHER_TYPES[array.dtype.name])
    if array.ndim > 2:
        yield "flat", array.ravel()
    for axis in range(array.ndim):
        if array.shape[axis] > 1:
            yield f"less {axis}", np.delete(array, 0, axis)
    if array.dtype == I32:
        yield "low", array - I32(1000)
        yield "high", array + I32(1000)


def each(name: str, *values: Any) -> list[dict[str, Any]]:
    """Changes of one thing to each of some values."""
    return [{name: value} for value in values]


def ints(**values: int) -> dict[str, Any]:
    return {name: I64(value) for name, value in values.items()}


def named(prefix: str, *arrays: Any) -> dict[str, Any]:
    """The arrays of a weight, and both sides of its adapter."""
    names = ("data", "scale", "low", "left", "right")
    return {f"{prefix}{part}": array for part, array in zip(names, arrays, strict=False)}


LIVE, COUNTS, ONE = np.array([4], I32), np.array([5, 6, 2], I32), zeros(1, dtype=I32)
LEFT, RIGHT, NORM, STEP = zeros(2, 20), zeros(2, 70), zeros(70), np.ones(1, F32)
NO_STEPS = each("steps", *(np.array([value], F32) for value in (0, -1, np.nan, np.inf, 1e-38, 1e38)))
FORM = ints(bits=8, group=0) | {"widen": True}
GROUPED, NESTED = ints(bits=4, group=32), ints(bits=4, group=64)
OF_ROWS = "at least one row; number of rows; a count is; steps must be; shape does not fit; an adapter does; "

# 20 units of 70 inputs: 2 panels and 3 blocks; in groups, in two planes, and with rows of floats beside.
PLANE, PLACE, ROWS = zeros(2, 3, 256, dtype=U8), zeros(70, dtype=I32), zeros(3, 20, dtype=F16)
UNITS = FORM | ints(units=20, units_at=0) | {"eps": F32(0), "shadowed": False}
TO = ({"y": Y}, {"x": X, "live": LIVE})


def to_units(*weight: Any) -> dict[str, Any]:
    return {"norm": NORM, "counts": COUNTS, "steps": STEP} | named("", *weight, LEFT, RIGHT)


# The same weight as that of a sum; and one of three segments of 40 inputs.
SUM, SUM_PLANE = (zeros(1, 3, 2, 512, dtype=I8), zeros(1, 32), NOTHING), zeros(1, 3, 2, 256, dtype=U8)
STACK = zeros(3, 2, 2, 256, dtype=U8), zeros(3, 2, 2, 16, dtype=F16), NOTHING
FROM = ({"y": Y}, {"h": X, "live": LIVE, "residual": Y})
SEGMENT = FORM | ints(segments=1, units_at=1) | {"stacked": False}


def from_units(*weight: Any, counts: Any = COUNTS, left: Any = RIGHT, right: Any = LEFT) -> dict[str, Any]:
    return named("", *weight, left, right) | {"counts": counts, "steps": STEP}


# 20 neurons over 70.
OUT, DOWN, DOWN_SCALE = (DATA, SCALE, NOTHING), zeros(1, 1, 5, 512, dtype=I8), zeros(1, 80)
NEURONS = FORM | ints(units=20, units_at=1, activation=0) | {"residual": True, "eps": F32(0)}
BLOCK = {
    **{"norm": NORM, "counts": COUNTS, "steps": np.ones(2, F32)},
    **named("gate ", *OUT, LEFT, RIGHT), **named("up ", *OUT, LEFT, RIGHT),
    **named("down ", DOWN, DOWN_SCALE, NOTHING, LEFT, RIGHT),
}  # fmt: skip
SHADOW_OF_BLOCK = {
    "place": PLACE, "gate rows": ROWS, "up rows": ROWS, "inner": zeros(20, dtype=I32),
    "down rows": zeros(2, 70, dtype=F16),
}  # fmt: skip
CALLS = {
    "to_units": Call(
        "to_units", *TO, to_units(*OUT), UNITS,
        OF_ROWS + "other rows; norm's scale; each weight needs; do not divide",
        wrong=[*NO_STEPS, *each("bits", I64(4)), *each("low", PLANE), *each("counts", COUNTS * I32(-1))],
    ),
    "to_units of groups": Call(
        "to_units", *TO, to_units(PLANE, zeros(2, 3, 16, dtype=F16), NOTHING), UNITS | GROUPED,
        wrong=[*each("group", I64(64), I64(16)), *each("bits", I64(8), I64(2)), *each("low", PLANE)],
        taken="scale flat", like="to_units",
    ),
    "to_units of planes": Call(
        "to_units", *TO, to_units(PLANE, zeros(2, 80, dtype=U8), PLANE), UNITS | NESTED,
        like="to_units",
        wrong=[
            *each("group", I64(32)), *each("bits", I64(8), I64(2)), *each("scale", zeros(2, 88, dtype=U8)),
        ],
    ),
    "to_units with a shadow": Call(
        "to_units", {"y": Y, "channels": ONE}, TO[1], to_units(*OUT) | {"place": PLACE, "rows": ROWS},
        UNITS | {"shadowed": True}, "a shadow does not fit", "place low, place high, rows less 0",
        wrong=[*each("bits", I64(4)), *each("shadowed", False), *each("steps", NOTHING)], like="to_units",
    ),
    "from_units": Call(
        "from_units", *FROM, from_units(*SUM), SEGMENT,
        OF_ROWS + "other rows; the residual; into segments; a product needs", "units_at 0",
        wrong=[*NO_STEPS, *each("counts", COUNTS * I32(-1))],
    ),
    "from_units of segments": Call(
        "from_units", {"y": Y}, {"h": zeros(4, 120), "live": LIVE, "residual": Y},
        from_units(*STACK, left=zeros(2, 120), counts=np.array([3, 2, 2], I32)),
        SEGMENT | GROUPED | ints(segments=3, units_at=0) | {"stacked": True}, taken="scale flat",
        wrong=each("stacked", False), like="from_units",
    ),
    "from_units of planes": Call(
        "from_units", *FROM, from_units(SUM_PLANE, zeros(1, 160, dtype=U8), SUM_PLANE), SEGMENT | NESTED,
        wrong=each("scale", zeros(1, 144, dtype=U8)), like="from_units",
    ),
    "from_units with a shadow": Call(
        "from_units", {"y": Y, "channels": ONE}, FROM[1], from_units(*SUM) | {"place": PLACE, "rows": ROWS},
        SEGMENT, "a shadow", "place low, place high, rows less 0", like="from_units",
    ),
    "feed_forward": Call(
        "feed_forward", {"y": X}, TO[1], BLOCK, NEURONS,
        OF_ROWS + "another shape; norm's scale; at least one unit; three weights",
        "gate data none, units_at 0",
    ),
    "feed_forward of units by row": Call(
        "feed_forward", {"y": X}, TO[1], BLOCK | {"counts": np.array([[1, 9, 2]] * 5, I32)}, NEURONS,
        taken="counts less 1", like="feed_forward",
        wrong=each("counts", *(np.array([[1, 9, 2]] * 4 + [[1, last, 2]], I32) for last in (10, -1))),
    ),
    "feed_forward with a shadow": Call(
        "feed_forward", {"y": X, "channels": zeros(2, dtype=I32)}, TO[1], BLOCK | SHADOW_OF_BLOCK, NEURONS,
        "a shadow", "place low, place high, gate rows less 0, up rows less 0, inner low, inner high, "
        "down rows less 0", like="feed_forward",
    ),
    "integer_product": Call(
        "integer_product", {"y": zeros(4, 20, dtype=I32)}, {"x": zeros(4, 70, dtype=I8), "data": DATA}, None,
        {}, "must be int8; must be int32; shape does not fit", "x less 1, y more 1",
        wrong=[*each("x", zeros(4, 64, dtype=I8)), *each("y", zeros(4, 33, dtype=I32))],
    ),
    "add_normed": Call(
        "add_normed", {"y": X}, {"x": X, "more": X, "live": LIVE}, {"scale": zeros(70)}, {"eps": F32(0)},
        "at least one row; another shape; norm's scale; the residual; number of rows; an operand is missing",
    ),
}  # fmt: skip

# 4 tokens of width 70 choose 2 of 3 experts; three tiles of at most 2 of them, of 2 experts; 5 visits.
TILES = {
    "x": X, "tokens": np.array([[0, 1], [2, 3], [1, 0]], I32), "experts": np.array([0, 1, 1], I32),
    "sizes": np.array([2, 2, 1], I32), "count": I32(3),
}  # fmt: skip
VISITS, CHOSEN, EXPERTS = zeros(5, 70), zeros(4, 2, dtype=I32), {"norm": zeros(70)}
for matrix in ("gate", "up", "down"):
    EXPERTS |= {f"{matrix} left": zeros(2, 2, 20), f"{matrix} right": zeros(2, 2, 70)}
for expert in (1, 2):
    EXPERTS |= named(f"gate {expert} ", *OUT) | named(f"up {expert} ", *OUT)
    EXPERTS |= named(f"down {expert} ", DOWN, DOWN_SCALE, NOTHING)
CALLS |= {
    "route": Call(
        "route", {"logits": zeros(4, 3), "weights": zeros(4, 2), "ids": CHOSEN}, {"x": X},
        {"norm": zeros(70), "router": zeros(3, 70), "bias": zeros(3)}, {"eps": F32(0), "normalized": True},
        "at least one row; a router must be; norm's scale; a router's bias; other shapes; "
        "an operand is missing",
        "bias none", wrong=[{"weights": zeros(4, 4), "ids": zeros(4, 4, dtype=I32)}],
    ),
    "experts": Call(
        "experts", {"y": VISITS}, TILES, EXPERTS,
        ints(units=20, activation=0) | {"eps": F32(0), "bits": np.array([8, 8]), "groups": np.array([0, 0])},
        "at least one row; another width; each expert needs; norm's scale; a tile lies; shape does not fit; "
        "an adapter does", "y more 0",
        wrong=[
            *each("sizes", *(np.array(sizes, I32) for sizes in ([2, 0, 1], [3, 1, 1], [2, 2, 2]))),
            *each("bits", np.array([8]), np.array([8, 4])), *each("groups", np.array([0])),
            *each("count", I32(4), I32(-1)), *each("experts", np.array([0, 1, 2], I32)),
        ],
    ),
    "sum_visits": Call(
        "sum_visits", {"y": X},
        {"visits": VISITS, "places": CHOSEN, "weights": zeros(4, 2), "residual": X}, None, {},
        "visits must be; another width; other shapes; the residual; outside of the visits", "visits less 0",
        wrong=each("places", np.full((4, 2), 5, I32), np.full((4, 2), -1, I32)),
    ),
}  # fmt: skip

Q, NEW, CACHE, AT = zeros(1, 4, 2, 3, 16), zeros(1, 4, 2, 16), zeros(1, 2, 32, 16), np.arange(4, dtype=I32)
OUTS = {
    "y": "q", "new keys": "keys", "new values": "values", "new mass": "mass", "new of chunks": "of chunks",
}  # fmt: skip
SEEN = {
    "q": Q, "k": NEW, "v": NEW, "cos": zeros(4, 7), "sin": zeros(4, 7), "keys": CACHE, "values": CACHE,
    "mass": zeros(1, 32), "slot": NO_COUNTS, "rows": AT, "positions": AT, "valid": I32(4), "base": NO_COUNTS,
    "seen": np.zeros((4, 0), np.bool_), "chunks": zeros(0, dtype=U32), "chunk layer": NO_COUNTS,
    "chunk tokens": NO_COUNTS, "of chunks": NOTHING, "bias": zeros(2, 3, 7), "sinks": zeros(2, 3),
}  # fmt: skip
HEADS = {"scale": F32(1), "softcap": F32(0)} | ints(window=0, heads_at=0)
PAIRS = (("k", "v"), ("keys", "values"), ("cos", "sin"))
LEGAL_PAIRS = "k and v none, keys and values type, cos and sin none, cos and sin less 1"
TREE = {"mass": zeros(1, 5, 32), "base": np.array(3, I32), "seen": np.zeros((4, 5), np.bool_)}
CALLS |= {
    "attention": Call(
        "attention", OUTS, SEEN, {"counts": np.array([2], I32)}, HEADS,
        "queries must be; do not fit the queries; float32 or float16; cache does not fit; cosines and sines; "
        "out of range; mass must be; added to scores; sink logits; another shape; an operand is missing; "
        "no such table; chunks need a table; mass of chunks; rows and positions",
        f"{LEGAL_PAIRS}, mass none, rows high, positions high, bias none, bias less 2, bias flat, "
        f"sinks none, v flat, values flat, window 3, window {1 << 62}", together=PAIRS,
        wrong=[
            *each("rows", AT[::-1], np.array([0, 2, 1, 3], I32)), *each("valid", I32(5), I32(-1)),
            *each("softcap", F32(5)), *each("counts", np.array([3], I32), np.array([-1], I32)),
            *each("of chunks", zeros(1, 2, dtype=F16)), *each("mass", TREE["mass"]), *each("slot", I32(0)),
            *each("seen", TREE["seen"]), *each("chunks", np.array([7, 9], U32)),
            {"chunks": np.array([7, 9], U32), "chunk layer": I32(0), "chunk tokens": I32(4)},
        ],
    ),
    "attention of a stack": Call(
        "attention", OUTS,
        SEEN | {"keys": zeros(3, *CACHE.shape), "values": zeros(3, *CACHE.shape), "slot": I32(2)},
        {"counts": NO_COUNTS}, HEADS, "no such layer", f"{LEGAL_PAIRS}, values flat", together=PAIRS,
        wrong=each("slot", I32(3), I32(-1), zeros(2, dtype=I32)), like="attention",
    ),
    "attention of a tree": Call(
        "attention", OUTS, SEEN | TREE, {"counts": NO_COUNTS}, HEADS, "seen of a tree",
        "mass none, base high, seen less 1", wrong=each("mass", zeros(1, 4, 32)), like="attention",
    ),
}  # fmt: skip

# Two stacks of two layers each, whose chunks are nowhere; rows of documents; choices of tokens.
STACKS = {f"cache {at}": zeros(2, 1, 3, 16, 8) for at in range(4)}
FOUND = {
    "extents": zeros(2, 1, 3, dtype=U32), "bits": np.array([-1], I32), "slots": np.array([1, 0], I32),
    "counts": np.array([1, 3], I32),
}  # fmt: skip
CHUNKS = {"keys_by_token": True, "values_by_token": True, "rotated": False, "stacks": np.array([0, 1])}
QS, KS, STARTS, LSE = zeros(2, 3, 2, 2, 4), zeros(2, 3, 2, 4), zeros(2, 3, dtype=I32), zeros(2, 3, 2, 2)
DOCUMENTS = {"q": QS, "k": KS, "v": KS, "starts": STARTS}
NO_STARTS = each(
    "starts",
    *(
        np.array([[0, 1, 1], row], I32)
        for row in ([1, 1, 1], [-1, 0, 0], [0, 0, 1], [0, 2, 2], [0, 1, 0], [0, 0, 3])
    ),
)
OF_DOCUMENTS = "queries must be; keys and values; starts must be; start must be its own; another shape"
OWN = {f"cache {at}": zeros(1, 3, 16, 8) for at in range(4)}
ROWS = {
    "q": zeros(2, 3, 2, 8), "k": zeros(2, 3, 8), "v": zeros(2, 3, 8), "cos": zeros(2, 4), "sin": zeros(2, 4),
    "positions": np.array([3, 0], I32), "written": np.array([1, 0], I32), "slot": zeros(0, dtype=I32),
    "heads": np.array([2, 3], I32), "sinks": zeros(3, 2),
}  # fmt: skip
CALLS |= {
    "load_chunks": Call(
        "load_chunks", {f"new {name}": name for name in STACKS}, FOUND | STACKS, None,
        CHUNKS | ints(tokens=16),
        "each stack needs; needs a slot; must have an address; levels of 8, 4 or 2 bits; a chunk has no; "
        "a cache to load; no such layer; of one length; a count is; a stack is missing; a cache is missing",
        "bits low, tokens 3, cache 0 and cache 1 less 2, cache 2 and cache 3 less 0, extents flat, "
        "cache 1 flat, cache 3 flat",
        wrong=[
            *each("bits", *(np.array([bits], I32) for bits in (16, 1, 8))),
            *each("stacks", np.zeros(0, I64), np.array([0, 2]), np.array([-1, 0])),
            *(
                dict.fromkeys(STACKS, zeros(*shape))
                for shape in ((2, 1, 3, 16, 6), (2, 2, 3, 16, 8), (1, 3, 16, 8))
            ),
            dict.fromkeys(STACKS, zeros(2, 1, 3, 16, 8, dtype=I32)),
        ],
        together=(("cache 0", "cache 1"), ("cache 2", "cache 3")),
    ),
    "row_attention": Call(
        "row_attention", {"y": "q"} | {f"new {name}": name for name in OWN}, ROWS | OWN, None,
        {"scale": F32(1), "softcap": F32(0), "window": I64(0)},
        "queries must be; do not fit the queries; cosines and sines; positions, and; sink logits; "
        "another shape; cache is missing; cache does not fit; out of range",
        f"heads none, sinks none, k flat, v flat, positions high, window 3, window {1 << 62}",
    ),
    "document_attention": Call(
        "document_attention", {"y": "q", "sums": LSE}, DOCUMENTS, None, {"scale": F32(1)}, OF_DOCUMENTS,
        wrong=NO_STARTS, together=(("k", "v"),),
    ),
    "document_attention_gradients": Call(
        "document_attention_gradients", {"dq": "q", "dk": "k", "dv": "v"},
        DOCUMENTS | {"y": QS, "sums": LSE, "dy": QS}, None, {"scale": F32(1)},
        OF_DOCUMENTS + "; must be as the queries", "sums flat", wrong=NO_STARTS, together=(("k", "v"),),
    ),
    "largest": Call(
        "largest", {"y": zeros(4, dtype=I32)}, {"x": X}, None, {}, "one int32 for each row; rows must be",
        "x less 1",
    ),
    "draw": Call(
        "draw", {"y": zeros(4, dtype=I32)},
        {"x": X, "floats": zeros(2, 3), "ints": zeros(2, 2, dtype=I32), "seed": zeros(2, 2, dtype=U32)},
        None, {},
        "rows must be; top_k and; temperature, top_p; seeds must be; one int32 for each row",
        "x less 1, ints low, ints high",
    ),
    "follow": Call(
        "follow", {"next": zeros(9), "reply": zeros(1, dtype=I32)},
        {
            "channel": zeros(2, dtype=U32), "tokens": zeros(1, 6, dtype=I32), "mask": zeros(9),
            "asked": np.array([0, 1, 3, 5], I32),
        },
        None, {},
        "must be two uint32; must be int32; as many before and after; some of the block",
        "tokens less 1, tokens low, tokens high",
        wrong=[*each("asked", np.array([0, -1, 3, 5], I32), np.array([0, 1, 7, 5], I32))],
    ),
    "unit_rows": Call(
        "unit_rows", {"y": X}, {"index": zeros(4, dtype=I32), "live": LIVE}, named("", *OUT),
        ints(bits=8, group=0, outputs=20),
        "one for each row; rows must be; an operand is missing; shape does not fit; number of rows",
        "index low, index high, y more 1, outputs 3",
        wrong=[*each("y", zeros(4, 64)), *each("outputs", I64(33))],
    ),
}  # fmt: skip


def refusal(call: Call) -> str:
    """What kernels refuse a call with, if they do."""
    try:
        call.ask()
    # Of a graph that has run before XLA's error is a ValueError.
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return str(error).partition("jaxllm kernels: ")[2]
    return ""


@needs_native
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_disagrees_in_one_thing_is_refused(name: str) -> None:
    call = CALLS[name]
    call.ask()
    found = {name: refusal(call.but(change)) for name, change in call.changes()}
    legal = {*OPTIONAL.split(", ")} & found.keys() | {*filter(None, call.taken.split(", "))}
    assert {name for name, said in found.items() if not said} == legal
    for part in filter(None, call.said.split("; ")):
        assert any(part in said for said in found.values()), part


def test_kernels_that_are_not_there(monkeypatch):
    """The door says so itself, instead of a graph with a name that XLA does not know."""
    weight = weight_of(np.random.default_rng(0), (20, 70), (8, 0), -1)
    fall_back(monkeypatch)
    with pytest.raises(ConfigError, match="no native kernels in this process"):
        native_products.to_units(jnp.asarray(X), [weight])
    assert native.threads() == 1
    assert native.busy_ns() == 0
