"""The calibration of contexts: errors against attention written out, and what a service makes of it."""

import numpy as np
import pytest

from jaxllm.bundle import Bundle
from jaxllm.bundle.calibrations import read_contexts
from jaxllm.contexts.codecs import CODECS
from jaxllm.contexts.tolerance import Candidate
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.server.service import engine_options
from jaxllm.training.calibration import BundleOutput, ContextRecipe
from jaxllm.training.contexts.contexts import calibrate_contexts
from tests import tiny_states
from tests.tiny import TINY, write_tiny_bundle

RECIPE = ContextRecipe(tokens=128, row_tokens=64, sensitivity_rows=1, chunk_tokens=(16, 32))


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrated")
    plain = write_tiny_bundle(folder / "plain.jaxllm", "int8")
    facts = calibrate_contexts(RECIPE, plain, BundleOutput(folder / "calibrated.jaxllm"))
    return plain, folder / "calibrated.jaxllm", facts


def test_fewer_bits_err_more_everywhere(calibrated):
    _, path, facts = calibrated
    with Bundle.open(path) as bundle:
        found = read_contexts(bundle)
    assert found is not None
    assert found.errors.keys() == {Candidate(codec, size) for codec in CODECS for size in (16, 32)}
    for errors in found.errors.values():
        assert errors.shape == (TINY.layers, 3, 2)
        assert np.all(np.diff(errors, axis=1) > 0)
        assert np.all((errors > 0) & (errors < 1))
    assert found.sensitivity.shape == (TINY.layers, 2)
    assert np.all(found.sensitivity > 0)
    # Scales of channels are shared by more tokens, those of tokens are not.
    assert np.all(found.errors[Candidate("channel", 32)] > found.errors[Candidate("channel", 16)])
    np.testing.assert_allclose(
        found.errors[Candidate("token", 32)], found.errors[Candidate("token", 16)], rtol=1e-3
    )
    assert (facts["codec"], facts["chunk_tokens"]) == (found.chosen.codec, found.chosen.chunk_tokens)


def test_services_take_the_choice(calibrated, tmp_path):
    plain, path, facts = calibrated
    contexts = ContextOptions(folder=tmp_path)
    chosen = engine_options(path, (), EngineOptions(), contexts)
    assert (chosen.kv_codec, chosen.kv_chunk_tokens) == (facts["codec"], facts["chunk_tokens"])
    asked = engine_options(path, (), EngineOptions(kv_codec="raw"), contexts)
    assert (asked.kv_codec, asked.kv_chunk_tokens) == ("raw", 16)
    assert engine_options(path, (), EngineOptions(), None).kv_codec == ""
    shared = engine_options(plain, (), EngineOptions(), contexts)
    # The window of the tiny model has room for few chunks.
    assert (shared.kv_codec, shared.kv_chunk_tokens) == ("channel", 16)


def test_bad_input_is_refused(calibrated, tmp_path):
    plain, out = calibrated[0], BundleOutput(tmp_path / "out.jaxllm")
    for sizes, match in (((16, 24), "must divide the longest"), ((256,), "at least two chunks, 512 tokens")):
        with pytest.raises(ConfigError, match=match):
            ContextRecipe(chunk_tokens=sizes, row_tokens=256)
    with pytest.raises(CheckpointError, match=r"config.json"):
        calibrate_contexts(RECIPE, tmp_path, out)
    text = tmp_path / "short.txt"
    text.write_text("Short.")
    with pytest.raises(ConfigError, match="are too few for contexts of"):
        calibrate_contexts(RECIPE, plain, out, texts=[text])
    # Models with states have one codec.
    path = tiny_states.write_bundle(tmp_path / "tiny.jaxllm", "short_conv")
    with pytest.raises(ConfigError, match="kept as they are"):
        calibrate_contexts(RECIPE, path, out)
