import dataclasses

import numpy as np
import pytest

from jaxllm.elastic.units import UnitOrder, check_order, order_units, reorder
from jaxllm.errors import ConfigError
from jaxllm.models.decoder import forward_documents
from tests.elastic.models import LLAMA, MODELS, QWEN3_MOE, TOKENS, random_order, scaled_params


@pytest.mark.parametrize("name", MODELS)
def test_units_in_another_order_are_the_same_model(name):
    cfg = MODELS[name]
    params = scaled_params(cfg)
    moved = dict(reorder(cfg, params.items(), random_order(cfg)))
    differing = {key.split(".", 2)[-1] for key in params if not np.array_equal(params[key], moved[key])}
    assert {"attn.q", "attn.k", "attn.v", "attn.o"} <= differing
    assert not any("norm" in key or key in ("router", "attn.o_bias", "ffn.down_bias") for key in differing)
    assert len(differing) >= 6
    before, after = (np.asarray(forward_documents(each, TOKENS, cfg=cfg)) for each in (params, moved))
    np.testing.assert_allclose(after, before, rtol=0, atol=2e-5 * np.abs(before).max())


def test_the_most_important_units_come_first_and_ties_stay():
    importance = np.array([0.5, 2.0, 0.5, 3.0])
    order = order_units([importance], [np.stack([importance, -importance])])
    np.testing.assert_array_equal(order.groups[0], [3, 1, 0, 2])
    np.testing.assert_array_equal(order.neurons[0], [[3, 1, 0, 2], [0, 2, 1, 3]])


def test_reordering_follows_the_importance():
    params = scaled_params(LLAMA)
    groups = [np.arange(4.0)] * 3
    neurons = [np.arange(96.0)] * 3
    moved = dict(reorder(LLAMA, params.items(), order_units(groups, neurons)))
    np.testing.assert_array_equal(moved["layers.1.attn.v"], params["layers.1.attn.v"][::-1])
    np.testing.assert_array_equal(moved["layers.2.ffn.down"], params["layers.2.ffn.down"][::-1])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_importance_must_be_finite(value):
    with pytest.raises(ConfigError, match="not finite"):
        order_units([np.array([1.0, value])], [])


def test_an_order_of_another_model_is_refused():
    order = random_order(LLAMA)
    with pytest.raises(ConfigError, match="of 3 layers, the model has 2"):
        check_order(dataclasses.replace(LLAMA, layers=2, attention_windows=()), order)
    with pytest.raises(ConfigError, match="layer 0's neurons is no permutation"):
        check_order(QWEN3_MOE, order)
    twice = UnitOrder((np.array([0, 0, 1, 2]), *order.groups[1:]), order.neurons)
    with pytest.raises(ConfigError, match="layer 0's kv-groups is no permutation"):
        check_order(LLAMA, twice)
