"""Routing by hand, and its losses against the papers' formulas and transformers."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.experts.bitwidth import lowering_order, search_widths, width_bounds
from jaxllm.experts.routing import high_alone, load_balancing_loss, route, router_z_loss
from jaxllm.nn.layers import Norm, rms_norm
from tests.kernels.switching import needs_native
from tests.variants import every_variant

# Logits of a token [1, 0] are this router's first column: probabilities 1/10, 4/10, 2/10, 3/10.
ROUTER = np.stack([np.log([1.0, 4.0, 2.0, 3.0]), np.log([5.0, 1.0, 1.0, 1.0])], axis=1).astype(np.float32)
TOKENS = np.eye(2, dtype=np.float32)[None]


ROUTE = ("experts_per_token", "normalize")
DIMS = chex.Dimensions(B=1, T=2, E=4, k=2)


@pytest.mark.parametrize(
    ("loss", "alone"),
    [
        (0.0, [False, False, False, False]),
        (0.05, [False, False, False, False]),
        # 0.1 of 0.9 is the last one's share, a third that of the last two.
        (0.12, [False, False, False, True]),
        (0.34, [False, False, True, True]),
        (0.99, [False, True, True, True]),
        (1.0, [True, True, True, True]),
    ],
)
def test_which_experts_their_high_planes_stand_for(loss, alone):
    weights = np.array([0.4, 0.2, 0.2, 0.1], np.float32)
    assert high_alone(weights, loss).tolist() == alone
    # A token's do not depend on others, nor on the sum of its weights.
    two = jnp.stack([jnp.asarray(weights), 0.5 * jnp.asarray(weights)])
    assert np.asarray(high_alone(two, loss)).tolist() == [alone, alone]


def random_logits(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@every_variant
def test_the_most_probable_experts_in_order(variant):
    routing = variant(route, static_argnames=ROUTE)(TOKENS, ROUTER, experts_per_token=2, normalize=False)
    chex.assert_shape([routing.logits, routing.probs], DIMS["BTE"])
    chex.assert_shape([routing.ids, routing.weights], DIMS["BTk"])
    chex.assert_type([routing.logits, routing.ids, routing.weights], [jnp.float32, jnp.int32, jnp.float32])
    np.testing.assert_array_equal(routing.ids, [[[1, 3], [0, 1]]])
    np.testing.assert_allclose(routing.weights, [[[0.4, 0.3], [0.625, 0.125]]], rtol=1e-6)
    np.testing.assert_allclose(routing.probs[0, 0], [0.1, 0.4, 0.2, 0.3], rtol=1e-6)


@every_variant
def test_normalized_weights_sum_to_one(variant):
    choose = variant(route, static_argnames=ROUTE)
    routing = choose(TOKENS, ROUTER, experts_per_token=2, normalize=True)
    np.testing.assert_allclose(routing.weights, [[[4 / 7, 3 / 7], [5 / 6, 1 / 6]]], rtol=1e-6)
    one = choose(TOKENS, ROUTER, experts_per_token=1, normalize=True)
    np.testing.assert_array_equal(one.weights, np.ones((1, 2, 1)))
    np.testing.assert_array_equal(one.ids, [[[1], [0]]])


@every_variant
def test_ties_go_to_the_lower_id(variant):
    choose = variant(route, static_argnames=ROUTE)
    routing = choose(TOKENS, np.ones((4, 2), np.float32), experts_per_token=2, normalize=False)
    np.testing.assert_array_equal(routing.ids, [[[0, 1], [0, 1]]])


def test_narrow_activations_route_in_float32():
    x = random_logits(3, 5, 8).astype(jnp.bfloat16)
    router = random_logits(4, 8)
    got = route(jnp.asarray(x), router, experts_per_token=2, normalize=True)
    wide = route(jnp.asarray(x).astype(jnp.float32), router, experts_per_token=2, normalize=True)
    chex.assert_type([got.weights, got.logits], jnp.float32)
    np.testing.assert_array_equal(got.logits, wide.logits)


def test_gradients_reach_the_router_through_the_weights():
    def total(router, normalize):
        weights = route(TOKENS, router, experts_per_token=2, normalize=normalize).weights
        return jnp.sum(weights * np.asarray([2.0, 1.0], np.float32))

    for normalize in (True, False):
        gradient = jax.grad(total)(jnp.asarray(ROUTER), normalize)
        assert np.abs(gradient).max() > 0.01


# Losses


def test_load_balancing_loss_by_hand():
    probs = jnp.asarray([[0.7, 0.3], [0.6, 0.4], [0.2, 0.8], [0.9, 0.1]], jnp.float32)
    ids = jnp.asarray([[0], [0], [1], [0]], jnp.int32)
    # Shares 3/4 and 1/4; mean probabilities 0.6 and 0.4.
    assert load_balancing_loss(probs, ids) == pytest.approx(2 * (0.75 * 0.6 + 0.25 * 0.4))
    gradient = jax.grad(load_balancing_loss)(probs, ids)
    np.testing.assert_allclose(gradient, np.tile([2 * 0.75 / 4, 2 * 0.25 / 4], (4, 1)), rtol=1e-6)


@pytest.mark.parametrize("choices", [1, 2])
def test_load_balancing_loss_is_that_of_transformers(choices):
    torch = pytest.importorskip("torch")
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    logits = random_logits(3, 2, 7, 5)
    ids = jax.lax.top_k(jnp.asarray(logits), choices)[1]
    expected = mixtral.load_balancing_loss_func(
        tuple(torch.from_numpy(layer.reshape(-1, 5)) for layer in logits), num_experts=5, top_k=choices
    )
    got = load_balancing_loss(jax.nn.softmax(jnp.asarray(logits)), ids)
    assert got == pytest.approx(float(expected), rel=1e-5)


def test_router_z_loss():
    logits = jnp.log(jnp.asarray([[1.0, 3.0], [2.0, 6.0]], jnp.float32))
    expected = (np.log(4.0) ** 2 + np.log(8.0) ** 2) / 2
    assert router_z_loss(logits) == pytest.approx(expected, rel=1e-6)
    assert router_z_loss(logits[None]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@needs_native
def test_a_token_of_many_is_routed_as_it_is_alone():
    """To the bit, by routers of any width: a near tie among experts is the same tie in a tree."""
    draws = np.random.default_rng(0)
    for experts, width in ((6, 40), (8, 64), (128, 256)):
        x = draws.standard_normal((1, 33, width)).astype(np.float32)
        router = draws.standard_normal((experts, width)).astype(np.float32)
        scale = 1 + 0.3 * draws.standard_normal(width).astype(np.float32)
        norm = Norm(scale=jnp.asarray(scale), bias=None, eps=1e-5)
        run = jax.jit(functools.partial(route, experts_per_token=2, normalize=True, norm=norm))
        together = run(x, router)
        alone = [run(x[:, t : t + 1], router) for t in range(33)]
        joined = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *alone)
        chex.assert_trees_all_equal(together, joined, strict=True)
        plain = route(
            rms_norm(x, norm.scale, norm.eps),
            router,
            experts_per_token=2,
            normalize=True,
            differentiable=True,
        )
        np.testing.assert_allclose(together.logits, plain.logits, atol=1e-4)
        np.testing.assert_array_equal(together.ids, plain.ids)
        np.testing.assert_allclose(together.weights, plain.weights, atol=1e-5)


@pytest.mark.parametrize(
    ("losses", "bounds"),
    [
        ({2: 0.3, 4: 0.02, 8: 0.001}, (2, 4)),
        ({2: 0.3, 4: 0.08, 8: 0.001}, (4, 8)),
        ({2: 0.05, 4: 0.01, 8: 0.001}, (2, 2)),
    ],
)
def test_bounds(losses, bounds):
    assert width_bounds(losses, 0.05) == bounds


def test_a_loss_that_no_width_reaches_is_refused_with_the_best():
    with pytest.raises(ConfigError, match=r"at most 1\.00%: the least, by 8 bits for all experts, is 2\.50%"):
        width_bounds({2: 0.3, 4: 0.08, 8: 0.025}, 0.01)


def test_robust_and_busy_experts_are_lowered_first():
    """0.2 for a half of the visits costs less than 0.1 for a tenth; what nothing is lost by goes first."""
    importance = np.array([[0.2, 0.1, -0.01], [0.0, 0.3, 0.6]])
    shares = np.array([[0.5, 0.1, 0.4], [0.1, 0.5, 0.4]])
    assert lowering_order(importance, shares).tolist() == [2, 3, 0, 4, 1, 5]


def additive(importance, uniform):
    """A loss that adds up what lowered experts cost, and how often it was asked for."""
    asked = []

    def loss_of(bits):
        asked.append(bits)
        if np.all(bits == bits.flat[0]) and bits.flat[0] != 4:
            return uniform[int(bits.flat[0])]
        return 0.01 + float(importance[bits == 2].sum())

    return loss_of, asked


@pytest.mark.parametrize(
    ("importance", "uniform", "bounds", "lowered", "loss", "measured"),
    [
        # 1 + 2 + ... + 8 = 36 thousandths fit into 40, and 45 do not.
        (np.arange(1, 17).reshape(2, 8) / 1000, {2: 0.146, 8: 0.0}, (2, 4), 8, 0.046, 3 + 4),
        # Nothing fits, and all do.
        (np.full((1, 4), 0.1), {2: 0.41, 8: 0.0}, (2, 4), 0, 0.01, 3 + 2),
        (np.zeros((1, 4)), {2: 0.01, 8: 0.0}, (2, 2), 4, 0.01, 3),
    ],
)
def test_as_many_are_lowered_as_fit(importance, uniform, bounds, lowered, loss, measured):
    loss_of, asked = additive(importance, uniform)
    plan = search_widths(importance, np.full(importance.shape, 0.25), loss_of, most_loss=0.05)
    assert (plan.lower, plan.upper, plan.lowered, len(asked)) == (*bounds, lowered, measured)
    assert plan.loss == pytest.approx(loss)
    assert plan.bits.reshape(-1).tolist() == [2] * lowered + [4] * (importance.size - lowered)


@pytest.mark.parametrize("most", [0, -0.1, float("nan"), float("inf")])
def test_losses_that_are_no_bounds_are_refused(most):
    with pytest.raises(ConfigError, match="must be positive"):
        search_widths(np.zeros((1, 2)), np.ones((1, 2)), lambda _: 0.0, most_loss=most)
