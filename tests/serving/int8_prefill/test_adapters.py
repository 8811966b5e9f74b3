"""An adapter is not what a bundle's loss was measured with: it is refused under integer prefill, or prompts
are read in floats, and that is said."""

import dataclasses

import pytest

from jaxllm import Engine
from jaxllm.checkpoints.peft import write_adapter
from jaxllm.errors import ConfigError
from jaxllm.models.lora import LoraConfig
from jaxllm.serving.buckets.prefill import PrefillBucket
from jaxllm.serving.ground.int8_prefill_options import PrefillOptions
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.int8_prefill.chunk_bucket import IntegerChunkBucket
from tests.models.test_lora import random_adapter
from tests.tiny import TINY

LORA = LoraConfig(rank=2, targets=("attn.q",))
OPTIONS = EngineOptions(
    chunk_tokens=(16,),
    cache_tokens=(64,),
    context_tokens=64,
    buckets_bytes=0,
    adapter_rank=2,
    adapter_targets=("attn.q",),
)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter") / "a"
    write_adapter(folder, TINY, LORA, random_adapter(TINY, LORA))
    return folder


def opened(bundle, adapter=None, **how) -> Engine:
    options = dataclasses.replace(OPTIONS, prefill=PrefillOptions(**how))
    return Engine.open(bundle, options=options, adapter=adapter, warm_up=False)


def test_it_is_refused_where_integers_were_asked_for(calibrated_bundle, adapter):
    engine = opened(calibrated_bundle, mode="int8")
    with pytest.raises(ConfigError, match=r"measured without an adapter.*--prefill float"):
        engine.set_adapter(adapter)
    assert not engine.model.adapter_digest
    assert engine.prefill_mode(20) == "int8"
    with pytest.raises(ConfigError, match="measured without an adapter"):
        opened(calibrated_bundle, adapter, mode="int8")


def test_prompts_are_read_in_floats_while_there_is_one(calibrated_bundle, adapter, caplog):
    """As long as it is on the model, whatever the profile says; the buckets for it are there."""
    engine = opened(calibrated_bundle, mode="auto")
    engine.model.runners.modes.choose_by(lambda level, tokens: True)
    assert engine.prefill_mode(20) == "int8"
    engine.set_adapter(adapter)
    assert engine.prefill_mode(20) == "float"
    assert caplog.text.count("while the model has an adapter") == 1
    assert {PrefillBucket, IntegerChunkBucket} <= {type(each) for each in engine.runner.all_buckets()}
    engine.set_adapter(None)
    assert engine.prefill_mode(20) == "int8"


def test_any_loss_may_be_allowed(calibrated_bundle, adapter):
    engine = opened(calibrated_bundle, adapter, mode="int8", most_loss=float("inf"))
    assert engine.model.adapter_digest
    assert engine.prefill_mode(20) == "int8"
