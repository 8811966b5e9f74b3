"""Steps of flat arrays, and the sampling in them, against the decoder and sampler that they are made of."""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import sampling
from jaxllm.export.folder_format.signature import MASK, POSITIONS, STOP_IDS, TOKENS, cache_shapes, controls
from jaxllm.export.steps import exported
from jaxllm.export.steps.exported import StepOptions, one_by_one, run_step, run_tree
from jaxllm.models.decoder import forward, logits
from jaxllm.sampling import by_loop
from jaxllm.sampling_state import NO_TOKEN, Sampling, sampler_state
from tests.tiny import TINY, tiny_params

CONTEXT = 24
PARAMS = {name: jnp.asarray(value) for name, value in tiny_params().items()}
TEXT = np.random.default_rng(0).integers(0, TINY.vocab_size, CONTEXT).astype(np.int32)
NOT_A_PLACE = (-1, 0)


def caches(fill=0.0):
    return {name: np.full(shape, fill, np.float32) for name, shape in cache_shapes(TINY, CONTEXT).items()}


OPTIONS = StepOptions(TINY, jnp.float32)


@functools.partial(jax.jit, static_argnames="with_logits")
def step(caches, tokens, places, with_logits):
    inputs = {TOKENS: tokens, POSITIONS: places}
    return run_step(PARAMS, caches, inputs, options=OPTIONS, with_logits=with_logits)


@jax.jit
def tree(caches, tokens, places, mask):
    return run_tree(PARAMS, caches, {TOKENS: tokens, POSITIONS: places, MASK: mask}, options=OPTIONS)


@jax.jit
def whole(tokens):
    return logits(PARAMS, forward(PARAMS, tokens[None], cfg=TINY)[0], cfg=TINY)[0]


def fed(count, at=0, state=None, length=16, padding=-1):
    """Caches with the tokens at positions `at` to `at + count`, in one chunk."""
    row, places = np.zeros((1, length), np.int32), np.full(length, padding, np.int32)
    row[0, :count] = TEXT[at : at + count]
    places[:count] = np.arange(at, at + count)
    return step(caches() if state is None else state, row, places, False)


@pytest.mark.parametrize(("dtype", "within"), [(np.float16, 2e-3), (np.int8, 3e-2)])
def test_narrow_caches_give_nearly_the_logits_of_wide_ones(dtype, within):
    shapes = cache_shapes(TINY, CONTEXT, np.dtype(dtype))
    found = fed(16, state={name: np.zeros(shape, dtype) for name, shape in shapes.items()})
    for at in range(16, 20):
        row, place = TEXT[None, at : at + 1], np.array([at], np.int32)
        found = step(found, row, place, True)
        wanted = np.asarray(whole(TEXT[: at + 1])[-1])
        change = np.asarray(found.pop("logits"))[0, 0] - wanted
        assert np.abs(change).max() < within * np.abs(wanted).max()
    assert {each.dtype for each in found.values()} == {np.dtype(dtype)}


@pytest.mark.parametrize("padding", NOT_A_PLACE)
def test_a_padded_chunk_and_a_step_give_what_the_whole_text_gives(padding):
    out = step(fed(11, padding=padding), TEXT[None, 11:12], np.array([11], np.int32), True)
    chex.assert_shape(out["logits"], (1, 1, TINY.vocab_size))
    np.testing.assert_allclose(out["logits"][0, 0], whole(TEXT[:12])[-1], rtol=1e-4, atol=1e-5)


def test_a_chunk_over_the_end_leaves_older_rows_alone():
    """`dynamic_update_slice` would move a chunk of 16 at row 20 of 24 back onto rows 8 to 23."""
    before = fed(4, at=16, state=fed(16))
    out = fed(4, at=20, state=dict(before))
    first = functools.partial(jax.tree.map, lambda rows: rows[:, :, :20])
    chex.assert_trees_all_equal(first(out), first(before), strict=True)
    for name, rows in out.items():
        assert (np.asarray(rows)[:, :, 20:] != np.asarray(before[name])[:, :, 20:]).any(), name


def test_every_path_of_a_tree_is_a_text_of_its_own():
    # A root with two children, and a child of the second; the last place is padding.
    parents, nodes = (-1, 0, 0, 2), TEXT[8:12]
    mask = np.zeros((5, 5), np.bool_)
    for node, parent in enumerate(parents):
        mask[node, node] = True
        if parent >= 0:
            mask[node] |= mask[parent]
    places = np.array([8, 9, 9, 10, 0], np.int32)
    before = fed(8)
    out = tree(before, np.array([[*nodes, 0]], np.int32), places, mask)
    chex.assert_shape(out["logits"], (1, 5, TINY.vocab_size))
    chex.assert_trees_all_equal_shapes_and_dtypes({name: out[name] for name in before}, before)
    for node in range(4):
        path = [*TEXT[:8], *nodes[mask[node, :4]]]
        want = whole(np.array(path, np.int32))[-1]
        np.testing.assert_allclose(out["logits"][0, node], want, rtol=1e-4, atol=1e-5, err_msg=str(node))
    assert (np.asarray(out["kv_cache_k_0"])[:, :, 12:] == 0).all()


VOCAB = 61
STOPS = np.full(STOP_IDS, -1, np.int32)
ROWS = np.random.default_rng(0).normal(size=(6, 1, VOCAB)).astype(np.float32) * 3
# Ties at the threshold of every filter.
ROWS[1, 0, :20] = 1.5
CASES = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.05, top_k=1),
    Sampling(temperature=1.5, top_k=7, top_p=0.8, min_p=0.03),
    Sampling(temperature=1.0, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),
    Sampling(repetition_penalty=3.0, logit_bias=((3, -np.inf), (5, 4.0))),
]


@pytest.fixture(scope="module")
def chosen():
    """The choices of both modules, compiled once for all options."""

    def each(repeat):
        def choose(row, given, done):
            return exported.choose(row, given, given["counts"], done, repeat)

        return jax.jit(choose)

    return each(by_loop), each(one_by_one), jax.jit(sampling.choose)


def test_the_same_tokens(chosen):
    looped, unrolled, wanted = chosen
    for options, (index, row) in itertools.product(CASES, enumerate(ROWS)):
        state = sampler_state(options, [1, 2, 3], VOCAB, 77 + (index << 40))
        state.counts[0, :4] = 2
        given, done = controls(state, STOPS, 1), jnp.int32(3)
        later = wanted(row, dataclasses.replace(state, drawn=np.int32(3)))
        assert looped(row, given, done) == unrolled(row, given, done) == later, options


def test_logits_that_are_no_numbers_give_no_token(chosen):
    looped, unrolled, _ = chosen
    row = ROWS[0].copy()
    row[0, 9] = np.nan
    for options in (Sampling(), Sampling(temperature=1.0)):
        given = controls(sampler_state(options, [], VOCAB, 1), STOPS, 1)
        assert looped(row, given, jnp.int32(0)) == unrolled(row, given, jnp.int32(0)) == NO_TOKEN
