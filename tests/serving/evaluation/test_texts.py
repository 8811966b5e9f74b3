"""Perplexity by its definition; two models beside each other; and the experts of one."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

from jaxllm import Engine, EngineOptions
from jaxllm.cli.main import cli
from jaxllm.errors import ConfigError
from jaxllm.kernels import native
from jaxllm.models.decoder import forward, logits
from jaxllm.quant import dequantize
from jaxllm.quant.parts import high_planes
from jaxllm.serving.evaluation.texts import expert_use, greedy_agreement, perplexity
from jaxllm.serving.runners.scorer import Scorer
from tests.models.test_lora import MOE
from tests.serving.conftest import OPTIONS
from tests.serving.speculation.test_speculative import CFG, sharp
from tests.tiny import TINY, tiny_params, tiny_tokenizer, write_tiny_bundle

DOCUMENTS = ["the cat sat on the mat. " * 8, "a dog", "ran and ran to the end of the road. " * 5]


def reference(engine, documents, window):
    """Sum of negative log-likelihoods, and their number, from whole-window logits."""
    params = engine.model.bundle.load()

    @jax.jit
    def scored(tokens):
        hidden, _ = forward(params, tokens, cfg=engine.cfg)
        return jax.nn.log_softmax(logits(params, hidden, cfg=engine.cfg), axis=-1)

    loss, count = 0.0, 0
    for text in documents:
        ids = engine.tokenizer.encode(text)
        for at in range(0, len(ids) - 1, window):
            targets = ids[at + 1 : at + window + 1]
            inputs = np.zeros((1, window), np.int32)
            inputs[0, : len(targets)] = ids[at : at + len(targets)]
            scores = scored(inputs)
            loss -= sum(float(scores[0, i, token]) for i, token in enumerate(targets))
            count += len(targets)
    return loss, count


@pytest.mark.parametrize("window", [20, 128])
def test_equals_the_definition_for_windows_within_and_beyond_a_chunk(engine, window):
    seen = []
    result = perplexity(engine, DOCUMENTS, window_tokens=window, progress=lambda *call: seen.append(call))
    loss, count = reference(engine, DOCUMENTS, window)
    assert (result.tokens, result.documents) == (count, 3)
    assert result.perplexity == pytest.approx(math.exp(loss / count), rel=1e-5)
    size = sum(len(text.encode()) for text in DOCUMENTS)
    assert result.bits_per_byte == pytest.approx(loss / math.log(2) / size, rel=1e-5)
    scored = [call[1:] for call in seen if call[0] == "score"]
    assert scored == sorted(scored)
    assert scored[-1] == (count, count)
    with pytest.raises(ConfigError, match="no token to predict"):
        perplexity(engine, [""])
    for wrong in (-1, 129):
        with pytest.raises(ConfigError, match="window"):
            perplexity(engine, DOCUMENTS, window_tokens=wrong)


@pytest.mark.skipif(not native.kernels().native, reason="planes are read by native kernels")
def test_high_planes_predict_as_a_model_of_their_own(tmp_path):
    options = EngineOptions(context_tokens=64, chunk_tokens=(32,))
    nested = Engine.open(
        write_tiny_bundle(tmp_path / "nested.jaxllm", "int8-nested", cfg=CFG, params=sharp(CFG)),
        options=options,
        warm_up=False,
    )
    params = {
        name: np.asarray(dequantize(weight, jnp.dtype(jnp.float32)))
        for name, weight in high_planes(nested.model.bundle.load()).items()
    }
    alone = Engine.open(
        write_tiny_bundle(tmp_path / "high.jaxllm", cfg=CFG, params=params), options=options, warm_up=False
    )
    high = perplexity(nested, DOCUMENTS, high_planes=True).perplexity
    both, expected = (perplexity(each, DOCUMENTS).perplexity for each in (nested, alone))
    # Activations are quantized in one of them alone.
    assert abs(high - expected) < 0.5 * abs(high - both)
    with pytest.raises(ConfigError, match=r"predict by its high planes, because it has f32 weights"):
        perplexity(alone, DOCUMENTS, high_planes=True)


@pytest.mark.slow
def test_a_short_document_needs_no_graph_of_its_own(tiny_bundle):
    """Caches that other requests made ready, shorter than the window's, have no graph that scores."""
    options = EngineOptions(context_tokens=128, chunk_tokens=(32,), cache_tokens=(32, 128), decode_block=1)
    engine = Engine.open(tiny_bundle, options=options)
    assert perplexity(engine, ["a dog"], window_tokens=128).tokens == 5


# Two models beside each other, and the experts of one.


TEXTS = ["hello there, all of you", "the hell with it " * 9, "x"]


def opened(path, **parts):
    return Engine.open(write_tiny_bundle(path, **parts), options=OPTIONS, warm_up=False)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agreement")
    return opened(folder / "a"), opened(folder / "b", params=tiny_params(TINY, 5))


def test_a_model_agrees_with_itself_and_rarely_with_another(engines, tmp_path):
    first, second = engines
    same = greedy_agreement(first, first, TEXTS)
    assert same.agreement == 1.0
    assert same.right == same.other_right
    other = greedy_agreement(first, second, TEXTS)
    assert other.agreement < 0.3
    assert other.tokens == sum(len(first.tokenizer.encode(text)) - 1 for text in TEXTS)
    swapped = greedy_agreement(second, first, TEXTS)
    assert (swapped.agreement, swapped.right) == (other.agreement, other.other_right)
    files = tiny_tokenizer()
    renamed = files.tokenizer_json.replace('"<|user|>"', '"<|me|>"')
    stranger = opened(tmp_path / "other", tokenizer=dataclasses.replace(files, tokenizer_json=renamed))
    with pytest.raises(ConfigError, match="different tokenizers"):
        greedy_agreement(first, stranger, TEXTS)
    with pytest.raises(ConfigError, match="no experts"):
        expert_use(first, TEXTS)


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
