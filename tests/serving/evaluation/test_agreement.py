"""Two models beside each other, and the experts of one."""

import dataclasses
import json

import numpy as np
import pytest
from click.testing import CliRunner

from jaxllm import Engine
from jaxllm.cli.main import cli
from jaxllm.errors import ConfigError
from jaxllm.serving.evaluation.agreement import greedy_agreement
from jaxllm.serving.evaluation.routing import expert_use
from jaxllm.serving.runners.scorer import Scorer
from tests.models.test_lora import MOE
from tests.serving.conftest import OPTIONS
from tests.tiny import TINY, tiny_params, tiny_tokenizer, write_tiny_bundle

TEXTS = ["hello there, all of you", "the hell with it " * 9, "x"]


def opened(path, **parts):
    return Engine.open(write_tiny_bundle(path, **parts), options=OPTIONS, warm_up=False)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agreement")
    return opened(folder / "a"), opened(folder / "b", params=tiny_params(TINY, 5))


def test_a_model_agrees_with_itself_and_rarely_with_another(engines):
    first, second = engines
    same = greedy_agreement(first, first, TEXTS)
    assert same.agreement == 1.0
    assert same.right == same.other_right
    other = greedy_agreement(first, second, TEXTS)
    assert other.agreement < 0.3
    assert other.tokens == sum(len(first.tokenizer.encode(text)) - 1 for text in TEXTS)
    swapped = greedy_agreement(second, first, TEXTS)
    assert (swapped.agreement, swapped.right) == (other.agreement, other.other_right)


def test_agreement_is_that_of_greedy_answers(engines):
    """Token by token: where the models agree, both would go on with the same token."""
    first, second = engines
    ids = first.tokenizer.encode(TEXTS[0])
    agreed = 0
    for end in range(1, len(ids)):
        heads = [Scorer(each.runner).predict(ids[:end], ids[1 : end + 1])[1][-1] for each in engines]
        agreed += heads[0] == heads[1]
    found = greedy_agreement(first, second, TEXTS[:1])
    assert found.agreement == pytest.approx(agreed / (len(ids) - 1))


def test_other_tokenizers_are_refused(engines, tmp_path):
    other = opened(
        tmp_path / "other",
        tokenizer=dataclasses.replace(
            tiny_tokenizer(), tokenizer_json=tiny_tokenizer().tokenizer_json.replace('"<|user|>"', '"<|me|>"')
        ),
    )
    with pytest.raises(ConfigError, match="different tokenizers"):
        greedy_agreement(engines[0], other, TEXTS)


@pytest.mark.slow
def test_experts_are_counted(tmp_path):
    engine = opened(tmp_path / "moe", cfg=MOE)
    use = expert_use(engine, TEXTS)
    tokens = [engine.tokenizer.encode(text) for text in TEXTS]
    assert use.tokens == sum(len(ids) - 1 for ids in tokens)
    assert np.sum(use.shares, axis=1) == pytest.approx([1.0, 1.0], abs=1e-3)
    assert (use.possible_paths, len(use.shares), len(use.shares[0])) == (16, 2, 4)
    assert use.least <= 1 <= use.most
    assert 0.1 < use.top_paths_share <= 1
    assert 1 <= use.paths <= 16
    # A router that likes one expert leaves the others dead, but for a token's second choice.
    params = dict(tiny_params(MOE))
    for layer in range(MOE.layers):
        router = np.zeros_like(params[f"layers.{layer}.router"])
        params[f"layers.{layer}.router"] = router
    even = expert_use(opened(tmp_path / "even", cfg=MOE, params=params), TEXTS)
    # Equal probabilities go to the lower ids: experts 0 and 1 alone, on one path.
    assert (even.dead, even.paths, even.top_paths_share) == (4, 1, 1.0)
    assert even.shares == ((0.5, 0.5, 0.0, 0.0),) * 2


def test_a_dense_model_has_no_experts_to_count(engines):
    with pytest.raises(ConfigError, match="no experts"):
        expert_use(engines[0], TEXTS)


def test_the_commands_report_agreement_and_routing(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("|".join(TEXTS))
    bundle = str(write_tiny_bundle(tmp_path / "moe", cfg=MOE))
    agreement = ["agreement", str(text), bundle, "-m", bundle, "--separator", "|"]
    routing = ["routing", str(text), "-m", bundle, "--separator", "|"]
    tokens = set()
    for arguments, shown, key in (
        (agreement, "agreement 100.0%", "agreement"),
        (routing, "experts: ", "paths"),
    ):
        result = CliRunner().invoke(cli, ["eval", *arguments, "--json"], catch_exceptions=False)
        facts = json.loads(result.stdout)
        assert facts["weights"] == "f32"
        assert facts[key] > 0
        tokens.add(facts["tokens"])
        result = CliRunner().invoke(cli, ["eval", *arguments], catch_exceptions=False)
        assert shown in result.stdout
    assert len(tokens) == 1
