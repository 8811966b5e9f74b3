"""Mixtures of which only some experts are in memory answer as if all were."""

import dataclasses
import re

import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.bundle import Bundle
from jaxllm.bundle.calibrations import read_token_experts
from jaxllm.contexts.codecs import RAW
from jaxllm.contexts.recompute import LOST
from jaxllm.errors import BudgetExceeded
from jaxllm.prepare import prepare
from jaxllm.sampling import Sampling
from jaxllm.serving.contexts.chunk_io import ChunkIO
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.contexts.restore import restore
from jaxllm.serving.engine.request import GenerationConfig, Session
from jaxllm.serving.ground.expert_options import PREDICTORS, ExpertOptions
from jaxllm.serving.ground.speculation_options import TreeShape
from jaxllm.serving.runners.layerwise import LayerwiseRunner
from jaxllm.serving.runners.runner import prefill_prompt
from jaxllm.serving.weights.memory_plan import fixed_bytes, whole_budget
from jaxllm.serving.weights.streamed import StreamedWeights
from jaxllm.speculation.tree import line_tree
from tests.checkpoints.test_quantization import GPT_OSS, write_mxfp4
from tests.kernels.switching import fall_back, needs_native
from tests.serving.contexts.talking import READ, TURNS, answers_without_contexts, new, say
from tests.serving.experts.conftest import CFG, OPTIONS, SPARSE, E, K, budget
from tests.tiny import random_params, write_tiny_bundle

PROMPT = "the hello there, hello the"
CONFIG = GenerationConfig(max_tokens=24, ignore_eos=True)


def answer(engine, config=CONFIG, prompt=PROMPT, **more):
    engine.runner.fill(engine.runner.buckets_for(len(engine.tokenizer.encode(prompt)), config.max_tokens))
    return engine.stream(prompt, config, **more).result().tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "apart"), [(4, False), (8, False), ("nested", True), ("mixed", True), (16, True), ("xla", True)]
)
def test_the_answer_is_that_of_the_whole_model(
    bundle_of, resident_of, streamed_of, width, apart, monkeypatch
):
    """Of the same widths; uniform ones against experts that are stored together, as they always were."""
    weights = {4: "int4", 8: "int8", "nested": "int8-nested"}.get(width, "f32")
    width, native = {"nested": 8, "xla": "mixed"}.get(width, width), width != "xla"
    whole = resident_of(width, weights, apart)
    if not native:
        fall_back(monkeypatch)
        whole = Engine.open(bundle_of(width), options=OPTIONS, warm_up=False)
    streamed = streamed_of(width, weights)
    assert not isinstance(whole.runner, LayerwiseRunner)
    drawn = dataclasses.replace(CONFIG, sampling=Sampling(temperature=0.8, seed=3, repetition_penalty=1.1))
    for config in (CONFIG, drawn):
        tokens = answer(streamed, config)
        assert tokens == answer(whole, config)
        assert len(set(tokens)) > 1
    counts = streamed.model.streamed.counts
    assert 0 < counts.hits < counts.visits


def test_logits_are_the_same_and_a_conversation_goes_on(resident_of, streamed_of):
    """To the last bit behind a prompt; of one token XLA fuses the sums of a whole graph in another order."""
    whole, streamed = resident_of(), streamed_of(room=K)
    tokens, scores, texts = np.random.default_rng(0).integers(0, CFG.vocab_size, 40).tolist(), [], []
    for engine in (streamed, whole):
        runner = engine.runner
        runner.fill(runner.buckets_for(len(tokens), CONFIG.max_tokens))
        # Behind a prompt of two chunks, and behind one more token.
        first, cache = prefill_prompt(runner, runner.start(128), tokens, 0)
        second, _ = prefill_prompt(runner, cache, [3], len(tokens))
        scores.append((np.asarray(first), np.asarray(second)))
        session = Session()
        first = engine.stream(PROMPT, CONFIG, session=session).result()
        second = engine.stream(first.text[:5] + " the", CONFIG, session=session).result()
        texts.append((first.text, second.text, second.finish_reason, second.reused_tokens))
    np.testing.assert_array_equal(scores[0][0], scores[1][0])
    np.testing.assert_allclose(scores[0][1], scores[1][1], atol=1e-6)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("predictor", sorted({*PREDICTORS} - {ExpertOptions.predictor}))
def test_every_predictor_gives_the_same_answer(resident_of, streamed_of, predictor):
    how = ExpertOptions(predictor=predictor, eviction="lru")
    whole, streamed = resident_of(), streamed_of(room=4, experts=how)
    weights = streamed.model.streamed
    counts = weights.counts
    if predictor == "none":
        # A prompt reads each expert once.
        prompt, one = "the hello " * 20, dataclasses.replace(CONFIG, max_tokens=1)
        assert len(streamed.tokenizer.encode(prompt)) > 2 * OPTIONS.chunk_tokens[-1]
        assert answer(streamed, one, prompt) == answer(whole, one, prompt)
        assert counts.visits <= SPARSE * E
        assert counts.read_bytes <= weights.store.total_bytes
    assert answer(streamed) == answer(whole)
    # In the bundle's statistics all experts are as frequent.
    assert (counts.guesses > 0) == (predictor not in ("none", "frequency"))
    if predictor == "tokens":
        # What is read next says who comes.
        token, asked = np.array([11]), []
        known = read_token_experts(streamed.model.bundle).chances(0, token, E)
        weights.cache.expect = asked.extend
        streamed.runner.expect(token)
        first = [expert for layer, expert, _ in asked if layer == 0]
        assert sorted(first) == np.flatnonzero(known).tolist()
        # Of what nobody has seen the most frequent ones are foreseen, if any is likelier than the others.
        asked.clear()
        streamed.runner.expect(np.array([CFG.vocab_size + 1]))
        assert asked == []


@pytest.mark.slow
def test_contexts_come_back(streamed_of, tmp_path):
    """Their chunks read or computed again, they go on as conversations whose cache stayed."""
    streamed = streamed_of(room=5, kv_codec="raw")
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
    cache, bits = streamed.runner.start(len(tokens)), [RAW, LOST, RAW]
    back = restore(chunk_io, cache, tokens, bits, stored, lambda *_: None, delays=READ)
    assert back.how.computed == (1,)
    for got, expected in zip([*back.cache.keys, *back.cache.values], rows, strict=True):
        np.testing.assert_allclose(np.asarray(got)[..., :48, :], expected, atol=2e-5)


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


def test_the_least_budget_is_the_same_at_every_try_and_enough(bundle_of):
    def opened(memory_bytes):
        options = dataclasses.replace(OPTIONS, memory_bytes=memory_bytes)
        return Engine.open(bundle_of("mixed"), options=options, warm_up=False)

    def least(memory_bytes):
        message = r"at least ([\d,]+) .* for the 2 experts that a token visits"
        with pytest.raises(BudgetExceeded, match=message) as caught:
            opened(memory_bytes)
        return int(re.search(message, str(caught.value))[1].replace(",", ""))

    enough = least(1)
    assert {least(enough // 2), least(enough - 1)} == {enough}
    opened(enough).close()
    # Memory for all keeps all.
    assert opened(1 << 30).model.streamed is None


# Drafts: a tree is read to the bit as its tokens alone.


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize(
    ("width", "weights", "loss"),
    [
        (4, "int8", 0.0),
        (8, "int8-nested", 0.4),
        *(
            pytest.param(*each, marks=pytest.mark.campaign)
            for each in ((2, "int8", 0.0), (8, "int8", 0.0), (8, "int8-nested", 0.0))
        ),
    ],
)
def test_a_tree_is_read_as_its_tokens_one_by_one(bundle_of, width, weights, loss):
    """Experts streamed, of a model whose other weights have 8 bits; also where some are of high planes."""
    path, nodes, options = bundle_of(width, weights), 16, dataclasses.replace(OPTIONS, trees=TreeShape())
    whole = Engine.open(path, options=options, warm_up=False)
    options = dataclasses.replace(options, memory_bytes=budget(whole, 6), experts=ExpertOptions(loss=loss))
    whole.close()
    engine = Engine.open(path, options=options, warm_up=False)
    runner, draws = engine.runner, np.random.default_rng(1)
    assert isinstance(runner, LayerwiseRunner)
    prompt, tokens = (draws.integers(0, CFG.vocab_size, nodes).tolist() for _ in range(2))
    runner.fill(runner.buckets_for(len(prompt), 2 * nodes, trees=[nodes]))
    _, cache = prefill_prompt(runner, runner.start(128), prompt, 0)
    together, _ = runner.tree_logits(line_tree(tokens), cache)
    _, cache = prefill_prompt(runner, runner.start(128), prompt, 0)
    alone = []
    for at, token in enumerate(tokens):
        # As decoding feeds it; a prompt of one token goes through a chunk.
        logits, cache = runner._feed(cache, [token], len(prompt) + at)
        alone.append(np.asarray(logits)[0])
    np.testing.assert_array_equal(together, np.stack(alone))
    engine.close()


# Experts with biases and a clamped gate (gpt-oss).


def answers_with_biases(path):
    """Those with all experts in memory, and with two of eight; and the second engine's counts."""
    whole = Engine.open(path, options=OPTIONS, warm_up=False)
    options = dataclasses.replace(OPTIONS, memory_bytes=budget(whole, 2))
    streamed = Engine.open(path, options=options, warm_up=False)
    assert isinstance(streamed.runner, LayerwiseRunner)
    assert not isinstance(whole.runner, LayerwiseRunner)
    found = answer(whole), answer(streamed), streamed.model.streamed.counts
    streamed.close()
    return found


def test_biases_stay_in_memory(tmp_path):
    bits = np.asarray([[8, 4, 8, 2], [4, 8, 2, 8]])
    path = write_tiny_bundle(
        tmp_path / "m.jaxllm", cfg=GPT_OSS, params=random_params(GPT_OSS), expert_bits=bits
    )
    whole, streamed, counts = answers_with_biases(path)
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
    whole, streamed, _ = answers_with_biases(tmp_path / "apart.jaxllm")
    assert streamed == whole
    assert whole == answer(Engine.open(tmp_path / "m.jaxllm", options=OPTIONS, warm_up=False))
