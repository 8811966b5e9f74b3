"""A model with outliers put into it is the same function, with larger activations."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.int8_prefill.calibration import PLACES, OutlierRecipe, with_outliers
from jaxllm.int8_prefill.reference import observed
from jaxllm.models.decoder import forward
from tests.tiny import TINY, random_params, tiny_params

BIASED = dataclasses.replace(
    TINY, norm="layer", qkv_bias=True, o_bias=True, ffn_bias=True, gated_ffn=False, activation="relu"
)
TOKENS = np.arange(11, dtype=np.int32) * 7 % TINY.vocab_size


def run(cfg, params):
    return np.asarray(forward(params, TOKENS[None], cfg=cfg)[0])


def tops(cfg, params) -> np.ndarray:
    """The largest input of each product over a usual one, `[L, 4]`."""

    def look(layer, product, x):
        sizes = jnp.max(jnp.abs(x), axis=0)
        return jnp.max(sizes) / jnp.median(sizes)

    return np.array(jax.jit(lambda p: observed(p, TOKENS, look, cfg=cfg))(params))


@pytest.mark.parametrize("cfg", [TINY, BIASED], ids=["gated", "biased"])
@pytest.mark.parametrize("place", [*PLACES, "all"])
def test_the_function_stays(cfg, place):
    params = dict(tiny_params(cfg))
    if cfg is BIASED:
        params = {name: 0.1 * each for name, each in random_params(cfg).items()}
    recipe = OutlierRecipe(channels=3, factor=64, places=PLACES if place == "all" else (place,))
    changed = with_outliers(cfg, params, recipe)
    np.testing.assert_allclose(run(cfg, changed), run(cfg, params), rtol=1e-4, atol=1e-4)
    grown = tops(cfg, changed) / tops(cfg, params)
    where = {"norm": [0, 2], "value": [1], "neuron": [3], "all": [0, 1, 2, 3]}[place]
    assert (grown[:, where] > 2).all()
    others = [product for product in range(4) if product not in where]
    np.testing.assert_allclose(grown[:, others], 1, rtol=1e-3)


def test_what_is_given_stays():
    params = tiny_params()
    before = {name: each.copy() for name, each in params.items()}
    with_outliers(TINY, params, OutlierRecipe())
    chex.assert_trees_all_equal(dict(params), before, strict=True)


@pytest.mark.parametrize(
    ("cfg", "change", "message"),
    [
        (TINY, {"channels": 65}, "65 of 64 channels"),
        (TINY, {"channels": 0}, "at least one channel"),
        (TINY, {"factor": 3}, "power of two"),
        (TINY, {"factor": 1}, "power of two"),
        (TINY, {"places": ()}, "outliers are in some of"),
        (dataclasses.replace(TINY, gated_ffn=False), {}, "cannot be scaled past silu"),
        (dataclasses.replace(TINY, qkv_clip=1.0), {}, "clipped"),
        (dataclasses.replace(TINY, experts=2, experts_per_token=1), {}, "mixtures"),
    ],
)
def test_refusals(cfg, change, message):
    with pytest.raises(ConfigError, match=message):
        with_outliers(cfg, tiny_params(), OutlierRecipe(**change))
