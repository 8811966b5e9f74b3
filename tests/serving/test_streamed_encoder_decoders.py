"""Encoder-decoders of which only a part is in memory answer as if all of it were, with drafts and without."""

import collections
import dataclasses

import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.bundle import Bundle, expert_widths, lay_experts_apart
from jaxllm.errors import BudgetExceeded, CheckpointError, ConfigError
from jaxllm.kernels import native
from jaxllm.models.features import room_refusal
from jaxllm.models.parameters import sparse_layers
from jaxllm.sampling import Sampling
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.experts.store import ExpertStore
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions, TreeShape
from jaxllm.serving.host import direct_io
from jaxllm.serving.opening.weight_source import budget_with_experts
from jaxllm.serving.weights import pieces
from tests import tiny, tiny_encdec
from tests.kernels.switching import fall_back
from tests.serving.memory import budget
from tests.serving.speculation.test_speculative import sharp

OPTIONS = EngineOptions(chunk_tokens=(16,), decode_block=4, context_tokens=48)
TREES = TreeShape(nodes=(4, 8), room=8, tips=2, branches=3)
TOKENS = 8
_LAYERS = {"layers": 4, "attention_windows": (0,) * 4}
T5 = dataclasses.replace(
    tiny_encdec.TINY_T5, **_LAYERS, encoder=dataclasses.replace(tiny_encdec.ENCODER, **_LAYERS)
)
_BART = {
    "relative_buckets": 0, "relative_distance": 0, "learned_positions": True, "embed_norm": True,
    "norm": "layer", "norm_after": True, "final_norm": False, "qkv_bias": True, "o_bias": True,
    "ffn_bias": True, "activation": "gelu", "model_type": "bart", "window_tokens": 64,
    "attention_scale": 0.25,
}  # fmt: skip
_SIDE = dataclasses.replace(tiny_encdec.ENCODER, **_LAYERS, **_BART)
BART = dataclasses.replace(_SIDE, encoder=_SIDE, head_bias=True)
MARIAN = dataclasses.replace(
    BART,
    learned_positions=False, sinusoidal_positions=True, embed_norm=False, model_type="marian",
    encoder=dataclasses.replace(_SIDE, learned_positions=False, sinusoidal_positions=True, embed_norm=False),
)  # fmt: skip
needs_native = pytest.mark.skipif(not native.kernels().native, reason="planes are read by native kernels")


def written(folder, weights, cfg):
    params = sharp(cfg)
    if cfg.head_bias:
        params["head_bias"] = np.linspace(-2, 2, cfg.vocab_size).astype(np.float32)
    files = tiny_encdec.tokenizer()
    path = folder / f"{weights}.jaxllm"
    return tiny.write_tiny_bundle(path, weights, cfg=cfg, params=params, tokenizer=files)


def source(place):
    draw = np.random.default_rng(place)
    return draw.integers(3, 90, draw.integers(3, 41)).tolist()


def config(place):
    """Every fourth answer is drawn."""
    drawn = Sampling(temperature=0.9, top_p=0.95, seed=place, repetition_penalty=1.1)
    sampling = Sampling(temperature=0) if place % 4 else drawn
    return GenerationConfig(max_tokens=TOKENS, ignore_eos=True, sampling=sampling)


def opened(path, whole, share=0.6, **more):
    memory = {"memory_bytes": budget(whole, share, more.get("speculation"))}
    return Engine.open(path, options=dataclasses.replace(OPTIONS, **memory), **more)


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    return written(tmp_path_factory.mktemp("t5"), "int8-nested" if native.kernels().native else "int8", T5)


@pytest.fixture(scope="module")
def whole(t5):
    engine = Engine.open(t5, options=OPTIONS)
    yield engine
    engine.close()


@pytest.mark.slow
def test_two_hundred_sources_are_answered_as_in_memory(t5, whole):
    streamed = opened(t5, whole, warm_up=True)
    stream = streamed.model.streamed
    assert stream.plan.slots == 2
    # What each token needs is kept before what each prompt needs once.
    assert stream.plan.resident
    assert min(stream.plan.resident) >= T5.encoder.layers
    assert stream.plan.planned_bytes <= stream.plan.budget_bytes
    before = dict(streamed.runner.buckets.bucket_ms)
    for place in range(200):
        expected = whole.generate(source(place), config(place)).tokens
        assert streamed.generate(source(place), config(place)).tokens == expected, place
    assert streamed.runner.buckets.bucket_ms == before
    streamed.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cfg", "weights"),
    [
        (T5, "f32"),
        (BART, "int8"),
        *(
            pytest.param(*each, marks=pytest.mark.campaign)
            for each in ((MARIAN, "int8"), (T5, "int4"), (BART, "bf16"))
        ),
    ],
)
def test_every_family_streams(tmp_path, cfg, weights):
    path = written(tmp_path, weights, cfg)
    whole = Engine.open(path, options=OPTIONS, warm_up=False)
    streamed = opened(path, whole, warm_up=False)
    assert streamed.model.streamed.plan.slots == 2
    for engine in (whole, streamed):
        engine.runner.fill(engine.runner.buckets_for(40, TOKENS))
    # Sources of one length of buckets.
    for place in (each for each in range(30) if len(source(each)) > 32):
        assert streamed.generate(source(place), config(place)).tokens == (
            whole.generate(source(place), config(place)).tokens
        )
    whole.close()
    streamed.close()


@pytest.mark.slow
def test_without_native_kernels_it_is_the_same(tmp_path, monkeypatch):
    fall_back(monkeypatch)
    test_every_family_streams(tmp_path, T5, "int8")


def test_the_encoder_is_read_once_per_source(t5, whole, monkeypatch):
    # Layers so small would be read whole: a seek takes longer.
    monkeypatch.setattr(pieces, "_SHORT_GAP_BYTES", 0)
    streamed = opened(t5, whole, 0.4)
    layout = streamed.model.bundle.layout
    encoder = [layout.segments[f"encoder.layers.{each}"] for each in range(T5.encoder.layers)]
    crossing = [
        extent
        for name, each in layout.tensors.items()
        if ".cross.k" in name or ".cross.v" in name
        for extent in each.extents
    ]
    counted = []
    read_into = direct_io.PieceReader.read_into

    def counting(self, memory, place, offset, size):
        counted.append((offset, offset + size))
        read_into(self, memory, place, offset, size)

    def reads(begin, end):
        return sum(max(0, min(end, last) - max(begin, first)) for first, last in counted) / (end - begin)

    streamed.generate(source(0), config(1))
    monkeypatch.setattr(direct_io.PieceReader, "read_into", counting)
    answers = [streamed.generate(source(place), config(1)).tokens for place in range(3)]
    assert all(len(each) == TOKENS for each in answers)
    for each in encoder:
        assert reads(each.offset, each.offset + each.size_bytes) == pytest.approx(3), each.name
    # Of layers that are not resident each once, and for no token again.
    assert {round(reads(each.offset, each.offset + each.size_bytes), 2) for each in crossing} <= {0, 3}
    streamed.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter",
    [
        *(pytest.param(each, marks=pytest.mark.campaign) for each in ("ngram", "model")),
        pytest.param("nested", marks=needs_native),
    ],
)
def test_drafts_change_no_answer(t5, whole, tmp_path, drafter):
    small = dataclasses.replace(tiny_encdec.ENCODER, layers=1, attention_windows=(0,))
    draft = dataclasses.replace(small, encoder=small, window_tokens=64)
    model = written(tmp_path, "int8", draft) if drafter == "model" else None
    how = SpeculationOptions(
        drafter=drafter, model=model, trees=TREES, pausing=False, fallback="fixed", alpha=1e-6
    )
    # The high planes and the head stay in memory.
    streamed = opened(t5, whole, 0.85 if drafter == "nested" else 0.6, speculation=how)
    assert streamed.model.streamed.plan.slots >= 2
    before = dict(streamed.runner.buckets.bucket_ms)
    for place in range(20):
        expected = whole.generate(source(place), config(place)).tokens
        assert streamed.generate(source(place), config(place)).tokens == expected, place
    assert streamed.runner.buckets.bucket_ms == before
    counts = streamed.speculation.counts
    assert counts.verifications
    # High planes know the source, and so what the target says of it.
    assert drafter != "nested" or counts.acceptance_length > 1.25
    # Answers to two sources that take turns.
    expected = [whole.generate(source(each), config(each)).tokens for each in (1, 2)]
    first, second = streamed.stream(source(1), config(1)), streamed.stream(source(2), config(2))
    for _ in zip(first, second, strict=False):
        pass
    assert [first.result().tokens, second.result().tokens] == expected
    streamed.close()


def test_a_source_whose_reading_fails_leaves_nothing_behind(t5, whole, monkeypatch):
    streamed = opened(t5, whole)
    expected = whole.generate(source(1), config(1)).tokens
    read_into, calls = direct_io.PieceReader.read_into, []

    def failing(self, *rest):
        calls.append(rest)
        if len(calls) == 3:
            raise CheckpointError("the disk is gone")
        read_into(self, *rest)

    monkeypatch.setattr(direct_io.PieceReader, "read_into", failing)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        streamed.generate(source(1), config(1))
    assert streamed.generate(source(1), config(1)).tokens == expected
    streamed.close()
    with pytest.raises(BudgetExceeded, match="this model needs at least"):
        opened(t5, whole, 0.05)


# A Switch model whose experts are on storage: an encoder's expert is loaded at most once per prompt.


_SPARSE = {
    "model_type": "switch_transformers", "layers": 4, "attention_windows": (0,) * 4, "experts": 8,
    "experts_per_token": 1, "normalize_expert_weights": False, "expert_capacity": 5,
    "expert_ffn_size": 48, "sparse_layers": (False, True) * 2,
}  # fmt: skip
_SWITCH = dataclasses.replace(tiny_encdec.ENCODER, **_SPARSE)
SWITCH = dataclasses.replace(_SWITCH, encoder=_SWITCH, window_tokens=64)


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
def switch(together):
    engine = Engine.open(together, options=OPTIONS)
    yield engine
    engine.close()


def opened_apart(path, experts, **more):
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
def test_experts_on_storage_change_no_answer_and_are_loaded_once(apart, switch):
    streamed = opened_apart(apart, 6)
    experts = streamed.model.streamed
    assert experts.store.of_encoder == 2
    before = dict(streamed.runner.buckets.bucket_ms)
    for place in range(30):
        expected = switch.generate(source(place), config(place)).tokens
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
        expected = switch.generate(source(place), config(place)).tokens
        assert engine.generate(source(place), config(place)).tokens == expected
    engine.close()


def test_an_encoders_experts_leave_first(apart):
    streamed = opened_apart(apart, 12)
    cache = streamed.model.streamed.cache
    streamed.generate(source(0), config(1))
    kept = {key for key in cache._slots if key[0] >= 2}
    assert kept
    # A source takes the room of the one before it.
    streamed.runner.read_source(streamed.runner.start(8), source(0))
    assert kept <= cache._slots.keys() or len(kept) > 12 - 8
    streamed.close()


@pytest.mark.slow
def test_drafts_by_ngrams(apart, switch):
    how = SpeculationOptions(drafter="ngram", trees=TREES, pausing=False, fallback="fixed", alpha=1e-6)
    streamed = opened_apart(apart, 6, speculation=how)
    for place in range(12):
        expected = switch.generate(source(place), config(place)).tokens
        assert streamed.generate(source(place), config(place)).tokens == expected, place
    streamed.close()


def test_both_sides_have_the_same_experts(tmp_path):
    assert sparse_layers(SWITCH) == ["encoder.layers.1.", "encoder.layers.3.", "layers.1.", "layers.3."]
    other = dataclasses.replace(SWITCH, encoder=dataclasses.replace(_SWITCH, experts=4))
    assert "both sides have as many" in room_refusal(other, "experts apart")
    with pytest.raises(ConfigError, match="both sides have as many"):
        tiny.write_tiny_bundle(tmp_path / "odd.jaxllm", "int8", cfg=other, expert_bits=np.full((4, 8), 8))
