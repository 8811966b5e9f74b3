"""Experts with biases and a clamped gate (gpt-oss), of which only some are in memory, answer as if all
were."""

import dataclasses

import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.bundle import Bundle
from jaxllm.prepare import prepare
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.runners.layerwise import LayerwiseRunner
from tests.checkpoints.test_mxfp4 import GPT_OSS, write_mxfp4
from tests.serving.experts.conftest import OPTIONS, budget
from tests.tiny import random_params, write_tiny_bundle

CONFIG = GenerationConfig(max_tokens=12, ignore_eos=True)
PROMPT = "the hello there, hello the"
MIXED = np.asarray([[8, 4, 8, 2], [4, 8, 2, 8]])


def answer(engine):
    engine.runner.fill(engine.runner.request_buckets(len(engine.tokenizer.encode(PROMPT)), CONFIG.max_tokens))
    return engine.stream(PROMPT, CONFIG).result().tokens


def answers(path):
    """Those with all experts in memory, and with two of eight; and the second engine's counts."""
    whole = Engine.open(path, options=OPTIONS, warm_up=False)
    some = dataclasses.replace(OPTIONS, memory_bytes=budget(whole, 2))
    streamed = Engine.open(path, options=some, warm_up=False)
    assert isinstance(streamed.runner, LayerwiseRunner)
    assert not isinstance(whole.runner, LayerwiseRunner)
    found = answer(whole), answer(streamed), streamed.model.streamed.counts
    streamed.close()
    return found


def test_biases_stay_in_memory(tmp_path):
    path = tmp_path / "m.jaxllm"
    write_tiny_bundle(path, cfg=GPT_OSS, params=random_params(GPT_OSS), expert_bits=MIXED)
    whole, streamed, counts = answers(path)
    assert streamed == whole
    assert len(set(whole)) > 1
    assert 0 < counts.hits < counts.visits


@pytest.mark.slow
def test_mxfp4_is_laid_apart_bit_for_bit(tmp_path):
    write_mxfp4(tmp_path / "q")
    prepare(tmp_path / "q", tmp_path / "m.jaxllm")
    prepare(tmp_path / "m.jaxllm", tmp_path / "apart.jaxllm", expert_bits=8)
    with Bundle.open(tmp_path / "m.jaxllm") as together, Bundle.open(tmp_path / "apart.jaxllm") as apart:
        own, stack = apart.stored("layers.1.experts.2.down"), together.stored("layers.1.experts.down")
        assert (own.group, own.bits) == (32, 8) == (stack.group, stack.bits)
    whole, streamed, _ = answers(tmp_path / "apart.jaxllm")
    assert streamed == whole
    assert whole == answer(Engine.open(tmp_path / "m.jaxllm", options=OPTIONS, warm_up=False))
