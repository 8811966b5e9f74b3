"""Makes an equivalent model whose weights stand in another order, so that no format finds the grid that a
quantized file left in its values.

A model whose published weights are quantized is a favour to the format of the file: its groups of 32 are its
scales' groups. Reordered, the values are the same, and the function is up to rounding, but a group has values
of many of the file's groups. The order of these is drawn: of the residual stream's dimensions, of each
layer's neurons and kv groups, and of the dimensions of each head's values.
"""

from collections.abc import Mapping

import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.parameters import param_specs


def permutable(cfg: ModelConfig) -> bool:
    """Whether all parameters of a model are of those kinds whose order is known here."""
    known = ("embed.tokens", "final_norm.scale", "head")
    ends = ("_norm.scale", ".attn.q", ".attn.k", ".attn.v", ".attn.o", ".gate", ".up", ".down")
    own = cfg.encoder is None and cfg.states is None and cfg.mixed is None and not cfg.experts
    return own and not cfg.qk_norm and all(name in known or name.endswith(ends) for name in param_specs(cfg))


def permuted(params: Mapping[str, np.ndarray], cfg: ModelConfig) -> dict[str, np.ndarray]:
    """The parameters of an equivalent model."""
    if not permutable(cfg):
        raise ConfigError(f"the order of the weights of a {cfg.model_type} model is not known here")
    draw = np.random.default_rng(7)
    stream = draw.permutation(cfg.hidden_size)
    found = {name: value[..., stream] for name, value in params.items()}
    for layer in range(cfg.layers):
        units = cfg.units(layer)
        neurons, groups = draw.permutation(units.neurons), draw.permutation(units.kv_heads)
        values = np.stack([draw.permutation(cfg.head_dim) for _ in groups])
        for part in ("gate", "up", "down") if cfg.gated_ffn else ("up", "down"):
            name = f"layers.{layer}.ffn.{part}"
            found[name] = found[name][neurons]
        for part in ("q", "k", "v", "o"):
            name = f"layers.{layer}.attn.{part}"
            found[name] = found[name][groups]
        v, o = f"layers.{layer}.attn.v", f"layers.{layer}.attn.o"
        found[v] = np.take_along_axis(found[v], values[..., None], 1)
        # Rows of each head of a group's queries.
        heads = found[o].reshape(len(groups), cfg.group, cfg.head_dim, -1)
        found[o] = np.take_along_axis(heads, values[:, None, :, None], 2).reshape(found[o].shape)
    return {name: np.ascontiguousarray(value) for name, value in found.items()}
