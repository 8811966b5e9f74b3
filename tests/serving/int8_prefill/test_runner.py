"""An engine that reads prompts in integers: the calibrated products, in the cache that decoding uses."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.bundle.calibrations import prefill_parts
from jaxllm.errors import ConfigError
from jaxllm.int8_prefill.reference import forward_by_rule, integer_rule
from jaxllm.models.decoder import logits
from jaxllm.serving.buckets.model import PrefillBucket
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.evaluation.tasks import score_options
from jaxllm.serving.ground.int8_prefill_options import PrefillOptions
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.int8_prefill.buckets import IntegerChunkBucket, IntegerStageBucket
from jaxllm.serving.runners.runner import prefill_prompt
from jaxllm.serving.runners.scorer import Scorer
from jaxllm.steps.branching import Branching
from tests.int8_prefill.calibrated import calibrated, outlying, stored
from tests.tiny import TINY, WINDOW_TOKENS, write_tiny_bundle

OPTIONS = EngineOptions(
    chunk_tokens=(16, 32),
    cache_tokens=(64, WINDOW_TOKENS),
    cache_dtype="float32",
    buckets_bytes=0,
    prefill=PrefillOptions(mode="int8"),
)
# One token, a chunk's end and beyond, several chunks, padding in the last, the whole window.
LENGTHS = (1, 15, 16, 17, 32, 33, 64, 96, 101, WINDOW_TOKENS)


@pytest.fixture(scope="module")
def engine(calibrated_bundle) -> Engine:
    return Engine.open(calibrated_bundle, options=OPTIONS)


@functools.cache
def reference():
    def run(params, layers, tokens):
        hidden = forward_by_rule(params, tokens, integer_rule(params, layers, TINY), cfg=TINY)
        return logits(params, hidden, cfg=TINY)

    return jax.jit(run)


def expected(tokens: list[int], calibration=None) -> np.ndarray:
    """Logits `[T, V]` of a prompt read by the calibrated products."""
    layers = (calibration or calibrated()).layers(100, TINY)
    # Of one length, so that it is compiled once; what comes behind a token does not matter to it.
    row = np.zeros(WINDOW_TOKENS, np.int32)
    row[: len(tokens)] = tokens
    return np.asarray(reference()(stored(), layers, row))[: len(tokens)]


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, TINY.vocab_size, length).tolist()


def read(engine: Engine, tokens: list[int]):
    found, cache = prefill_prompt(engine.runner, engine.runner.start(len(tokens)), tokens, 0)
    return np.asarray(found), cache


def test_every_length_is_read_as_calibrated(engine, compiles):
    """Chunked = whole, for any length; and nothing is compiled for any of them."""
    tokens = prompt(WINDOW_TOKENS)
    known = expected(tokens)
    built = dict(engine.runner.buckets.bucket_ms)
    with compiles() as count:
        for length in LENGTHS:
            found, cache = read(engine, tokens[:length])
            np.testing.assert_allclose(found[0], known[length - 1], atol=2e-2 * np.abs(known).max())
            assert int(cache.length) == length
        # A prompt that goes on behind what the cache holds.
        _, cache = prefill_prompt(engine.runner, engine.runner.start(96), tokens[:40], 0)
        found, cache = prefill_prompt(engine.runner, cache, tokens[40:96], 40)
    whole, _ = read(engine, tokens[:96])
    np.testing.assert_allclose(found, whole, atol=1e-2 * np.abs(whole).max())
    assert int(cache.length) == 96
    assert count() == 0
    assert engine.runner.buckets.bucket_ms == built
    # A chunk is one bucket: of all layers, for all chunks of its length, one for each length of the cache.
    buckets = engine.runner.buckets_for()
    chunks = [each for each in buckets if isinstance(each, IntegerChunkBucket)]
    lengths = [(each.tokens, each.cache_tokens) for each in chunks]
    assert sorted(lengths) == [(16, 64), (16, WINDOW_TOKENS), (32, 64), (32, WINDOW_TOKENS)]
    assert {sum(each.shadowed) for each in chunks} == {sum(engine.runner.int8.calibration.shadowed)}
    assert not any(isinstance(each, PrefillBucket | IntegerStageBucket) for each in buckets)


def test_it_is_nearer_to_the_function_than_without_shadow(engine, tmp_path):
    calibration = prefill_parts(calibrated(shadows=0))
    bare = write_tiny_bundle(tmp_path / "bare.jaxllm", "int8", params=outlying(), parts=calibration)
    exact = write_tiny_bundle(tmp_path / "exact.jaxllm", "f32", params=outlying())
    fewer = dataclasses.replace(OPTIONS, chunk_tokens=(32,), cache_tokens=(WINDOW_TOKENS,))
    engines = [
        Engine.open(bare, options=fewer, warm_up=False),
        engine,
        Engine.open(exact, options=dataclasses.replace(fewer, prefill=PrefillOptions()), warm_up=False),
    ]
    for each in engines[::2]:
        each.warm_up(prompt_tokens=64, max_tokens=1)
    without, with_shadow, known = (read(each, prompt(64))[0] for each in engines)
    assert np.abs(with_shadow - known).mean() < 0.6 * np.abs(without - known).mean()


def test_it_answers(engine):
    """Sampling, decoding and sessions go on from its cache; what it did is counted."""
    before = dataclasses.replace(engine.runner.int8.shared.outliers)
    answer = engine.generate(prompt(40), GenerationConfig(max_tokens=20, ignore_eos=True))
    assert len(answer.tokens) == 20
    counts = engine.runner.int8.shared.outliers
    # Two chunks of 40 tokens, one layer with a shadow at four products.
    assert counts.products == before.products + 8
    assert counts.channels > before.channels
    assert counts.enlarged == before.enlarged


def test_a_question_is_read_once_for_all_of_its_ends(engine):
    """They follow the same cache, in any order, up to the window's end: each as if it were the only one."""
    trunk, draw = prompt(37), np.random.default_rng(1)
    one, two = engine.generate(trunk, GenerationConfig(max_tokens=2, ignore_eos=True)).tokens
    ends = [tuple(draw.integers(0, TINY.vocab_size, size).tolist()) for size in (40, 1, 3, 92, 2)]
    ends += [(5,), (one,), (one, two), *((one, each) for each in range(0, TINY.vocab_size, 5))]
    assert len(trunk) + len(ends[3]) - 1 == WINDOW_TOKENS
    before = engine.runner.int8.shared.outliers.products
    (scores,) = score_options(engine, [Branching(tuple(trunk), tuple(ends))])
    # Two chunks, one layer with a shadow at four products.
    assert engine.runner.int8.shared.outliers.products == before + 8
    for score, end in zip(scores[:5], ends, strict=False):
        found, cache = prefill_prompt(engine.runner, engine.runner.start(WINDOW_TOKENS), trunk, 0)
        alone = float(jax.nn.log_softmax(np.asarray(found)[0])[end[0]])
        alone += Scorer(engine.runner).score(end[:-1], end[1:], cache).sum() if len(end) > 1 else 0.0
        assert score == pytest.approx(alone, abs=1e-3)
    # The first token of an option by what the prompt's reading gave, the next ones behind its cache.
    known = np.asarray(jax.nn.log_softmax(expected(trunk)[-1]))
    np.testing.assert_allclose(scores[5:7], known[[5, one]], atol=0.05)
    assert scores[7] == pytest.approx(scores[7:].max())


def test_more_outliers_than_expected_are_not_dropped(calibrated_bundle):
    """With steps that are far too small nearly all is shadow: the product stays what it is, and it is
    said."""
    options = dataclasses.replace(OPTIONS, chunk_tokens=(32,))
    engine = Engine.open(calibrated_bundle, options=options, warm_up=False)
    runner, known = engine.runner, calibrated()
    narrow = known.steps.copy()
    narrow[:, known.shadowed.index(True)] /= 50
    runner.int8.calibration = dataclasses.replace(known, steps=narrow)
    engine.warm_up(prompt_tokens=32, max_tokens=1)
    tokens = prompt(32)
    found, _ = read(engine, tokens)
    wanted = expected(tokens, runner.int8.calibration)[-1]
    np.testing.assert_allclose(found[0], wanted, atol=2e-2 * np.abs(wanted).max())
    assert runner.int8.shared.outliers.enlarged > 0
    # Broken weights are not hidden.
    params = dict(runner.model.weights)
    params["layers.0.attn_norm.scale"] = params["layers.0.attn_norm.scale"].at[3].set(np.nan)
    runner.model.put(runner.model.prepared(params))
    assert np.isnan(read(engine, tokens)[0]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "int4"}, "mode must be one of float, int8, auto, got"),
        ({"processors": 3}, r"processors must be a whole number in \[1, 2\]"),
        ({"most_loss": float("nan")}, "most_loss must be a number at least 0"),
        ({"order": "random"}, "order must be one of"),
        ({"integer_bytes": -1}, "integer_bytes must be a whole number of at least 0"),
        ({"integer_device": "npu", "processors": 2}, "one of cpu, gpu"),
        ({"integer_device": "gpu"}, "takes 2 processors"),
    ],
)
def test_refused_options(change, message):
    with pytest.raises(ConfigError, match=message):
        PrefillOptions(**change)
