"""Weights that overflow: every way to answer says so, and none says token 0 or nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ConfigError, NotFinite
from jaxllm.export.programs.runner import _most_likely
from jaxllm.sampling import NO_TOKEN, Sampling, sample, sampler_state
from jaxllm.serving.engine.decoding import Decoding
from jaxllm.serving.engine.request import GenerationConfig, Session
from jaxllm.serving.engine.step import Answer
from jaxllm.speculation.tree import choices, new_tree
from tests.serving.experts.conftest import OPTIONS
from tests.serving.ways import opened

SAMPLINGS = {
    "greedy": Sampling(),
    "drawn": Sampling(temperature=1.0, top_p=0.9, top_k=5, seed=1),
    "penalized": Sampling(repetition_penalty=1.3, logit_bias=((5, -np.inf),)),
}


def overflowing(params):
    """The last norm's scale makes all logits infinite or NaN; each weight is finite."""
    return {**params, "final_norm.scale": np.full_like(params["final_norm.scale"], 3e38)}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["resident", "streamed", "drafted", "experts"])
def test_an_answer_of_no_numbers_is_an_error(way, tmp_path):
    path = tmp_path / "overflowing.jaxllm"
    engine = opened(way, path, OPTIONS, change=overflowing, warm_up=False)
    engine.warm_up(prompt_tokens=20, max_tokens=4)
    for sampling in SAMPLINGS.values():
        session, config = Session(), GenerationConfig(max_tokens=4, sampling=sampling)
        with pytest.raises(NotFinite, match="logits are not finite numbers"):
            engine.stream("Once upon a time", config, session=session).result()
        assert session.tokens == []
    engine.close()


def test_logits_that_spoil_in_the_middle_of_an_answer(engine):
    """The token that a graph gives then ends its block, and the answer."""

    class Spoiling:
        def __getattr__(self, name):
            return getattr(engine.runner, name)

        def decode(self, row):
            found = engine.runner.decode(row)
            return dataclasses.replace(found, tokens=[*found.tokens[:-1], NO_TOKEN])

    prompt = engine.tokenizer.encode("hello")
    config = GenerationConfig(max_tokens=20, ignore_eos=True)
    decoding = Decoding(Spoiling())
    generation = Answer(decoding, engine.tokenizer, engine.request(prompt, config))
    with pytest.raises(NotFinite):
        generation.result()
    assert len(generation.tokens) >= 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_one_logit_that_is_no_number_gives_no_token(bad, sampling):
    sampled, chosen = jax.jit(sample), jax.jit(choices)
    logits = np.random.default_rng(0).normal(size=(1, 50)).astype(np.float32)
    state = sampler_state(SAMPLINGS[sampling], [1], 50, 1)
    assert sampled(jnp.asarray(logits), state)[0][0] >= 0
    for place in (0, 17, 49):
        spoilt = logits.copy()
        spoilt[0, place] = bad
        assert sampled(jnp.asarray(spoilt), state)[0][0] == NO_TOKEN
        assert chosen(new_tree(jnp.int32(3), 1), jnp.asarray(spoilt), state)[0] == NO_TOKEN
        assert _most_likely(spoilt)[0] == NO_TOKEN
    assert sampled(jnp.full((1, 50), -jnp.inf), state)[0][0] == NO_TOKEN
    forbidden = np.where(np.arange(50) == 7, logits, -np.inf).astype(np.float32)
    assert sampled(jnp.asarray(forbidden), state)[0][0] == 7
    # Samplings that give no token are refused.
    bias = tuple((token, -np.inf) for token in range(20))
    with pytest.raises(ConfigError, match="forbids every token"):
        sampler_state(Sampling(logit_bias=bias), [1], 20, 0)
    with pytest.raises(ConfigError, match=r"top_p must be above 0, at least 1.2e-38"):
        Sampling(temperature=1.0, top_p=1.1e-38)
