"""A mixture of experts from folder to answer, at every width: the engine against the plainest loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import Engine, EngineOptions, GenerationConfig
from jaxllm.bundle import WEIGHT_FORMATS, Bundle
from jaxllm.models.decoder import forward, logits
from jaxllm.prepare import prepare
from tests.kernels.switching import fall_back
from tests.tiny import TINY, tiny_params, write_tiny_folder

CFG = dataclasses.replace(
    TINY, model_type="qwen3_moe", qk_norm=True, layers=3, attention_windows=(), experts=4,
    experts_per_token=2, expert_ffn_size=48, sparse_layers=(True, False, True),
)  # fmt: skip
OPTIONS = EngineOptions(context_tokens=64, chunk_tokens=(16,), cache_tokens=(64,), decode_block=4)
PROMPT = np.random.default_rng(0).integers(0, CFG.vocab_size, 21).tolist()
NEW = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Attention and routers far from uniform, so that answers depend on both."""
    params = {
        name: np.asarray(value) * np.float32(3.0 if name.endswith("router") else 1.0)
        for name, value in tiny_params(CFG).items()
    }
    return write_tiny_folder(tmp_path_factory.mktemp("experts") / "folder", cfg=CFG, params=params)


def plain_loop(params):
    """Scores of the token after each, and greedy ids, by feeding the whole sequence anew each time."""

    @jax.jit
    def step(tokens):
        hidden, _ = forward(params, tokens, cfg=CFG)
        return logits(params, hidden, cfg=CFG)

    tokens = np.zeros((1, len(PROMPT) + NEW), np.int32)
    tokens[0, : len(PROMPT)] = PROMPT
    for at in range(len(PROMPT), len(PROMPT) + NEW):
        tokens[0, at] = jnp.argmax(step(tokens)[0, at - 1])
    return tokens[0, len(PROMPT) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
def test_answers_are_those_of_the_plain_loop(folder, tmp_path, weights, monkeypatch):
    if weights.startswith("int4") or weights == "int8-nested":
        # Native products by planes of four bits round the activations of one token and of many
        # differently: enough to turn a near tie of a random model.
        fall_back(monkeypatch)
    bundle = tmp_path / "model.jaxllm"
    prepare(folder, bundle, weights=weights)
    with Bundle.open(bundle) as opened:
        assert opened.cfg == CFG
        expected = plain_loop(opened.load())
    engine = Engine.open(bundle, options=OPTIONS, warm_up=False)
    engine.warm_up(prompt_tokens=len(PROMPT), max_tokens=NEW)
    answer = engine.generate(PROMPT, GenerationConfig(max_tokens=NEW, ignore_eos=True))
    assert answer.tokens == expected
    assert len(set(expected)) > 1
