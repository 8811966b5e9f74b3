"""A mixture is its definition, token by token: in both ways of running it, at every tile size and width."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxllm.experts.mixture import mixture, no_visits, tiles_and_weights, tiles_of
from jaxllm.experts.routing import Routing, high_alone, route
from jaxllm.kernels import native
from jaxllm.nn.layers import Norm, activate, normalize
from jaxllm.nn.linear import FeedForward
from jaxllm.quant import Apart, Bfloat16Bits, by_form, dequantize, quantize, to_blocks, unit_at
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


def in_blocks(dense, bits):
    sides = zip((dense.up, dense.down, dense.gate), (-1, -2, -1), strict=True)
    stored = [to_blocks(quantize(each, bits=bits, axis=axis)) for each, axis in sides]
    return FeedForward(*jax.tree.map(jnp.asarray, stored))


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


def mix(x, routing, experts=EXPERTS, live=None, *, differentiable=False):
    # With their name, or a test would run what another one traced without native kernels.
    return _mix(x, routing, experts, live, differentiable, native.kernels().name)


@functools.partial(jitted, static_argnums=(4, 5))
def _mix(x, routing, experts, live, differentiable, _kernels):
    return mixture(x, NORM, routing, experts, live=live, differentiable=differentiable)


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


@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize("valid", [1, 5, 11])
def test_padding_visits_no_expert(valid, differentiable):
    live = np.arange(12) < valid
    results = []
    for garbage in (0.0, 7.0):
        x = draw(B, 12, D)
        x[:, valid:] = garbage * draw(B, 12 - valid, D, seed=5)
        results.append(np.asarray(mix(x, routed(x), live=live, differentiable=differentiable)))
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "bits", "neurons", "kernels"),
    # Only blocks have panels, and are read by native kernels.
    [
        ("bf16", 16, F, "xla"),
        *(("columns", bits, F, "xla") for bits in (8, 4)),
        *(("blocks", bits, neurons, "xla") for bits in (8, 4) for neurons in (F, 24)),
        *(
            pytest.param("blocks", bits, neurons, "native", marks=needs_native)
            for bits in (8, 4) for neurons in (F, 24)
        ),
    ],
)  # fmt: skip
def test_stored_experts_compute_what_they_stand_for(form, bits, neurons, kernels, monkeypatch):
    """Up to the rounding of activations by native kernels (`tests/kernels` has its bounds)."""
    if kernels == "xla":
        fall_back(monkeypatch)
    dense = experts_of(neurons)

    def stored(weight, axis):
        if form == "bf16":
            return Bfloat16Bits(jnp.asarray(np.asarray(weight, jnp.bfloat16).view(np.uint16)))
        columns = quantize(weight, bits=bits, axis=axis)
        return jax.tree.map(jnp.asarray, columns if form == "columns" else to_blocks(columns))

    assert dense.gate is not None
    block = FeedForward(stored(dense.up, -1), stored(dense.down, -2), stored(dense.gate, -1))
    meant = FeedForward(*map(floats, (block.up, block.down, block.gate)))
    for tokens in (1, 20):
        x = draw(B, tokens, D)
        routing = routed(x)
        got, expected = mix(x, routing, block), naive(x, routing, meant)
        bound = 2e-5 if kernels == "xla" else 0.03 * np.abs(expected).max()
        np.testing.assert_allclose(got, expected, rtol=0 if kernels == "native" else 1e-7, atol=bound)


@pytest.mark.parametrize("neurons", [F, 24], ids=["whole-panels", "shared-panels"])
@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("axis", [-1, -2])
def test_a_unit_of_blocks_is_the_matrix_it_stands_for(axis, group, neurons):
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


@pytest.mark.parametrize("valid", [0, 1, 3])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_padding_is_in_no_tile(rows, valid):
    """Where tokens choose fewer experts than there are, too: with 64 experts seven tokens of 8 choices."""
    ids = np.stack([np.random.default_rng(0).permutation(63)[:8] for _ in range(7)]).astype(np.int32)
    ids[valid:] = 64
    tiles = cut_in_tiles(ids, 64, rows=rows)
    visited = np.asarray(tiles.expert)[: int(tiles.count)]
    assert set(visited.tolist()) == set(ids[:valid].reshape(-1).tolist())
    assert int(np.asarray(tiles.size).sum()) == 8 * valid


@pytest.mark.slow
@pytest.mark.parametrize(("experts", "choices", "tokens"), [(8, 2, 64), (128, 8, 64), (64, 8, 64), (8, 1, 3)])
def test_visits_take_a_row_for_each_pair(experts, choices, tokens):
    """Whatever tiles leave free."""
    pairs = (1, tokens, choices)
    routing = Routing(
        np.zeros((1, tokens, experts), np.float32), np.zeros(pairs, np.int32), np.zeros(pairs, np.float32)
    )

    def run(routing, live, x):
        tiles, _ = tiles_and_weights(routing, experts, live=live)
        return no_visits(x, tiles), tiles

    # Shapes are all that this asks about.
    visits, tiles = jax.eval_shape(run, routing, np.ones(tokens, bool), np.zeros((tokens, D), np.float32))
    assert visits.shape[0] < tokens * choices + tiles.token.shape[1]


def test_the_worst_routing_fits():
    """As many tiles as there may be: every expert has one pair more than whole tiles."""
    ids = np.asarray([[e] for e in range(4) for _ in range(5)], np.int32)
    tiles = cut_in_tiles(ids, 4, rows=4)
    assert int(tiles.count) == len(tiles.expert) == 8


def test_routing_keeps_its_types_in_narrow_graphs():
    x = draw(B, 3, D).astype(jnp.bfloat16)
    routing = Routing(
        logits=np.zeros((B, 3, E), np.float32),
        ids=np.zeros((B, 3, 1), np.int32),
        weights=np.ones((B, 3, 1), np.float32),
    )
    for differentiable in (True, False):
        out = mix(x, routing, differentiable=differentiable)
        chex.assert_shape(out, (B, 3, D))
        chex.assert_type(out, jnp.bfloat16)


# Rows of a tree, and experts apart


def apart(dense, widths, hold=Apart):
    """Experts of widths of their own (32: floats), and what they stand for."""

    def stored(stack, axis):
        levels = [
            each if width == 32 else to_blocks(quantize(each, bits=width, axis=axis))
            for each, width in zip(stack, widths, strict=True)
        ]
        return hold([jax.tree.map(jnp.asarray, each) for each in levels])

    block = FeedForward(stored(dense.up, -1), stored(dense.down, -2), stored(dense.gate, -1))
    return block, FeedForward(*map(floats, (block.up, block.down, block.gate)))


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("lie", ["together", "apart"])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_row_of_a_tree_is_to_the_bit_what_it_is_alone(bits, lie):
    """Where it is with others, and whatever else is compiled around it."""
    dense = experts_of()
    if lie == "apart":
        block, _ = apart(dense, [bits] * E, hold=lambda each: Apart(tuple(each)))
    else:
        block = in_blocks(dense, bits)

    @jax.jit
    def layer(x):
        routing = route(x, ROUTER, experts_per_token=2, normalize=True, norm=NORM)
        return mixture(x, NORM, routing, block, add_input=True)

    x = draw(1, 33, D)
    alone = np.concatenate([layer(x[:, t : t + 1]) for t in range(33)], axis=1)
    for tokens in (2, 16, 33):
        np.testing.assert_array_equal(layer(x[:, :tokens]), alone[:, :tokens])


@pytest.mark.slow
@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_native), False])
@pytest.mark.parametrize("widths", [[8, 4, 2, 8], [32, 8, 32, 4]], ids=["levels", "with-floats"])
def test_experts_apart_compute_what_they_stand_for(widths, native, monkeypatch):
    if not native:
        fall_back(monkeypatch)
    block, meant = apart(
        experts_of(), widths, hold=lambda each: Apart(tuple(each)) if native else by_form(each)
    )
    for tokens in (1, 20):
        x = draw(B, tokens, D)
        routing, live = routed(x), np.arange(tokens) < max(1, tokens - 3)
        got, expected = mix(x, routing, block, live=live), naive(x, routing, meant) * live[:, None]
        # Native kernels round activations, too.
        np.testing.assert_allclose(got, expected, atol=0.03 * np.abs(expected).max() if native else 2e-5)


@pytest.mark.parametrize("hold", [lambda each: Apart(tuple(each)), by_form], ids=["apart", "by-form"])
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
    tiles, _ = tiles_and_weights(routing, experts, live=np.arange(9) < 8, loss=loss)
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
