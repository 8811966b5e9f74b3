"""Training levels together: what a step computes, and that all of them learn."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.elastic.ladder import Ladder, sub_config, sub_model
from jaxllm.elastic.units import reorder
from jaxllm.errors import ConfigError
from jaxllm.models.lora import LoraConfig
from jaxllm.models.parameters import init_params
from jaxllm.models.scanned_layers import stacked
from jaxllm.training.data.rows import Batch
from jaxllm.training.data.sources import Source
from jaxllm.training.elastic import importance
from jaxllm.training.elastic.importance import Importance, measure
from jaxllm.training.elastic.job import (
    ElasticRecipe,
    adapter_of_level,
    at_level,
    cut_adapter,
    cut_level_job,
    divergence_job,
    joint_job,
    level_counts,
    level_job,
    without_layer,
)
from jaxllm.training.elastic.run import within_bound
from jaxllm.training.loop.losses import distillation_losses, next_token_losses, outputs_of
from jaxllm.training.loop.parallel import MeshShape, make_mesh
from jaxllm.training.loop.trainer import Trainer
from tests.elastic.models import LLAMA, MIXTRAL, MODELS, PLAIN, scaled_params
from tests.training.tiny_runs import SMOKE, held_out_of

LADDER = Ladder(levels=(30, 50, 70, 100), anchors=())
RECIPE = dataclasses.replace(SMOKE, model=dataclasses.replace(SMOKE.model, layers=2, attention_windows=()))


@pytest.fixture(scope="module")
def params():
    return jax.device_get(init_params(RECIPE.model, jax.random.key(3)))


def first_batch():
    return next(iter(held_out_of(RECIPE)()))


@pytest.mark.slow
def test_a_step_has_the_whole_the_smallest_and_one_between(params):
    cfg, batch = RECIPE.model, first_batch()
    job = joint_job(cfg, params, LADDER, RECIPE)
    assert job.sampled_losses is not None

    def outputs(params, level):
        part = sub_config(cfg, LADDER, level)
        return outputs_of(sub_model(params, part), batch, cfg=part)

    @jax.jit
    def by_hand(params):
        all_outputs = [outputs(params, level) for level in (100, 30, 50, 70)]
        whole, *parts = all_outputs
        small, *between = (distillation_losses(each, whole, batch, teacher_share=1.0) for each in parts)
        chosen = [(next_token_losses(whole, batch) + small + each) / 3 for each in between]
        return chosen, sum(next_token_losses(each, batch) for each in all_outputs) / 4

    by_choice, expected = by_hand(params)
    run = jax.jit(job.sampled_losses)
    seen = set()
    for seed in range(8):
        losses, penalty = run(params, None, batch, jax.random.key(seed))
        assert float(penalty) == 0
        seen.add(next(n for n, each in enumerate(by_choice) if np.allclose(each, losses, atol=1e-5)))
    assert seen == {0, 1}
    held_out, _ = jax.jit(job.losses)(params, None, batch)
    np.testing.assert_allclose(held_out, expected, atol=1e-5)


def test_a_ladder_of_one_level_trains_the_whole_which_stays_close_to_the_original(params):
    cfg, batch, one = RECIPE.model, first_batch(), Ladder(levels=(100,))
    original = jax.tree.map(lambda each: each * np.float32(1.1), params)
    free, bound = (joint_job(cfg, params, one, RECIPE, original=each) for each in (None, original))

    @jax.jit
    def run(params, original):
        losses = [
            job.sampled_losses(params, frozen, batch, jax.random.key(0))[0]
            for job, frozen in ((free, None), (bound, original))
        ]
        ours, theirs = (outputs_of(each, batch, cfg=cfg) for each in (params, original))
        log_p, log_q = (jax.nn.log_softmax(each.logits) for each in (theirs, ours))
        apart = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
        measured, _ = divergence_job(cfg, original, RECIPE).losses(params, original, batch)
        return *losses, next_token_losses(ours, batch), apart, measured

    whole, close, expected, apart, measured = run(params, bound.frozen)
    np.testing.assert_allclose(whole, expected, atol=1e-6)
    np.testing.assert_allclose(close - expected, apart, atol=1e-4)
    np.testing.assert_allclose(measured, apart, atol=1e-4)
    assert float(apart.max()) > 1e-3


# Levels as counts of used units: losses and gradients of models cut to the level, by one compiled step.
THREE = Ladder(levels=(30, 60, 100), anchors=(1,))
ADAPTERS = ElasticRecipe(
    steps=3, batch=2, row_tokens=24, peak_learning_rate=1e-2, warmup_steps=0, lora=LoraConfig(rank=2),
    sources=(Source(text="text.txt"),),
)  # fmt: skip


def two_layers(name):
    return dataclasses.replace(MODELS[name], layers=2, attention_windows=(), sparse_layers=())


def mean_loss(params, cfg, of):
    losses = next_token_losses(outputs_of(params, of, cfg=cfg), of)
    return jnp.sum(losses * of.weights) / jnp.sum(of.weights)


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_losses_and_gradients_are_those_of_a_model_cut_to_the_level(name):
    cfg = two_layers(name)
    # Every token visits every expert: a choice would make gradients of routers differ by rounding.
    cfg = dataclasses.replace(cfg, experts_per_token=cfg.experts)
    params, of = scaled_params(cfg), batch()
    by_counts = jax.jit(
        jax.value_and_grad(lambda params, counts: mean_loss(at_level(params, counts, cfg), cfg, of))
    )
    part = sub_config(cfg, THREE, 30)
    cut = jax.jit(jax.value_and_grad(lambda params: mean_loss(sub_model(params, part), part, of)))
    wanted, found = cut(params), by_counts(params, level_counts(cfg, THREE, 30))
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    for key, gradient in wanted[1].items():
        np.testing.assert_allclose(found[1][key], gradient, rtol=2e-3, atol=2e-5, err_msg=key)
    # Another level is other numbers, not another program.
    larger, _ = by_counts(params, level_counts(cfg, THREE, 60))
    assert larger != found[0]
    assert by_counts._cache_size() == 1


def test_stacked_layers_take_the_same_counts():
    cfg, of = two_layers("mixtral"), batch()
    params, counts = scaled_params(cfg), level_counts(cfg, THREE, 30)
    stacks = at_level(stacked(jax.tree.map(jnp.asarray, params), cfg), counts, cfg)
    assert stacks["stacks.0.used_units"].shape == (2, 3)
    run = jax.jit(lambda params: mean_loss(params, cfg, of))
    np.testing.assert_allclose(run(stacks), run(at_level(params, counts, cfg)), rtol=1e-5)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_levels_train_by_one_step_and_as_if_cut(share):
    cfg = two_layers("llama")
    ladder, params, of = dataclasses.replace(THREE, anchors=()), scaled_params(cfg), batch()
    mesh, recipe = make_mesh(MeshShape(data=1), 1), dataclasses.replace(ADAPTERS, teacher_share=share)
    whole = Trainer(level_job(cfg, params, ladder, recipe), recipe, mesh)

    def trained(trainer):
        state, losses = trainer.initial(), []
        for _ in range(ADAPTERS.steps):
            state, (loss, *_) = trainer.step(state, of)
            losses.append(float(loss))
        return state.params, losses

    for level in (30, 60):
        part = sub_config(cfg, ladder, level)
        beside = whole.beside(
            adapter_of_level(cfg, part, ADAPTERS.lora, ADAPTERS.seed), level_counts(cfg, ladder, level)
        )
        adapter, losses = trained(beside)
        if level == 30:
            arrays = jax.tree.map(jnp.asarray, params)
            job = cut_level_job(cfg, arrays, ladder, level, recipe, {})
            alone, wanted = trained(Trainer(job, recipe, mesh))
            np.testing.assert_allclose(losses, wanted, rtol=1e-4)
            for name, value in cut_adapter(part, jax.device_get(adapter)).items():
                np.testing.assert_allclose(value, alone[name], atol=1e-3, err_msg=name)
    # One compiled step for all levels.
    assert len(whole._compiled) == 1


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
    assert found.anchors(1.0) == tuple(range(10))


def test_a_broken_model_is_refused():
    cfg, params = SMALL[0], scaled_params(SMALL[0])
    broken = {**params, "final_norm.scale": jnp.full_like(params["final_norm.scale"], jnp.nan)}
    with pytest.raises(ConfigError, match="loss on the calibration text is nan"):
        measure(cfg, jax.tree.map(jnp.asarray, broken), [batch()])


def test_weights_go_back_as_far_as_a_bound_says():
    start, end = {"w": jnp.zeros(2)}, {"w": jnp.ones(2)}
    for bound, share in ((0.25, 0.5), (2.0, 1.0), (1e-9, 0.0)):
        kept, found, nats = within_bound(start, end, lambda params: float(params["w"][0]) ** 2, bound)
        assert nats <= bound
        assert found == pytest.approx(share, abs=0.01)
        np.testing.assert_allclose(kept["w"], found)
