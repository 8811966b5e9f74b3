"""Tests the factors of the sum of several adapters, as native kernels read them."""

import numpy as np
import pytest

from jaxllm.elastic.ladder import Ladder, sub_config
from jaxllm.models.lora import summed_factors
from jaxllm.models.parameters import param_specs
from tests.elastic.models import LLAMA

RANKS = {"layers.0.attn.q": 3, "layers.0.attn.o": 5, "layers.2.ffn.down": 2}


def random_adapter(cfg, ranks, seed):
    draw, adapter = np.random.default_rng(seed), {}
    for name, rank in ranks.items():
        *units, width = param_specs(cfg)[name].shape
        adapter[f"{name}.left"] = draw.normal(size=(*units, rank)).astype(np.float32)
        adapter[f"{name}.right"] = draw.normal(size=(rank, width)).astype(np.float32)
    return adapter


def change_of(name, adapters, rank):
    """What the factors add to a parameter."""
    left, right = summed_factors(name, param_specs(LLAMA)[name].shape, adapters, rank)
    assert (left.dtype, right.dtype) == (np.float32, np.float32)
    assert left.shape == (rank, *param_specs(LLAMA)[name].shape[:-1])
    assert right.shape == (rank, param_specs(LLAMA)[name].shape[-1])
    return np.tensordot(np.moveaxis(left, 0, -1), right, axes=1)


def test_adapters_of_a_model_and_of_a_sub_model_add_up():
    cfg = sub_config(LLAMA, Ladder(anchors=(1,)), 50)
    whole = random_adapter(LLAMA, {"layers.0.attn.q": 2, "layers.2.ffn.down": 2}, 0)
    part = random_adapter(cfg, {"layers.0.attn.q": 1, "layers.0.attn.o": 4}, 1)
    assert part["layers.0.attn.q.left"].shape < whole["layers.0.attn.q.left"].shape
    for name, rank in RANKS.items():
        expected = np.zeros(param_specs(LLAMA)[name].shape)
        for adapter, scaling in ((whole, 0.5), (part, 2.0)):
            if f"{name}.left" in adapter:
                change = scaling * adapter[f"{name}.left"] @ adapter[f"{name}.right"]
                expected[tuple(map(slice, change.shape))] += change
        assert expected.any()
        found = change_of(name, [(whole, 0.5), (part, 2.0)], rank)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("more", [0, 1, 7])
def test_ranks_of_the_adapters_come_first(more):
    """The others are zeros, as is all of a parameter that no adapter changes."""
    adapter, name = random_adapter(LLAMA, {"layers.0.attn.q": 2}, 2), "layers.0.attn.q"
    left, right = summed_factors(name, param_specs(LLAMA)[name].shape, [(adapter, 1.0)], 2 + more)
    np.testing.assert_array_equal(left[:2], np.moveaxis(adapter[f"{name}.left"], -1, 0))
    np.testing.assert_array_equal(right[:2], adapter[f"{name}.right"])
    assert not left[2:].any()
    assert not right[2:].any()
    assert not change_of("layers.0.attn.o", [(adapter, 1.0)], 2 + more).any()
