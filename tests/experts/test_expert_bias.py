"""Experts and routers with biases, and the clamped gate of gpt-oss, are their definition."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.experts.routing import route
from tests.experts.test_mixture import EXPERTS, ROUTER, B, D, E, F, draw, mix, normed_by_itself, routed


@pytest.mark.parametrize("differentiable", [True, False])
def test_biases_and_the_clamped_gate(differentiable):
    """Of gpt-oss: (up + 1) · gate · sigmoid(1.702 gate), where gate is at most 7 and up in ±7."""
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
