"""A layer of integer prefill as one step, for a processor that computes all of it (mllm-NPU, arXiv
2407.05858).

The result is that of the layer's stages (`subgraphs.py`) but for the order of sums: here the products add
their shadow themselves (`shadowed.py`).
"""

import jax
import jax.numpy as jnp

from jaxllm.config import ModelConfig
from jaxllm.int8_prefill.products import NARROW, OUT, PROJECT, WIDEN, matrices_of
from jaxllm.int8_prefill.shadowed import feed_forward, from_units, normed_to_units
from jaxllm.int8_prefill.subgraphs import (
    LayerCalibration,
    Projected,
    attend,
    block_weights,
    check_past,
    check_stage,
    finish,
    project,
)
from jaxllm.kv.cache import Past
from jaxllm.kv.positions import TokenPositions
from jaxllm.models.layer_stack import layer_of
from jaxllm.models.parameters import Params
from jaxllm.nn.linear import add_normed


def pass_layer(
    params: Params,
    calibration: LayerCalibration,
    x: jax.Array,
    at: TokenPositions,
    past: Past,
    mass: jax.Array | None,
    *,
    cfg: ModelConfig,
    layer: int,
) -> tuple[jax.Array, Past, jax.Array | None, jax.Array | None]:
    """One layer over a chunk.

    Args:
      params: the layer's.
      calibration: of the layer.
      x: `[1, T, D]`, its input.
      at, past, mass, cfg, layer: see `decoder.forward_layer`; past and mass are donated.

    Returns:
      The next layer's input, the updated keys and values, the updated mass; and if the layer has a shadow the
      number of channels with outliers of each of `PRODUCTS`, `[4]` int32, else None.
    """
    check_past(check_stage("pass_layer", calibration, cfg, x=x), at, past, mass)
    steps, rows = calibration.steps, calibration.rows
    plain = LayerCalibration(steps)
    if rows is None:
        heads = project(params, plain, x, cfg=cfg, layer=layer)
        out, _, past, mass, _ = attend(params, plain, Projected(heads), at, past, mass, cfg=cfg, layer=layer)
        return finish(params, plain, x, out, cfg=cfg, layer=layer), past, mass, None
    weights = layer_of(params, layer)
    groups, neurons = weights.used
    heads, projected = normed_to_units(
        x,
        weights.norm("attn_norm", cfg),
        *matrices_of(weights, PROJECT, cfg),
        steps[PROJECT],
        rows[PROJECT],
        used=groups,
        live=at.valid,
    )
    out, _, past, mass, _ = attend(params, plain, Projected(heads), at, past, mass, cfg=cfg, layer=layer)
    residual = None if cfg.post_norms else x
    mixed, attended = from_units(
        out,
        weights["attn.o"],
        weights.vector("attn.o_bias"),
        steps[OUT],
        rows[OUT],
        residual=residual,
        used=groups,
        live=at.valid,
    )
    x = add_normed(x, mixed, weights.norm("attn_post_norm", cfg), at.valid) if cfg.post_norms else mixed
    mixed, both = feed_forward(
        x,
        weights.norm("ffn_norm", cfg),
        block_weights(weights, cfg),
        (steps[WIDEN], steps[NARROW]),
        (rows[WIDEN], rows[NARROW]),
        add_input=not cfg.post_norms,
        used=neurons,
        live=at.valid,
    )
    x = add_normed(x, mixed, weights.norm("ffn_post_norm", cfg), at.valid) if cfg.post_norms else mixed
    return x, past, mass, jnp.concatenate([projected, attended, both])
