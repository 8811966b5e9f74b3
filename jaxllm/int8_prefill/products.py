"""The products of a layer that have a static step in integer prefill: their weights, biases and sizes."""

from typing import Literal

import jax
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.models.layer_params import LayerParams
from jaxllm.models.parameters import Params, param_specs
from jaxllm.quant import Weight

# Products, named by their inputs, each of which has one step; and their indices.
PRODUCTS = ("project", "out", "widen", "narrow")
PROJECT, OUT, WIDEN, NARROW = range(4)


def product_matrices(params: Params, layer: int, product: int, cfg: ModelConfig) -> list[Weight]:
    """The weights of one of `PRODUCTS`."""
    return matrices_of(LayerParams(params, f"layers.{layer}."), product, cfg)[0]


def product_biases(params: Params, layer: int, product: int, cfg: ModelConfig) -> list[jax.Array | None]:
    """The biases of one of `PRODUCTS`."""
    return matrices_of(LayerParams(params, f"layers.{layer}."), product, cfg)[1]


def product_sizes(cfg: ModelConfig, layer: int, product: int) -> tuple[int, list[int]]:
    """Number of inputs of a product, and of outputs of each of its weights."""
    specs = param_specs(cfg)
    shapes = [specs[name].shape for name in product_names(layer, product, cfg)]
    units = [int(np.prod(shape[:-1], dtype=object)) for shape in shapes]
    if contracts_last_axis(product):
        return shapes[0][-1], units
    return units[0], [shape[-1] for shape in shapes]


def contracted_axes(cfg: ModelConfig) -> dict[str, Literal[-1, -2]]:
    """Name of each product's weight -> its contracted axis, as `quantize` takes it."""
    return {
        name: -1 if contracts_last_axis(product) else -2
        for layer in range(cfg.layers)
        for product in range(len(PRODUCTS))
        for name in product_names(layer, product, cfg)
    }


def product_names(layer: int, product: int, cfg: ModelConfig) -> list[str]:
    """The names of the weights of one of `PRODUCTS`, among a model's parameters."""
    return [f"layers.{layer}.{name}" for name in _names(product, cfg)]


def contracts_last_axis(product: int) -> bool:
    """Whether a product contracts its weights' last axis; else it contracts their units."""
    return product in (PROJECT, WIDEN)


def matrices_of(
    weights: LayerParams, product: int, cfg: ModelConfig
) -> tuple[list[Weight], list[jax.Array | None]]:
    """The weights and biases of one of `PRODUCTS`, from a layer's parameters."""
    names = _names(product, cfg)
    return [weights[name] for name in names], [weights.vector(f"{name}_bias") for name in names]


def _names(product: int, cfg: ModelConfig) -> list[str]:
    """The names of a product's weights within a layer."""
    gate = ["ffn.gate"] if cfg.gated_ffn else []
    return (["attn.q", "attn.k", "attn.v"], ["attn.o"], [*gate, "ffn.up"], ["ffn.down"])[product]
