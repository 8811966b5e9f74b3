"""The tiny LM as a proposer: what it reads, what it may choose, what it costs."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxllm.bundle.levels import elastic_parts
from jaxllm.bundle.tiny_lm import tiny_lm_parts
from jaxllm.elastic.compression import input_rows, marked
from jaxllm.elastic.ladder import Ladder
from jaxllm.elastic.slo import SLOS, Slo
from jaxllm.errors import ConfigError
from jaxllm.models.tiny_lm import forward_both
from jaxllm.serving.elastic import tiny_lm
from jaxllm.serving.elastic.tiny_lm import TinyLmBucket, TinyPlanner
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.server.service import LLMService
from jaxllm.tasks.example import TaskExample
from jaxllm.text.droppable import prompt_tokens
from jaxllm.text.tokenizer import Tokenizer
from tests.tiny import tiny_tokenizer, write_tiny_bundle
from tests.tiny_tlm import tiny_lm as random_tiny_lm

LEVELS, RATIOS = (40, 70, 100), (0.25, 0.5, 1.0)
TINY_LM = random_tiny_lm(LEVELS, RATIOS)
QUESTION = TaskExample(user="the quick brown fox jumps over the lazy dog", answer="", system="say it")
ALL = np.ones((3, 3), bool)


@pytest.fixture(scope="module", params=["floats", "8 bits"])
def planner(request):
    """One whose matrices are small, and one that takes them for large."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "8 bits":
            patch.setattr(tiny_lm, "_LARGE", 1)
        return TinyPlanner(TINY_LM, LEVELS)


@pytest.fixture(scope="module")
def prompt():
    return prompt_tokens(Tokenizer(tiny_tokenizer()), QUESTION)


def read_by_hand(prompt, slo, length=64):
    rows, mask = input_rows(prompt.ids, length)
    return forward_both(TINY_LM.params, marked(rows, slo, TINY_LM.mark_ids), mask, cfg=TINY_LM.cfg)


@pytest.mark.slow
def test_scores_are_the_probabilities_of_the_prompts_tokens(planner, prompt):
    keep, _ = read_by_hand(prompt, SLOS[2])
    expected = 1 / (1 + np.exp(-np.asarray(keep)[0, 2 : 2 + len(prompt.ids)]))
    found = planner.propose(prompt, SLOS[2], ALL)
    # Large weights are at 8 bits where native kernels serve them.
    np.testing.assert_allclose(found.scores, expected, atol=0.05)
    assert planner.scores(prompt).shape == prompt.ids.shape


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slo", "row_tokens"), [(Slo(ttft=0.2, tpot=0.5), 64), (Slo(ttft=0.9, tpot=0.9), 64), (SLOS[4], 20)]
)
def test_the_likeliest_of_the_lightest_choices_is_proposed(prompt, slo, row_tokens):
    """A long prompt is read in rows as it was trained, and all of them decide."""
    assert len(prompt.ids) > 20
    _, heads = read_by_hand(prompt, slo, row_tokens)
    model, share = (np.asarray(each).mean(0) for each in heads)
    trained = random_tiny_lm(LEVELS, RATIOS, row_tokens=row_tokens) if row_tokens < 64 else TINY_LM
    found = TinyPlanner(trained, LEVELS, decision="lightest").propose(prompt, slo, ALL)
    assert found.level == LEVELS[int(np.argmax(model))]
    assert found.prompt_ratio == RATIOS[int(np.argmax(share))]


@pytest.mark.parametrize("slo", [Slo(ttft=0.2, tpot=0.5), Slo(ttft=0.9, tpot=0.9)])
@pytest.mark.parametrize("smallest", [True, False])
def test_the_choice_that_is_likeliest_right_is_proposed(planner, prompt, slo, smallest):
    # Either more of the model or more of the prompt.
    allowed = np.zeros((3, 3), bool)
    allowed[(0, 1, 2), (2, 1, 0)] = True
    if not smallest:
        allowed[0, 2] = False
    _, heads = read_by_hand(prompt, slo)
    model, share = (np.exp(np.asarray(each, np.float64)[0]) for each in heads)
    right = np.cumsum(model)[:, None] * np.cumsum(share)
    level, ratio = np.unravel_index(np.argmax(np.where(allowed, right, 0)), right.shape)
    found = planner.propose(prompt, slo, allowed)
    assert (found.level, found.prompt_ratio) == (LEVELS[level], RATIOS[ratio])
    # With time for everything everything is taken.
    found = planner.propose(prompt, slo, ALL)
    assert (found.level, found.prompt_ratio) == (LEVELS[-1], RATIOS[-1])


def test_only_what_is_allowed_is_proposed(planner, prompt):
    for level, ratio in itertools.product(range(3), repeat=2):
        allowed = np.zeros((3, 3), bool)
        allowed[level, ratio] = True
        found = planner.propose(prompt, SLOS[0], allowed)
        assert (found.level, found.prompt_ratio) == (LEVELS[level], RATIOS[ratio])
    # Levels that it does not know are never proposed.
    other = TinyPlanner(TINY_LM, (20, 40, 100))
    assert {other.propose(prompt, slo, ALL).level for slo in SLOS} <= {40, 100}
    with pytest.raises(ConfigError, match="of which none is served"):
        TinyPlanner(TINY_LM, (20, 50))


def test_long_prompts_take_several_passes(planner, prompt):
    more = dataclasses.replace(QUESTION, user=QUESTION.user + " and so on" * 12)
    long = prompt_tokens(Tokenizer(tiny_tokenizer()), more)
    passes = -(-len(long.ids) // 62)
    assert passes > 2
    assert planner.propose(long, SLOS[0], ALL).scores.shape == long.ids.shape
    assert planner.planning_ms(len(long.ids)) == pytest.approx(passes * planner.planning_ms(62))
    assert planner.planning_ms(10) > 0
    # A tokenizer of its own scores the same words.
    own = TinyPlanner(random_tiny_lm(LEVELS, RATIOS, tokenizer=tiny_tokenizer(chat=False)), LEVELS)
    found = own.propose(prompt, SLOS[1], ALL)
    assert found.scores.shape == prompt.ids.shape
    for word in set(prompt.words.tolist()):
        assert len(set(found.scores[prompt.words == word].tolist())) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("own_compilations")
def test_a_service_plans_with_the_bundles_tiny_lm(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    parts = {**elastic_parts(Ladder(levels=LEVELS)), **tiny_lm_parts(TINY_LM)}
    path = write_tiny_bundle(tmp_path / "tiny.jaxllm", parts=parts)
    options = EngineOptions(context_tokens=64, chunk_tokens=(16, 64), buckets_bytes=1 << 28)
    service = LLMService.open(path, options=options)
    answer = service.call(QUESTION.user, slo=Slo(ttft=0.99, tpot=0.99), max_tokens=4).result()
    assert answer.plan.source in ("proposed", "fallback", "nearest")
    # A second process reads its buckets.
    compiled = []
    monkeypatch.setattr(TinyLmBucket, "lower", lambda *args: compiled.append(args))
    LLMService.open(path, options=options)
    assert compiled == []
