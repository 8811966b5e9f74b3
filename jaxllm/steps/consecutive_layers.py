"""Defines the step of layers in a row that are each in a weight table by itself, as prefetched layers are.

A pure function of static shapes, as in `layers.py`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.axes import Axes
from jaxllm.config import ModelConfig
from jaxllm.kv.cache import Past
from jaxllm.kv.positions import TokenPositions
from jaxllm.kv.source import SourceKV
from jaxllm.models import encoder_decoder
from jaxllm.models.decoder import forward_layer
from jaxllm.models.layer import rotary_by_rope
from jaxllm.models.layer_stack import STACK, LayersAt, layer_of
from jaxllm.models.parameters import Params

# A layer's input, keys and values, and the attention mass.
_Carry = tuple[jax.Array, Past, jax.Array | None]


def consecutive_layers(
    params: Params,
    x: jax.Array,
    at: TokenPositions,
    past: Past,
    mass: jax.Array | None,
    count: jax.Array,
    *,
    cfg: ModelConfig,
    layer: int,
) -> _Carry:
    """Runs equal layers in a row, as `decoder.forward_layer` does one.

    A loop for any number of them, so that a layer's bits do not depend on which others run with it.

    Args:
      params: of the layers, `LayersAt`, and what all layers share.
      x: `[1, T, D]`, the first layer's input; donated.
      at: positions of the T tokens.
      past: keys and values of the first of them, in the stack of all; donated.
      mass: see `KVCache`; donated.
      count: int32 scalar, number of layers.
      cfg: the model.
      layer: the first layer that equals them.

    Returns:
      The next layer's input, `past` with keys and values of all of them, and the mass.
    """
    axes = Axes("consecutive_layers", B=1, D=cfg.hidden_size, H=cfg.head_dim)
    axes.check(jnp.floating, "B T D", x=x)
    axes.check(jnp.int32, "", count=count)
    at.check(axes)
    past.check(axes)
    layers: Any = params[STACK]
    assert isinstance(layers, LayersAt)
    rotaries = {} if cfg.encoder is not None else rotary_by_rope(at.positions, cfg)
    rotary = rotaries.get(cfg.layer_rope(layer))

    def run(number: jax.Array, carry: _Carry) -> _Carry:
        x, first, mass = carry
        own: Any = {**params, STACK: layers.at(number)}
        how: Any = {"cfg": cfg, "layer": layer}
        here = _of_later_layer(first, number)
        if cfg.encoder is None:
            x, here, mass = forward_layer(layer_of(own, layer), x, at, here, mass, rotary=rotary, **how)
        else:
            x, here, mass = encoder_decoder.forward_layer(own, x, at, here, mass, **how)
        return x, _of_layer_of(first, here), mass

    return jax.lax.fori_loop(0, count, run, (x, past, mass))


def _of_later_layer(past: Past, number: jax.Array) -> Past:
    """Keys and values of the layer so many layers after that of `past`, in the same stack."""
    assert past.slot is not None
    # Who streams weights attends to no coded chunks.
    assert past.coded is None
    source = past.source
    if isinstance(source, SourceKV):
        source = source.in_layer(jnp.asarray(source.layer) + number)
    return dataclasses.replace(past, slot=past.slot + number, source=source)


def _of_layer_of(first: Past, past: Past) -> Past:
    """`past`, of another layer of the same stack, as that of the layer of `first`."""
    source = past.source
    if isinstance(source, SourceKV) and isinstance(first.source, SourceKV):
        source = dataclasses.replace(source, layer=first.source.layer)
    return dataclasses.replace(past, slot=first.slot, source=source)
