"""Encoder-decoders of which only a part is in memory answer as if all of it were, with drafts and without."""

import dataclasses

import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.errors import BudgetExceeded, CheckpointError
from jaxllm.kernels import native
from jaxllm.sampling import Sampling
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions, TreeShape
from jaxllm.serving.host import direct_io
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
