"""Drafted answers are the target's own, whoever drafts and wherever the target's weights are."""

import dataclasses

import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.bundle.levels import elastic_parts
from jaxllm.elastic.ladder import Ladder
from jaxllm.errors import BudgetExceeded, ConfigError
from jaxllm.sampling import Sampling
from jaxllm.serving.engine.request import GenerationConfig, Session
from jaxllm.serving.ground.bundles import open_model
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions, TreeShape
from jaxllm.serving.host.direct_io import Storage
from jaxllm.serving.speculation.ngram_drafter import NgramDrafter
from jaxllm.serving.weights import pieces
from jaxllm.serving.weights.footprint import drafter_bytes, fixed_bytes
from jaxllm.serving.weights.prefetch_plan import whole_budget
from tests.tiny import TINY, tiny_params, tiny_tokenizer, write_tiny_bundle

CFG = dataclasses.replace(
    TINY, layers=6, hidden_size=128, heads=8, kv_heads=4, ffn_size=384, attention_windows=()
)
SMALL = dataclasses.replace(TINY, layers=1, attention_windows=())
OPTIONS = EngineOptions(
    context_tokens=128, cache_tokens=(64, 128), chunk_tokens=(16, 32), decode_block=4, buckets_bytes=0
)
# The models are random: what they are sure of is little.
TREES = TreeShape(nodes=(4, 8), room=16, threshold=0.02)
PROMPT = "the hello there, hello the hello there"
GREEDY = GenerationConfig(max_tokens=48, ignore_eos=True)
DRAWN = dataclasses.replace(
    GREEDY, sampling=Sampling(temperature=0.8, seed=5, top_p=0.9, repetition_penalty=1.2)
)


def sharp(cfg):
    """Parameters whose model is surer of its answers than a fresh one, so that none hangs on the last bit."""
    return {name: value * np.float32(3 if value.ndim > 1 else 1) for name, value in tiny_params(cfg).items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speculative")
    parts = elastic_parts(Ladder(levels=(25, 100)))
    write_tiny_bundle(folder / "target.jaxllm", "int8", cfg=CFG, params=sharp(CFG), parts=parts)
    write_tiny_bundle(folder / "small.jaxllm", "int8", cfg=SMALL, params=sharp(SMALL))
    return folder


@pytest.fixture(scope="module")
def plain(folder):
    return Engine.open(folder / "target.jaxllm", options=OPTIONS)


def speculation(folder, drafter, **options):
    own = {
        "small": {"model": folder / "small.jaxllm"},
        "itself": {"model": folder / "target.jaxllm"},
        "level": {"drafter": "level", "level": 25},
        "ngram": {"drafter": "ngram"},
    }[drafter]
    return SpeculationOptions(
        **{"trees": TREES, "pausing": False, "fallback": "fixed", "alpha": 1e-6, **own, **options}
    )


def own_bytes(plain, options):
    """What the target takes besides its weights, the logits of its trees among it."""
    return fixed_bytes(CFG, dataclasses.replace(plain.options, trees=options.trees))


def open_drafted(folder, plain, options, share=0.0, *, warm_up=False):
    """An engine with a drafter; unless `warm_up`, with the graphs of the longest cache alone."""
    others = own_bytes(plain, options) + drafter_bytes(options, OPTIONS.context_tokens, CFG)
    memory = whole_budget(others + int(share * plain.model.bundle.weight_bytes))
    # So slow that there is something to wait for.
    storage = Storage(latency_ms=4)
    engine_options = dataclasses.replace(OPTIONS, memory_bytes=memory if share else 0, storage=storage)
    engine = Engine.open(
        plain.model.bundle.path, options=engine_options, speculation=options, warm_up=warm_up
    )
    if not warm_up:
        engine.warm_up(prompt_tokens=80, max_tokens=48)
        # Those that a request would not wait for, too.
        engine.runner.fill(engine.runner.request_buckets(80, engine.speculation.cache_tokens(48)))
    return engine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "share"),
    [
        ("small", 0),
        ("itself", 0),
        ("level", 0),
        ("ngram", 0),
        ("small", 0.7),
        ("itself", 0.7),
        ("level", 0.95),
        ("ngram", 0.7),
    ],
)
def test_the_answer_is_the_targets(folder, plain, drafter, share, monkeypatch):
    # Layers so small would stay whole, not a level of them alone.
    monkeypatch.setattr(pieces, "_SHORT_GAP_BYTES", 0)
    engine = open_drafted(folder, plain, speculation(folder, drafter), share)
    assert (engine.model.streamed is not None) == bool(share)
    built = dict(engine.runner.buckets.bucket_ms)
    for config in (GREEDY, DRAWN):
        assert engine.generate(PROMPT, config).tokens == plain.generate(PROMPT, config).tokens
    assert engine.runner.buckets.bucket_ms == built
    counts = engine.speculation.counts
    assert counts.tokens + counts.plain_tokens == 2 * (GREEDY.max_tokens - 1)
    assert counts.tokens == counts.verifications + counts.accepted
    if drafter == "itself":
        assert counts.acceptance_length > 1.5
        if share:
            # Weights are waited for, and the draft goes on meanwhile.
            assert counts.hidden_steps
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("share", [0, 0.7])
def test_as_published_the_answer_is_the_targets(folder, plain, share):
    trees = dataclasses.replace(TreeShape.published(), nodes=(4, 8), room=16)
    options = SpeculationOptions.published(model=folder / "target.jaxllm", trees=trees)
    engine = open_drafted(folder, plain, options, share)
    for config in (GREEDY, DRAWN):
        assert engine.generate(PROMPT, config).tokens == plain.generate(PROMPT, config).tokens
    assert engine.speculation.counts.verifications
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("share", [0, 0.7])
def test_one_request_takes_buckets_of_one_cache(folder, plain, share):
    options = speculation(folder, "small")
    engine = open_drafted(folder, plain, options, share)
    lengths = {getattr(bucket, "cache_tokens", 128) for bucket in engine.runner.buckets.bucket_ms}
    assert lengths == {128}
    assert engine.generate(PROMPT, GREEDY).tokens == plain.generate(PROMPT, GREEDY).tokens
    assert engine.speculation.counts.verifications


@pytest.mark.slow
def test_lines_and_fixed_thresholds_give_the_same_answer(folder, plain):
    line = dataclasses.replace(TREES, branches=1, tips=1)
    for options in (
        {"trees": line, "alpha": 0.3},
        {"fallback": "measured"},
        {"fallback": "learned", "pausing": True},
    ):
        engine = open_drafted(folder, plain, speculation(folder, "itself", **options))
        assert engine.generate(PROMPT, GREEDY).tokens == plain.generate(PROMPT, GREEDY).tokens


@pytest.mark.slow
def test_conversations_stops_and_full_contexts(folder, plain):
    engine = open_drafted(folder, plain, speculation(folder, "itself"), warm_up=True)
    found = []
    for each in (plain, engine):
        session = Session()
        first = each.stream(PROMPT, GREEDY, session=session).result()
        stop = dataclasses.replace(GREEDY, stop=(first.text[9:12],))
        stopped = each.stream(PROMPT, stop, session=session).result()
        # Another turn, over the kept beginning, until the context is full.
        further = dataclasses.replace(GREEDY, max_tokens=200)
        last = each.stream(PROMPT + stopped.text + " the", further, session=session).result()
        found.append((first.tokens, stopped.text, stopped.finish_reason, last.tokens, last.finish_reason))
    assert found[0] == found[1]
    assert found[1][4] == "length"


@pytest.mark.slow
def test_an_answer_that_is_left_harms_no_later_one(folder, plain):
    engine = open_drafted(folder, plain, speculation(folder, "itself"))
    session = Session()
    answering = engine.stream(PROMPT, GREEDY, session=session)
    for _ in range(3):
        next(answering)
    answering.close()
    assert engine.generate("hello", GREEDY).tokens == plain.generate("hello", GREEDY).tokens
    assert (
        engine.stream(PROMPT, GREEDY, session=session).result().tokens
        == plain.generate(PROMPT, GREEDY).tokens
    )


@pytest.mark.slow
def test_a_drafter_gives_its_memory_up_and_takes_it_again(folder, plain):
    engine = open_drafted(folder, plain, speculation(folder, "small"))
    drafts, expected = engine.speculation, plain.generate(PROMPT, GREEDY).tokens
    memory, counts = drafts.drafter.memory, drafts.counts
    assert engine.generate(PROMPT, GREEDY).tokens == expected
    with open_model(folder / "small.jaxllm") as bundle:
        assert bundle.weight_bytes < memory.size_bytes <= memory.most_bytes
    verified = counts.verifications
    drafts.draft(False)
    assert memory.size_bytes == 0
    assert engine.generate(PROMPT, GREEDY).tokens == expected
    assert (memory.size_bytes, counts.verifications) == (0, verified)
    drafts.draft(True)
    assert engine.generate(PROMPT, GREEDY).tokens == expected
    assert memory.size_bytes > 0
    assert counts.verifications > verified
    engine.close()


def test_prompt_lookup_has_no_memory_to_give_up(folder):
    assert NgramDrafter(TREES).memory is None


@pytest.mark.slow
def test_drafts_that_never_help_are_given_up(folder, plain):
    # Of another random model nothing is right.
    engine = open_drafted(folder, plain, speculation(folder, "small", pausing=True))
    assert engine.generate(PROMPT, GREEDY).tokens == plain.generate(PROMPT, GREEDY).tokens
    assert engine.speculation.counts.plain_tokens > engine.speculation.counts.verifications


def test_a_draft_of_other_tokens_is_refused(folder, plain, tmp_path):
    other = tiny_tokenizer()
    swapped = other.tokenizer_json.replace('"!"', '"\\u0000\\u0000"', 1)
    tokenizer = dataclasses.replace(other, tokenizer_json=swapped)
    write_tiny_bundle(tmp_path / "other.jaxllm", cfg=SMALL, params=tiny_params(SMALL), tokenizer=tokenizer)
    options = SpeculationOptions(model=tmp_path / "other.jaxllm", trees=TREES)
    with pytest.raises(ConfigError, match="another tokenizer"):
        open_drafted(folder, plain, options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs a model"),
        ({"drafter": "level"}, "needs a level"),
        ({"drafter": "ngram", "level": 3}, "and no other"),
        ({"drafter": "ngram", "alpha": 2.0}, "alpha must be"),
        ({"drafter": "ngram", "fallback": "oracle"}, "fallback must be"),
        ({"drafter": "ngram", "trees": {"nodes": (8, 4)}}, "ascending"),
        ({"drafter": "ngram", "trees": {"nodes": (8, 256)}}, "room must be"),
        ({"drafter": "ngram", "trees": {"room": 1000}}, "room must be"),
        ({"drafter": "ngram", "trees": {"tips": 0}}, "tips must be"),
        ({"drafter": "ngram", "trees": {"threshold": 0}}, "threshold must be"),
        ({"drafter": "ngram", "trees": {"pacer": "oldest"}}, "pacer must be one of confidence, fair, order"),
    ],
)
def test_options_out_of_their_domain(options, message):
    def made():
        trees = TreeShape(**options.get("trees", {}))
        return SpeculationOptions(**{**options, "trees": trees})

    with pytest.raises(ConfigError, match=message):
        made()


def test_the_draft_counts_in_the_budget(folder, plain):
    options = speculation(folder, "small")
    engine = open_drafted(folder, plain, options, 0.7)
    own = own_bytes(plain, options)
    assert own > fixed_bytes(CFG, plain.options)
    assert engine.model.streamed.plan.fixed_bytes >= drafter_bytes(options, 128, CFG) + own
    with pytest.raises(BudgetExceeded, match="activations, the draft and the runtime"):
        open_drafted(folder, plain, options, 0.1)


def test_there_is_no_such_drafter(folder, plain):
    with pytest.raises(ConfigError, match=r"no drafter 'oracle'; there are model, ngram, level"):
        open_drafted(folder, plain, SpeculationOptions(drafter="oracle"))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_attention_is_counted_as_without_drafts(folder, plain, share):
    """Contexts choose widths by it: nodes that are not kept have attended to nothing."""
    options = dataclasses.replace(OPTIONS, kv_codec="raw", cache_tokens=(128,))
    found, engine = [], plain
    for drafted in (False, True):
        spoken = speculation(folder, "itself") if drafted else None
        memory = 0
        if drafted and share:
            others = fixed_bytes(CFG, engine.options) + drafter_bytes(spoken, OPTIONS.context_tokens, CFG)
            memory = whole_budget(others + int(share * plain.model.bundle.weight_bytes))
        own = dataclasses.replace(options, memory_bytes=memory)
        engine = Engine.open(plain.model.bundle.path, options=own, speculation=spoken, warm_up=False)
        engine.warm_up(prompt_tokens=20, max_tokens=48)
        session = Session()
        answer = engine.stream(PROMPT, GREEDY, session=session).result()
        assert not drafted or engine.speculation.counts.nodes > engine.speculation.counts.accepted
        assert (engine.model.streamed is not None) == (drafted and share > 0)
        assert session.cache is not None
        found.append((answer.tokens, np.asarray(session.cache.mass)[0, : len(session.tokens)]))
    (tokens, mass), (same, ours) = found
    assert same == tokens
    np.testing.assert_allclose(ours, mass, rtol=1e-3)
