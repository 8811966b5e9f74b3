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
BASE, TREE = np.array(3, I32), np.zeros((4, 5), np.bool_)
GOOD = [
    Q, NEW, NEW, NOTHING, NOTHING, CACHE, CACHE, MASS, PLACES, PLACES, FOUR, COUNTS, TREE[:, :0], COUNTS,
]  # fmt: skip


def but(**change: Any) -> list[Any]:
    names = (
        "q", "k", "v", "cos", "sin", "keys", "values", "mass", "rows", "positions", "valid", "base", "seen",
        "counts",
    )  # fmt: skip
    return [change.get(name, each) for name, each in zip(names, GOOD, strict=True)]


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
    "more heads than there are": ("count is", but(counts=np.array([3], I32))),
    "no heads": ("count is", but(counts=np.array([0], I32))),
    "float heads": ("count is", but(counts=zeros(1))),
    "narrow mass": ("mass must be", but(mass=zeros(1, 32, dtype=F16))),
}  # fmt: skip


@needs_native
@pytest.mark.parametrize(("part", "operands"), ATTENTION.values(), ids=ATTENTION)
def test_attention(part, operands):
    results = [Q, *operands[5:8]]
    options = dict(scale=np.float32(1), softcap=np.float32(0), window=np.int64(0), heads_at=np.int64(0))
    refuse(part, "attention", results, operands, **options)


@needs_native
def test_results_of_attention():
    options = dict(scale=np.float32(1), softcap=np.float32(0), window=np.int64(0), heads_at=np.int64(0))
    refuse("another shape", "attention", [zeros(1, 4, 2, 3, 15), CACHE, CACHE, MASS], GOOD, **options)
    refuse("does not fit", "attention", [Q, CACHE[:, :, :31], CACHE, MASS], GOOD, **options)
    refuse("does not fit", "attention", [Q, CACHE, CACHE[:, :, :31], MASS], GOOD, **options)
    refuse("mass must be", "attention", [Q, CACHE, CACHE, MASS[:, :31]], GOOD, **options)
    refuse(
        "rows and positions must be",
        "attention",
        [Q, CACHE, CACHE, MASS],
        GOOD,
        **(options | dict(window=np.int64(-1))),
    )


@needs_native
def test_what_fits_is_computed():
    options = dict(scale=F32(1), softcap=F32(0), window=np.int64(0), heads_at=np.int64(0))
    assert ask("attention", [Q, CACHE, CACHE, MASS], GOOD, **options)[0].shape == Q.shape
