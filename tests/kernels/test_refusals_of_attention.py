"""Graphs whose attention has shapes that disagree end in an error, never in a read beyond a buffer.

The package never makes such graphs. Exported ones and other people's callers may.
"""

from typing import Any

import numpy as np
import pytest

from tests.kernels.refusing import COUNTS, F16, F32, I32, NOTHING, ask, refuse, zeros
from tests.kernels.switching import needs_native

Q, NEW, CACHE, PLACES = zeros(1, 4, 2, 3, 16), zeros(1, 4, 2, 16), zeros(1, 2, 32, 16), zeros(4, dtype=I32)
FOUR = np.int32(4)
MASS = zeros(1, 32)
NO_CHUNKS = zeros(0, dtype=np.uint32)
BASE, TREE = np.array(3, I32), np.zeros((4, 5), np.bool_)
GOOD = [
    Q, NEW, NEW, NOTHING, NOTHING, CACHE, CACHE, MASS, COUNTS, PLACES, PLACES, FOUR, COUNTS, TREE[:, :0],
    NO_CHUNKS, COUNTS, COUNTS, NOTHING, NOTHING, NOTHING,
]  # fmt: skip


def but(**change: Any) -> list[Any]:
    names = (
        "q", "k", "v", "cos", "sin", "keys", "values", "mass", "slot", "rows", "positions", "valid", "base",
        "seen", "chunks", "chunk_layer", "chunk_tokens", "chunk_mass", "bias", "sink_logits",
    )  # fmt: skip
    return [change.get(name, each) for name, each in zip(names, GOOD, strict=True)]


def stacked(*shape: int) -> dict[str, np.ndarray]:
    return {"keys": zeros(*shape), "values": zeros(*shape)}


STACK = zeros(3, 1, 2, 32, 16)
STACKED = stacked(*STACK.shape)
OPTIONS = dict(scale=F32(1), softcap=F32(0), window=np.int64(0), heads_at=np.int64(0))
ATTENTION: dict[str, tuple[str, list[Any]]] = {
    "flat queries": ("queries must be", but(q=zeros(4, 96))),
    "narrow queries": ("queries must be", but(q=Q.astype(F16))),
    "narrow keys": ("queries must be", but(k=NEW.astype(F16))),
    "fewer keys": ("do not fit the queries", but(k=zeros(1, 3, 2, 16))),
    "fewer values": ("do not fit the queries", but(v=zeros(1, 3, 2, 16))),
    "other kv heads": ("do not fit the queries", but(k=zeros(1, 4, 3, 16), v=zeros(1, 4, 3, 16))),
    "wider keys": ("do not fit the queries", but(k=zeros(1, 4, 2, 17))),
    "integer cache": ("float32 or float16", but(keys=CACHE.astype(np.int8), values=CACHE.astype(np.int8))),
    "mixed cache": ("float32 or float16", but(values=CACHE.astype(F16))),
    "cache of other heads": ("cache does not fit", but(keys=zeros(1, 3, 32, 16), values=zeros(1, 3, 32, 16))),
    "cache of two": ("cache does not fit", but(keys=zeros(2, 2, 32, 16), values=zeros(2, 2, 32, 16))),
    "narrower cache": ("cache does not fit", but(keys=zeros(1, 2, 32, 8), values=zeros(1, 2, 32, 8))),
    "shorter values": ("cache does not fit", but(values=zeros(1, 2, 31, 16))),
    "short sines": ("cosines and sines", but(cos=zeros(4, 8), sin=zeros(4, 7))),
    "wide cosines": ("cosines and sines", but(cos=zeros(4, 9), sin=zeros(4, 9))),
    "cosines of three tokens": ("cosines and sines", but(cos=zeros(3, 7), sin=zeros(3, 7))),
    "narrow cosines": ("cosines and sines", but(cos=zeros(4, 8, dtype=F16), sin=zeros(4, 8, dtype=F16))),
    "negative positions": ("out of range", but(positions=PLACES - np.int32(1))),
    "negative rows": ("out of range", but(rows=PLACES - np.int32(1))),
    "rows that descend": ("do not ascend", but(rows=np.array([0, 2, 1, 3], I32))),
    "two rows": ("rows and positions must be", but(rows=zeros(2, dtype=I32))),
    "a tree of three tokens": ("seen of a tree", but(base=BASE, seen=TREE[:3])),
    "a tree of bytes": ("seen of a tree", but(base=BASE, seen=TREE.astype(np.int8))),
    "a tree without a base": ("seen of a tree", but(seen=TREE)),
    "a tree from below zero": ("seen of a tree", but(base=np.array(-1, I32), seen=TREE)),
    "a tree from a float": ("seen of a tree", but(base=zeros(1), seen=TREE)),
    "negative count": ("out of range", but(valid=np.int32(-1))),
    "more than there are": ("out of range", but(valid=np.int32(5))),
    "two positions": ("rows and positions must be", but(positions=zeros(2, dtype=I32))),
    "float positions": ("rows and positions must be", but(positions=zeros(4))),
    "two counts": ("rows and positions must be", but(valid=zeros(2, dtype=I32))),
    "mass of two": ("mass must be", but(mass=zeros(2, 32))),
    "mass of fewer": ("mass must be", but(mass=zeros(1, 31))),
    "mass by node without a tree": ("mass must be", but(mass=zeros(1, 5, 32))),
    "mass of other nodes": ("mass must be", but(mass=zeros(1, 4, 32), base=BASE, seen=TREE)),
    "a stack without a slot": ("queries must be", but(keys=STACK, values=STACK)),
    "a slot without a stack": ("queries must be", but(slot=np.int32(0))),
    "a slot behind the stack": ("no such layer", but(**STACKED, slot=np.int32(3))),
    "a slot before the stack": ("no such layer", but(**STACKED, slot=np.int32(-1))),
    "two slots": ("no such layer", but(**STACKED, slot=zeros(2, dtype=I32))),
    "a float slot": ("no such layer", but(**STACKED, slot=F32(0))),
    "an empty stack": ("no such layer", but(keys=STACK[:0], values=STACK[:0], slot=np.int32(0))),
    "a stack of other heads": ("cache does not fit", but(**stacked(3, 1, 3, 32, 16), slot=np.int32(0))),
    "a stack of two": ("cache does not fit", but(**stacked(3, 2, 2, 32, 16), slot=np.int32(0))),
    "a shorter stack of values": ("cache does not fit", but(keys=STACK, values=STACK[:2], slot=np.int32(0))),
    "a handle of one word": ("chunks need a table", but(chunks=zeros(1, dtype=np.uint32), chunk_tokens=FOUR)),
    "chunks without a layer": (
        "chunks need a table",
        but(chunks=zeros(2, dtype=np.uint32), chunk_tokens=FOUR),
    ),
    "a table that is not open": (
        "no such table",
        but(chunks=np.array([7, 9], np.uint32), chunk_layer=np.int32(0), chunk_tokens=FOUR),
    ),
    "two numbers of tokens": (
        "chunks need a table",
        but(chunks=np.zeros(2, np.uint32), chunk_layer=np.int32(0), chunk_tokens=zeros(2, dtype=I32)),
    ),
    "narrow mass of chunks": ("mass of chunks must be", but(chunk_mass=zeros(1, 2, dtype=F16))),
    "a narrow bias": ("added to scores must be", but(bias=zeros(2, 3, 5, dtype=F16))),
    "sink logits of five heads": ("sink logits must be", but(sink_logits=zeros(5))),
    "narrow sink logits": ("sink logits must be", but(sink_logits=zeros(2, 3, dtype=F16))),
    "a bias of five heads": ("added to scores must be", but(bias=zeros(5, 7))),
    "new values without keys": ("do not fit the queries", but(k=NOTHING)),
    "narrow mass": ("mass must be", but(mass=zeros(1, 32, dtype=F16))),
}  # fmt: skip


@needs_native
@pytest.mark.parametrize(("part", "operands"), ATTENTION.values(), ids=ATTENTION)
def test_attention(part, operands):
    results = [Q, *operands[5:8], operands[17]]
    refuse(part, "attention", results, operands, [COUNTS], **OPTIONS)


HEADS = {
    "more heads than there are": (np.array([3], I32), 0),
    "no heads": (np.array([0], I32), 0),
    "heads below zero": (np.array([-1], I32), 0),
    "float heads": (zeros(1), 0),
    "heads from behind": (np.array([1], I32), 1),
    "heads from nowhere": (np.array([1], I32), -1),
}


@needs_native
@pytest.mark.parametrize(("counts", "at"), HEADS.values(), ids=HEADS)
def test_heads(counts, at):
    options = OPTIONS | {"heads_at": np.int64(at)}
    refuse("count is", "attention", [Q, CACHE, CACHE, MASS, NOTHING], GOOD, [counts], **options)


@needs_native
def test_counts_that_are_missing():
    for operands in ([], [COUNTS, COUNTS]):
        refuse(
            "an operand is missing", "attention", [Q, CACHE, CACHE, MASS, NOTHING], GOOD, operands, **OPTIONS
        )


@needs_native
def test_results_of_attention():
    for part, results in (
        ("another shape", [zeros(1, 4, 2, 3, 15), CACHE, CACHE, MASS, NOTHING]),
        ("does not fit", [Q, CACHE[:, :, :31], CACHE, MASS, NOTHING]),
        ("does not fit", [Q, CACHE, CACHE[:, :, :31], MASS, NOTHING]),
        ("mass must be", [Q, CACHE, CACHE, MASS[:, :31], NOTHING]),
    ):
        refuse(part, "attention", results, GOOD, [COUNTS], **OPTIONS)
    capped = but(bias=zeros(2, 3, 7))
    options = OPTIONS | {"softcap": F32(5)}
    refuse("are not capped", "attention", [Q, CACHE, CACHE, MASS, NOTHING], capped, [COUNTS], **options)
    options = OPTIONS | {"window": np.int64(-1)}
    refuse(
        "rows and positions must be", "attention", [Q, CACHE, CACHE, MASS, NOTHING], GOOD, [COUNTS], **options
    )


@needs_native
def test_what_fits_is_computed():
    by_node = zeros(1, 5, 32)
    for operands in (
        GOOD,
        but(**STACKED, slot=np.int32(2)),
        but(**STACKED, slot=np.array([0], I32), mass=NOTHING),
        but(base=BASE, seen=TREE, mass=by_node),
        but(bias=zeros(2, 3, 7)),
        but(sink_logits=zeros(2, 3)),
        but(k=NOTHING, v=NOTHING),
    ):
        results = [Q, *operands[5:8], operands[17]]
        for counts in (COUNTS, np.array([1], I32)):
            assert ask("attention", results, operands, [counts], **OPTIONS)[0].shape == Q.shape
