"""A mixture is its definition, token by token: in both ways of running it, at every tile size and width."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxllm.experts.mixture import (
    by_groups,
    differentiable_visits,
    in_tiles,
    mixture,
    tiles_and_weights,
    tiles_of,
)
from jaxllm.experts.routing import Routing, high_alone, route
from jaxllm.kernels import native
from jaxllm.nn.layers import Norm, activate, normalize
from jaxllm.nn.linear import FeedForward
from jaxllm.quant import Bfloat16Bits, PerExpert, by_form, dequantize, quantize, to_blocks, unit_at
from tests.kernels.switching import fall_back, needs_native
from tests.variants import every_variant, jitted

B, E, F, D = 2, 4, 32, 64


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


NORM = Norm(scale=jnp.asarray(1 + 0.3 * draw(D)), bias=None, eps=1e-5)
ROUTER = draw(E, D)


def experts_of(neurons=F):
    return FeedForward(
        up=draw(E, neurons, D, seed=1) / np.float32(8),
        down=draw(E, neurons, D, seed=2) / np.float32(6),
        gate=draw(E, neurons, D, seed=3) / np.float32(8),
    )


EXPERTS = experts_of()


# Compiled once for all tests, as each operation by itself is compiled for each shape.
floats = jitted(functools.partial(dequantize, dtype=jnp.dtype(jnp.float32)))
take_unit = jitted(unit_at)
cut_in_tiles = jitted(tiles_of, static_argnums=1, static_argnames="rows")
normed_by_itself = jitted(functools.partial(normalize, norm=NORM))


def routed(x, choices=2, normalize_weights=True):
    return _routed(x, choices, normalize_weights)


@functools.partial(jitted, static_argnums=(1, 2))
def _routed(x, choices, normalize_weights):
    return route(normalize(x, NORM), ROUTER, experts_per_token=choices, normalize=normalize_weights)


def mix(x, routing, experts=EXPERTS, valid_rows=None, *, differentiable=False):
    # With their name, or a test would run what another one traced without native kernels.
    return _mix(x, routing, experts, valid_rows, differentiable, native.kernels().name)


@functools.partial(jitted, static_argnums=(4, 5))
def _mix(x, routing, experts, valid_rows, differentiable, _kernels):
    return mixture(x, NORM, routing, experts, valid_rows=valid_rows, differentiable=differentiable)


def naive(x, routing, experts=EXPERTS):
    """Each token's experts in turn, in float64."""
    assert experts.gate is not None
    normed = np.asarray(normed_by_itself(x), np.float64)
    ids, weights = jax.device_get((routing.ids, routing.weights))
    gates, ups, downs = jax.device_get((experts.gate, experts.up, experts.down))
    out = np.zeros_like(normed)
    for b, t in np.ndindex(*x.shape[:2]):
        for expert, weight in zip(ids[b, t], weights[b, t], strict=True):
            gate, up = (each[expert] @ normed[b, t] for each in (gates, ups))
            hidden = gate / (1 + np.exp(-gate)) * up
            out[b, t] += float(weight) * (hidden @ np.asarray(downs[expert], np.float64))
    return out


# Each two of tokens, choices and the way of running together; not all three.
@pytest.mark.parametrize(("row", "tokens"), list(enumerate((1, 5, 40))))
@pytest.mark.parametrize(("column", "choices"), list(enumerate((1, 2, 4))))
def test_every_token_is_seen_by_its_experts(row, tokens, column, choices):
    differentiable = (row + column) % 2 == 0
    x = draw(B, tokens, D)
    routing = routed(x, choices)
    got = mix(x, routing, differentiable=differentiable)
    chex.assert_shape(got, (B, tokens, D))
    chex.assert_type(got, jnp.float32)
    np.testing.assert_allclose(got, naive(x, routing), atol=2e-5)
    # Nor is any dropped where all choose one expert.
    if choices == 1:
        routing = dataclasses.replace(routing, ids=jnp.full_like(routing.ids, 2))
        got = mix(x, routing, differentiable=differentiable)
        np.testing.assert_allclose(got, naive(x, routing), atol=2e-5)
    if tokens == 5:
        narrow = mix(jnp.asarray(x, jnp.bfloat16), routing, differentiable=differentiable)
        chex.assert_type(narrow, jnp.bfloat16)


@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize("valid", [1, 5, 11])
def test_padding_visits_no_expert(valid, differentiable):
    valid_rows = np.arange(12) < valid
    results = []
    for garbage in (0.0, 7.0):
        x = draw(B, 12, D)
        x[:, valid:] = garbage * draw(B, 12 - valid, D, seed=5)
        results.append(np.asarray(mix(x, routed(x), valid_rows=valid_rows, differentiable=differentiable)))
    np.testing.assert_array_equal(results[0], results[1])
    x = draw(B, 12, D)
    np.testing.assert_allclose(results[0][:, :valid], naive(x, routed(x))[:, :valid], atol=2e-5)
    assert not np.any(results[0][:, valid:])


def test_gradients_are_those_of_the_definition():
    """Of a sum over all experts with the other weights at zero, which needs no sorting."""
    x = jnp.asarray(draw(B, 33, D))
    parts = (jnp.asarray(ROUTER), *map(jnp.asarray, (EXPERTS.gate, EXPERTS.up, EXPERTS.down)))

    def routing_of(x, router):
        return route(normalize(x, NORM), router, experts_per_token=2, normalize=True)

    def tiled(x, router, gate, up, down):
        block = FeedForward(up=up, down=down, gate=gate)
        return mixture(x, NORM, routing_of(x, router), block, differentiable=True)

    def dense(x, router, gate, up, down):
        routing, normed = routing_of(x, router), normalize(x, NORM)
        spread = jax.nn.one_hot(routing.ids, E, dtype=jnp.float32) * routing.weights[..., None]
        hidden = activate(jnp.einsum("btd,efd->btef", normed, gate), "silu")
        hidden = hidden * jnp.einsum("btd,efd->btef", normed, up)
        return jnp.einsum("btef,efd,bte->btd", hidden, down, spread.sum(2))

    target = draw(B, 33, D, seed=9)
    gradients = [
        jax.jit(jax.grad(lambda *a, f=f: jnp.sum(f(*a) * target), argnums=(0, 1, 2, 3, 4)))(x, *parts)
        for f in (tiled, dense)
    ]
    assert all(np.abs(expected).max() > 0.1 for expected in gradients[1])
    chex.assert_trees_all_close(*gradients, atol=2e-4, rtol=1e-7, strict=True)


def held(dense, form, widths):
    """Experts in a form, apart with widths of their own (32: floats); and what they stand for."""

    def stored(stack, axis):
        if form == "bf16":
            return Bfloat16Bits(jnp.asarray(np.asarray(stack, jnp.bfloat16).view(np.uint16)))
        if form in ("columns", "blocks"):
            columns = quantize(stack, bits=widths[0], axis=axis)
            return jax.tree.map(jnp.asarray, columns if form == "columns" else to_blocks(columns))
        each = [
            jnp.asarray(one) if width == 32 else to_blocks(quantize(one, bits=width, axis=axis))
            for one, width in zip(stack, widths, strict=True)
        ]
        each = [jax.tree.map(jnp.asarray, one) for one in each]
        return PerExpert(tuple(each)) if form == "apart" else by_form(each)

    block = FeedForward(stored(dense.up, -1), stored(dense.down, -2), stored(dense.gate, -1))
    return block, FeedForward(*map(floats, (block.up, block.down, block.gate)))


# Only blocks have panels, and are read by native kernels.
STORED = {
    "bf16-xla": ([16], F), "columns-8-xla": ([8], F), "columns-4-xla": ([4], F), "blocks-8-xla": ([8], 24),
    "blocks-4-xla": ([4], F), "blocks-8-native": ([8], 24), "blocks-4-native": ([4], 24),
    "apart-levels-native": ([8, 4, 2, 8], F), "apart-floats-native": ([32, 8, 32, 4], F),
    "by_form-levels-xla": ([8, 4, 2, 8], F), "by_form-floats-xla": ([32, 8, 32, 4], F),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", STORED)
def test_stored_experts_compute_what_they_stand_for(kind, monkeypatch):
    """Up to the rounding of activations by native kernels (`tests/kernels` has its bounds)."""
    if kind.endswith("xla"):
        fall_back(monkeypatch)
    elif not native.kernels().native:
        pytest.skip("without native kernels")
    widths, neurons = STORED[kind]
    block, meant = held(experts_of(neurons), kind.partition("-")[0], widths)
    for tokens in (1, 20):
        x = draw(B, tokens, D)
        routing, valid_rows = routed(x), np.arange(tokens) < max(1, tokens - 3)
        got, expected = (
            mix(x, routing, block, valid_rows=valid_rows),
            naive(x, routing, meant) * valid_rows[:, None],
        )
        bound = 2e-5 if kind.endswith("xla") else 0.03 * np.abs(expected).max()
        np.testing.assert_allclose(got, expected, rtol=0, atol=bound)


@pytest.mark.parametrize(("axis", "group", "neurons"), [(-1, 0, 24), (-2, 32, 24), (-2, 0, F), (-1, 32, F)])
def test_a_unit_of_blocks_is_its_matrix(axis, group, neurons):
    stack = to_blocks(quantize(draw(E, neurons, D), bits=8, axis=axis, group=group))
    whole = np.asarray(floats(stack))
    for index in range(E):
        one = take_unit(stack, np.int32(index))
        chex.assert_shape(one, (neurons, D))
        np.testing.assert_array_equal(floats(one), whole[index])


# Tiles


@every_variant
def test_tiles_by_hand(variant):
    """Expert 1 has five pairs, hence three tiles of two; expert 0 none; expert 2 one."""
    ids = jnp.asarray([[1, 2], [1, 3], [1, 3], [1, 3], [1, 3]], jnp.int32)
    tiles = variant(tiles_of, static_argnums=1, static_argnames="rows")(ids, 4, rows=2)
    assert int(tiles.count) == 6
    np.testing.assert_array_equal(tiles.expert[:6], [1, 1, 1, 2, 3, 3])
    np.testing.assert_array_equal(tiles.token[:6, 0], [0, 2, 4, 0, 1, 3])
    np.testing.assert_array_equal(tiles.token[[0, 1, 4, 5], 1], [1, 3, 2, 4])
    np.testing.assert_array_equal(tiles.start[:6], [0, 2, 4, 5, 6, 8])
    np.testing.assert_array_equal(tiles.size[:6], [2, 2, 1, 1, 2, 2])
    np.testing.assert_array_equal(tiles.place, [[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]])


@pytest.mark.parametrize("rows", [1, 2, 4, 16])
@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_tiles_hold_every_pair_once(tokens, rows):
    draws = np.random.default_rng(tokens)
    for _ in range(5):
        ids = np.stack([draws.permutation(6)[:2] for _ in range(tokens)]).astype(np.int32)
        tiles = cut_in_tiles(ids, 6, rows=rows)
        assert int(tiles.count) <= len(tiles.expert)
        places = np.asarray(tiles.place).reshape(-1)
        assert sorted(places.tolist()) == list(range(ids.size))
        count, start = int(tiles.count), np.asarray(tiles.start)
        ends = (start + np.asarray(tiles.size))[:count]
        assert start[:count].tolist() == [0, *ends[:-1].tolist()]
        assert ends[-1] == ids.size
        tile = np.searchsorted(start[:count], places, side="right") - 1
        token = np.asarray(tiles.token)[tile, places - start[tile]]
        np.testing.assert_array_equal(token, np.arange(ids.size) // 2)
        np.testing.assert_array_equal(np.asarray(tiles.expert)[tile], ids.reshape(-1))


def test_the_worst_routing_fits():
    """As many tiles as there may be: every expert has one pair more than whole tiles."""
    ids = np.asarray([[e] for e in range(4) for _ in range(5)], np.int32)
    tiles = cut_in_tiles(ids, 4, rows=4)
    assert int(tiles.count) == len(tiles.expert) == 8


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("lie", ["together", "apart"])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_row_of_a_tree_is_to_the_bit_what_it_is_alone(bits, lie):
    """Where it is with others, and whatever else is compiled around it."""
    block, _ = held(EXPERTS, "apart" if lie == "apart" else "blocks", [bits] * E)

    @jax.jit
    def layer(x):
        routing = route(x, ROUTER, experts_per_token=2, normalize=True, norm=NORM)
        return mixture(x, NORM, routing, block, add_input=True)

    x = draw(1, 33, D)
    alone = np.concatenate([layer(x[:, t : t + 1]) for t in range(33)], axis=1)
    for tokens in (2, 16, 33):
        np.testing.assert_array_equal(layer(x[:, :tokens]), alone[:, :tokens])


@pytest.mark.parametrize("hold", [lambda each: PerExpert(tuple(each)), by_form], ids=["apart", "by-form"])
def test_what_is_traced_does_not_grow_with_the_experts(hold):
    """There is code for each width, not for each expert."""

    def products(jaxpr):
        inner = [each for eqn in jaxpr.eqns for each in jaxprs_in_params(eqn.params)]
        own = sum(eqn.primitive.name in ("ffi_call", "dot_general") for eqn in jaxpr.eqns)
        return own + sum(map(products, inner))

    def traced(experts):
        stacks = [
            hold([to_blocks(quantize(draw(F, D), bits=[8, 4][e % 2], axis=axis)) for e in range(experts)])
            for axis in (-1, -2, -1)
        ]
        routing = Routing(
            np.zeros((1, 5, experts), np.float32),
            np.zeros((1, 5, 2), np.int32),
            np.ones((1, 5, 2), np.float32),
        )
        run = jax.make_jaxpr(lambda x, routing: mixture(x, NORM, routing, FeedForward(*stacks)))
        return products(run(draw(1, 5, D), routing).jaxpr)

    assert 0 < traced(32) == traced(4)


# Biases, and high planes alone


@pytest.mark.parametrize("differentiable", [True, False])
def test_biases_and_the_clamped_gate(differentiable):
    """As gpt-oss has them: (up + 1) · gate · sigmoid(1.702 gate), where gate is at most 7 and up in ±7."""
    x = draw(B, 9, D)
    biases = {"gate_bias": 4 * draw(E, F), "up_bias": 4 * draw(E, F, seed=1), "down_bias": draw(E, D, seed=1)}
    experts = dataclasses.replace(EXPERTS, activation="clamped_swiglu", **biases)
    routing, normed = routed(x), np.asarray(normed_by_itself(x), np.float64)
    expected = np.zeros_like(normed)
    for b, t, k in np.ndindex(*routing.ids.shape):
        expert, weight = int(routing.ids[b, t, k]), float(routing.weights[b, t, k])
        gate, up = (
            np.asarray(each[expert], np.float64) @ normed[b, t] + biases[f"{name}_bias"][expert]
            for name, each in (("gate", experts.gate), ("up", experts.up))
        )
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        hidden = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
        expected[b, t] += weight * (hidden @ np.asarray(experts.down[expert]) + biases["down_bias"][expert])
    assert np.abs(expected).max() > 7
    np.testing.assert_allclose(mix(x, routing, experts, differentiable=differentiable), expected, atol=2e-4)


def test_a_bias_of_the_router_moves_choices():
    x, bias = draw(B, 9, D), jnp.asarray([0.0, 50.0, 0.0, -50.0])
    normed = jnp.asarray(normed_by_itself(x))
    expected = np.asarray(normed) @ ROUTER.T + np.asarray(bias)
    for differentiable in (True, False):
        found = route(
            normed, ROUTER, experts_per_token=2, normalize=True, bias=bias, differentiable=differentiable
        )
        np.testing.assert_allclose(found.logits, expected, atol=2e-5)
        np.testing.assert_array_equal(found.ids, np.argsort(-expected, axis=-1)[..., :2])


@pytest.mark.parametrize("loss", [0.3, 1.0])
def test_high_planes_alone_have_tiles_of_their_own(loss):
    """Each pair is in one tile, of its expert or of its expert's high plane, whatever other tokens do."""
    experts, choices = 4, 3
    logits = np.random.default_rng(5).standard_normal((1, 9, experts)).astype(np.float32)
    ids = np.argsort(-logits, -1)[..., :choices].astype(np.int32)
    weights = np.take_along_axis(np.exp(logits), ids, -1)
    routing = Routing(logits=logits, ids=ids, weights=weights)
    tiles, _ = tiles_and_weights(routing, experts, valid_rows=np.arange(9) < 8, loss=loss)
    alone = np.asarray(high_alone(weights[0], loss))
    wanted = {
        (token, int(ids[0, token, k]) + experts * bool(alone[token, k]))
        for token in range(8)
        for k in range(3)
    }
    found = [
        (int(token), int(tiles.expert[tile]))
        for tile in range(int(tiles.count))
        for token in np.asarray(tiles.token[tile])[: int(tiles.size[tile])]
    ]
    assert len(found) == len(wanted)
    assert set(found) == wanted


# Visits for training: by groups of pairs as by tiles, gradients too, and only by groups off CPUs.

M, K = 37, 2
X, TARGET = draw(M, D), draw(M, K, D, seed=1)
PARTS = EXPERTS.up, EXPERTS.down, EXPERTS.gate


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
