"""Visits for training: by groups of pairs as by tiles, gradients too, and by groups alone off CPUs."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.experts.mixture import by_groups, differentiable_visits, in_tiles, tiles_of
from jaxllm.nn.linear import FeedForward

M, K, E, F, D = 37, 2, 6, 24, 16


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


X, TARGET = draw(M, D), draw(M, K, D, seed=1)
PARTS = tuple(draw(E, F, D, seed=seed) / 4 for seed in (2, 3, 4))


def loss(visits_of, x, parts, ids):
    """A number that depends on the visits of all pairs that have an expert."""
    up, down, gate = parts
    tiles = tiles_of(ids, E, rows=4)
    visits = visits_of(x, tiles, FeedForward(up=up, down=down, gate=gate))
    counted = (ids < E)[..., None].astype(x.dtype)
    return jnp.sum(visits[tiles.place] * TARGET.astype(x.dtype) * counted)


@functools.partial(jax.jit, static_argnums=0)
def gradients(visits_of, x, parts, ids):
    return jax.value_and_grad(functools.partial(loss, visits_of), argnums=(0, 1))(x, parts, ids)


def ids(kind):
    chosen = np.random.default_rng(5).integers(0, E, (M, K)).astype(np.int32)
    if kind == "one expert":
        chosen[:] = 3
    if kind == "padding":
        chosen[30:] = E
    return chosen


@pytest.mark.parametrize("kind", ["all", "one expert", "padding"])
def test_groups_are_tiles_to_rounding(kind):
    tiled, grouped = (gradients(each, X, PARTS, ids(kind)) for each in (in_tiles, by_groups))
    assert all(np.abs(each).max() > 0.1 for each in jax.tree.leaves(tiled))
    chex.assert_trees_all_close(grouped, tiled, atol=2e-5, rtol=2e-5)


def test_groups_keep_narrow_types():
    half = jax.tree.map(lambda each: jnp.asarray(each, jnp.bfloat16), (X, PARTS))
    _, found = gradients(by_groups, *half, ids("all"))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found)} == {"bfloat16"}


@pytest.mark.parametrize("platform", ["cuda", "tpu", "cpu"])
def test_accelerators_multiply_by_groups(platform):
    step = jax.jit(jax.grad(functools.partial(loss, differentiable_visits), argnums=(0, 1)))
    text = step.trace(X, PARTS, ids("all")).lower(lowering_platforms=(platform,)).as_text()
    # Of three products two forward, as no gradient needs the last, and two for the gradients of each.
    assert text.count('"chlo.ragged_dot"(') == (0 if platform == "cpu" else 8)
