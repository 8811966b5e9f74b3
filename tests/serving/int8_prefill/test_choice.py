"""Tests when prompts are prefilled in integers, and the messages where they cannot be."""

import dataclasses

import pytest

from jaxllm.bundle import Bundle
from jaxllm.bundle.calibrations import prefill_parts
from jaxllm.errors import ConfigError
from jaxllm.serving.ground.int8_prefill_options import PrefillOptions
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.int8_prefill.choice import chosen_prefill
from tests.int8_prefill.calibrated import calibrated, outlying
from tests.tiny import TINY, write_tiny_bundle


def chosen(path, *, levels=(100,), streamed=False, **how):
    options = EngineOptions(prefill=PrefillOptions(**how))
    with Bundle.open(path) as bundle:
        return chosen_prefill(bundle, options, levels, streamed=streamed)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_tiny_bundle(tmp_path_factory.mktemp("plain") / "plain.jaxllm", "int8")


def test_what_is_asked_for(calibrated_bundle):
    assert chosen(calibrated_bundle, mode="float") is None
    assert chosen(calibrated_bundle) is None
    for how in ({"mode": "int8"}, {"mode": "auto"}, {"processors": 2}):
        assert chosen(calibrated_bundle, **how).integer_levels == {100}


@pytest.mark.parametrize("how", [{"mode": "int8"}, {"processors": 2}, {"mode": "auto", "processors": 2}])
def test_what_cannot_be_is_refused_by_name(calibrated_bundle, plain, tmp_path, how):
    """Two processors take integers, too: floats without a word would leave one of them out."""
    with pytest.raises(ConfigError, match=r"was not calibrated.*`jaxllm calibrate prefill .*plain.jaxllm "):
        chosen(plain, **how)
    with pytest.raises(ConfigError, match="more --memory"):
        chosen(calibrated_bundle, streamed=True, **how)
    with pytest.raises(ConfigError, match=r"lose 0\.20% of level 100's perplexity, more than 0\.10%"):
        chosen(calibrated_bundle, most_loss=0.001, **how)
    floats = write_tiny_bundle(tmp_path / "f32.jaxllm", params=outlying(), parts=prefill_parts(calibrated()))
    with pytest.raises(ConfigError, match="has f32"):
        chosen(floats, **how)
    cfg = dataclasses.replace(TINY, experts=2, experts_per_token=1)
    mixture = write_tiny_bundle(tmp_path / "moe.jaxllm", "int8", cfg=cfg)
    with pytest.raises(ConfigError, match="mixture of experts has no integer prefill"):
        chosen(mixture, **how)


def test_what_was_left_to_the_bundle_is_said(calibrated_bundle, plain, caplog):
    assert chosen(plain, mode="auto") is None
    assert "prefilled in floats: " in caplog.text
    assert "was not calibrated" in caplog.text
    caplog.clear()
    assert chosen(calibrated_bundle, mode="auto", most_loss=0.001) is None
    assert "more than 0.10%" in caplog.text


def test_a_lossy_level_is_refused_by_itself(calibrated_bundle, caplog):
    """Level 50 was never measured."""
    found = chosen(calibrated_bundle, mode="int8", levels=(50, 100))
    assert found.integer_levels == {100}
    assert "prompts of level 50 (inf%) are prefilled in floats" in caplog.text
    assert (found.of(50, 9), found.of(100, 9)) == ("float", "int8")
    with pytest.raises(ConfigError, match="of level 50's perplexity"):
        found.require(50)
    with pytest.raises(ConfigError, match="of level 50's perplexity"):
        chosen(calibrated_bundle, mode="int8", levels=(50,))
    # Any loss may be allowed, but there are no steps.
    assert chosen(
        calibrated_bundle, mode="int8", levels=(50, 100), most_loss=float("inf")
    ).integer_levels == {100}


def test_options_that_contradict_each_other():
    with pytest.raises(ConfigError, match="two processors prefill in integers"):
        PrefillOptions(mode="float", processors=2)
