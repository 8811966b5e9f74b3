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

import functools
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
# A product's prepared arrays and its input `[T, inputs]` -> `[T, outputs]` of all its weights together.
Multiply = Callable[[Any, jax.Array], jax.Array]


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
      name: of `QUANTIZERS`.
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
    prepare, multiply = _MAKERS[name]
    arrays: Arrays = []
    cuts: list[list[list[int]]] = []
    for layer in range(cfg.layers):
        arrays.append([])
        cuts.append([])
        for product in range(len(PRODUCTS)):
            matrix, sizes = dense_matrix(floats, layer, product, cfg)
            arrays[-1].append(jax.tree.map(jnp.asarray, prepare(matrix, tops[layer][product], product)))
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
            return jnp.split(multiply(arrays[layer][product], x), cuts[layer][product], axis=1)

        return rule

    return arrays, made


def _by_channel(matrix: np.ndarray) -> np.ndarray:
    """Weights `[inputs, outputs]` rounded to 8 bits with a scale per output."""
    scale = np.maximum(np.abs(matrix).max(0), 1e-30) / 127
    return (np.rint(matrix / scale) * scale).astype(np.float32)


def _step(tops: np.ndarray) -> np.float32:
    return np.float32(max(float(tops.max()) / 127, 1e-20))


def _naive(matrix: np.ndarray, tops: np.ndarray, product: int) -> Any:
    del product
    return _by_channel(matrix), _step(tops)


def _multiply_stepped(prepared: Any, x: jax.Array) -> jax.Array:
    matrix, step = prepared
    return rounded(x, step) @ matrix


def _smoothing(matrix: np.ndarray, tops: np.ndarray) -> np.ndarray:
    """SmoothQuant's factor of each input (equation 4)."""
    weights = np.maximum(np.abs(matrix).max(1), 1e-5)
    return np.maximum(np.maximum(tops, 1e-5) ** _ALPHA / weights ** (1 - _ALPHA), 1e-5).astype(np.float32)


def _smooth(products: Sequence[int], matrix: np.ndarray, tops: np.ndarray, product: int) -> Any:
    factor = _smoothing(matrix, tops) if product in products else np.ones(len(matrix), np.float32)
    return _by_channel(matrix * factor[:, None]), _step(tops / factor), factor


def _multiply_smoothed(prepared: Any, x: jax.Array) -> jax.Array:
    matrix, step, factor = prepared
    return rounded(x / factor, step) @ matrix


def _mixed(matrix: np.ndarray, tops: np.ndarray, product: int) -> Any:
    del tops, product
    return _by_channel(matrix), matrix


def _multiply_mixed(prepared: Any, x: jax.Array) -> jax.Array:
    matrix, floats = prepared
    large = jnp.any(jnp.abs(x) >= 6.0, axis=0)
    rest = jnp.where(large, 0.0, x)
    step = jnp.maximum(jnp.max(jnp.abs(rest), axis=1, keepdims=True) / 127, 1e-30)
    return rounded(rest, step) @ matrix + jnp.where(large, x, 0.0) @ floats


def _grouped(matrix: np.ndarray, tops: np.ndarray, product: int) -> Any:
    del tops, product
    inputs, outputs = matrix.shape
    padded = np.pad(matrix, ((0, -inputs % _GROUP), (0, 0))).reshape(-1, _GROUP, outputs)
    scale = np.maximum(np.abs(padded).max(1, keepdims=True), 1e-30) / 127
    return (np.rint(padded / scale) * scale).reshape(-1, outputs)[:inputs].astype(np.float32)


def _multiply_grouped(prepared: Any, x: jax.Array) -> jax.Array:
    tokens, inputs = x.shape
    spans = jnp.pad(x, ((0, 0), (0, -inputs % _SPAN))).reshape(tokens, -1, _SPAN)
    step = jnp.maximum(jnp.max(jnp.abs(spans), axis=2, keepdims=True) / 127, 1e-30)
    return rounded(spans, step).reshape(tokens, -1)[:, :inputs] @ prepared


def _rotated(matrix: np.ndarray, tops: np.ndarray, product: int) -> Any:
    del tops, product
    rotation = hadamard(len(matrix))
    return _by_channel(rotation.T @ matrix), rotation


def _multiply_rotated(prepared: Any, x: jax.Array) -> jax.Array:
    matrix, rotation, step = prepared
    return rounded(x @ rotation, step) @ matrix


_MAKERS: dict[str, tuple[Callable[..., Any], Multiply]] = {
    "naive-int8": (_naive, _multiply_stepped),
    # The products after norms, into whose scales the smoothing goes.
    "SmoothQuant": (functools.partial(_smooth, (0, 2)), _multiply_smoothed),
    "SmoothQuant-all": (functools.partial(_smooth, range(len(PRODUCTS))), _multiply_smoothed),
    "LLM.int8()": (_mixed, _multiply_mixed),
    "K-Quant": (_grouped, _multiply_grouped),
    "Hadamard": (_rotated, _multiply_rotated),
}
QUANTIZERS = ("float", OURS, PER_TENSOR, *_MAKERS)
