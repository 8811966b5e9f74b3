"""The parameters of an encoder: their names, shapes and initial values.

A flat dict with stable string keys; every matrix is `[out, in]` and has a bias `{name}_bias` `[out]`:

    embed.tokens [V, Z]        embed.positions [P, D]     embed.types [Y, D]       (these have no biases)
    embed.projection [D, Z], or [D, 3·Z] of the next, this and the previous token  (where one is needed)
    embed.norm.scale/bias [D]
    layers.{i}.narrow [W, D]   .narrow_norm.scale/bias [W]                         (with a bottleneck)
    layers.{i}.attn.narrow [W, D]  .attn.narrow_norm.scale/bias [W]                (with a shared one)
    layers.{i}.attn.q [W, W]   .k [W, W]  .v [W, W], or [W, D] beside a shared one .o [W, W]
    layers.{i}.attn_norm.scale/bias [W]
    layers.{i}.ffn.{j}.up [F, W]   .down [W, F]           layers.{i}.ffn.{j}.norm.scale/bias [W]
    layers.{i}.widen [D, W]    .widen_norm.scale/bias [D]                          (with a bottleneck)
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm.models.encoder.config import EncoderConfig
from jaxllm.quant import Weight

Params = Mapping[str, Weight]
Shape = tuple[int, ...]

# Standard deviation of BERT's and MobileBERT's initial matrices.
_DEVIATION = 0.02


def encoder_shapes(cfg: EncoderConfig) -> dict[str, Shape]:
    """The shape of every parameter of the encoder by name, in the order of their use."""
    shapes = embedding_shapes(cfg)
    for layer in range(cfg.layers):
        shapes.update(layer_shapes(cfg, f"layers.{layer}."))
    return shapes


def embedding_shapes(cfg: EncoderConfig) -> dict[str, Shape]:
    """Shapes of the embedding's parameters."""
    shapes: dict[str, Shape] = {
        "embed.tokens": (cfg.vocab_size, cfg.embedding_size),
        "embed.positions": (cfg.window_tokens, cfg.hidden_size),
        "embed.types": (cfg.type_vocab_size, cfg.hidden_size),
    }
    if cfg.projects_embeddings:
        neighbours = 3 if cfg.trigram_input else 1
        shapes.update(_dense("embed.projection", cfg.hidden_size, neighbours * cfg.embedding_size))
    shapes.update(_norm("embed.norm", cfg.hidden_size))
    return shapes


def layer_shapes(cfg: EncoderConfig, prefix: str) -> dict[str, Shape]:
    """Shapes of the parameters of one layer, their names prefixed by `prefix`."""
    hidden, width = cfg.hidden_size, cfg.width
    shapes: dict[str, Shape] = {}
    if cfg.bottleneck_size:
        shapes.update(_dense("narrow", width, hidden) | _norm("narrow_norm", width))
    if cfg.share_bottleneck:
        shapes.update(_dense("attn.narrow", width, hidden) | _norm("attn.narrow_norm", width))
    inputs = {"q": width, "k": width, "v": hidden if cfg.share_bottleneck else width, "o": width}
    for name, size in inputs.items():
        shapes.update(_dense(f"attn.{name}", width, size))
    shapes.update(_norm("attn_norm", width))
    for block in range(cfg.ffn_blocks):
        shapes.update(_dense(f"ffn.{block}.up", cfg.ffn_size, width))
        shapes.update(_dense(f"ffn.{block}.down", width, cfg.ffn_size))
        shapes.update(_norm(f"ffn.{block}.norm", width))
    if cfg.bottleneck_size:
        shapes.update(_dense("widen", hidden, width) | _norm("widen_norm", hidden))
    return {prefix + name: shape for name, shape in shapes.items()}


def init_values(
    shapes: Mapping[str, Shape], key: jax.Array, dtype: DTypeLike = jnp.float32
) -> dict[str, jax.Array]:
    """BERT's initial values: matrices from a normal distribution of deviation 0.02 truncated at two
    deviations, norm scales one, biases zero."""
    keys = jax.random.split(key, len(shapes))

    def value(name: str, shape: Shape, key: jax.Array) -> jax.Array:
        if name.endswith("norm.scale"):
            return jnp.ones(shape, dtype)
        if name.endswith("bias"):
            return jnp.zeros(shape, dtype)
        return jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype) * np.asarray(_DEVIATION, dtype)

    return {name: value(name, shape, each) for (name, shape), each in zip(shapes.items(), keys, strict=True)}


def _dense(name: str, outputs: int, inputs: int) -> dict[str, Shape]:
    return {name: (outputs, inputs), f"{name}_bias": (outputs,)}


def _norm(name: str, size: int) -> dict[str, Shape]:
    return {f"{name}.scale": (size,), f"{name}.bias": (size,)}
