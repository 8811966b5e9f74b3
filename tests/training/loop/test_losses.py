"""Losses over blocks of the vocabulary are those of whole logits, with their gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models.parameters import init_params
from jaxllm.training.data.rows import Batch
from jaxllm.training.loop import losses
from jaxllm.training.loop.losses import distillation_losses, next_token_losses, outputs_of, vocabulary_blocks
from tests.training.jobs import SMOKE

CFG = dataclasses.replace(SMOKE.model, vocab_size=203)


def batch():
    ids = np.random.default_rng(0).integers(0, CFG.vocab_size, (2, 17)).astype(np.int32)
    nothing = np.zeros((2, 16), np.int32)
    return Batch(ids[:, :-1], ids[:, 1:], nothing, np.ones((2, 16), np.float32), nothing)


def in_blocks(monkeypatch, least):
    monkeypatch.setattr(losses, "WHOLE_LOGITS_BYTES", 0)
    monkeypatch.setattr(losses, "_BLOCK_TOKENS", 64)
    monkeypatch.setattr(losses, "_LEAST_BLOCK_TOKENS", least)


@pytest.mark.parametrize(("least", "softcap"), [(8, 3.0), (60, 0.0)])
def test_blocks_have_the_losses_of_whole_logits(monkeypatch, least, softcap):
    cfg = dataclasses.replace(CFG, logit_softcap=softcap)
    params, other = (init_params(cfg, jax.random.key(seed)) for seed in (0, 1))

    def hard(params):
        return next_token_losses(outputs_of(params, batch(), cfg=cfg), batch())

    def soft(params):
        outputs, teacher = (outputs_of(each, batch(), cfg=cfg) for each in (params, other))
        return distillation_losses(outputs, teacher, batch(), teacher_share=0.7)

    def measured():
        def of(params):
            return [
                (each(params), jax.grad(lambda own, each=each: each(own).mean())(params))
                for each in (hard, soft)
            ]

        return jax.jit(of)(params)

    whole = measured()
    in_blocks(monkeypatch, least)
    for one, other_way in zip(jax.tree.leaves(whole), jax.tree.leaves(measured()), strict=True):
        np.testing.assert_allclose(one, other_way, atol=2e-5)


def test_no_array_has_all_logits(monkeypatch):
    in_blocks(monkeypatch, 8)
    params = init_params(CFG, jax.random.key(0))

    def loss(params, dtype):
        return next_token_losses(outputs_of(params, batch(), cfg=CFG, dtype=dtype), batch()).mean()

    for dtype in (jnp.float32, jnp.bfloat16):
        text = jax.jit(jax.grad(loss), static_argnums=1).lower(params, dtype).as_text()
        assert "2x16x203" not in text
        assert "32x203" not in text


def test_vocabularies_are_cut_evenly_where_they_can_be():
    assert [vocabulary_blocks(size) for size in (288, 8192, 32000, 128256, 151936)] == [1, 1, 4, 16, 32]
    assert vocabulary_blocks(50257) == 29
    assert vocabulary_blocks(65537) == 9
