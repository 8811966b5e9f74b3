"""Training levels together: what a step computes, and that all of them learn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.elastic.ladder import Ladder, sub_config, sub_model
from jaxllm.models.parameters import init_params
from jaxllm.training.elastic.job import divergence_job, joint_job
from jaxllm.training.elastic.run import within_bound
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
    run = jax.jit(job.drawn_losses)
    seen = set()
    for seed in range(8):
        losses, penalty = run(params, None, batch, jax.random.key(seed))
        assert float(penalty) == 0
        seen.add(next(n for n, each in enumerate(by_choice) if np.allclose(each, losses, atol=1e-5)))
    assert seen == {0, 1}
    held_out, _ = jax.jit(job.losses)(params, None, batch)
    np.testing.assert_allclose(held_out, expected, atol=1e-5)


@pytest.mark.slow
def test_all_levels_learn_from_the_given_weights(params, tmp_path):
    recipe = dataclasses.replace(
        RECIPE, steps=30, checkpoint_steps=30, peak_learning_rate=1e-2, warmup_steps=2
    )
    trainer = Trainer(joint_job(recipe.model, params, LADDER, recipe), recipe, one_device())
    start = trainer.initial().params
    for name, value in params.items():
        np.testing.assert_array_equal(np.asarray(start[name]), value)
    state, batch = train(recipe, tmp_path, trainer=trainer), first_batch()

    @jax.jit
    def losses(params):
        parts = [sub_config(recipe.model, LADDER, level) for level in LADDER.levels]
        all_outputs = [outputs_of(sub_model(params, part), batch, cfg=part) for part in parts]
        sums = [(next_token_losses(each, batch) * batch.weights).sum() for each in all_outputs]
        return jnp.stack(sums) / batch.weights.sum()

    assert (losses(state.params) < losses(jax.tree.map(jnp.asarray, params)) - 0.5).all()


def test_a_ladder_of_one_level_trains_the_whole_which_stays_close_to_the_original(params):
    cfg, batch, one = RECIPE.model, first_batch(), Ladder(levels=(100,))
    original = jax.tree.map(lambda each: each * np.float32(1.1), params)
    free, bound = (joint_job(cfg, params, one, RECIPE, original=each) for each in (None, original))

    @jax.jit
    def run(params, original):
        losses = [
            job.drawn_losses(params, frozen, batch, jax.random.key(0))[0]
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
