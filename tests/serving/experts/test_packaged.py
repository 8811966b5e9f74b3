"""The packaged mixture answers with drafts token for token as without, in memory and with experts streamed.

`JAXLLM_TEST_ANSWERS=60 pytest -m slow tests/serving/experts/test_packaged.py` asks for 60 greedy
and as many drawn answers of each engine.
"""

import dataclasses
import functools
import itertools
import os

import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.bundle import Bundle, expert_widths
from jaxllm.prepare import prepare
from jaxllm.sampling import Sampling
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.experts.store import ExpertStore
from jaxllm.serving.ground.bundles import find_model
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions, TreeShape
from jaxllm.serving.opening.weight_source import budget_with_experts
from jaxllm.serving.runners.layerwise import LayerwiseRunner
from jaxllm.serving.weights.memory_plan import drafter_bytes
from tests.kernels.switching import needs_native

ANSWERS = int(os.environ.get("JAXLLM_TEST_ANSWERS", "2"))
TOKENS, EXPERTS = 40, 10
TREES = TreeShape(nodes=(16, 32), room=32)
OPTIONS = EngineOptions(
    context_tokens=128, cache_tokens=(128,), chunk_tokens=(32,), decode_block=8, trees=TREES, buckets_bytes=0
)
# Always: what does not pay is as exact as what does.
HOW = {"trees": TREES, "pausing": False, "pipelined": False}
DRAFTERS = {
    "ngram": SpeculationOptions(drafter="ngram", **HOW),
    "model": SpeculationOptions(drafter="model", model="draft", **HOW),
}
WHO = ("a little girl named Lily", "a boy called Tim", "a big red dog", "an old cat", "a tiny bird", "a bear")
DID = (
    "who loved to play", "who wanted a toy", "who went to the park", "who found a box", "who was very sad",
    "who liked to sing", "who saw a tree", "who had a friend", "who could not sleep", "who ate an apple",
)  # fmt: skip


def requests():
    """Prompts and how they are answered, greedily and drawn."""
    for number in range(ANSWERS):
        prompt = f"Once upon a time, there was {WHO[number % len(WHO)]} {DID[number // len(WHO) % len(DID)]}."
        for sampling in (Sampling(temperature=0.0), Sampling(temperature=0.8, seed=number)):
            yield prompt, GenerationConfig(max_tokens=TOKENS, ignore_eos=True, sampling=sampling)


def answers(path, *, streamed, drafter=None):
    """Of one engine, and how many trees its target read."""
    speculation, options = DRAFTERS.get(drafter), OPTIONS
    if streamed:
        with Bundle.open(path) as bundle:
            room = EXPERTS * ExpertStore(bundle).largest_bytes
            if speculation is not None:
                room += drafter_bytes(speculation, OPTIONS.context_tokens, bundle.cfg)
            resolved = OPTIONS.resolve(bundle.cfg, quantized=True)
            options = dataclasses.replace(OPTIONS, memory_bytes=budget_with_experts(bundle, resolved, room))
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


def cases(*daily):
    """Widths, where experts are, and who drafts."""
    every = itertools.product((8, 4, 2), (False, True), (None, "ngram", "model"))
    return [
        pytest.param(*each, marks=() if each in daily else pytest.mark.campaign)
        for each in every
        if each[1] or each[2]
    ]


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize(
    ("width", "streamed", "drafter"), cases((4, False, "ngram"), (4, True, "ngram"), (8, True, "model"))
)
def test_the_answers_are_those_of_plain_decoding_in_memory(made, width, streamed, drafter):
    path, plain = made(width)
    found, trees = answers(path, streamed=streamed, drafter=drafter)
    differing = [number for number, pair in enumerate(zip(found, plain, strict=True)) if pair[0] != pair[1]]
    assert not differing, f"{len(differing)} of {len(found)} answers differ"
    assert len({tuple(each) for each in found}) > ANSWERS
    assert (trees > 0) == (drafter is not None)


@needs_native
@pytest.mark.slow
def test_laid_apart_it_answers_as_it_is_packaged(made):
    """At its own width."""
    assert answers(find_model("moe"), streamed=False)[0] == made(8)[1]


def test_its_experts_can_be_streamed():
    with Bundle.open(find_model("moe")) as bundle:
        assert bundle.layout.experts_apart
        assert np.all(expert_widths(bundle) == 8)
