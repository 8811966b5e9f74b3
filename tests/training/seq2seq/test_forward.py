"""The forward pass over pairs computes what transformers computes, and what the served model does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxllm.checkpoints import huggingface
from jaxllm.kv.cache import new_cache
from jaxllm.models import decoder
from jaxllm.models.encoder_decoder import encoder_params, read_source
from jaxllm.training.seq2seq.forward import dropout
from jaxllm.training.seq2seq.job import cross_entropy, init_seq2seq, target_logits
from tests.training.seq2seq.tiny import PAIRS, SWITCH, T5, batch, tiny_recipe


def model_of(family):
    """A family's config and its initial parameters."""
    cfg = tiny_recipe(family).cfg
    return cfg, jax.jit(lambda key: init_seq2seq(cfg, key))(jax.random.key(0))


def test_loss_is_that_of_transformers(tmp_path):
    cfg, params = model_of(T5)
    huggingface.write_folder(tmp_path, cfg, params)
    model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    filled = batch()
    real = filled.weights > 0
    with torch.no_grad():
        told = model(
            input_ids=torch.tensor(filled.read.astype(np.int64)),
            attention_mask=torch.tensor(np.arange(8)[None] < filled.read_tokens[:, None]).long(),
            decoder_input_ids=torch.tensor(filled.tokens.astype(np.int64)),
            labels=torch.tensor(np.where(real, filled.targets, -100).astype(np.int64)),
        )
    logits, _ = jax.jit(lambda batch: target_logits(params, batch, cfg=cfg))(filled)
    losses = np.asarray(cross_entropy(logits, filled.targets))
    np.testing.assert_allclose(np.asarray(logits)[real], told.logits.numpy()[real], atol=1e-4)
    assert float((losses * filled.weights).sum() / filled.weights.sum()) == pytest.approx(
        float(told.loss), abs=1e-4
    )


def test_rows_are_what_the_served_model_says_of_each():
    """Of layers with experts and without."""
    cfg, params = model_of(SWITCH)
    filled = batch()

    @jax.jit
    def alone(read, valid, tokens):
        cache = new_cache(cfg, batch=1, tokens=8, dtype=jnp.float32)
        cache = read_source(params, encoder_params(params), read, valid, cache, cfg=cfg)
        hidden, _ = decoder.forward(params, tokens, cache, cfg=cfg)
        return decoder.logits(params, hidden, cfg=cfg)[0]

    logits, _ = jax.jit(lambda batch: target_logits(params, batch, cfg=cfg))(filled)
    for row, (source, target) in enumerate(PAIRS):
        told = alone(filled.read[row : row + 1], jnp.int32(len(source)), filled.tokens[row : row + 1])
        np.testing.assert_allclose(logits[row, : len(target)], told[: len(target)], atol=2e-5)


def test_recomputed_layers_have_the_same_gradients_and_keep_less():
    cfg, params = model_of(SWITCH)
    filled = batch()

    def loss(params, remat):
        drop = dropout(jax.random.key(1), 0.1)
        logits, routings = target_logits(params, filled, cfg=cfg, drop=drop, remat=remat)
        return cross_entropy(logits, filled.targets).mean() + sum(each.weights.mean() for each in routings)

    gradients, kept = {}, {}
    for remat in ("none", "dots", "full"):
        own = functools.partial(loss, remat=remat)
        gradients[remat] = jax.jit(jax.grad(own))(params)
        pull = jax.eval_shape(lambda params, own=own: jax.vjp(own, params)[1], params)
        kept[remat] = sum(leaf.size for leaf in jax.tree.leaves(pull))
    for remat in ("dots", "full"):
        for name, value in gradients["none"].items():
            np.testing.assert_allclose(gradients[remat][name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    assert kept["full"] < kept["dots"] < kept["none"]


def test_dropout_keeps_the_mean_and_drops_its_share():
    x = jnp.ones((64, 250))
    dropped = np.asarray(dropout(jax.random.key(3), 0.25)(x, 7))
    assert abs((dropped == 0).mean() - 0.25) < 0.02
    assert abs(dropped.mean() - 1) < 0.03
    assert not np.array_equal(dropped, np.asarray(dropout(jax.random.key(3), 0.25)(x, 8)))
    np.testing.assert_array_equal(dropout(jax.random.key(3), 0.0)(x, 7), x)


def test_smoothing_spreads_a_share_over_all_tokens():
    logits, targets = jnp.array([[[0.0, 1.0, 2.0, -1.0]]]), jnp.array([[2]])
    wanted = np.array([0.025, 0.025, 0.925, 0.025])
    expected = -(wanted * np.asarray(jax.nn.log_softmax(logits))[0, 0]).sum()
    assert float(cross_entropy(logits, targets, 0.1)[0, 0]) == pytest.approx(expected, abs=1e-6)
