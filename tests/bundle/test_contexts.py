"""The calibration of contexts in a bundle: kept whole, and refused where it is not."""

import numpy as np
import pytest

from jaxllm.bundle import Bundle, Part
from jaxllm.bundle.calibrations import contexts_parts, read_contexts
from jaxllm.contexts.tolerance import Candidate, ContextCalibration
from jaxllm.errors import BundleError
from tests.bundle.forging import rewritten
from tests.tiny import TINY, write_tiny_bundle

CHOSEN = Candidate("kivi", 32)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_tiny_bundle(tmp_path_factory.mktemp("contexts") / "plain.jaxllm")


def calibration() -> ContextCalibration:
    rng = np.random.default_rng(0)
    shape = (TINY.layers, 3, 2)
    errors = {each: rng.random(shape, np.float32) for each in (Candidate("channel", 16), CHOSEN)}
    return ContextCalibration(chosen=CHOSEN, errors=errors, sensitivity=rng.random(shape[::2], np.float32))


def test_it_comes_back(plain, tmp_path):
    known = calibration()
    found = read_contexts(rewritten(plain, tmp_path / "m", contexts_parts(known, {"tokens": 7})))
    assert found is not None
    assert found.chosen == known.chosen
    assert found.errors.keys() == known.errors.keys()
    for each, errors in known.errors.items():
        np.testing.assert_array_equal(found.errors[each], errors)
    np.testing.assert_array_equal(found.sensitivity, known.sensitivity)
    with Bundle.open(plain) as bundle:
        assert read_contexts(bundle) is None


@pytest.mark.parametrize(
    ("facts", "arrays", "message"),
    [
        ({"chosen": ["channel", 64]}, {}, "not one of different candidates"),
        ({"chosen": ["zip", 16]}, {}, "no codec 'zip'"),
        ({"chosen": ["kivi", 0]}, {}, "is no codec with a length of chunks"),
        ({"chosen": 3}, {}, "malformed"),
        ({"candidates": [["kivi", 32]]}, {}, "errors must be float32"),
        ({}, {"sensitivity": np.full((TINY.layers, 2), np.nan, np.float32)}, "sensitivity are not all in"),
        ({}, {"errors": -np.ones((2, TINY.layers, 3, 2), np.float32)}, "errors are not all in"),
        ({}, {"more": np.ones(1, np.float32)}, "it holds errors, more"),
    ],
)
def test_forged_parts_are_refused(plain, tmp_path, facts, arrays, message):
    part = contexts_parts(calibration())["contexts"]
    forged = Part({**part.facts, **facts}, {**part.arrays, **arrays})
    with pytest.raises(BundleError, match=message):
        read_contexts(rewritten(plain, tmp_path / "m", {"contexts": forged}))
