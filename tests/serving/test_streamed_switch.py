"""A Switch model whose experts are on storage answers as one in memory; an encoder's expert is loaded at most
once per prompt."""

import collections
import dataclasses

import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.bundle import Bundle, expert_widths, lay_experts_apart
from jaxllm.errors import ConfigError
from jaxllm.models.features import room_refusal
from jaxllm.models.parameters import sparse_layers
from jaxllm.serving.experts.store import ExpertStore
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from jaxllm.serving.opening.weight_source import budget_with_experts
from tests import tiny, tiny_encdec
from tests.serving.speculation.test_speculative import sharp
from tests.serving.test_streamed_encoder_decoders import TREES, config, source

OPTIONS = EngineOptions(chunk_tokens=(16,), decode_block=4, context_tokens=48)
_SPARSE = {
    "model_type": "switch_transformers", "layers": 4, "attention_windows": (0,) * 4, "experts": 8,
    "experts_per_token": 1, "normalize_expert_weights": False, "expert_capacity": 5,
    "expert_ffn_size": 48, "sparse_layers": (False, True) * 2,
}  # fmt: skip
_SIDE = dataclasses.replace(tiny_encdec.ENCODER, **_SPARSE)
SWITCH = dataclasses.replace(_SIDE, encoder=_SIDE, window_tokens=64)


@pytest.fixture(scope="module", params=["int8", pytest.param("f32", marks=pytest.mark.campaign)])
def together(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("switch") / "together.jaxllm"
    files = tiny_encdec.tokenizer()
    return tiny.write_tiny_bundle(path, request.param, cfg=SWITCH, params=sharp(SWITCH), tokenizer=files)


@pytest.fixture(scope="module")
def apart(together):
    path = together.with_name("apart.jaxllm")
    with Bundle.open(together) as bundle:
        lay_experts_apart(path, bundle, expert_widths(bundle))
    return path


@pytest.fixture(scope="module")
def whole(together):
    engine = Engine.open(together, options=OPTIONS)
    yield engine
    engine.close()


def opened(path, experts, **more):
    """With room for so many experts."""
    trees = more["speculation"].trees if "speculation" in more else None
    options = dataclasses.replace(OPTIONS, trees=trees)
    with Bundle.open(path) as bundle:
        quantized = bundle.layout.weights == "int8"
        resolved = options.resolve(bundle.cfg, quantized=quantized)
        room = experts * ExpertStore(bundle).largest_bytes
        memory = budget_with_experts(bundle, resolved, room)
    return Engine.open(path, options=dataclasses.replace(options, memory_bytes=memory), **more)


@pytest.mark.slow
def test_experts_on_storage_change_no_answer_and_are_loaded_once(apart, whole):
    streamed = opened(apart, 6)
    experts = streamed.model.streamed
    assert experts.store.of_encoder == 2
    before = dict(streamed.runner.buckets.bucket_ms)
    for place in range(30):
        expected = whole.generate(source(place), config(place)).tokens
        loads = collections.Counter(experts.counts.loads)
        assert streamed.generate(source(place), config(place)).tokens == expected, place
        loads = experts.counts.loads - loads
        assert max((count for key, count in loads.items() if key[0] < 2), default=0) <= 1
    assert streamed.runner.buckets.bucket_ms == before
    facts = experts.facts()
    assert [len(facts[name]) for name in ("layer_hit_rates", "encoder_layer_hit_rates")] == [2, 2]
    # The decoder's experts stay for the next token, those of the encoder for nobody.
    assert min(facts["layer_hit_rates"]) > max(facts["encoder_layer_hit_rates"])
    streamed.close()
    # Without a budget all of them are in memory.
    engine = Engine.open(apart, options=OPTIONS)
    assert engine.model.streamed is None
    for place in range(4):
        expected = whole.generate(source(place), config(place)).tokens
        assert engine.generate(source(place), config(place)).tokens == expected
    engine.close()


def test_an_encoders_experts_leave_first(apart):
    streamed = opened(apart, 12)
    cache = streamed.model.streamed.cache
    streamed.generate(source(0), config(1))
    kept = {key for key in cache._slots if key[0] >= 2}
    assert kept
    # A source takes the room of the one before it.
    streamed.runner.read_source(streamed.runner.start(8), source(0))
    assert kept <= cache._slots.keys() or len(kept) > 12 - 8
    streamed.close()


@pytest.mark.slow
def test_drafts_by_ngrams(apart, whole):
    how = SpeculationOptions(drafter="ngram", trees=TREES, pausing=False, fallback="fixed", alpha=1e-6)
    streamed = opened(apart, 6, speculation=how)
    for place in range(12):
        expected = whole.generate(source(place), config(place)).tokens
        assert streamed.generate(source(place), config(place)).tokens == expected, place
    streamed.close()


def test_both_sides_have_the_same_experts(tmp_path):
    assert sparse_layers(SWITCH) == ["encoder.layers.1.", "encoder.layers.3.", "layers.1.", "layers.3."]
    other = dataclasses.replace(SWITCH, encoder=dataclasses.replace(_SIDE, experts=4))
    assert "both sides have as many" in room_refusal(other, "experts apart")
    with pytest.raises(ConfigError, match="both sides have as many"):
        tiny.write_tiny_bundle(tmp_path / "odd.jaxllm", "int8", cfg=other, expert_bits=np.full((4, 8), 8))
