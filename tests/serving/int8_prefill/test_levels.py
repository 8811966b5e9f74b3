"""Levels of an elastic bundle read prompts in integers, too: with steps of their own, in shared graphs."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.bundle.calibrations import prefill_parts
from jaxllm.bundle.levels import elastic_parts
from jaxllm.elastic.ladder import Ladder, sub_config, sub_model
from jaxllm.errors import ConfigError
from jaxllm.int8_prefill.reference import forward_by_rule, integer_rule
from jaxllm.models.decoder import logits
from jaxllm.serving.buckets.prefill import PrefillBucket
from jaxllm.serving.ground.int8_prefill_options import PrefillOptions
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.int8_prefill.chunk_bucket import IntegerChunkBucket
from jaxllm.serving.runners.runner import prefill_prompt
from tests.int8_prefill.calibrated import calibrated, outlying, stored
from tests.tiny import TINY, write_tiny_bundle

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
    path = tmp_path_factory.mktemp("levels") / "e.jaxllm"
    write_tiny_bundle(path, "int8", params=outlying(), parts=elastic_parts(LADDER) | prefill_parts(known))
    options = EngineOptions(
        chunk_tokens=(32,),
        cache_dtype="float32",
        levels=(50,),
        buckets_bytes=0,
        prefill=PrefillOptions(mode="int8"),
    )
    return Engine.open(path, options=options, warm_up=False)


@pytest.mark.slow
@pytest.mark.parametrize("level", [50, 100])
def test_each_level_is_read_as_calibrated(engine, known, level):
    runner = engine.runner_at(level)
    runner.fill(runner.request_buckets(32, 1))
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
    path = write_tiny_bundle(
        tmp_path / "e.jaxllm", "int8", params=outlying(), parts=elastic_parts(LADDER) | prefill_parts(lossy)
    )
    options = EngineOptions(
        chunk_tokens=(32,), levels=(50,), buckets_bytes=0, prefill=PrefillOptions(mode="int8")
    )
    engine = Engine.open(path, options=options, warm_up=False)
    assert (engine.prefill_mode(32, 50), engine.prefill_mode(32, 100)) == ("float", "int8")
    assert "prompts of level 50 (2.00%) are prefilled in floats" in caplog.text
    integers, floats = IntegerChunkBucket, PrefillBucket
    for level, own, other in ((50, floats, integers), (100, integers, floats)):
        families = {type(each) for each in engine.runner_at(level).all_buckets()}
        assert own in families
        assert other not in families
    with pytest.raises(ConfigError, match=r"lose 2\.00% of level 50's perplexity"):
        Engine.open(path, options=options, level=50, warm_up=False)
