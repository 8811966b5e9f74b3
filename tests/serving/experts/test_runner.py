"""Mixtures of which only some experts are in memory answer as if all were."""

import concurrent.futures
import dataclasses
import re

import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.bundle.calibrations import read_token_experts
from jaxllm.contexts.codecs import RAW
from jaxllm.contexts.recompute import LOST
from jaxllm.errors import BudgetExceeded, BundleError
from jaxllm.sampling import Sampling
from jaxllm.serving.contexts.chunk_io import ChunkIO
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.contexts.restore import Reader, restore
from jaxllm.serving.engine.request import GenerationConfig, Session
from jaxllm.serving.ground.expert_options import PREDICTORS, ExpertOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from jaxllm.serving.runners.layerwise import LayerwiseRunner
from jaxllm.serving.runners.runner import prefill_prompt
from jaxllm.serving.weights.footprint import fixed_bytes
from jaxllm.serving.weights.prefetch_plan import whole_budget
from jaxllm.serving.weights.streamed import StreamedWeights
from tests.kernels.switching import fall_back
from tests.serving.contexts.talking import READ, TURNS, answers_without_contexts, new, say
from tests.serving.experts.conftest import CFG, OPTIONS, SPARSE, E, K, budget

PROMPT = "the hello there, hello the"
CONFIG = GenerationConfig(max_tokens=24, ignore_eos=True)


def open_streamed(path, engine, room=6, **options):
    """An engine with memory for so many experts."""
    options = {"memory_bytes": budget(engine, room), **options}
    return Engine.open(path, options=dataclasses.replace(OPTIONS, **options), warm_up=False)


def answer(engine, config=CONFIG, prompt=PROMPT, **more):
    engine.runner.fill(engine.runner.request_buckets(len(engine.tokenizer.encode(prompt)), config.max_tokens))
    return engine.stream(prompt, config, **more).result().tokens


def scores(engine):
    """Logits behind a prompt of two chunks, and behind one more token."""
    runner, tokens = engine.runner, np.random.default_rng(0).integers(0, CFG.vocab_size, 40).tolist()
    runner.fill(runner.request_buckets(len(tokens), 2))
    first, cache = prefill_prompt(runner, runner.start(128), tokens, 0)
    second, _ = prefill_prompt(runner, cache, [3], len(tokens))
    return np.stack([np.asarray(first), np.asarray(second)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "apart"), [(4, False), (8, False), ("nested", True), ("mixed", True), (16, True)]
)
def test_the_answer_is_that_of_the_whole_model(bundle_of, resident_of, width, apart):
    """Of the same widths; uniform ones against experts that are stored together, as they always were."""
    weights = {4: "int4", 8: "int8", "nested": "int8-nested"}.get(width, "f32")
    width = 8 if width == "nested" else width
    whole = resident_of(width, weights, apart)
    streamed = open_streamed(bundle_of(width, weights), resident_of(width, weights))
    assert isinstance(streamed.runner, LayerwiseRunner)
    assert not isinstance(whole.runner, LayerwiseRunner)
    drawn = dataclasses.replace(CONFIG, sampling=Sampling(temperature=0.8, seed=3, repetition_penalty=1.1))
    for config in (CONFIG, drawn):
        tokens = answer(streamed, config)
        assert tokens == answer(whole, config)
        assert len(set(tokens)) > 1
    counts = streamed.model.streamed.counts
    assert 0 < counts.hits < counts.visits
    streamed.close()


def test_logits_are_the_same(bundle_of, resident_of):
    """To the last bit behind a prompt; of one token XLA fuses the sums of a whole graph in another order."""
    whole = resident_of("mixed")
    streamed = open_streamed(bundle_of("mixed"), whole, room=K)
    (prompt, token), (expected, after) = scores(streamed), scores(whole)
    np.testing.assert_array_equal(prompt, expected)
    np.testing.assert_allclose(token, after, atol=1e-6)
    streamed.close()


@pytest.mark.slow
def test_without_native_kernels(bundle_of, resident_of, monkeypatch):
    fall_back(monkeypatch)
    whole = Engine.open(bundle_of("mixed"), options=OPTIONS, warm_up=False)
    streamed = open_streamed(bundle_of("mixed"), whole)
    assert answer(streamed) == answer(whole)
    streamed.close()


@pytest.mark.parametrize("predictor", sorted({*PREDICTORS} - {ExpertOptions.predictor}))
def test_every_predictor_gives_the_same_answer(bundle_of, resident_of, predictor):
    whole = resident_of("mixed")
    how = ExpertOptions(predictor=predictor, eviction="lru")
    streamed = open_streamed(bundle_of("mixed"), whole, 4, experts=how)
    assert answer(streamed) == answer(whole)
    # In the bundle's statistics all experts are as frequent.
    assert (streamed.model.streamed.counts.guesses > 0) == (predictor not in ("none", "frequency"))
    streamed.close()


def test_what_is_read_next_says_who_comes(bundle_of, resident_of):
    whole = resident_of("mixed")
    streamed = open_streamed(bundle_of("mixed"), whole, 4, experts=ExpertOptions(predictor="tokens"))
    weights = streamed.model.streamed
    token = np.array([11])
    known = read_token_experts(streamed.model.bundle).chances(0, token, E)
    asked = []
    weights.cache.expect = asked.extend
    streamed.runner.expect(token)
    first = [expert for layer, expert, _ in asked if layer == 0]
    assert sorted(first) == np.flatnonzero(known).tolist()
    # Of what nobody has seen the most frequent ones are foreseen, if any is likelier than the others.
    asked.clear()
    streamed.runner.expect(np.array([CFG.vocab_size + 1]))
    assert asked == []
    streamed.close()


def test_a_prompt_reads_each_expert_once(bundle_of, resident_of):
    whole = resident_of("mixed")
    streamed = open_streamed(bundle_of("mixed"), whole, K, experts=ExpertOptions(predictor="none"))
    prompt = "the hello " * 20
    one = dataclasses.replace(CONFIG, max_tokens=1)
    assert len(streamed.tokenizer.encode(prompt)) > 2 * OPTIONS.chunk_tokens[-1]
    assert answer(streamed, one, prompt) == answer(whole, one, prompt)
    counts = streamed.model.streamed.counts
    assert counts.visits <= SPARSE * E
    assert counts.read_bytes <= streamed.model.streamed.store.total_bytes
    streamed.close()


def test_a_conversation_goes_on(bundle_of, resident_of):
    whole = resident_of("mixed")
    streamed = open_streamed(bundle_of("mixed"), whole)
    texts = []
    for engine in (whole, streamed):
        engine.runner.fill(engine.runner.request_buckets(40, CONFIG.max_tokens))
        session = Session()
        first = engine.stream(PROMPT, CONFIG, session=session).result()
        second = engine.stream(first.text[:5] + " the", CONFIG, session=session).result()
        texts.append((first.text, second.text, second.finish_reason, second.reused_tokens))
    assert texts[0] == texts[1]
    streamed.close()


@pytest.mark.slow
def test_drafts_are_verified(bundle_of, resident_of):
    whole = resident_of("mixed")
    speculation = SpeculationOptions(drafter="ngram")
    options = dataclasses.replace(OPTIONS, memory_bytes=budget(whole, 5, trees=speculation.trees))
    streamed = Engine.open(bundle_of("mixed"), options=options, speculation=speculation, warm_up=False)
    streamed.warm_up()
    prompt = "the hello the hello the hello the"
    assert streamed.stream(prompt, CONFIG).result().tokens == answer(whole, prompt=prompt)
    assert streamed.speculation.counts.verifications > 0
    streamed.close()


@pytest.mark.slow
def test_contexts_come_back(bundle_of, resident_of, tmp_path):
    """Their chunks read or computed again, they go on as conversations whose cache stayed."""
    whole = resident_of("mixed")
    streamed = open_streamed(bundle_of("mixed"), whole, 5, kv_codec="raw")
    streamed.warm_up()
    wanted = [answers_without_contexts(streamed, turns) for turns in TURNS[:2]]
    contexts = Contexts(streamed, ContextOptions(folder=tmp_path / "store"))
    mine = [new(contexts) for _ in wanted]
    for turn in range(3):
        for context, turns, answers in zip(mine, TURNS, wanted, strict=False):
            assert say(context, turns[turn]).tokens == answers[turn]
    contexts.close()
    chunk_io, tokens = ChunkIO(streamed.runner), TURNS[0][0] + TURNS[1][2]
    _, cache = prefill_prompt(streamed.runner, streamed.runner.start(len(tokens)), tokens, 0)
    rows = [np.array(each)[..., :48, :] for each in (*cache.keys, *cache.values)]
    # The second chunk is lost.
    stored = {
        chunk: each for chunk, each in chunk_io.encode(cache, {0: RAW, 1: RAW, 2: RAW}).items() if chunk != 1
    }
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        back = restore(
            chunk_io, streamed.runner.start(len(tokens)), tokens=tokens, bits=[RAW, LOST, RAW],
            resident=stored, reader=Reader(lambda layer, chunks: [], pool), delays=READ,
        )  # fmt: skip
    assert back.how.computed == (1,)
    for got, expected in zip([*back.cache.keys, *back.cache.values], rows, strict=True):
        np.testing.assert_allclose(np.asarray(got)[..., :48, :], expected, atol=2e-5)
    streamed.close()


def test_experts_that_lie_together_are_streamed_by_whole_layers_and_it_is_said(
    bundle_of, resident_of, caplog
):
    whole = resident_of(8, "int8", apart=False)
    needed = fixed_bytes(CFG, whole.options) + whole.model.bundle.weight_bytes * 9 // 10
    options = dataclasses.replace(OPTIONS, memory_bytes=whole_budget(needed))
    path = bundle_of(8, "int8", apart=False)
    engine = Engine.open(path, options=options, warm_up=False)
    assert isinstance(engine.model.streamed, StreamedWeights)
    engine.close()
    assert "is streamed by whole layers, because its experts are stored together" in caplog.text
    assert f"jaxllm prepare {path} --expert-bits 8 -o" in caplog.text


def test_memory_for_all_keeps_all(bundle_of):
    options = dataclasses.replace(OPTIONS, memory_bytes=1 << 30)
    assert Engine.open(bundle_of("mixed"), options=options, warm_up=False).model.streamed is None


def test_a_budget_below_the_experts_of_a_token_is_refused(bundle_of, resident_of):
    with pytest.raises(BudgetExceeded, match=r"at least [\d,]+ .* for the 2 experts that a token visits"):
        open_streamed(bundle_of("mixed"), resident_of("mixed"), room=0)


def test_the_least_budget_is_the_same_at_every_try_and_enough(bundle_of):
    def opened(memory_bytes):
        options = dataclasses.replace(OPTIONS, memory_bytes=memory_bytes)
        return Engine.open(bundle_of("mixed"), options=options, warm_up=False)

    def least(memory_bytes):
        with pytest.raises(BudgetExceeded) as caught:
            opened(memory_bytes)
        return int(re.search(r"needs at least ([\d,]+) ", str(caught.value))[1].replace(",", ""))

    enough = least(1)
    assert {least(enough // 2), least(enough - 1)} == {enough}
    opened(enough).close()


def test_a_corrupt_expert_is_named(bundle_of, resident_of, tmp_path):
    whole = resident_of("mixed")
    broken = tmp_path / "broken.jaxllm"
    raw = bytearray(bundle_of("mixed").read_bytes())
    segments = whole.model.bundle.layout.segments
    for expert in range(E):
        raw[segments[f"layers.2.experts.{expert}"].offset + 100] ^= 1
    broken.write_bytes(raw)
    streamed = open_streamed(broken, whole)
    with pytest.raises(BundleError, match=r"expert \d of layer 2 is corrupt .* read again"):
        answer(streamed)
    streamed.close()
