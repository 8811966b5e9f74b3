"""Answers drafted by nested weights are those of the weights alone: many of them, and in distribution."""

import dataclasses

import numpy as np
import pytest
import scipy.stats

from jaxllm import Engine
from jaxllm.bundle.levels import elastic_parts
from jaxllm.elastic.ladder import Ladder
from jaxllm.kernels import native
from jaxllm.sampling import Sampling
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from jaxllm.serving.weights.footprint import drafter_bytes, fixed_bytes
from jaxllm.serving.weights.prefetch_plan import whole_budget
from tests.serving.speculation.test_speculative import CFG, OPTIONS, TREES, sharp
from tests.tiny import write_tiny_bundle

pytestmark = [
    pytest.mark.usefixtures("shipped_compilations"),
    pytest.mark.slow,
    pytest.mark.skipif(not native.kernels().native, reason="planes are read by native kernels"),
]

MIXTURE = dataclasses.replace(
    CFG, model_type="qwen3_moe", qk_norm=True, layers=4, attention_windows=(), experts=4,
    experts_per_token=2, expert_ffn_size=96, sparse_layers=(True, False, True, True),
)  # fmt: skip
ANSWERS, TOKENS = 24, 20
# All cases together are more than 200 answers.
CASES = [(CFG, level, share) for share in (0, 0.8) for level in (20, 50, 0)]
CASES += [(MIXTURE, level, 0) for level in (20, 50, 0)] + [(MIXTURE, 0, 0.9)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder, parts = tmp_path_factory.mktemp("nested"), elastic_parts(Ladder(levels=(20, 50, 100)))

    def written(name, cfg):
        path = folder / f"{name}.jaxllm"
        return write_tiny_bundle(path, "int8-nested", cfg=cfg, params=sharp(cfg), parts=parts)

    return {CFG: written("dense", CFG), MIXTURE: written("moe", MIXTURE)}


@pytest.fixture(scope="module")
def plain(paths):
    return {cfg: Engine.open(path, options=OPTIONS, warm_up=False) for cfg, path in paths.items()}


def prompts(cfg, count):
    draw = np.random.default_rng(3)
    return [draw.integers(3, cfg.vocab_size, 12).tolist() for _ in range(count)]


def config(place, tokens=TOKENS):
    """Every other answer is drawn."""
    drawn = Sampling(temperature=0.9, top_p=0.95, seed=place, repetition_penalty=1.1)
    return GenerationConfig(max_tokens=tokens, ignore_eos=True, sampling=drawn if place % 2 else Sampling())


def drafted(plain, cfg, path, level, share):
    options = SpeculationOptions(
        drafter="nested", level=level, trees=TREES, pausing=False, fallback="fixed", alpha=1e-6
    )
    memory = 0
    if share:
        others = fixed_bytes(cfg, dataclasses.replace(plain.options, trees=TREES))
        others += drafter_bytes(options, OPTIONS.context_tokens, cfg)
        memory = whole_budget(others + int(share * plain.model.bundle.weight_bytes))
    engine_options = dataclasses.replace(OPTIONS, memory_bytes=memory)
    engine = Engine.open(path, options=engine_options, speculation=options, warm_up=False)
    ready(engine)
    return engine


def ready(engine):
    engine.warm_up(prompt_tokens=12, max_tokens=TOKENS)
    room = engine.speculation.cache_tokens(TOKENS) if engine.speculation else TOKENS
    engine.runner.fill(engine.runner.request_buckets(12, room))


@pytest.mark.parametrize(("cfg", "level", "share"), CASES)
def test_every_answer_is_the_weights_own(plain, paths, cfg, level, share):
    ready(plain[cfg])
    engine = drafted(plain[cfg], cfg, paths[cfg], level, share)
    assert (engine.model.streamed is not None) == bool(share)
    same = [
        engine.generate(prompt, config(place)).tokens == plain[cfg].generate(prompt, config(place)).tokens
        for place, prompt in enumerate(prompts(cfg, ANSWERS))
    ]
    assert all(same), f"{sum(same)} of {len(same)} answers are the same"
    counts = engine.speculation.counts
    # A level of random weights foretells next to nothing.
    assert counts.verifications > counts.plain_tokens
    assert counts.accepted or level
    engine.close()


def test_drawn_tokens_have_the_distribution_of_the_weights(plain, paths):
    """Of other seeds than those of plain answers, so that nothing is the same but the distribution."""
    ready(plain[CFG])
    engine = drafted(plain[CFG], CFG, paths[CFG], 0, 0)
    prompt, count, places = prompts(CFG, 1)[0], 400, 4

    def tokens(engine, first_seed):
        found = []
        for seed in range(first_seed, first_seed + count):
            sampling = Sampling(temperature=0.7, top_k=3, seed=seed)
            asked = GenerationConfig(max_tokens=places, ignore_eos=True, sampling=sampling)
            found.append(engine.generate(prompt, asked).tokens)
        return np.array(found)

    ours, theirs = tokens(engine, 0), tokens(plain[CFG], 10_000)
    assert engine.speculation.counts.accepted
    for place in range(1, places):
        # Rare tokens are one category.
        common = [token for token in np.unique(theirs[:, place]) if (theirs[:, place] == token).sum() >= 10]
        table = [[(each[:, place] == token).sum() for token in common] for each in (ours, theirs)]
        table = np.array([[*row, count - sum(row)] for row in table])
        table = table[:, table.sum(axis=0) > 0]
        assert table.shape[1] == 1 or scipy.stats.chi2_contingency(table).pvalue > 1e-4
    engine.close()
