"""Quantizes activations as the literature does, by rules for a model's products.

Rules are those of `jaxllm.int8_prefill.fitting`. Weights have 8 bits and a scale per output, unless said
otherwise. Values are rounded as each quantizer rounds them and multiplied in floats, for accuracy alone.

- float: neither activations nor weights are rounded.
- jaxllm: static steps with shadow outliers, by the products of integer prefill.
- jaxllm-per-tensor: the same with one scale per tensor of weights.
- naive-int8: one static step per tensor that covers all magnitudes in the calibration text.
- SmoothQuant (arXiv 2211.10438, alpha 0.5): the same after smoothing the outputs of norms.
- SmoothQuant-all: the inputs of the other two products are smoothed, too.
- LLM.int8() (arXiv 2208.07339): columns with magnitudes from 6 on in floats, the rest in 8 bits per token.
- K-Quant: activations in 8 bits per token and 256 inputs, weights per 32 (the formats of llama.cpp, at 8
bits).
- Hadamard: inputs and weights rotated by a Hadamard transform, then as naive-int8 (QuaRot, arXiv 2404.00456,
  whose rotation is done on the fly for all four products here).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.report import OURS
from jaxllm.config import ModelConfig
from jaxllm.contexts.codecs import hadamard
from jaxllm.int8_prefill.calibration import ByProduct, PrefillCalibration, largest_of
from jaxllm.int8_prefill.reference import Rule, integer_rule, observed, plain_rule
from jaxllm.int8_prefill.shadow import PRODUCTS, contracts_last_axis, product_matrices
from jaxllm.kernels.native_products import rounded
from jaxllm.models.parameters import Params

PER_TENSOR = f"{OURS}-per-tensor"
_ALPHA = 0.5
_SPAN, _GROUP = 256, 32
# What a quantizer prepared for each layer and product: arrays.
Arrays = list[list[Any]]


def dense_matrix(params: Params, layer: int, product: int, cfg: ModelConfig) -> tuple[np.ndarray, list[int]]:
    """The weights of a product side by side, `[inputs, outputs]` float32, and how many outputs each has."""
    found = []
    for weight in product_matrices(params, layer, product, cfg):
        value = np.asarray(weight, np.float32)
        last = contracts_last_axis(product)
        found.append(value.reshape(-1, value.shape[-1]).T if last else value.reshape(-1, value.shape[-1]))
    return np.concatenate(found, axis=1), [each.shape[1] for each in found]


def rule_of(
    name: str,
    cfg: ModelConfig,
    floats: Params,
    stored: Params,
    tops: ByProduct,
    calibration: PrefillCalibration,
    texts: Sequence[np.ndarray],
) -> tuple[Any, Callable[[Any], Rule]]:
    """A quantizer's arrays, and the function that makes its rule of them.

    Args:
      name: of `benchmarks.int8_prefill.QUANTIZERS`.
      stored: the same at 8 bits, with the scales that the quantizer has.
      tops: see `jaxllm.int8_prefill.calibration.channel_tops`, of the calibration text.
      calibration: ours, of `stored`.
      texts: rows of tokens of that text.
    """
    if name == "float":
        return floats, lambda params: plain_rule(params, cfg)
    if name in (OURS, PER_TENSOR):
        taken = stored, calibration.layers(100, cfg)
        return taken, lambda both: integer_rule(both[0], both[1], cfg)
    arrays: Arrays = []
    cuts: list[list[list[int]]] = []
    for layer in range(cfg.layers):
        arrays.append([])
        cuts.append([])
        for product in range(len(PRODUCTS)):
            matrix, sizes = dense_matrix(floats, layer, product, cfg)
            arrays[-1].append(
                jax.tree.map(jnp.asarray, _prepared(name, matrix, tops[layer][product], product))
            )
            cuts[-1].append(np.cumsum(sizes)[:-1].tolist())
    if name == "Hadamard":
        # Steps are those of the rotated inputs.
        def look(layer: int, product: int, x: jax.Array) -> jax.Array:
            return jnp.max(jnp.abs(x @ arrays[layer][product][1]))

        seen = jax.jit(lambda params, row: observed(params, row, look, cfg=cfg))
        largest = largest_of([jax.device_get(seen(floats, row)) for row in texts])
        for own, top in zip(arrays, largest, strict=True):
            own[:] = [(*each, jnp.maximum(most / 127, 1e-20)) for each, most in zip(own, top, strict=True)]

    def made(arrays: Arrays) -> Rule:
        def rule(layer: int, product: int, x: jax.Array) -> Sequence[jax.Array]:
            return jnp.split(_multiply(name, arrays[layer][product], x), cuts[layer][product], axis=1)

        return rule

    return arrays, made


def _by_channel(matrix: np.ndarray) -> np.ndarray:
    """Weights `[inputs, outputs]` rounded to 8 bits with a scale per output."""
    scale = np.maximum(np.abs(matrix).max(0), 1e-30) / 127
    return (np.rint(matrix / scale) * scale).astype(np.float32)


def _prepared(name: str, matrix: np.ndarray, tops: np.ndarray, product: int) -> tuple[Any, ...]:
    """What a quantizer multiplies by: matrices, and of static steps the factors of inputs and the step."""
    if name == "Hadamard":
        rotation = hadamard(len(matrix))
        return _by_channel(rotation.T @ matrix), rotation
    if name == "LLM.int8()":
        return _by_channel(matrix), matrix
    if name == "K-Quant":
        inputs, outputs = matrix.shape
        padded = np.pad(matrix, ((0, -inputs % _GROUP), (0, 0))).reshape(-1, _GROUP, outputs)
        scale = np.maximum(np.abs(padded).max(1, keepdims=True), 1e-30) / 127
        return ((np.rint(padded / scale) * scale).reshape(-1, outputs)[:inputs].astype(np.float32),)
    factor = np.ones(len(matrix), np.float32)
    # SmoothQuant's products are those after norms, into whose scales the smoothing goes.
    if name == "SmoothQuant-all" or (name == "SmoothQuant" and product in (0, 2)):
        # Of each input (equation 4).
        weights = np.maximum(np.abs(matrix).max(1), 1e-5)
        smoothed = np.maximum(tops, 1e-5) ** _ALPHA / weights ** (1 - _ALPHA)
        factor = np.maximum(smoothed, 1e-5).astype(np.float32)
    step = np.float32(max(float((tops / factor).max()) / 127, 1e-20))
    return _by_channel(matrix * factor[:, None]), factor, step


def _multiply(name: str, prepared: Any, x: jax.Array) -> jax.Array:
    """The outputs `[T, outputs]` of a product's weights together, of its input `[T, inputs]`."""
    if name == "LLM.int8()":
        matrix, floats = prepared
        large = jnp.any(jnp.abs(x) >= 6.0, axis=0)
        rest = jnp.where(large, 0.0, x)
        step = jnp.maximum(jnp.max(jnp.abs(rest), axis=1, keepdims=True) / 127, 1e-30)
        return rounded(rest, step) @ matrix + jnp.where(large, x, 0.0) @ floats
    if name == "K-Quant":
        tokens, inputs = x.shape
        spans = jnp.pad(x, ((0, 0), (0, -inputs % _SPAN))).reshape(tokens, -1, _SPAN)
        step = jnp.maximum(jnp.max(jnp.abs(spans), axis=2, keepdims=True) / 127, 1e-30)
        return rounded(spans, step).reshape(tokens, -1)[:, :inputs] @ prepared[0]
    matrix, turned, step = prepared
    return rounded(x @ turned if name == "Hadamard" else x / turned, step) @ matrix
