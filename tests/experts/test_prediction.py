"""Routing, its losses, widths and predictions: by hand, against transformers, stored, and adapting."""

import functools
from typing import get_args

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.experts import prediction
from jaxllm.experts.bitwidth import lowering_order, search_widths
from jaxllm.experts.prediction import (
    BACK_OFF,
    MOST_WEIGHT,
    POLICIES,
    PathCounts,
    Residents,
    TokenExperts,
    count_paths,
    count_tokens,
    learn,
    nearness,
    next_experts,
)
from jaxllm.experts.routing import high_alone, load_balancing_loss, route, router_z_loss
from jaxllm.nn.layers import Norm, rms_norm
from jaxllm.serving.ground.expert_options import Eviction
from tests.kernels.switching import needs_native
from tests.variants import every_variant


def tokens(*paths):
    """`[L, M, 1]` of paths that are one expert per layer."""
    return np.array(paths).T[:, :, None]


def test_counts_by_hand():
    counts = count_paths(tokens((0, 1, 2), (0, 1, 2), (0, 1, 0), (2, 1, 1)), 3)
    assert counts.alone.tolist() == [[3, 0, 1], [0, 4, 0], [1, 1, 2]]
    assert counts.after_one[1].tolist() == [[0, 3, 0], [0, 0, 0], [0, 1, 0]]
    assert counts.after_one[2].tolist() == [[0, 0, 0], [1, 1, 2], [0, 0, 0]]
    assert counts.pairs[2].tolist() == list(range(9))
    assert counts.after_two[2][0 * 3 + 1].tolist() == [1, 0, 2]
    assert counts.after_two[2][2 * 3 + 1].tolist() == [0, 1, 0]
    assert counts.after_two.sum() == 4
    assert not counts.after_one[0].any()
    assert (counts.pairs[:2] == -1).all()


def test_sets_count_every_pair():
    """One token visits {0, 1}, then {2, 0}, then {1, 2}."""
    counts = count_paths(np.array([[[0, 1]], [[2, 0]], [[1, 2]]]), 3)
    assert counts.after_one[1].tolist() == [[1, 0, 1], [1, 0, 1], [0, 0, 0]]
    assert counts.after_two[2][0 * 3 + 2].tolist() == [0, 1, 1]
    assert counts.after_two[2].sum() == 2 * 2 * 2


def test_back_off_by_hand():
    counts = count_paths(tokens((0, 1, 2), (0, 1, 2), (0, 1, 0), (2, 1, 1)), 3)
    chance = np.array([2, 2, 3]) / 7
    np.testing.assert_allclose(next_experts(counts, 2), chance, rtol=1e-6)
    behind_one = (np.array([1, 1, 2]) + BACK_OFF * chance) / (4 + BACK_OFF)
    one = np.array([[1]])
    np.testing.assert_allclose(next_experts(counts, 2, one), behind_one, rtol=1e-6)
    behind_two = (np.array([1, 0, 2]) + BACK_OFF * behind_one) / (3 + BACK_OFF)
    np.testing.assert_allclose(next_experts(counts, 2, one, np.array([[0]])), behind_two, rtol=1e-6)
    # What never came says nothing beyond one layer.
    np.testing.assert_allclose(next_experts(counts, 2, one, np.array([[1]])), behind_one, rtol=1e-6)


def test_several_tokens_are_a_mean():
    counts = count_paths(np.random.default_rng(0).integers(0, 4, (3, 50, 2)), 4)
    before, two = np.array([[0, 1], [2, 3]]), np.array([[1, 2], [3, 0]])
    each = [next_experts(counts, 2, before[i : i + 1], two[i : i + 1]) for i in range(2)]
    np.testing.assert_allclose(next_experts(counts, 2, before, two), np.mean(each, 0), rtol=1e-5)
    np.testing.assert_allclose(each[0].sum(), 1, rtol=1e-5)


def test_few_pairs_are_remembered(monkeypatch):
    """The most frequent ones; the others say as much as one layer."""
    monkeypatch.setattr(prediction, "_MOST_PAIRS", 1)
    counts = count_paths(tokens(*[(0, 1, 2)] * 3, (2, 1, 1)), 3)
    assert counts.pairs[2].tolist() == [1]
    assert counts.after_two.shape == (3, 1, 3)
    unknown = next_experts(counts, 2, np.array([[1]]), np.array([[2]]))
    np.testing.assert_allclose(unknown, next_experts(counts, 2, np.array([[1]])), rtol=1e-6)


def test_stored_counts_come_back():
    counts = count_paths(np.random.default_rng(0).integers(0, 5, (4, 300, 2)), 5)
    arrays = counts.to_arrays()
    assert sum(each.nbytes for each in arrays.values()) < 4 * 25 * (5 * 2 + 4) + 4 * 2 * (25 + 5) + 1
    again = PathCounts.from_arrays(arrays, layers=4, experts=5)
    for name in ("alone", "after_one", "after_two", "pairs"):
        np.testing.assert_array_equal(getattr(again, name), getattr(counts, name))


def test_counts_beyond_float16_are_stored_as_shares():
    counts = count_paths(np.zeros((2, 200_000, 1), int), 2)
    again = PathCounts.from_arrays(counts.to_arrays(), layers=2, experts=2)
    np.testing.assert_allclose(next_experts(again, 1), next_experts(counts, 1), atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: arrays.pop("alone"), "lack 'alone'"),
        (lambda arrays: arrays.update(pairs=arrays["pairs"] + 100), "of another model"),
        (lambda arrays: arrays["after_two"].fill(np.nan), "no counts"),
        (lambda arrays: arrays["alone"].fill(-1), "no counts"),
    ],
)
def test_malformed_counts_are_refused(change, message):
    arrays = count_paths(np.zeros((3, 4, 1), int), 3).to_arrays()
    change(arrays)
    with pytest.raises(ConfigError, match=message):
        PathCounts.from_arrays(arrays, layers=3, experts=3)


def test_learning_is_counting():
    draw = np.random.default_rng(0)
    ids = np.argsort(draw.random((3, 12, 4)), axis=-1)[:, :, :2]
    counts, whole = count_paths(ids[:, :6], 4), count_paths(ids, 4)
    learn(counts, ids[:, 6:])
    for name in ("alone", "after_one", "after_two"):
        np.testing.assert_array_equal(getattr(counts, name), getattr(whole, name))


def test_learning_forgets():
    """After as many other visits as a row may weigh, the new ones lead."""
    counts = count_paths(tokens(*[(0, 1, 2)] * 1000), 3)
    before, two = np.array([[1]]), np.array([[0]])
    assert next_experts(counts, 2, before, two).argmax() == 2
    for _ in range(int(MOST_WEIGHT)):
        learn(counts, tokens((0, 1, 0)))
    assert next_experts(counts, 2, before, two).argmax() == 0
    assert counts.after_two[2][1].sum() <= MOST_WEIGHT * 1.001


# The experts of tokens: counts by hand, stored and read again


# Three visits of token 7 and one of token 3, at two layers of four experts, two a token.
TOKENS = np.array([7, 3, 7, 7])
IDS = np.array([[[0, 1], [2, 3], [1, 2], [0, 1]], [[3, 2], [0, 1], [3, 2], [3, 0]]])


def test_counts_of_tokens_by_hand():
    found = count_tokens(IDS, TOKENS, 4)
    assert found.tokens.tolist() == [3, 7]
    assert found.experts.tolist() == [[[2, 3], [1, 0]], [[0, 1], [3, 2]]]


def test_chances_are_the_mean_over_known_tokens():
    found = count_tokens(IDS, TOKENS, 4)
    np.testing.assert_allclose(found.chances(0, np.array([7]), 4), [0.5, 0.5, 0, 0])
    np.testing.assert_allclose(found.chances(1, np.array([3, 9, 7, 1]), 4), [0.25] * 4)
    assert found.chances(0, np.array([9, 1]), 4) is None
    assert found.chances(0, np.zeros(0, np.int32), 4) is None
    assert TokenExperts.none(2, 2).chances(1, np.array([7]), 4) is None


@pytest.mark.parametrize("experts", [4, 300])
def test_stored_tokens_come_back(experts):
    found = count_tokens(IDS, TOKENS, experts)
    again = TokenExperts.from_arrays(found.to_arrays(), layers=2, experts=experts, choices=2)
    assert (again.tokens.tolist(), again.experts.tolist()) == (found.tokens.tolist(), found.experts.tolist())
    assert len(TokenExperts.from_arrays({}, layers=2, experts=experts, choices=2).tokens) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": np.array([7, 3], np.int32)},
        {"tokens": np.array([3.0, 7.0], np.float32)},
        {"token_experts": np.full((2, 2, 2), 4, np.uint8)},
        {"token_experts": np.zeros((2, 2, 2), np.float32)},
        {"token_experts": None},
    ],
)
def test_malformed_ones_are_refused(change):
    arrays = {**count_tokens(IDS, TOKENS, 4).to_arrays(), **change}
    with pytest.raises(ConfigError, match="of another model"):
        TokenExperts.from_arrays(arrays, layers=2, experts=4, choices=2)


def test_nearness_counts_down_from_the_next_layer():
    assert nearness(np.arange(5), 2, 5).tolist() == [2, 1, 0, 4, 3]


# Four experts: one of the layer at work, one just passed, one next and often, one next and rare.
THOSE = Residents(
    layers=np.array([1, 0, 2, 2]),
    frequency=np.array([9.0, 4.0, 8.0, 1.0]),
    loaded=np.array([3, 2, 1, 4]),
    used=np.array([9, 8, 2, 5]),
)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        # 9 · 0, 4 · 1, 8 · 2, 1 · 2.
        ("frequency-nearness", [0, 3, 1, 2]),
        ("fifo", [2, 1, 0, 3]),
        ("lru", [2, 3, 1, 0]),
        ("lfu", [3, 1, 2, 0]),
        # 9 / 2, 4 / 3, 8 / 9, 1 / 6.
        ("lfru", [3, 2, 1, 0]),
    ],
)
def test_order(policy, order):
    scores = POLICIES[policy](THOSE, 1, 3, 10)
    assert np.argsort(scores, kind="stable").tolist() == order
    # Options name all policies, and no others.
    assert set(POLICIES) == set(get_args(Eviction))


# Logits of a token [1, 0] are this router's first column: probabilities 1/10, 4/10, 2/10, 3/10.
ROUTER = np.stack([np.log([1.0, 4.0, 2.0, 3.0]), np.log([5.0, 1.0, 1.0, 1.0])], axis=1).astype(np.float32)
ONES = np.eye(2, dtype=np.float32)[None]


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
    routing = variant(route, static_argnames=ROUTE)(ONES, ROUTER, experts_per_token=2, normalize=False)
    chex.assert_shape([routing.logits, routing.probs], DIMS["BTE"])
    chex.assert_shape([routing.ids, routing.weights], DIMS["BTk"])
    chex.assert_type([routing.logits, routing.ids, routing.weights], [jnp.float32, jnp.int32, jnp.float32])
    np.testing.assert_array_equal(routing.ids, [[[1, 3], [0, 1]]])
    np.testing.assert_allclose(routing.weights, [[[0.4, 0.3], [0.625, 0.125]]], rtol=1e-6)
    np.testing.assert_allclose(routing.probs[0, 0], [0.1, 0.4, 0.2, 0.3], rtol=1e-6)


@every_variant
def test_normalized_weights_sum_to_one(variant):
    choose = variant(route, static_argnames=ROUTE)
    routing = choose(ONES, ROUTER, experts_per_token=2, normalize=True)
    np.testing.assert_allclose(routing.weights, [[[4 / 7, 3 / 7], [5 / 6, 1 / 6]]], rtol=1e-6)
    one = choose(ONES, ROUTER, experts_per_token=1, normalize=True)
    np.testing.assert_array_equal(one.weights, np.ones((1, 2, 1)))
    np.testing.assert_array_equal(one.ids, [[[1], [0]]])


@every_variant
def test_ties_go_to_the_lower_id(variant):
    choose = variant(route, static_argnames=ROUTE)
    routing = choose(ONES, np.ones((4, 2), np.float32), experts_per_token=2, normalize=False)
    np.testing.assert_array_equal(routing.ids, [[[0, 1], [0, 1]]])


def test_narrow_activations_route_in_float32():
    x = random_logits(3, 5, 8).astype(jnp.bfloat16)
    router = random_logits(4, 8)
    got = route(jnp.asarray(x), router, experts_per_token=2, normalize=True)
    wide = route(jnp.asarray(x).astype(jnp.float32), router, experts_per_token=2, normalize=True)
    chex.assert_type([got.weights, got.logits], jnp.float32)
    np.testing.assert_array_equal(got.logits, wide.logits)


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
def test_kernels_route_as_xla():
    """And to the bit alike for a token among others, with more experts than `test_mixture.py` has."""
    draws, how = np.random.default_rng(0), {"experts_per_token": 2, "normalize": True}
    x, router = (draws.standard_normal(shape).astype(np.float32) for shape in ((1, 33, 256), (128, 256)))
    norm = Norm(scale=jnp.asarray(1 + 0.3 * draws.standard_normal(256), jnp.float32), bias=None, eps=1e-5)
    run = jax.jit(functools.partial(route, norm=norm, **how))
    found, plain = (
        run(x, router),
        route(rms_norm(x, norm.scale, norm.eps), router, **how, differentiable=True),
    )
    chex.assert_trees_all_equal(run(x[:, 7:8], router).logits, found.logits[:, 7:8])
    np.testing.assert_array_equal(found.ids, plain.ids)
    np.testing.assert_allclose(found.logits, plain.logits, atol=1e-4)
    np.testing.assert_allclose(found.weights, plain.weights, atol=1e-5)


def test_a_loss_that_no_width_reaches_is_refused_with_the_best():
    losses = {2: 0.3, 4: 0.08, 8: 0.025}
    with pytest.raises(ConfigError, match=r"at most 1\.00%: the least, by 8 bits for all experts, is 2\.50%"):
        search_widths(np.zeros((1, 2)), np.ones((1, 2)), lambda bits: losses[int(bits[0, 0])], most_loss=0.01)


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
