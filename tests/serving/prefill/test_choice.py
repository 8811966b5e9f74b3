"""When prompts are read in integers, and what is said where they cannot be."""

import dataclasses

import pytest

from jaxllm.bundle import Bundle
from jaxllm.bundle.prefill import prefill_parts
from jaxllm.errors import ConfigError
from serving.options import EngineOptions
from serving.prefill.choice import chosen_calibration
from serving.prefill.options import PrefillOptions
from tests.prefill.calibrated import calibrated, outlying
from tests.tiny import TINY, write_tiny_bundle


def chosen(path, *, levels=(100,), streamed=False, **how):
    options = EngineOptions(prefill=PrefillOptions(**how))
    with Bundle.open(path) as bundle:
        return chosen_calibration(bundle, options, levels, streamed=streamed)


def test_what_is_asked_for(calibrated_bundle):
    assert chosen(calibrated_bundle, mode="float") is None
    assert chosen(calibrated_bundle, mode="int8") is not None


def test_what_is_chosen(calibrated_bundle, tmp_path):
    """Integers where another processor can do them, the bundle was calibrated, and little is lost."""
    assert chosen(calibrated_bundle) is None
    assert chosen(calibrated_bundle, processors=2) is not None
    assert chosen(calibrated_bundle, processors=2, most_loss=0.0001) is None
    assert chosen(calibrated_bundle, processors=2, streamed=True) is None
    assert chosen(write_tiny_bundle(tmp_path / "a.jaxllm", "int8"), processors=2) is None


def test_what_cannot_be(calibrated_bundle, tmp_path):
    plain = write_tiny_bundle(tmp_path / "plain.jaxllm", "int8")
    with pytest.raises(ConfigError, match=r"was not calibrated.*--prefill"):
        chosen(plain, mode="int8")
    with pytest.raises(ConfigError, match="more --memory"):
        chosen(calibrated_bundle, mode="int8", streamed=True)
    with pytest.raises(ConfigError, match=r"lose 0\.20% of level 100's perplexity, more than 0\.10%"):
        chosen(calibrated_bundle, mode="int8", most_loss=0.001)
    with pytest.raises(ConfigError, match="of level 50's perplexity"):
        chosen(calibrated_bundle, mode="int8", levels=(50, 100))
    floats = write_tiny_bundle(tmp_path / "f32.jaxllm", params=outlying(), parts=prefill_parts(calibrated()))
    with pytest.raises(ConfigError, match="has f32"):
        chosen(floats, mode="int8")
    cfg = dataclasses.replace(TINY, experts=2, experts_per_token=1)
    mixture = write_tiny_bundle(tmp_path / "moe.jaxllm", "int8", cfg=cfg)
    with pytest.raises(ConfigError, match="mixture of experts has no integer prefill"):
        chosen(mixture, mode="int8")
