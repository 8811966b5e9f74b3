"""Selects the parameters of buckets of one layer, of an embedding or of an expert."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.models.layer_stack import STACK, LayerStack, StackedLayers
from jaxllm.models.parameters import Params, head_name
from jaxllm.quant import PANEL, BlockedArray, QArray, Weight, blocked_shapes
from jaxllm.serving.buckets.bucket import shapes_of

# Layers that one dispatch runs at most.
MOST_LAYERS = 4
EXPERT_PARTS = ("gate", "up", "down")


def expert_parts(cfg: ModelConfig) -> tuple[str, ...]:
    """The matrices of an expert, in file order."""
    return EXPERT_PARTS if cfg.gated_ffn else EXPERT_PARTS[1:]


# Forms of experts besides bitwidths: of two planes, and the high plane of one alone.
NESTED, HIGH = "nested", "high"


def layer_params(params: Params, layer: int, like: int) -> dict[str, Any]:
    """The parameters of `layer` for buckets of layer `like`: by address, stacked, or under its names."""
    stack: Any = params.get(STACK)
    if isinstance(stack, LayerStack | StackedLayers):
        return {STACK: stack.at(layer), **shared_by_layers(params)}
    prefix = f"layers.{layer}."
    own = {
        f"layers.{like}.{name.removeprefix(prefix)}": each
        for name, each in params.items()
        if name.startswith(prefix)
    }
    return own | shared_by_layers(params)


def shared_by_layers(params: Params) -> dict[str, Any]:
    """The parameters outside of layers that each layer uses."""
    return {name: params[name] for name in ("relative_positions",) if name in params}


def layer_shapes(params: Params, layer: int) -> dict[str, Any]:
    """The shapes of `layer_params` under the layer's own names, of parameters or their shapes."""
    return shapes_of(layer_params(params, layer, layer))


def any_expert(form: str) -> str:
    """Prefix of the names of parameters that stand for any expert of a form."""
    return f"any_expert.{form}"


def router_params(params: Params, layer: int) -> dict[str, Any]:
    """The router of a sparse layer and the norm before it."""
    return _of_layer(params, layer, "router", "ffn_norm.")


def expert_norm(params: Params, layer: int) -> dict[str, Any]:
    """The norm before the experts of a sparse layer, and their biases if they have any, an argument of
    experts."""
    return _of_layer(params, layer, "ffn_norm.", "expert_")


def _of_layer(params: Params, layer: int, *beginnings: str) -> dict[str, Any]:
    """Parameters of a layer by their names in it, which begin with one of `beginnings`."""
    prefix = f"layers.{layer}."
    wanted = tuple(prefix + each for each in beginnings)
    return {name.removeprefix(prefix): each for name, each in params.items() if name.startswith(wanted)}


def used_heads(cfg: ModelConfig) -> np.ndarray:
    """The number of kv heads of each layer, `[L]` int32."""
    return np.array([cfg.units(layer).kv_heads for layer in range(cfg.layers)], np.int32)


def embedding_params(params: Params) -> dict[str, Any]:
    """The parameters that embed tokens."""
    return {name: each for name, each in params.items() if name.startswith("embed.")}


def outer_params(params: Params) -> dict[str, Any]:
    """The parameters outside of layers."""
    return {name: each for name, each in params.items() if name != STACK and not name.startswith("layers.")}


def norm_params(params: Params) -> dict[str, Any]:
    """The norm after the last layer."""
    return {name: each for name, each in params.items() if name.startswith("final_norm.")}


def head_params(params: Params, cfg: ModelConfig) -> dict[str, Any]:
    """The norm after the last layer, and the head with its bias."""
    names = {head_name(cfg), "head_bias"}
    return norm_params(params) | {name: each for name, each in params.items() if name in names}


def row_step(weight: Weight) -> int:
    """Number of rows of a `[V, D]` weight that are stored together."""
    return PANEL if isinstance(weight, BlockedArray | QArray) else 1


def some_rows(weight: Weight, rows: int) -> Any:
    """Shapes of a weight `[V, D]` that has `rows` of its rows."""
    shape = (rows, weight.shape[-1])
    if isinstance(weight, BlockedArray):
        parts = blocked_shapes(
            shape, bits=weight.bits, group=weight.group, axis=weight.axis, minima=weight.minima
        )
        data, scale = (
            jax.ShapeDtypeStruct(part, leaf.dtype)
            for part, leaf in zip(parts, (weight.data, weight.scale), strict=True)
        )
        return dataclasses.replace(weight, data=data, scale=scale, shape=shape)  # pyright: ignore
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), weight)
