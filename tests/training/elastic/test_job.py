"""Training levels together: what a step computes, and that all of them learn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.elastic.ladder import Ladder, sub_config, sub_model
from jaxllm.models.parameters import init_params
from jaxllm.training.elastic.job import divergence_job, joint_job
from jaxllm.training.elastic.recovery import within_bound
from jaxllm.training.loop.losses import distillation_losses, next_token_losses, outputs_of
from jaxllm.training.loop.trainer import Trainer
from tests.training.jobs import SMOKE, held_out_of, one_device, train

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
    assert job.drawn_losses is not None

    def outputs(level):
        part = sub_config(cfg, LADDER, level)
        return outputs_of(sub_model(params, part), batch, cfg=part)

    whole = outputs(100)
    drawn = {
        level: distillation_losses(outputs(level), whole, batch, teacher_share=1.0) for level in (30, 50, 70)
    }
    by_choice = [(next_token_losses(whole, batch) + drawn[30] + drawn[level]) / 3 for level in (50, 70)]
    run = jax.jit(job.drawn_losses)
    seen = set()
    for seed in range(8):
        losses, penalty = run(params, None, batch, jax.random.key(seed))
        assert float(penalty) == 0
        seen.add(next(n for n, each in enumerate(by_choice) if np.allclose(each, losses, atol=1e-5)))
    assert seen == {0, 1}
    held_out, _ = job.losses(params, None, batch)
    expected = sum(next_token_losses(outputs(level), batch) for level in (30, 50, 70, 100)) / 4
    np.testing.assert_allclose(held_out, expected, atol=1e-5)


@pytest.mark.slow
def test_all_levels_learn_from_the_given_weights(params, tmp_path):
    recipe = dataclasses.replace(
        RECIPE, steps=30, checkpoint_steps=30, peak_learning_rate=1e-2, warmup_steps=2
    )
    job = joint_job(recipe.model, params, LADDER, recipe)
    trainer = Trainer(job, recipe, one_device())
    start = trainer.initial().params
    for name, value in params.items():
        np.testing.assert_array_equal(np.asarray(start[name]), value)
    state = train(recipe, tmp_path, job=job)

    def loss(params, level):
        part, batch = sub_config(recipe.model, LADDER, level), first_batch()
        own = sub_model({name: jnp.asarray(value) for name, value in params.items()}, part)
        losses = next_token_losses(outputs_of(own, batch, cfg=part), batch)
        return float((losses * batch.weights).sum() / batch.weights.sum())

    for level in LADDER.levels:
        assert loss(state.params, level) < loss(params, level) - 0.5


def test_a_ladder_of_one_level_trains_the_whole(params):
    job = joint_job(RECIPE.model, params, Ladder(levels=(100,)), RECIPE)
    assert job.drawn_losses is not None
    batch = first_batch()
    losses, _ = job.drawn_losses(params, None, batch, jax.random.key(0))
    expected = next_token_losses(outputs_of(params, batch, cfg=RECIPE.model), batch)
    np.testing.assert_allclose(losses, expected, atol=1e-6)


def test_the_whole_model_stays_close_to_the_original(params):
    cfg, batch = RECIPE.model, first_batch()
    original = jax.tree.map(lambda each: each * np.float32(1.1), params)
    job = joint_job(cfg, params, Ladder(levels=(100,)), RECIPE, original=original)
    assert job.drawn_losses is not None
    losses, _ = job.drawn_losses(params, job.frozen, batch, jax.random.key(0))
    ours, theirs = (outputs_of(each, batch, cfg=cfg) for each in (params, original))
    log_p, log_q = (jax.nn.log_softmax(each.logits) for each in (theirs, ours))
    apart = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
    np.testing.assert_allclose(losses - next_token_losses(ours, batch), apart, atol=1e-4)
    measured, _ = divergence_job(cfg, original, RECIPE).losses(params, original, batch)
    np.testing.assert_allclose(measured, apart, atol=1e-4)
    assert float(apart.max()) > 1e-3


def test_weights_go_back_as_far_as_a_bound_says():
    start, end = {"w": jnp.zeros(2)}, {"w": jnp.ones(2)}

    def divergence(params):
        return float(params["w"][0]) ** 2

    kept, share, nats = within_bound(start, end, divergence, 0.25)
    assert nats <= 0.25
    assert 0.49 < share <= 0.5
    np.testing.assert_allclose(kept["w"], share)
    assert within_bound(start, end, divergence, 2.0)[1:] == (1.0, 1.0)
    assert within_bound(start, end, divergence, 1e-9)[1:] == (0.0, 0.0)
