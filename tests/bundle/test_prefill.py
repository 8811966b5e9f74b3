"""The calibration of integer prefill in a bundle: kept whole, and refused where it is not."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

import jaxllm
from jaxllm.bundle import Bundle, Part
from jaxllm.bundle.calibrations import prefill_facts, prefill_parts, read_prefill
from jaxllm.bundle.levels import read_ladder
from jaxllm.errors import BundleError
from jaxllm.int8_prefill.recipe import MOST_LOSS
from tests.bundle.forging import rewritten
from tests.int8_prefill.calibrated import calibrated, outlying
from tests.tiny import write_tiny_bundle


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("prefill") / "plain.jaxllm"
    return write_tiny_bundle(path, "int8", params=outlying(), parts={"other": Part({"a": 1})})


def test_it_comes_back_and_weights_stay_byte_for_byte(plain, tmp_path):
    known = calibrated()
    bundle = rewritten(plain, tmp_path / "m", prefill_parts(known, {"tokens": 7}))
    bundle.verify()
    found = read_prefill(bundle)
    assert found is not None
    assert (found.levels, found.shadowed) == (known.levels, known.shadowed)
    assert found.losses == known.losses
    np.testing.assert_array_equal(found.steps, known.steps)
    for key, channels in known.channels.items():
        np.testing.assert_array_equal(found.channels[key], channels)
        for own, other in zip(found.rows[key], known.rows[key], strict=True):
            np.testing.assert_array_equal(own, other)
    assert prefill_facts(bundle)["tokens"] == 7
    assert bundle.layout.parts["other"].facts == {"a": 1}
    with Bundle.open(plain) as source:
        assert read_prefill(source) is None
        assert prefill_facts(source) == {}
        assert source.layout.tensors.keys() == bundle.layout.tensors.keys()
        for name in source.layout.tensors:
            for own, other in zip(leaves(bundle.stored(name)), leaves(source.stored(name)), strict=True):
                np.testing.assert_array_equal(own, other)
        assert source.tokenizer_files() == bundle.tokenizer_files()
        assert source.layout.weights == bundle.layout.weights


def leaves(value):
    return [value] if isinstance(value, np.ndarray) else [np.asarray(value.data), np.asarray(value.scale)]


def test_other_calibrations_come_back(plain, tmp_path):
    """One without a shadow, and one of older versions, which said how many rows should stay in memory; in a
    file that is rewritten in its place."""
    none = dataclasses.replace(calibrated(), shadowed=(False, False), channels={}, rows={})
    part = prefill_parts(calibrated())["prefill"]
    older = Part(part.facts, {**part.arrays, "hot": np.ones((2, 4), np.int32)})
    path = Path(shutil.copy(plain, tmp_path / "own"))
    for parts, known in ((prefill_parts(none), none), ({"prefill": older}, calibrated())):
        bundle = rewritten(path, path, parts)
        found = read_prefill(bundle)
        assert found is not None
        assert (found.shadowed, found.row_bytes) == (known.shadowed, known.row_bytes)
    raw = bytearray(path.read_bytes())
    raw[bundle.layout.segments["part.prefill"].offset + 5] ^= 1
    (tmp_path / "bad").write_bytes(raw)
    with pytest.raises(BundleError, match="is corrupt"):
        read_prefill(Bundle.open(tmp_path / "bad"))


@pytest.mark.parametrize("name", ["default", "draft", "medium", "small"])
def test_packaged_models_can_be_read_in_integers(name):
    """All of their levels lose less than an engine allows."""
    with Bundle.open(Path(jaxllm.__file__).parent / "assets" / f"{name}.jaxllm") as bundle:
        found, ladder = read_prefill(bundle), read_ladder(bundle)
    assert found is not None
    assert found.levels == ((100,) if ladder is None else ladder.levels)
    assert max(map(found.loss, found.levels)) <= MOST_LOSS


LAYER = calibrated().shadowed.index(True)
CHANNELS = calibrated().channels[LAYER, 0]
ROWS = calibrated().rows[LAYER, 0][0]


@pytest.mark.parametrize(
    ("facts", "arrays", "message"),
    [
        ({"levels": []}, {}, "levels are"),
        ({"levels": [50, 100]}, {}, "steps must be"),
        ({"levels": 5}, {}, "malformed"),
        ({"shadowed": [True]}, {}, "whether they have a shadow"),
        ({"losses": {"100": [0.1]}}, {}, "no pairs"),
        ({"losses": {"100": [float("nan"), 0]}}, {}, "no pairs"),
        ({}, {"steps": np.zeros((1, 2, 4), np.float32)}, "steps are not all in"),
        ({}, {"steps": np.ones((1, 2, 4), np.float16)}, "steps must be"),
        ({}, {f"channels.{LAYER}.0": CHANNELS + 64}, "not different ones of 64"),
        ({}, {f"channels.{LAYER}.0": CHANNELS.astype(np.float32)}, "channels of layer"),
        ({}, {f"rows.{LAYER}.0.0": ROWS[:, :-1]}, "must be float16"),
        ({}, {f"rows.{LAYER}.0.0": ROWS * np.float16(np.nan)}, "NaN or infinity"),
        ({}, {f"rows.{LAYER}.0.9": ROWS}, "which nothing takes"),
    ],
)
def test_forged_parts_are_refused(plain, tmp_path, facts, arrays, message):
    part = prefill_parts(calibrated())["prefill"]
    forged = Part({**part.facts, **facts}, {**part.arrays, **arrays})
    with pytest.raises(BundleError, match=message):
        read_prefill(rewritten(plain, tmp_path / "m", {"prefill": forged}))
