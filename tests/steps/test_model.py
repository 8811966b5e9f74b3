"""The compiled steps compute what forward, logits and sample do, however they are cut into dispatches."""

import functools

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import ModelConfig, RopeConfig
from jaxllm.kv.cache import new_cache
from jaxllm.models import decoder
from jaxllm.models.parameters import param_specs
from jaxllm.sampling import Sampling, sample, sampler_state
from jaxllm.steps.model import BlockEnd, decode_step, decode_tokens, prefill_chunk, score_chunk
from tests.quick_jit import jit

V, CAPACITY, BLOCK = 23, 20, 6
DIMS = chex.Dimensions(B=1, T=7, V=V)
CFG = ModelConfig(
    model_type="llama", vocab_size=V, hidden_size=12, layers=1, heads=4, kv_heads=2, head_dim=6,
    ffn_size=10, window_tokens=32, rope=RopeConfig(dim=6), attention_windows=(6,), logit_softcap=6.0,
)  # fmt: skip
PROMPT = np.random.default_rng(0).integers(0, V, (1, 5), dtype=np.int32)
PADDED = np.concatenate([PROMPT, np.full((1, 2), 2**31 - 1, np.int32)], axis=1)
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=1.0),
    "everything": Sampling(
        temperature=1.5, top_k=15, top_p=0.95, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3,
        frequency_penalty=0.2, logit_bias=((3, 1.0), (4, -np.inf)),
    ),
}  # fmt: skip
NO_STOPS = np.full(4, -1, np.int32)
FIXED = {"cfg": CFG, "dtype": jnp.float32}


def make_params():
    # A seed whose greedy answer is varied; most random models soon repeat themselves.
    rng = np.random.default_rng(6)
    params = {
        name: rng.standard_normal(spec.shape).astype(np.float32) * np.float32(0.6)
        for name, spec in param_specs(CFG).items()
    }
    params["embed.tokens"] *= np.float32(2.0)
    return params


PARAMS = make_params()
prefill = jit(functools.partial(prefill_chunk, **FIXED))
score = jit(functools.partial(score_chunk, **FIXED))
one_step = jit(functools.partial(decode_step, **FIXED))
decode = jit(functools.partial(decode_tokens, **FIXED, block=BLOCK))
draw = jit(sample)


@jit
def reference(params, tokens, cache, valid):
    hidden, cache = decoder.forward(params, tokens, cache, cfg=CFG, valid=valid)
    return decoder.logits(params, hidden, cfg=CFG), cache


def empty_cache():
    return new_cache(CFG, batch=1, tokens=CAPACITY, dtype=jnp.float32)


def assert_same_cache(got, expected):
    chex.assert_trees_all_equal(got.length, expected.length, strict=True)
    chex.assert_trees_all_close(got, expected, atol=1e-5, rtol=0, strict=True)


def assert_untouched_after(cache, length):
    """No row at or after `length` was written."""
    assert int(cache.length) == length
    for rows in (*cache.keys, *cache.values):
        assert np.all(np.any(rows[..., :length, :], axis=(-3, -1)))
        assert not np.any(rows[..., length:, :])


def test_prefill_gives_the_logits_of_the_last_valid_token():
    for valid in (1, 3, 5):
        expected, cache = reference(PARAMS, PADDED, empty_cache(), np.int32(valid))
        got, after = prefill(PARAMS, PADDED, np.int32(valid), np.True_, empty_cache())
        chex.assert_shape(got, DIMS["BV"])
        chex.assert_type(got, jnp.float32)
        np.testing.assert_allclose(got, expected[:, valid - 1], atol=1e-5)
        assert np.std(got) > 0.5
        assert_same_cache(after, cache)
        assert_untouched_after(after, valid)
    # Chunks before the last skip the head, and nothing else.
    got, cache = prefill(PARAMS, PADDED, np.int32(5), np.False_, empty_cache())
    chex.assert_shape(got, DIMS["BV"])
    assert not np.any(got)
    chex.assert_trees_all_equal(cache, after, strict=True)


def begun(name, seed=7):
    """Cache and sampler after the prompt, and the answer's first token."""
    logits, cache = prefill(PARAMS, PADDED, np.int32(5), np.True_, empty_cache())
    token, sampler = draw(logits, sampler_state(SAMPLINGS[name], PROMPT[0], V, seed))
    return token, cache, sampler


def answer_by_steps(name, count, seed=7):
    token, cache, sampler = begun(name, seed)
    tokens = []
    for _ in range(count):
        token, cache, sampler = one_step(PARAMS, token, cache, sampler)
        tokens += token.tolist()
    return tokens, cache, sampler


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_step_is_forward_then_sample(name):
    token, cache, sampler = begun(name)
    logits, expected_cache = reference(PARAMS, token[:, None], cache, np.int32(1))
    expected, expected_sampler = draw(logits[:, 0], sampler)
    got, cache, sampler = one_step(PARAMS, token, cache, sampler)
    chex.assert_shape(got, DIMS["B"])
    chex.assert_type(got, jnp.int32)
    assert got.tolist() == expected.tolist()
    assert_same_cache(cache, expected_cache)
    assert_untouched_after(cache, 6)
    assert int(sampler.drawn) == 2
    chex.assert_trees_all_equal(sampler, expected_sampler, strict=True)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_blocks_do_not_change_the_answer(name):
    """Any division of 13 tokens into dispatches gives the tokens, cache and sampler of single steps."""
    expected, expected_cache, expected_sampler = answer_by_steps(name, 13)
    assert len(set(expected)) > 3
    for blocks in ((6, 6, 1), (1,) * 13, (2, 5, 3, 3), (4, 4, 4, 1)):
        (token, cache, sampler), tokens = begun(name), []
        for limit in blocks:
            end = BlockEnd(NO_STOPS, np.int32(limit))
            rows, count, cache, sampler = decode(PARAMS, token, cache, sampler, end)
            chex.assert_shape([rows, count], [(DIMS.B, BLOCK), ()])
            assert int(count) == limit
            assert rows[0, limit:].tolist() == [-1] * (BLOCK - limit)
            tokens += rows[0, :limit].tolist()
            token = rows[:, limit - 1]
        assert tokens == expected
        assert_same_cache(cache, expected_cache)
        assert_untouched_after(cache, 5 + 13)
        chex.assert_trees_all_equal(sampler, expected_sampler, strict=True)


def test_one_trace_serves_every_limit_and_every_sampling(compiles):
    """What differs between requests is an argument, and what a step returns is what the next one takes."""
    chex.clear_trace_counter()

    @jit
    @chex.assert_max_traces(n=1)
    def run(token, cache, sampler, end):
        return decode_tokens(PARAMS, token, cache, sampler, end, **FIXED, block=BLOCK)

    for number, name in enumerate(SAMPLINGS):
        token, cache, sampler = begun(name)
        with compiles() as count:
            for limit in (1, BLOCK):
                rows, _, cache, sampler = run(token, cache, sampler, BlockEnd(NO_STOPS, np.int32(limit)))
                token = np.asarray(rows)[:, limit - 1]
        assert count() == (number == 0)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_decoding_ends_at_a_stop_token(name):
    """On device, with the stop token as the last of the answer and not yet in the cache."""
    expected, *_ = answer_by_steps(name, BLOCK)
    unused = next(token for token in range(V) if token not in expected)
    for at, stop in enumerate(expected):
        first, stops = expected.index(stop), np.array([-1, unused, stop, -1], np.int32)
        rows, count, cache, sampler = decode(PARAMS, *begun(name), BlockEnd(stops, np.int32(BLOCK)))
        assert int(count) == first + 1, at
        assert rows[0].tolist() == expected[: first + 1] + [-1] * (BLOCK - first - 1)
        assert_untouched_after(cache, 5 + first + 1)
        # The first token was drawn before.
        assert int(sampler.drawn) == first + 2
        assert int(sampler.counts.sum()) == first + 2
    # A first token that is a stop token is the caller's to see: only what is chosen is looked at.
    token, cache, sampler = begun(name)
    stops = np.array([*token.tolist(), -1, -1, -1], np.int32)
    rows, *_ = decode(PARAMS, token, cache, sampler, BlockEnd(stops, np.int32(BLOCK)))
    said = expected[: expected.index(int(token[0])) + 1] if int(token[0]) in expected else expected
    assert rows[0, : len(said)].tolist() == said
