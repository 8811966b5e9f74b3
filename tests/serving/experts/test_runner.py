"""Mixtures of which only some experts are in memory answer as if all were."""

import dataclasses
import functools
import re

import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.bundle import Bundle
from jaxllm.bundle.calibrations import read_token_experts
from jaxllm.contexts.codecs import RAW
from jaxllm.contexts.recompute import LOST
from jaxllm.errors import BudgetExceeded, BundleError, ConfigError
from jaxllm.prepare import prepare
from jaxllm.sampling import Sampling
from jaxllm.serving.contexts.chunk_io import ChunkIO
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.contexts.restore import restore
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.experts.store import ExpertStore
from jaxllm.serving.ground.bundles import find_model
from jaxllm.serving.ground.expert_options import PREDICTORS, ExpertOptions
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions, TreeShape
from jaxllm.serving.opening.weight_source import budget_with_experts
from jaxllm.serving.runners.layerwise import LayerwiseRunner
from jaxllm.serving.runners.runner import prefill_prompt
from jaxllm.serving.weights.memory_plan import drafter_bytes, fixed_bytes, whole_budget
from jaxllm.serving.weights.streamed import StreamedWeights
from jaxllm.speculation.tree import line_tree
from tests.checkpoints.test_quantization import write_mxfp4
from tests.kernels.switching import fall_back, needs_native
from tests.serving.contexts.talking import READ, TURNS, answers_without_contexts, new, say
from tests.serving.experts.conftest import CFG, OPTIONS, SPARSE, E, K, budget

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
        # The next token tells the experts of the first layer.
        token, asked = np.array([11]), []
        known = read_token_experts(streamed.model.bundle).chances(0, token, E)
        weights.cache.expect = asked.extend
        streamed.runner.expect(token)
        first = [expert for layer, expert, _ in asked if layer == 0]
        assert sorted(first) == np.flatnonzero(known).tolist()


@pytest.mark.slow
def test_contexts_come_back(streamed_of, tmp_path):
    """Their chunks read or computed again, they go on as conversations whose cache stayed."""
    streamed = streamed_of(room=5, kv_codec="raw")
    streamed.warm_up()
    wanted = answers_without_contexts(streamed, TURNS[0])
    contexts = Contexts(streamed, ContextOptions(folder=tmp_path / "store"))
    context = new(contexts)
    assert [say(context, turn).tokens for turn in TURNS[0][:2]] == wanted[:2]
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


# Nested experts by planes.

NESTED = 8, "int8-nested"


@needs_native
def test_a_layer_is_one_call_and_one_more_for_late_experts(resident_of, streamed_of):
    """A token visits K experts of each sparse layer: a call each before, one for all that are there now."""
    expected, passes = answer(resident_of(*NESTED)), CONFIG.max_tokens
    for experts in (SPARSE * E - 1, 2 * K):
        engine = streamed_of(*NESTED, experts, experts=ExpertOptions(predictor="none"))
        assert answer(engine) == expected
        layers, counts = engine.runner, engine.model.streamed.counts
        layers.visits.calls = counts.visits = counts.hits = 0
        assert answer(engine) == expected
        late, calls = counts.visits - counts.hits, layers.visits.calls
        # The prompt is one chunk, and so one pass; there more experts may be late than come at once.
        assert counts.visits >= passes * SPARSE * K
        assert calls <= 2 * (passes - 1) * SPARSE + E * SPARSE
        if experts > 2 * K:
            assert passes * SPARSE <= calls <= passes * SPARSE + late
        else:
            assert late > passes


@pytest.mark.parametrize("loss", [0.4, 1.0])
def test_a_loss_does_not_depend_on_what_lies_in_memory(streamed_of, loss, compiles, monkeypatch):
    answers = []
    for experts, predictor in ((2 * K, "none"), (6, "router"), (SPARSE * E - 1, "tokens")):
        how = ExpertOptions(loss=loss, predictor=predictor)
        engine = streamed_of(*NESTED, experts, experts=how)
        answers.append(answer(engine))
        facts = engine.model.streamed.facts()
        # A loss of all is the model of high planes.
        assert (facts["low_plane_bytes"] == 0) == (loss == 1.0)
        assert facts["expert_loss"] == loss
        assert 0 < facts["high_plane_share"] <= 1.0
        with compiles() as count:
            assert answer(engine) == answers[-1]
        assert count() == 0
    assert answers[0] == answers[1] == answers[2]
    assert len(set(answers[0])) > 1
    if loss == 1.0:
        # Without native kernels, too, which compute tile by tile.
        fall_back(monkeypatch)
        engine = streamed_of(*NESTED, experts=ExpertOptions(loss=loss))
        assert len(set(answer(engine))) > 1
        assert engine.model.streamed.counts.low_bytes == 0


def test_a_loss_without_nested_experts_is_refused(bundle_of, streamed_of):
    message = r"has no nested experts .* --weights int8-nested --expert-bits 8"
    with pytest.raises(ConfigError, match=message):
        streamed_of(experts=ExpertOptions(loss=0.1))
    # Where all are in memory, too: what is asked for cannot be done by any memory.
    options = dataclasses.replace(OPTIONS, experts=ExpertOptions(loss=0.1))
    with pytest.raises(ConfigError, match=message):
        Engine.open(bundle_of(8, "int8"), options=options, warm_up=False)
    with pytest.raises(ConfigError, match="loss must be a number at least 0 and at most 1"):
        ExpertOptions(loss=1.5)


@needs_native
def test_an_answer_after_a_damaged_one_is_whole(resident_of, streamed_of):
    """What was begun when the other plane could not be read is begun again."""
    engine = streamed_of(*NESTED, 2 * K, experts=ExpertOptions(predictor="none"))
    expected = answer(resident_of(*NESTED))
    cache, store = engine.model.streamed.cache, engine.model.streamed.store
    read, low = cache._reader.read_into, {store.plane((1, e, 1)).offset for e in range(E)}
    left = [12]

    def spoiled(memory, place, offset, size):
        read(memory, place, offset, size)
        if offset in low:
            left[0] -= 1
            if left[0] < 0:
                memory[place] ^= 1

    cache._reader.read_into = spoiled
    with pytest.raises(BundleError, match="the low plane of expert"):
        answer(engine)
    cache._reader.read_into = read
    assert answer(engine) == expected


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


@pytest.mark.slow
def test_mxfp4_is_laid_apart_bit_for_bit(tmp_path):
    write_mxfp4(tmp_path / "q")
    prepare(tmp_path / "q", tmp_path / "m.jaxllm")
    prepare(tmp_path / "m.jaxllm", tmp_path / "apart.jaxllm", expert_bits=8)
    with Bundle.open(tmp_path / "m.jaxllm") as together, Bundle.open(tmp_path / "apart.jaxllm") as apart:
        own, stack = apart.stored("layers.1.experts.2.down"), together.stored("layers.1.experts.down")
        assert (own.group, own.bits) == (32, 8) == (stack.group, stack.bits)
    together, apart = (
        Engine.open(tmp_path / name, options=OPTIONS, warm_up=False) for name in ("m.jaxllm", "apart.jaxllm")
    )
    options = dataclasses.replace(OPTIONS, memory_bytes=budget(apart, 2))
    streamed = Engine.open(tmp_path / "apart.jaxllm", options=options, warm_up=False)
    assert isinstance(streamed.runner, LayerwiseRunner)
    assert answer(together) == answer(apart) == answer(streamed)
    counts = streamed.model.streamed.counts
    assert 0 < counts.hits < counts.visits
    streamed.close()


# The packaged mixture answers with drafts token for token as without, in memory and with experts streamed.

TREES = TreeShape(nodes=(16, 32), room=32)
PACKAGED = EngineOptions(
    context_tokens=128, cache_tokens=(128,), chunk_tokens=(32,), decode_block=8, trees=TREES, buckets_bytes=0
)
# Always: what does not pay is as exact as what does.
HOW = {"trees": TREES, "pausing": False, "pipelined": False}
DRAFTERS = {
    "ngram": SpeculationOptions(drafter="ngram", **HOW),
    "model": SpeculationOptions(drafter="model", model="draft", **HOW),
}
WHO = ("a little girl named Lily", "a boy called Tim")


def requests():
    """Prompts and how they are answered, greedily and sampled."""
    for number, who in enumerate(WHO):
        for sampling in (Sampling(temperature=0.0), Sampling(temperature=0.8, seed=number)):
            config = GenerationConfig(max_tokens=40, ignore_eos=True, sampling=sampling)
            yield f"Once upon a time, there was {who} who loved to play.", config


def answers(path, *, streamed, drafter=None):
    """Of one engine, and how many trees its target read."""
    speculation, options = DRAFTERS.get(drafter), PACKAGED
    if streamed:
        with Bundle.open(path) as bundle:
            room = 10 * ExpertStore(bundle).largest_bytes
            if speculation is not None:
                room += drafter_bytes(speculation, PACKAGED.context_tokens, bundle.cfg)
            resolved = PACKAGED.resolve(bundle.cfg, quantized=True)
            options = dataclasses.replace(PACKAGED, memory_bytes=budget_with_experts(bundle, resolved, room))
    engine = Engine.open(path, options=options, speculation=speculation)
    assert isinstance(engine.runner, LayerwiseRunner) == streamed
    found = [engine.generate(prompt, config).tokens for prompt, config in requests()]
    trees = 0 if speculation is None else engine.speculation.counts.verifications
    engine.close()
    return found, trees


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The packaged mixture with experts of a width, and its answers without drafts, in memory."""

    @functools.cache
    def of(width):
        path = tmp_path_factory.mktemp("moe") / f"moe{width}.jaxllm"
        prepare(find_model("moe"), path, expert_bits=width)
        return path, answers(path, streamed=False)[0]

    return of


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize(
    ("width", "streamed", "drafter"),
    [
        (4, False, "ngram"), (4, True, "ngram"), (8, True, "model"),
        pytest.param(2, True, None, marks=pytest.mark.campaign),
        pytest.param(2, True, "model", marks=pytest.mark.campaign),
    ],
)  # fmt: skip
def test_the_answers_are_those_of_plain_decoding_in_memory(made, width, streamed, drafter):
    path, plain = made(width)
    found, trees = answers(path, streamed=streamed, drafter=drafter)
    differing = [number for number, pair in enumerate(zip(found, plain, strict=True)) if pair[0] != pair[1]]
    assert not differing, f"{len(differing)} of {len(found)} answers differ"
    assert len({tuple(each) for each in found}) > len(WHO)
    assert (trees > 0) == (drafter is not None)


@needs_native
@pytest.mark.slow
def test_laid_apart_it_answers_as_it_is_packaged(made):
    """At its own width, in which its experts are apart already."""
    with Bundle.open(find_model("moe")) as bundle:
        assert bundle.layout.experts_apart
    assert answers(find_model("moe"), streamed=False)[0] == made(8)[1]
