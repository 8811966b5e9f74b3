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
from jaxllm.serving.host.storage import Storage
from jaxllm.serving.speculation.drafter import NgramDrafter
from jaxllm.serving.weights import pieces
from jaxllm.serving.weights.memory_plan import drafter_bytes, fixed_bytes
from tests.serving.memory import budget
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
    }.get(drafter)
    if own is None:
        trees = dataclasses.replace(TreeShape.published(), nodes=(4, 8), room=16)
        return SpeculationOptions.published(model=folder / "target.jaxllm", trees=trees)
    return SpeculationOptions(
        **{"trees": TREES, "pausing": False, "fallback": "fixed", "alpha": 1e-6, **own, **options}
    )


def open_drafted(plain, options, share=0.0, *, tokens=(80, 48), warm_up=False, **more):
    """An engine with a drafter; unless `warm_up`, with the graphs for one request alone."""
    # Storage is so slow that there is something to wait for.
    engine_options = dataclasses.replace(
        OPTIONS,
        memory_bytes=budget(plain, share, options) if share else 0,
        storage=Storage(latency_ms=4),
        **more,
    )
    engine = Engine.open(
        plain.model.bundle.path, options=engine_options, speculation=options, warm_up=warm_up
    )
    if not warm_up:
        ready(engine, *tokens)
    return engine


def ready(engine, prompt_tokens, max_tokens):
    """Compiles the graphs for one request, those that it would not wait for, too."""
    engine.warm_up(prompt_tokens=prompt_tokens, max_tokens=max_tokens)
    room = engine.speculation.cache_tokens(max_tokens) if engine.speculation else max_tokens
    engine.runner.fill(engine.runner.buckets_for(prompt_tokens, room))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "share"),
    [
        ("itself", 0),
        ("level", 0),
        ("ngram", 0),
        ("small", 0.7),
        ("itself", 0.7),
        ("published", 0.7),
        pytest.param("level", 0.95, marks=pytest.mark.campaign),
    ],
)
def test_the_answer_is_the_targets(folder, plain, drafter, share, monkeypatch):
    # Layers so small would stay whole, not a level of them alone.
    monkeypatch.setattr(pieces, "_SHORT_GAP_BYTES", 0)
    engine = open_drafted(plain, speculation(folder, drafter), share)
    assert (engine.model.streamed is not None) == bool(share)
    built = dict(engine.runner.buckets.bucket_ms)
    # One request takes buckets of one cache.
    assert {getattr(bucket, "cache_tokens", 128) for bucket in built} == {128}
    for config in (GREEDY, DRAWN):
        assert engine.generate(PROMPT, config).tokens == plain.generate(PROMPT, config).tokens
    assert engine.runner.buckets.bucket_ms == built
    counts = engine.speculation.counts
    assert counts.tokens + counts.plain_tokens == 2 * (GREEDY.max_tokens - 1)
    assert counts.tokens == counts.verifications + counts.accepted
    assert counts.verifications or drafter != "published"
    if drafter == "itself":
        assert counts.acceptance_length > 1.5
        if share:
            # Weights are waited for, and the draft goes on meanwhile.
            assert counts.hidden_steps
    engine.close()


@pytest.mark.slow
def test_lines_and_other_thresholds_give_the_same_answer(folder, plain):
    line, expected = dataclasses.replace(TREES, branches=1, tips=1), plain.generate(PROMPT, GREEDY).tokens
    for drafter, options in (
        ("itself", {"trees": line, "alpha": 0.3}),
        ("itself", {"trees": line, "fallback": "measured"}),
        # Of another random model nothing is right: its drafts are given up.
        ("small", {"fallback": "learned", "pausing": True}),
    ):
        engine = open_drafted(plain, speculation(folder, drafter, **options))
        assert engine.generate(PROMPT, GREEDY).tokens == expected
        counts = engine.speculation.counts
        assert drafter == "itself" or counts.plain_tokens > counts.verifications
        engine.close()


@pytest.mark.slow
def test_conversations_stops_and_full_contexts(folder, plain):
    engine = open_drafted(plain, speculation(folder, "itself"), warm_up=True)
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
    # An answer that is left harms no later one.
    session = Session()
    answering = engine.stream(PROMPT, GREEDY, session=session)
    for _ in range(3):
        next(answering)
    answering.close()
    assert engine.generate("hello", GREEDY).tokens == plain.generate("hello", GREEDY).tokens
    assert engine.stream(PROMPT, GREEDY, session=session).result().tokens == found[0][0]
    engine.close()


@pytest.mark.slow
def test_a_drafter_gives_its_memory_up_and_takes_it_again(folder, plain):
    engine = open_drafted(plain, speculation(folder, "small"))
    drafts, expected = engine.speculation, plain.generate(PROMPT, GREEDY).tokens
    memory, counts = drafts.drafter, drafts.counts
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs a model"),
        ({"drafter": "level"}, "needs a level"),
        ({"drafter": "ngram", "level": 3}, "and no other"),
        ({"drafter": "ngram", "fallback": "oracle"}, "fallback must be"),
        ({"drafter": "ngram", "trees": {"nodes": (8, 256)}}, "room must be"),
        ({"drafter": "ngram", "trees": {"pacer": "oldest"}}, "pacer must be one of confidence, fair, order"),
    ],
)
def test_options_out_of_their_domain(options, message):
    with pytest.raises(ConfigError, match=message):  # noqa: PT012
        trees = TreeShape(**options.get("trees", {}))
        SpeculationOptions(**{**options, "trees": trees})


def test_the_draft_counts_in_the_budget(folder, plain, tmp_path):
    options = speculation(folder, "small")
    engine = open_drafted(plain, options, 0.7)
    # What the target takes besides its weights, the logits of its trees among it.
    own = fixed_bytes(CFG, dataclasses.replace(plain.options, trees=options.trees))
    assert own > fixed_bytes(CFG, plain.options)
    assert engine.model.streamed.plan.fixed_bytes >= drafter_bytes(options, 128, CFG) + own
    engine.close()
    with pytest.raises(BudgetExceeded, match="activations, the draft and the runtime"):
        open_drafted(plain, options, 0.1)
    # Prompt lookup has no memory to give up.
    assert NgramDrafter(TREES).most_bytes == 0
    with pytest.raises(ConfigError, match=r"no drafter 'oracle'; there are model, ngram, level"):
        open_drafted(plain, SpeculationOptions(drafter="oracle"))
    files = tiny_tokenizer()
    swapped = files.tokenizer_json.replace('"!"', '"\\u0000\\u0000"', 1)
    other = dataclasses.replace(files, tokenizer_json=swapped)
    write_tiny_bundle(tmp_path / "other.jaxllm", cfg=SMALL, params=tiny_params(SMALL), tokenizer=other)
    with pytest.raises(ConfigError, match="another tokenizer"):
        open_drafted(plain, SpeculationOptions(model=tmp_path / "other.jaxllm", trees=TREES))


@pytest.mark.slow
def test_attention_is_counted_as_without_drafts(folder, plain):
    """Contexts choose widths by it: nodes that are not kept have attended to nothing."""
    options = dataclasses.replace(OPTIONS, kv_codec="raw", cache_tokens=(128,))
    found, engine = [], plain
    for drafted in (False, True):
        spoken = speculation(folder, "itself") if drafted else None
        memory = budget(engine, 0.5, spoken) if drafted else 0
        own = dataclasses.replace(options, memory_bytes=memory)
        engine = Engine.open(plain.model.bundle.path, options=own, speculation=spoken, warm_up=False)
        engine.warm_up(prompt_tokens=20, max_tokens=48)
        session = Session()
        answer = engine.stream(PROMPT, GREEDY, session=session).result()
        assert not drafted or engine.speculation.counts.nodes > engine.speculation.counts.accepted
        assert (engine.model.streamed is not None) == drafted
        assert session.cache is not None
        found.append((answer.tokens, np.asarray(session.cache.mass)[0, : len(session.tokens)]))
    (tokens, mass), (same, ours) = found
    assert same == tokens
    np.testing.assert_allclose(ours, mass, rtol=1e-3)
