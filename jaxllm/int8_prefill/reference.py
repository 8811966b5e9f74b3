"""A forward pass over a text with any rule for its products, to observe activations and to compare
quantization methods.

It computes one chunk from an empty cache. Requests are served by the stages of `subgraphs.py` instead.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.axes import shaped
from jaxllm.config import ModelConfig
from jaxllm.int8_prefill.shadow import (
    PRODUCTS,
    contracts_last_axis,
    matrices_of,
    product_matrices,
    shadow_products,
)
from jaxllm.int8_prefill.subgraphs import LayerCalibration
from jaxllm.kv.cache import Past, TokenPositions
from jaxllm.models.decoder import embed_tokens, final_normed, logits
from jaxllm.models.layer import attend_cache, normed_heads
from jaxllm.models.layer_stack import LayerParams
from jaxllm.models.parameters import Params
from jaxllm.nn.layers import activate, normalize
from jaxllm.nn.linear import add_normed, from_units, to_units

# (layer, index in PRODUCTS, the product's input `[T, inputs]`) -> its results `[T, outputs]`, without biases.
Rule = Callable[[int, int, jax.Array], Sequence[jax.Array]]


@shaped(tokens="int32 T")
def forward_by_rule(params: Params, tokens: jax.Array, rule: Rule, *, cfg: ModelConfig) -> jax.Array:
    """Hidden states `[T, D]` after the final norm of a text's tokens `[T]` int32, from position 0.

    Args:
      params: parameters of the model; matrices of layers are only read by the rule.
    """
    count = len(tokens)
    at = TokenPositions.after(jnp.zeros((), jnp.int32), count, jnp.asarray(count, jnp.int32))
    x = embed_tokens(params, tokens[None], at.positions, cfg=cfg)
    for layer in range(cfg.layers):
        x = layer_by_rule(params, x, at, rule, cfg=cfg, layer=layer)
    return final_normed(params, x, cfg=cfg)[0]


@shaped(tokens="int32 T", targets="int32 T")
def scores_by_rule(
    params: Params, tokens: jax.Array, targets: jax.Array, rule: Rule, *, cfg: ModelConfig
) -> jax.Array:
    """Natural log-probabilities `[T]` float32 of targets `[T]`, each after its token and all tokens
    before."""
    out = logits(params, forward_by_rule(params, tokens, rule, cfg=cfg), cfg=cfg)
    return jnp.take_along_axis(jax.nn.log_softmax(out, axis=-1), targets[:, None], axis=-1)[:, 0]


def plain_rule(params: Params, cfg: ModelConfig) -> Rule:
    """A rule that computes products with the stored weights."""

    def rule(layer: int, product: int, x: jax.Array) -> list[jax.Array]:
        return [_product(x, each, product, None) for each in product_matrices(params, layer, product, cfg)]

    return rule


def integer_rule(params: Params, calibration: Sequence[LayerCalibration], cfg: ModelConfig) -> Rule:
    """A rule that computes products like integer prefill, including shadows."""

    def rule(layer: int, product: int, x: jax.Array) -> list[jax.Array]:
        known, weights = calibration[layer], product_matrices(params, layer, product, cfg)
        step, last = known.steps[product], contracts_last_axis(product)
        found = [_product(x, each, product, step) for each in weights]
        if known.rows is None:
            return found
        shadows, _ = shadow_products(x, step, weights, known.rows[product], last=last)
        return [each + shadow for each, shadow in zip(found, shadows, strict=True)]

    return rule


def observed(
    params: Params,
    tokens: jax.Array,
    look: Callable[[int, int, jax.Array], Any],
    *,
    cfg: ModelConfig,
) -> list[list[Any]]:
    """Results of `look(layer, product, x)` for the inputs `[T, inputs]` of all products, by layer and
    product."""
    found: list[list[Any]] = [[None] * len(PRODUCTS) for _ in range(cfg.layers)]
    multiply = plain_rule(params, cfg)

    def watching(layer: int, product: int, x: jax.Array) -> Sequence[jax.Array]:
        found[layer][product] = look(layer, product, x)
        return multiply(layer, product, x)

    forward_by_rule(params, tokens, watching, cfg=cfg)
    return found


def layer_by_rule(
    params: Params, x: jax.Array, at: TokenPositions, rule: Rule, *, cfg: ModelConfig, layer: int
) -> jax.Array:
    """The output `[1, T, D]` of one layer of `x` `[1, T, D]`, from position 0; see `forward_by_rule`."""
    weights, units = LayerParams(params, f"layers.{layer}."), cfg.units(layer)

    def multiplied(product: int, rows: jax.Array) -> list[jax.Array]:
        found = rule(layer, product, rows.reshape(rows.shape[1], math.prod(rows.shape[2:])))
        _, biases = matrices_of(weights, product, cfg)
        return [
            each if bias is None else each + bias.reshape(-1)
            for each, bias in zip(found, biases, strict=True)
        ]

    def with_residual(x: jax.Array, mixed: jax.Array, norm: str) -> jax.Array:
        if not cfg.post_norms:
            return x + mixed[None]
        return add_normed(x, mixed[None], weights.norm(norm, cfg))

    q, k, v = multiplied(0, normalize(x, weights.norm("attn_norm", cfg)))
    shape = (1, len(at.positions), units.kv_heads)
    q, k, v = (each.reshape(*shape, width * cfg.head_dim) for each, width in ((q, cfg.group), (k, 1), (v, 1)))
    heads = normed_heads(weights, q, k, v, cfg)
    none = jnp.zeros((1, units.kv_heads, shape[1], cfg.head_dim), jnp.float32)
    out, _ = attend_cache(heads, None, cfg=cfg, layer=layer, at=at, past=Past(none, none), mass=None)
    x = with_residual(x, multiplied(1, out)[0], "attn_post_norm")
    products = multiplied(2, normalize(x, weights.norm("ffn_norm", cfg)))
    hidden = activate(products[0], cfg.activation)
    hidden = hidden * products[1] if cfg.gated_ffn else hidden
    return with_residual(x, multiplied(3, hidden[None])[0], "ffn_post_norm")


def _product(x: jax.Array, weight: Any, product: int, step: jax.Array | None) -> jax.Array:
    if contracts_last_axis(product):
        return to_units(x, weight, step=step).reshape(len(x), math.prod(weight.shape[:-1]))
    return from_units(x.reshape(len(x), *weight.shape[:-1]), weight, step=step)
