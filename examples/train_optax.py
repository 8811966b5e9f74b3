"""Trains a small decoder from nothing with optax, and serves its parameters as they are.

python examples/train_optax.py
"""

import tempfile

import jax
import numpy as np
import optax

from jaxllm import Engine, GenerationConfig, write_bundle
from jaxllm.models import decoder, parameters

packaged = Engine.open("draft")  # its shape and its tokens, not its weights
cfg, tokenizer = packaged.cfg, packaged.tokenizer
animals = ("cat", "dog", "fish", "frog", "duck", "cow", "hen")
lines = [tokenizer.encode(f"The {animal} sang: moon, silver moon, good night.") for animal in animals]
tokens = np.array([line[: min(map(len, lines))] for line in lines], np.int32)  # [B, T]
optimizer = optax.adam(3e-3)


@jax.jit
@jax.value_and_grad
def loss_and_gradients(params):
    """Cross-entropy of each token after those before it."""
    logits = decoder.logits(params, decoder.forward_documents(params, tokens[:, :-1], cfg=cfg), cfg=cfg)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


state = optimizer.init(params := parameters.init_params(cfg, jax.random.key(0)))
for number in range(31):
    loss, gradients = loss_and_gradients(params)
    updates, state = optimizer.update(gradients, state)
    params = optax.apply_updates(params, updates)
    print(f"step {number}: loss {loss:.3f}")
with tempfile.TemporaryDirectory() as folder:
    path = f"{folder}/songs.jaxllm"
    write_bundle(path, cfg=cfg, params=params, weights="f32", tokenizer=tokenizer.files, name="songs")
    print(Engine.open(path).generate("The duck sang:", GenerationConfig(max_tokens=10)).text)
