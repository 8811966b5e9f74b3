"""High planes that draft for their own weights: answers are the weights' own, in memory and streamed."""

import dataclasses
import re

import numpy as np
import pytest
import scipy.stats

from jaxllm import Engine
from jaxllm.bundle.levels import elastic_parts
from jaxllm.checkpoints.peft import write_adapter
from jaxllm.elastic.ladder import Ladder
from jaxllm.errors import BudgetExceeded, ConfigError
from jaxllm.kernels import native
from jaxllm.models.lora import LoraConfig
from jaxllm.sampling import Sampling
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from jaxllm.serving.host.direct_io import PAGE
from jaxllm.serving.opening import engine as opening
from jaxllm.serving.speculation import drafters
from tests.models.test_lora import random_adapter
from tests.serving.memory import budget
from tests.serving.speculation.test_speculative import (
    CFG,
    DRAWN,
    GREEDY,
    OPTIONS,
    PROMPT,
    TREES,
    open_drafted,
    ready,
    sharp,
)
from tests.tiny import tiny_params, write_tiny_bundle

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not native.kernels().native, reason="planes are read by native kernels"),
]


MIXTURE = dataclasses.replace(
    CFG, model_type="qwen3_moe", qk_norm=True, layers=4, attention_windows=(), experts=4,
    experts_per_token=2, expert_ffn_size=96, sparse_layers=(True, False, True, True),
)  # fmt: skip

TIED = dataclasses.replace(CFG, tied_head=True)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Without drafts, of a dense model and of a mixture."""
    folder, parts = tmp_path_factory.mktemp("nested"), elastic_parts(Ladder(levels=(20, 50, 100)))

    def opened(name, cfg):
        path = folder / f"{name}.jaxllm"
        write_tiny_bundle(path, "int8-nested", cfg=cfg, params=sharp(cfg), parts=parts)
        return Engine.open(path, options=OPTIONS, warm_up=False)

    return {CFG: opened("dense", CFG), TIED: opened("tied", TIED), MIXTURE: opened("moe", MIXTURE)}


@pytest.fixture(scope="module")
def plain(engines):
    return engines[CFG]


def answer(engine, config):
    engine.runner.fill(engine.runner.buckets_for(len(engine.tokenizer.encode(PROMPT)), config.max_tokens))
    return engine.generate(PROMPT, config).tokens


def drafts(**more):
    return SpeculationOptions(
        **{"drafter": "nested", "trees": TREES, "pausing": False, "fallback": "fixed", "alpha": 1e-6}
        | {"lookup": False} | more
    )  # fmt: skip


@pytest.mark.parametrize(
    ("cfg", "share", "whole"), [(CFG, 0.71, False), (TIED, 0.72, False), (TIED, 0.9, True)]
)
def test_the_answer_is_that_of_both_planes(engines, compiles, monkeypatch, cfg, share, whole):
    """Streamed; of weights in memory and of levels `test_every_answer_is_the_weights_own` tells."""
    plain = engines[cfg]
    engine = open_drafted(plain, drafts(), share)
    streamed = engine.model.streamed
    # The drafter goes on from the target's keys and values, and reads no prompt.
    monkeypatch.delattr(drafters, "prefill_prompt")
    with compiles() as count:
        found = [engine.generate(PROMPT, config).tokens for config in (GREEDY, DRAWN)]
    assert count() == 0
    assert found == [answer(plain, config) for config in (GREEDY, DRAWN)]
    counts = engine.speculation.counts
    assert counts.tokens + counts.plain_tokens == 2 * (GREEDY.max_tokens - 1)
    # Random weights are hard to foretell at 4 bits.
    assert counts.acceptance_length > 1.05
    # High planes were read once, low planes in each pass, the head's too unless all of it is in memory.
    passes, layout = counts.verifications + counts.plain_tokens + 2, plain.model.bundle.layout
    low = sum(each.size_bytes for name, each in layout.segments.items() if name.endswith(".low"))
    assert streamed.counts.read_bytes <= (passes + 1) * low
    pieces = CFG.layers + (0 if whole else len(streamed.head))
    assert f"{'all' if whole else 'that'} of the head" in streamed.facts()["plan"]
    assert re.search(rf"head: \d of {pieces} in .*; a pass reads \d", streamed.facts()["plan"])
    # Neither holds an untied embedding, of which only the rows of tokens are read.
    assert streamed.staying_bytes <= share * plain.model.bundle.weight_bytes + 2 * PAGE
    engine.close()


def test_a_context_keeps_the_attention_of_the_target_alone(plain):
    """Drafts attend, and are not counted: chunks are stored as if nothing had been drafted."""
    whole, drafted = (open_drafted(plain, each, kv_codec="channel") for each in (None, drafts()))
    masses = []
    for engine in (whole, drafted):
        run = engine.stream(PROMPT, GREEDY)
        run.result()
        assert run.session.cache is not None
        masses.append(run.session.cache.mass[0, : len(run.session.tokens) - 1])
    assert drafted.speculation.counts.accepted
    assert abs(masses[0] - masses[1]).max() < 1e-4 * abs(masses[0]).max()


def test_an_adapter_drafts_as_well(plain, tmp_path):
    lora = LoraConfig(rank=4, alpha=16)
    write_adapter(tmp_path / "adapter", CFG, lora, random_adapter(CFG, lora, 0))
    adapted, drafted = (open_drafted(plain, each, adapter_rank=4) for each in (None, drafts()))
    before = drafted.generate(PROMPT, GREEDY).tokens
    for engine in (adapted, drafted):
        engine.set_adapter(tmp_path / "adapter")
    after = drafted.generate(PROMPT, GREEDY).tokens
    assert after == answer(adapted, GREEDY) != before
    drafted.set_adapter(None)
    assert drafted.generate(PROMPT, GREEDY).tokens == before


def test_where_there_are_no_high_planes_or_no_room_for_them(plain, tmp_path):
    with pytest.raises(BudgetExceeded, match="at least"):
        open_drafted(plain, drafts(), 0.4)
    other = write_tiny_bundle(tmp_path / "plain.jaxllm", "int8", cfg=CFG, params=tiny_params(CFG))
    with pytest.raises(ConfigError, match="prepare the model with --weights int8-nested"):
        Engine.open(other, options=OPTIONS, speculation=drafts(), warm_up=False)


def test_by_itself_a_model_drafts_where_it_can_and_may_pay(plain, tmp_path, monkeypatch):
    path = plain.model.bundle.path
    own = SpeculationOptions.by_itself()
    asked = drafts(trees=own.trees)

    def drafter(path, share=0.0):
        memory = budget(plain, share, asked) if share else 0
        options = dataclasses.replace(OPTIONS, memory_bytes=memory)
        engine = Engine.open(path, options=options, speculation=own, warm_up=False)
        found = None if engine.speculation is None else engine.speculation.options.drafter
        engine.close()
        return found

    # So small that it is in the processor's caches.
    assert drafter(path) is None
    # Streamed it drafts, by lookup if the memory has no room for high planes.
    assert (drafter(path, 0.8), drafter(path, 0.45)) == ("nested", "ngram")
    with pytest.raises(BudgetExceeded, match="needs at least"):
        drafter(path, 0.2)
    monkeypatch.setattr(opening, "_LEAST_DRAFTING_BYTES", 0)
    assert drafter(path) == "nested"
    other = write_tiny_bundle(tmp_path / "plain.jaxllm", "int8", cfg=CFG, params=tiny_params(CFG))
    assert drafter(other) is None
    engine = Engine.open(path, options=OPTIONS, speculation=own, level=20, warm_up=False)
    assert engine.speculation is None


# Many answers are those of the weights alone, and drawn ones in distribution.

ANSWERS, TOKENS = 24, 20
# All cases together are more than 200 answers.
CASES = [(CFG, 20, 0), (CFG, 0, 0), (CFG, 0, 0.8), (MIXTURE, 20, 0), (MIXTURE, 0, 0.9)]
CASES += [pytest.param(*each, marks=pytest.mark.campaign) for each in ((CFG, 50, 0.8), (MIXTURE, 0, 0))]


def prompts(cfg, count):
    draw = np.random.default_rng(3)
    return [draw.integers(3, cfg.vocab_size, 12).tolist() for _ in range(count)]


def config(place, tokens=TOKENS):
    """Every other answer is drawn."""
    drawn = Sampling(temperature=0.9, top_p=0.95, seed=place, repetition_penalty=1.1)
    return GenerationConfig(max_tokens=tokens, ignore_eos=True, sampling=drawn if place % 2 else Sampling())


@pytest.mark.usefixtures("shipped_compilations")
@pytest.mark.parametrize(("cfg", "level", "share"), CASES)
def test_every_answer_is_the_weights_own(engines, cfg, level, share):
    ready(engines[cfg], 12, TOKENS)
    engine = open_drafted(engines[cfg], drafts(level=level, lookup=True), share, tokens=(12, TOKENS))
    assert (engine.model.streamed is not None) == bool(share)
    same = [
        engine.generate(prompt, config(place)).tokens == engines[cfg].generate(prompt, config(place)).tokens
        for place, prompt in enumerate(prompts(cfg, ANSWERS))
    ]
    assert all(same), f"{sum(same)} of {len(same)} answers are the same"
    counts = engine.speculation.counts
    # A level of random weights foretells next to nothing.
    assert counts.verifications > counts.plain_tokens
    assert counts.accepted or level
    engine.close()


@pytest.mark.usefixtures("shipped_compilations")
def test_drawn_tokens_have_the_distribution_of_the_weights(engines):
    """Of other seeds than those of engines answers, so that nothing is the same but the distribution."""
    ready(engines[CFG], 12, TOKENS)
    engine = open_drafted(engines[CFG], drafts(lookup=True), tokens=(12, TOKENS))
    prompt, count, places = prompts(CFG, 1)[0], 400, 4

    def tokens(engine, first_seed):
        found = []
        for seed in range(first_seed, first_seed + count):
            sampling = Sampling(temperature=0.7, top_k=3, seed=seed)
            asked = GenerationConfig(max_tokens=places, ignore_eos=True, sampling=sampling)
            found.append(engine.generate(prompt, asked).tokens)
        return np.array(found)

    ours, theirs = tokens(engine, 0), tokens(engines[CFG], 10_000)
    assert engine.speculation.counts.accepted
    for place in range(1, places):
        # Rare tokens are one category.
        common = [token for token in np.unique(theirs[:, place]) if (theirs[:, place] == token).sum() >= 10]
        table = [[(each[:, place] == token).sum() for token in common] for each in (ours, theirs)]
        table = np.array([[*row, count - sum(row)] for row in table])
        table = table[:, table.sum(axis=0) > 0]
        assert table.shape[1] == 1 or scipy.stats.chi2_contingency(table).pvalue > 1e-4
    engine.close()
