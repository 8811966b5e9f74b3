"""Levels as counts of used units: losses and gradients of models cut to the level, by one compiled step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.elastic.ladder import Ladder, sub_config, sub_model
from jaxllm.models.lora import LoraConfig, init_adapter
from jaxllm.models.scanned_layers import stacked
from jaxllm.training.data.sources import Source
from jaxllm.training.elastic.job import adapter_of_level, at_level, cut_adapter, level_counts, level_job
from jaxllm.training.loop.losses import next_token_losses, outputs_of
from jaxllm.training.loop.parallel import MeshShape, make_mesh
from jaxllm.training.loop.trainer import Trainer
from jaxllm.training.lora.run import LoraRecipe, lora_job
from tests.elastic.models import MODELS, scaled_params
from tests.training.elastic.test_importance import batch

LADDER = Ladder(levels=(30, 60, 100), anchors=(1,))
RECIPE = LoraRecipe(
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
    part = sub_config(cfg, LADDER, 30)
    cut = jax.jit(jax.value_and_grad(lambda params: mean_loss(sub_model(params, part), part, of)))
    wanted, found = cut(params), by_counts(params, level_counts(cfg, LADDER, 30))
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    for key, gradient in wanted[1].items():
        np.testing.assert_allclose(found[1][key], gradient, rtol=2e-3, atol=2e-5, err_msg=key)
    # Another level is other numbers, not another program.
    larger, _ = by_counts(params, level_counts(cfg, LADDER, 60))
    assert larger != found[0]
    assert by_counts._cache_size() == 1


def test_stacked_layers_take_the_same_counts():
    cfg, of = two_layers("mixtral"), batch()
    params, counts = scaled_params(cfg), level_counts(cfg, LADDER, 30)
    stacks = at_level(stacked(jax.tree.map(jnp.asarray, params), cfg), counts, cfg)
    assert stacks["stacks.0.used_units"].shape == (2, 3)
    run = jax.jit(lambda params: mean_loss(params, cfg, of))
    np.testing.assert_allclose(run(stacks), run(at_level(params, counts, cfg)), rtol=1e-5)


def test_an_adapter_of_a_level_has_its_shapes():
    cfg = MODELS["llama"]
    part = sub_config(cfg, LADDER, 30)
    wide = adapter_of_level(cfg, part, RECIPE.lora, 0)
    plain = init_adapter(part, RECIPE.lora, jax.random.key(0))
    assert wide["layers.0.ffn.down.left"].shape == (cfg.ffn_size, 2)
    for name, value in cut_adapter(part, wide).items():
        np.testing.assert_array_equal(value, plain[name])


def test_all_levels_train_by_one_step_and_as_if_cut():
    cfg = two_layers("llama")
    ladder, params, of = dataclasses.replace(LADDER, anchors=()), scaled_params(cfg), batch()
    mesh = make_mesh(MeshShape(data=1), 1)
    whole = Trainer(level_job(cfg, params, ladder, RECIPE), RECIPE, mesh)

    def trained(trainer):
        state, losses = trainer.initial(), []
        for _ in range(RECIPE.steps):
            state, (loss, *_) = trainer.step(state, of)
            losses.append(float(loss))
        return state.params, losses

    for level in (30, 60):
        part = sub_config(cfg, ladder, level)
        beside = whole.beside(
            adapter_of_level(cfg, part, RECIPE.lora, RECIPE.seed), level_counts(cfg, ladder, level)
        )
        adapter, losses = trained(beside)
        if level == 30:
            cut = sub_model(jax.tree.map(jnp.asarray, params), part)
            alone, wanted = trained(Trainer(lora_job(part, cut, RECIPE), RECIPE, mesh))
            np.testing.assert_allclose(losses, wanted, rtol=1e-4)
            for name, value in cut_adapter(part, jax.device_get(adapter)).items():
                np.testing.assert_allclose(value, alone[name], atol=1e-3, err_msg=name)
    # One compiled step for all levels.
    assert len(whole._compiled) == 1
