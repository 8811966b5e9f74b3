"""Tests the models of benchmarks: folders, bundles written back as folders, and random shapes."""

import numpy as np
import pytest

from benchmarks.models.checkpoint import Checkpoint
from benchmarks.models.shapes import SHAPES, shape_folder, write_random
from jaxllm.bundle import Bundle
from jaxllm.checkpoints.huggingface import read_config, read_params
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.parameters import parameter_count
from jaxllm.prepare import prepare
from tests.tiny import TINY, tiny_params, write_tiny_bundle, write_tiny_folder


def nothing(*_):
    pass


def test_a_folder_is_its_own_checkpoint_at_any_width(tmp_path):
    folder = write_tiny_folder(tmp_path / "tiny")
    found = Checkpoint.find(folder)
    assert (found.name, found.stored, found.cfg) == ("tiny", None, TINY)
    assert found.folder(nothing) == folder
    assert found.widths(()) == ("f32",)
    assert found.widths(("int8", "int4", "int8")) == ("int8", "int4")


def test_a_float_bundle_comes_back_exactly(tmp_path):
    found = Checkpoint.find(write_tiny_bundle(tmp_path / "tiny.jaxllm", "f32"))
    folder = found.folder(nothing)
    assert read_config(folder) == TINY
    for name, value in read_params(folder, TINY):
        np.testing.assert_array_equal(value, tiny_params()[name])
    prepare(folder, tmp_path / "again.jaxllm")  # the tokenizer came along


def test_a_narrow_bundle_comes_back_as_what_it_stands_for(tmp_path):
    path = write_tiny_bundle(tmp_path / "tiny.jaxllm", "int8")
    found = Checkpoint.find(path)
    folder = found.folder(nothing)
    assert found.folder(nothing) == folder  # made once
    off = [np.abs(value - tiny_params()[name]).max() for name, value in read_params(folder, TINY)]
    assert 0 < max(off) < 0.02
    assert found.widths(()) == found.widths(("int8",)) == ("int8",)
    with pytest.raises(CheckpointError, match="holds int8 weights, not int4"):
        found.widths(("int4",))


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        Checkpoint.find(tmp_path / "nowhere")


@pytest.mark.parametrize(("name", "millions"), [("15m", 15.2), ("110m", 110), ("250m", 258), ("1b", 1100)])
def test_shapes_have_the_size_of_their_names(name, millions):
    assert parameter_count(SHAPES[name].cfg) / 1e6 == pytest.approx(millions, rel=0.02)


def test_random_weights_are_the_same_each_time_and_make_a_model(tmp_path):
    for name in ("one", "two"):
        write_random(tmp_path / name, TINY, nothing)
    pairs = zip(read_params(tmp_path / "one", TINY), read_params(tmp_path / "two", TINY), strict=True)
    for (name, one), (_, two) in pairs:
        np.testing.assert_array_equal(one, two)
        assert one.dtype.name == "bfloat16"
        assert name.endswith("scale") or 0 < np.abs(one.astype(np.float32)).mean() < 1
    prepare(tmp_path / "one", tmp_path / "one.jaxllm", weights="int8")
    with Bundle.open(tmp_path / "one.jaxllm") as bundle:
        assert bundle.cfg == TINY


def test_an_unknown_shape_names_those_there_are():
    with pytest.raises(ConfigError, match=r"15m, 110m, 250m, 0\.5b, 1b"):
        shape_folder("7t", nothing)
