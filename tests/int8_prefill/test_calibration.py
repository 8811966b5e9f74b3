"""Steps, channels and layers, by hand; and that a calibrated model is nearly the float one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.int8_prefill.calibration import (
    channel_tops,
    clipped_layers,
    clipping_steps,
    importances,
    largest_of,
    most_important,
    outlying_channels,
    product_errors,
    shadow_counts,
    whole_steps,
)
from jaxllm.int8_prefill.recipe import ShadowRecipe
from jaxllm.int8_prefill.reference import integer_rule, plain_rule, scores_by_rule
from tests.int8_prefill.calibrated import OUTLIERS, calibrated, outlying, stored, texts
from tests.tiny import TINY


def test_steps():
    """Of four channels at most one passes, and only where that makes the step enough finer."""
    tops = [[np.array([1.0, 2.0, 3.0, 100.0]), np.array([5.0, 4.0, 0.0, 0.0]), np.array([5.0, 4.8, 1, 1])]]
    recipe = ShadowRecipe(most_channels=0.25, least_gain=0.1)
    np.testing.assert_allclose(127 * clipping_steps(tops, recipe), [[3, 4, 5]], rtol=1e-6)
    two = ShadowRecipe(most_channels=0.5, least_gain=0.1)
    # Two are worth it together, though the first alone is not.
    np.testing.assert_allclose(127 * clipping_steps(tops, two), [[2, 4, 1]], rtol=1e-6)
    np.testing.assert_allclose(127 * whole_steps(tops), [[100, 5, 5]], rtol=1e-6)
    np.testing.assert_allclose(importances(tops, clipping_steps(tops, recipe)), [127 * 100 / 3], rtol=1e-6)
    assert clipping_steps([[np.zeros(3)]], recipe) > 0
    assert whole_steps([[np.zeros(3)]]) > 0


def test_texts_together():
    one, other = [[np.array([1.0, 5.0])] * 4], [[np.array([2.0, 3.0])] * 4]
    np.testing.assert_array_equal(largest_of([one, other])[0][2], [2, 5])
    with pytest.raises(ConfigError, match="no text"):
        largest_of([])
    with pytest.raises(ConfigError, match="NaN or infinite"):
        largest_of([one, [[np.array([np.nan, 1])] * 4]])


def test_channels_with_outliers():
    assert outlying_channels(np.array([0, 50, 5, 0, 30, 15])).tolist() == [1, 4, 5, 2]
    assert not len(outlying_channels(np.zeros(4, np.int32)))


def test_layers():
    importance = np.array([1.0, 9.0, 3.0, 3.0])
    assert most_important(importance, 2) == (False, True, True, False)
    assert shadow_counts(24, 0.85) == [4, 8, 16, 24]
    assert shadow_counts(1, 0.85) == [1]
    assert shadow_counts(4, 0) == [4]
    assert shadow_counts(4, 1) == [0, 1, 2, 4]


def test_a_layer_without_a_shadow_clips_where_its_products_change_less():
    """The outliers of one channel cost less to clip than a step for all channels does, unless weights make
    much of that channel."""
    floats = {name: jnp.asarray(each) for name, each in outlying().items()}
    text = texts(TINY)[0]
    tops = largest_of([jax.device_get(channel_tops(floats, text, cfg=TINY))])
    wide = whole_steps(tops)
    fine = clipping_steps(tops, ShadowRecipe(most_channels=0.1))
    errors = jax.device_get(product_errors(floats, text, (fine, wide), cfg=TINY))
    assert clipped_layers([errors]) == tuple(
        sum(each[0] for each in layer) <= sum(each[1] for each in layer) for layer in errors
    )
    # A step that clips everything changes all of a product, one that clips nothing next to none.
    errors = jax.device_get(product_errors(floats, text, (fine / 1e6, wide), cfg=TINY))
    assert clipped_layers([errors]) == (False,) * TINY.layers
    np.testing.assert_allclose([each[0] for layer in errors for each in layer], 1, atol=1e-3)
    assert clipped_layers([[[each[::-1] for each in layer] for layer in errors]]) == (True,) * TINY.layers


@pytest.mark.parametrize("field", ["most_channels", "least_gain", "pruned_share"])
def test_shares(field):
    with pytest.raises(ConfigError, match=f"{field} must be in"):
        ShadowRecipe(**{field: 1.5})


def test_outliers_are_found():
    """The channels that were scaled up are those of the float rows."""
    found = calibrated(shadows=2)
    scaled = np.flatnonzero(outlying()["layers.0.attn_norm.scale"] != 1)
    assert len(scaled) == OUTLIERS.channels
    for layer in range(TINY.layers):
        for product in (0, 2):
            assert set(scaled) <= set(found.channels[layer, product])
            np.testing.assert_allclose(
                found.rows[layer, product][-1][0],
                outlying()[f"layers.{layer}.{'attn.v' if product == 0 else 'ffn.up'}"].reshape(
                    -1, TINY.hidden_size
                )[:, found.channels[layer, product][0]],
                rtol=1e-3,
                atol=1e-7,
            )
    assert found.row_bytes == sum(each.nbytes for rows in found.rows.values() for each in rows) > 0
    with pytest.raises(ConfigError, match="level 50 has no integer prefill"):
        found.layers(50, TINY)
    assert found.loss(100) == 0.002
    assert found.loss(50) == np.inf


@pytest.mark.slow
def test_the_shadow_brings_the_function_back():
    """With outliers 8 bits of whole tensors are far off; with their shadow they are near."""
    params, floats = stored(), {name: jnp.asarray(each) for name, each in outlying().items()}

    @functools.partial(jax.jit, static_argnames="exact")
    def scores(params, layers, tokens, exact=False):
        rule = plain_rule(params, TINY) if exact else integer_rule(params, layers, TINY)
        return scores_by_rule(params, tokens[:-1], tokens[1:], rule, cfg=TINY)

    errors = {}
    for row in texts(count=2):
        known = scores(floats, (), row, exact=True)
        for shadows in (0, 1, 2):
            layers = calibrated(shadows=shadows).layers(100, TINY)
            errors.setdefault(shadows, []).append(np.abs(scores(params, layers, row) - known).mean())
    naive, half, whole = (np.mean(errors[shadows]) for shadows in (0, 1, 2))
    assert whole < half < naive
    assert whole < 0.3 * naive


def test_broken_activations_are_seen():
    floats = {name: jnp.asarray(each) for name, each in outlying().items()}
    floats["layers.1.ffn_norm.scale"] = floats["layers.1.ffn_norm.scale"].at[3].set(np.nan)
    tops = jax.jit(functools.partial(channel_tops, cfg=TINY))(floats, texts()[0])
    with pytest.raises(ConfigError, match="NaN or infinite"):
        largest_of([jax.device_get(tops)])
