"""The choice of the prompts that are read in integers: by options, bundles and level, and without
an adapter."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.bundle import Bundle
from jaxllm.bundle.calibrations import prefill_parts
from jaxllm.bundle.levels import elastic_parts
from jaxllm.checkpoints.peft import write_adapter
from jaxllm.elastic.ladder import Ladder, sub_config, sub_model
from jaxllm.errors import ConfigError
from jaxllm.int8_prefill.reference import forward_by_rule, integer_rule
from jaxllm.models.decoder import logits
from jaxllm.models.lora import LoraConfig
from jaxllm.serving.buckets.model import PrefillBucket
from jaxllm.serving.ground.int8_prefill_options import PrefillOptions
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.int8_prefill.buckets import IntegerChunkBucket
from jaxllm.serving.int8_prefill.modes import chosen_prefill
from jaxllm.serving.runners.runner import prefill_prompt
from tests.int8_prefill.calibrated import calibrated, outlying, stored
from tests.models.test_lora import random_adapter
from tests.tiny import TINY, write_tiny_bundle


def chosen(path, *, levels=(100,), streamed=False, **how):
    options = EngineOptions(prefill=PrefillOptions(**how))
    with Bundle.open(path) as bundle:
        return chosen_prefill(bundle, options, levels, streamed=streamed)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_tiny_bundle(tmp_path_factory.mktemp("plain") / "plain.jaxllm", "int8")


def test_what_is_asked_for(calibrated_bundle, plain, caplog):
    for how in ({"mode": "int8"}, {"mode": "auto"}, {"processors": 2}):
        assert chosen(calibrated_bundle, **how).integer_levels == {100}
    with pytest.raises(ConfigError, match="two processors prefill in integers"):
        PrefillOptions(mode="float", processors=2)
    # What was left to the bundle is said.
    assert chosen(plain, mode="auto") is None
    assert "prefilled in floats: " in caplog.text
    assert "was not calibrated" in caplog.text
    caplog.clear()
    assert chosen(calibrated_bundle, mode="auto", most_loss=0.001) is None
    assert "more than 0.10%" in caplog.text


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


# Levels of an elastic bundle read prompts in integers, too: with steps of their own, in shared graphs.


LADDER = Ladder(levels=(50, 100), anchors=())
PROMPT = np.random.default_rng(3).integers(0, TINY.vocab_size, 32).tolist()


@pytest.fixture(scope="module")
def known():
    """A calibration with other steps at each level."""
    whole = calibrated()
    steps = np.stack([1.25 * whole.steps[0], whole.steps[0]]).astype(np.float32)
    return dataclasses.replace(whole, levels=(50, 100), steps=steps, losses={50: (0, 0), 100: (0, 0)})


@pytest.fixture(scope="module")
def engine(known, tmp_path_factory):
    return opened(tmp_path_factory.mktemp("levels") / "e.jaxllm", known)


def opened(path, calibration, **more):
    parts = elastic_parts(LADDER) | prefill_parts(calibration)
    write_tiny_bundle(path, "int8", params=outlying(), parts=parts)
    options = EngineOptions(
        chunk_tokens=(32,), cache_dtype="float32", levels=(50,), buckets_bytes=0,
        prefill=PrefillOptions(mode="int8"),
    )  # fmt: skip
    return Engine.open(path, options=options, warm_up=False, **more)


@pytest.mark.slow
@pytest.mark.parametrize("level", [50, 100])
def test_each_level_is_read_as_calibrated(engine, known, level):
    runner = engine.runner_at(level)
    runner.fill(runner.buckets_for(32, 1))
    found, _ = prefill_prompt(runner, runner.start(32), PROMPT, 0)
    cfg = sub_config(TINY, LADDER, level)
    layers, params = known.layers(level, cfg), sub_model(stored(), cfg)

    @jax.jit
    def reference(params, layers, tokens):
        hidden = forward_by_rule(params, tokens, integer_rule(params, layers, cfg), cfg=cfg)
        return logits(params, hidden[-1], cfg=cfg)

    wanted = np.asarray(reference(params, layers, np.array(PROMPT, np.int32)))
    np.testing.assert_allclose(np.asarray(found)[0], wanted, atol=2e-2 * np.abs(wanted).max())
    assert engine.runner_at(50).int8.shared is engine.runner.int8.shared


def test_a_lossy_level_is_read_in_floats_beside_the_others(known, tmp_path, caplog):
    """Its buckets are there, too; and who asks for that level and integers by name is refused."""
    lossy = dataclasses.replace(known, losses={50: (0.001, 0.02), 100: (0.001, 0.001)})
    engine = opened(tmp_path / "e.jaxllm", lossy)
    assert (engine.prefill_mode(32, 50), engine.prefill_mode(32, 100)) == ("float", "int8")
    assert "prompts of level 50 (2.00%) are prefilled in floats" in caplog.text
    integers, floats = IntegerChunkBucket, PrefillBucket
    for level, own, other in ((50, floats, integers), (100, integers, floats)):
        families = {type(each) for each in engine.runner_at(level).buckets_for()}
        assert own in families
        assert other not in families
    with pytest.raises(ConfigError, match=r"lose 2\.00% of level 50's perplexity"):
        opened(tmp_path / "other.jaxllm", lossy, level=50)


# An adapter is not what a bundle's loss was measured with: it is refused, or prompts are read in floats.


LORA = LoraConfig(rank=2, targets=("attn.q",))
ADAPTABLE = EngineOptions(
    chunk_tokens=(16,), cache_tokens=(64,), context_tokens=64, buckets_bytes=0, adapter_rank=2,
    adapter_targets=LORA.targets,
)  # fmt: skip


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter") / "a"
    write_adapter(folder, TINY, LORA, random_adapter(TINY, LORA))
    return folder


def adaptable(bundle, adapter=None, **how) -> Engine:
    options = dataclasses.replace(ADAPTABLE, prefill=PrefillOptions(**how))
    return Engine.open(bundle, options=options, adapter=adapter, warm_up=False)


def test_it_is_refused_where_integers_were_asked_for(calibrated_bundle, adapter):
    engine = adaptable(calibrated_bundle, mode="int8")
    with pytest.raises(ConfigError, match=r"measured without an adapter.*--prefill float"):
        engine.set_adapter(adapter)
    assert not engine.model.adapter_digest
    assert engine.prefill_mode(20) == "int8"
    with pytest.raises(ConfigError, match="measured without an adapter"):
        adaptable(calibrated_bundle, adapter, mode="int8")
    # Any loss may be allowed.
    engine = adaptable(calibrated_bundle, adapter, mode="int8", most_loss=float("inf"))
    assert engine.model.adapter_digest
    assert engine.prefill_mode(20) == "int8"


def test_prompts_are_read_in_floats_while_there_is_one(calibrated_bundle, adapter, caplog):
    """As long as it is on the model, whatever the profile says; the buckets for it are there."""
    engine = adaptable(calibrated_bundle, mode="auto")
    engine.model.runners.modes.choose_by(lambda level, tokens: True)
    assert engine.prefill_mode(20) == "int8"
    engine.set_adapter(adapter)
    assert engine.prefill_mode(20) == "float"
    assert caplog.text.count("while the model has an adapter") == 1
    assert {PrefillBucket, IntegerChunkBucket} <= {type(each) for each in engine.runner.buckets_for()}
    engine.set_adapter(None)
    assert engine.prefill_mode(20) == "int8"
