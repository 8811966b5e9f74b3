"""Places a model's parameters on the devices of a mesh, tensor by tensor."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxllm.config import ModelConfig
from jaxllm.models.parameters import param_specs
from jaxllm.models.scanned_layers import stack_name
from training.loop.parallel import gathered, shardings_of, spec_of, stacks_layers


def placed(
    tensors: Iterable[tuple[str, Any]], mesh: Mesh, dtype: jnp.dtype | None = None
) -> dict[str, jax.Array]:
    """Puts tensors on the devices one after the other, each divided as `spec_of` says.

    The host holds one tensor at a time, and a device its shards alone.

    Args:
      tensors: by name, as they are read.
      mesh: the devices.
      dtype: of all arrays; None keeps their own.
    """
    found = {}
    for name, value in tensors:
        own = value if dtype is None or value.dtype == dtype else np.asarray(value, dtype)
        found[name] = put(own, NamedSharding(mesh, spec_of(name, value.shape, mesh)))
    return found


def laid_out(
    tensors: Iterable[tuple[str, Any]], cfg: ModelConfig, mesh: Mesh, dtype: jnp.dtype | None = None
) -> dict[str, jax.Array]:
    """`placed`; off CPUs equal layers of a decoder alone are then stacked."""
    found = placed(tensors, mesh, dtype)
    return stacked_on(found, cfg, mesh) if stacks_layers(mesh) and cfg.encoder is None else found


def one_by_one(params: Mapping[str, jax.Array], cfg: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """A model's parameters, each layer's by itself, whole on the host one after the other.

    Every process of a group goes through all of them together.
    """
    for name in param_specs(cfg):
        own, row = stack_name(cfg, name)
        value = params[own][row] if own in params and row >= 0 else params[name]
        yield name, gathered({name: value})[name]


def put(value: Any, sharding: NamedSharding) -> jax.Array:
    """An array on the devices of a sharding; from the host each gets its own shard alone."""
    if not isinstance(value, np.ndarray):
        return jax.device_put(value, sharding)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def stacked_on(params: Mapping[str, Any], cfg: ModelConfig, mesh: Mesh) -> dict[str, Any]:
    """Parameters with equal layers in stacks, which lie on the mesh as `spec_of` says.

    Stacks are made one after the other, and the layers' own arrays released as soon as their caller does not
    hold them. What is stacked already stays as it is.
    """
    columns: dict[str, list[Any]] = {}
    rest = dict(params)
    for name in params:
        own, row = stack_name(cfg, name)
        if row >= 0:
            # Layers ascend, so that rows do.
            columns.setdefault(own, []).append(name)
    for own, names in columns.items():
        layers = [rest.pop(name) for name in names]
        shardings = shardings_of({own: jax.eval_shape(_stack, *layers)}, mesh)[own]
        rest[own] = jax.jit(_stack, out_shardings=shardings)(*layers)
    return rest


def _stack(*layers: Any) -> Any:
    return jax.tree.map(lambda *row: jnp.stack(row), *layers)
