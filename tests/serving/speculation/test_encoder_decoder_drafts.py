"""Drafted answers of encoder-decoders are those without drafts; drafters read the source, too."""

import dataclasses

import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.errors import ConfigError
from jaxllm.kernels import native
from jaxllm.sampling import Sampling
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions, TreeShape
from jaxllm.serving.speculation.drafter import NgramDrafter
from jaxllm.speculation.token_tree import Growing
from tests import tiny, tiny_encdec
from tests.serving.speculation.test_speculative import sharp

OPTIONS = EngineOptions(chunk_tokens=(16,), decode_block=4, context_tokens=48)
TREES = TreeShape(nodes=(4, 8), room=8, tips=2, branches=3)
SMALL = dataclasses.replace(tiny_encdec.ENCODER, layers=1, attention_windows=(0,), window_tokens=24)
DRAFT = dataclasses.replace(SMALL, encoder=SMALL, window_tokens=64)
ANSWERS, TOKENS = 50, 12

needs_native = pytest.mark.skipif(not native.kernels().native, reason="planes are read by native kernels")


def written(path, weights, cfg):
    files = tiny_encdec.tokenizer()
    return tiny.write_tiny_bundle(path, weights, cfg=cfg, params=sharp(cfg), tokenizer=files, name=path.stem)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def target(folder):
    weights = "int8-nested" if native.kernels().native else "int8"
    return written(folder / "target.jaxllm", weights, tiny_encdec.TINY_T5)


@pytest.fixture(scope="module")
def draft(folder):
    return written(folder / "draft.jaxllm", "int8", DRAFT)


@pytest.fixture(scope="module")
def plain(target):
    with_engine = Engine.open(target, options=OPTIONS)
    yield with_engine
    with_engine.close()


def source(place):
    """Of up to 40 tokens, some more than the draft's encoder reads."""
    draw = np.random.default_rng(place)
    return draw.integers(3, 90, draw.integers(3, 41)).tolist()


def config(place):
    """Every other answer is drawn."""
    drawn = Sampling(temperature=0.9, top_p=0.95, seed=place, repetition_penalty=1.1)
    sampling = drawn if place % 2 else Sampling(temperature=0)
    return GenerationConfig(max_tokens=TOKENS, ignore_eos=True, sampling=sampling)


@pytest.fixture(scope="module")
def expected(plain):
    return [plain.generate(source(each), config(each)).tokens for each in range(ANSWERS)]


@pytest.mark.parametrize(
    "drafter",
    [
        pytest.param("ngram", marks=pytest.mark.campaign), "model", "itself",
        pytest.param("nested", marks=needs_native),
    ],
)  # fmt: skip
def test_drafts_change_no_answer(target, draft, expected, drafter):
    of_model = {"model": draft, "itself": target}.get(drafter)
    how = SpeculationOptions(
        drafter="model" if of_model else drafter, model=of_model, trees=TREES,
        pausing=False, fallback="fixed", alpha=1e-6,
    )  # fmt: skip
    engine = Engine.open(target, options=OPTIONS, speculation=how)
    assert engine.speculation is not None
    before = dict(engine.runner.buckets.bucket_ms)
    for each, tokens in enumerate(expected):
        assert engine.generate(source(each), config(each)).tokens == tokens, each
    assert engine.runner.buckets.bucket_ms == before
    counts = engine.speculation.counts
    assert counts.verifications
    # Of drawn answers few drafts are accepted; of greedy ones they are if the draft reads the same source.
    assert drafter != "itself" or counts.acceptance_length > 1.25
    # Answers to two sources that take turns keep their drafts apart.
    first, second = engine.stream(source(0), config(0)), engine.stream(source(2), config(2))
    for _ in zip(first, second, strict=False):
        pass
    assert [first.result().tokens, second.result().tokens] == [expected[0], expected[2]]
    engine.close()


def test_what_a_source_says_is_looked_up():
    drafter = NgramDrafter(TREES)
    drafter.read((5, 6, 7, 8))
    tree, _ = drafter.grow([1, 5], 6, Growing(1e-6, 8), None)
    assert np.asarray(tree.tokens)[: int(tree.count)].tolist() == [6, 7, 8]
    # The end of the source is not followed by the answer.
    assert int(drafter.grow([1, 7], 8, Growing(1e-6, 8), None)[0].count) == 1
    drafter.read(())
    assert int(drafter.grow([1, 5], 6, Growing(1e-6, 8), None)[0].count) == 1
    # Trees have room behind the tokens of a short context.
    shape = TreeShape()
    assert shape.within(1024) == shape
    shapes = [(each.nodes, each.room) for each in map(shape.within, (128, 40, 10))]
    assert shapes == [(shape.nodes, 64), ((8, 16), 20), ((8,), 8)]


def test_drafts_of_another_kind_are_refused(folder, target):
    alone = tiny.write_tiny_bundle(folder / "decoder.jaxllm")
    for one, other, what in (
        (target, alone, r"decoder\.jaxllm \(llama\) is decoder-only, and .*\(t5\) is an encoder-decoder"),
        (alone, target, r"target\.jaxllm \(t5\) is an encoder-decoder, and .*\(llama\) is decoder-only"),
    ):
        how = SpeculationOptions(drafter="model", model=other, trees=TREES)
        with pytest.raises(ConfigError, match=what):
            Engine.open(one, options=OPTIONS, speculation=how, warm_up=False)


def test_the_packaged_translator_is_drafted():
    """Its window of 128 tokens is no longer than the trees of a longer one."""
    options = SpeculationOptions(model="translate-draft", pausing=False)
    plain = Engine.open("translate")
    drafted = Engine.open("translate", speculation=options)
    for text in ("Ein kleiner Hund läuft über eine Wiese.", "Zwei Kinder spielen im Park."):
        assert drafted.generate(text).text == plain.generate(text).text
    assert drafted.speculation.counts.acceptance_length > 2
    plain.close()
    drafted.close()
