import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.elastic.units import reorder
from jaxllm.errors import ConfigError
from jaxllm.training.data.rows import Batch
from jaxllm.training.elastic import importance
from jaxllm.training.elastic.importance import (
    Importance,
    calibration_batches,
    magnitudes,
    measure,
    random_order,
)
from jaxllm.training.elastic.job import without_layer
from jaxllm.training.loop.losses import next_token_losses, outputs_of
from tests.elastic.models import LLAMA, MIXTRAL, MODELS, PLAIN, scaled_params

SMALL = [dataclasses.replace(cfg, layers=2, attention_windows=()) for cfg in (LLAMA, PLAIN)]
# Every token visits every expert: a choice would make the loss jump.
MIXTURE = dataclasses.replace(
    MIXTRAL, layers=2, attention_windows=(), sparse_layers=(True, False), experts_per_token=4
)
SMALL.append(MIXTURE)


def batch(seed=0, rows=2, tokens=24):
    draw = np.random.default_rng(seed)
    ids = draw.integers(0, LLAMA.vocab_size, (rows, tokens + 1)).astype(np.int32)
    nothing = np.zeros((rows, tokens), np.int32)
    weights = np.ones((rows, tokens), np.float32)
    weights[:, -3:] = 0
    return Batch(ids[:, :-1], ids[:, 1:], nothing, weights, nothing)


@pytest.fixture(autouse=True)
def short_texts(monkeypatch):
    monkeypatch.setattr(importance, "LEAST_TOKENS", 16)


@functools.cache
def measured(cfg):
    """Importances of the same parameters on the same batch, measured once."""
    return measure(cfg, scaled_params(cfg), [batch()])


@functools.partial(jax.jit, static_argnums=0)
def _losses(cfg, params, of):
    return next_token_losses(outputs_of(params, of, cfg=cfg), of)


def loss_of(cfg, params, of):
    losses = np.asarray(_losses(cfg, params, of), np.float64)
    return float((losses * (of.weights > 0)).sum() / (of.weights > 0).sum())


def scaled_unit(params, name_of_part, layer, unit, factor):
    """The parameters with one unit's weights and biases times a factor."""
    out = dict(params)
    for name, value in params.items():
        part = name.removeprefix(f"layers.{layer}.")
        mine = part.startswith(name_of_part) and "norm" not in part
        if part == name or not mine or part in ("attn.o_bias", "ffn.down_bias"):
            continue
        changed = np.array(value)
        changed[unit] *= np.float32(factor)
        out[name] = changed
    return out


@pytest.mark.slow
@pytest.mark.parametrize("cfg", SMALL, ids=lambda cfg: cfg.model_type)
def test_importance_is_the_slope_of_the_loss_along_a_unit(cfg):
    params, of = scaled_params(cfg), batch()
    found = measured(cfg)
    first = ("experts.", (2, 5)) if cfg.is_sparse(0) else ("ffn.", (5,))
    for layer, part, unit, value in [
        (0, "attn.", (1,), found.groups[0][1]),
        (1, "attn.", (3,), found.groups[1][3]),
        (1, "ffn.", (7,), found.neurons[1][7]),
        (0, *first, found.neurons[0][first[1]]),
    ]:
        step = 0.02
        above, below = (
            loss_of(cfg, scaled_unit(params, part, layer, unit, 1 + sign * step), of) for sign in (1, -1)
        )
        assert value == pytest.approx(abs(above - below) / (2 * step), rel=0.05, abs=2e-5)
    # That of a layer is what the loss grows without it.
    for layer in range(2):
        grown = loss_of(cfg, without_layer(cfg, params, layer), of) - loss_of(cfg, params, of)
        assert found.layers[layer] == pytest.approx(grown, abs=1e-5)


def test_batches_are_averaged_by_their_tokens():
    cfg, params = SMALL[0], scaled_params(SMALL[0])
    one, two = batch(0), batch(1)
    two.weights[1] = 0
    apart = [measured(cfg), measure(cfg, params, [two])]
    both = measure(cfg, params, [one, two])
    np.testing.assert_allclose(
        both.neurons[0], (2 * apart[0].neurons[0] + apart[1].neurons[0]) / 3, rtol=1e-4, atol=1e-9
    )
    assert both.loss == pytest.approx((2 * apart[0].loss + apart[1].loss) / 3, rel=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mixtral"])
def test_a_layer_that_adds_nothing_is_left_out(name):
    """With biases, with norms behind a layer, and with experts."""
    cfg = MODELS[name]
    params, of = scaled_params(cfg), batch()
    # Its norms may be anything then.
    without = without_layer(cfg, params, 1)
    other = {
        key: value + 1 if key.startswith("layers.1.") and "norm" in key else value
        for key, value in without.items()
    }
    if not cfg.post_norms:
        assert loss_of(cfg, without, of) == pytest.approx(loss_of(cfg, other, of), abs=1e-6)
    assert loss_of(cfg, without, of) != pytest.approx(loss_of(cfg, params, of), abs=1e-4)


def test_the_order_follows_the_units_when_they_move():
    # Measured again after reordering, importances come falling.
    moved = dict(reorder(MIXTURE, scaled_params(MIXTURE).items(), measured(MIXTURE).order(MIXTURE)))
    again = measure(MIXTURE, moved, [batch()])
    for each in (*again.groups, *again.neurons):
        assert np.all(np.diff(each, axis=-1) <= 1e-3 * np.abs(each).max())


def test_anchors_are_the_most_important_fifth():
    layers = np.array([0.1, 3.0, -0.2, 0.5, 0.4, 0.3, 2.0, 0.2, 0.1, 0.0])
    found = Importance((), (), layers, 1.0)
    assert found.anchors() == (1, 6)
    assert found.anchors(0.0) == ()
    assert found.anchors(1.0) == tuple(range(10))
    with pytest.raises(ConfigError, match="share of anchor layers"):
        found.anchors(1.5)


def test_other_orders():
    cfg, params = MIXTURE, scaled_params(MIXTURE)
    neurons = params["layers.0.experts.up"], params["layers.0.experts.gate"], params["layers.0.experts.down"]
    norms = np.sqrt(sum(np.square(each).sum(-1) for each in neurons))
    np.testing.assert_array_equal(magnitudes(cfg, params.items()).neurons[0], np.argsort(-norms, axis=-1))
    first, second = random_order(cfg, 1), random_order(cfg, 2)
    np.testing.assert_array_equal(first.neurons[1], random_order(cfg, 1).neurons[1])
    assert not np.array_equal(first.neurons[1], second.neurons[1])


def test_a_text_that_is_too_short_or_a_broken_model_is_refused(monkeypatch):
    cfg, params = SMALL[0], scaled_params(SMALL[0])
    monkeypatch.setattr(importance, "LEAST_TOKENS", 64)
    with pytest.raises(ConfigError, match="has 42 tokens to predict; give at least 64"):
        measure(cfg, params, [batch()])
    monkeypatch.setattr(importance, "LEAST_TOKENS", 16)
    broken = {**params, "final_norm.scale": jnp.full_like(params["final_norm.scale"], jnp.nan)}
    with pytest.raises(ConfigError, match="loss on the calibration text is nan"):
        measure(cfg, jax.tree.map(jnp.asarray, broken), [batch()])


def test_calibration_takes_whole_batches_until_it_has_enough():
    batches = [batch(seed) for seed in range(4)]
    assert calibration_batches(iter(batches), 43) == batches[:2]
    assert calibration_batches(iter(batches), 10_000) == batches
