"""The base of all bucket families: what a bucket is, and what it is lowered from."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import WHOLE, ModelConfig
from jaxllm.elastic.submodel import CountedSubModel, part_of_sub_model, sub_model
from jaxllm.kv.cache import KVCache, TokenPositions, TreePositions, new_cache
from jaxllm.models.parameters import Params
from jaxllm.sampling import Sampling, sampler_state
from jaxllm.speculative.tree import TokenTree, new_tree
from serving.host.device import Device
from serving.options import EngineOptions


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a bucket runs that is not for the first device, or not compiled as others are.

    Attributes:
      device: that it is for.
      blocks: whether its weights are in blocks, as native kernels take them.
      compiler_options: for XLA.
    """

    device: Device
    blocks: bool = True
    compiler_options: tuple[tuple[str, str | bool], ...] = ()

    def facts(self) -> list[Any]:
        """What tells it from others, as plain data."""
        device = self.device
        known = [device.platform, device.device_kind, device.id, device.client.platform_version]
        return [known, self.blocks, self.compiler_options]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucket(abc.ABC):
    """One compiled static shape. Subclasses are its families: their fields say all that tells one bucket from
    the others of its model.

    Attributes:
      level: whose parameters and caches it takes, in percent; 100 where levels share it.
    """

    level: int = WHOLE

    @abc.abstractmethod
    def lower(self, model: Any, /) -> jax.stages.Lowered:
        """Traces it.

        Args:
          model: what its family is lowered from, a `ModelShapes` of the bucket's level where nothing else is
            said.
        """

    def compile(self, model: Any, /) -> jax.stages.Compiled:
        """Compiles it for where it runs."""
        where = self.placement
        options = None if where is None else dict(where.compiler_options)
        return self.lower(model).compile(compiler_options=options or None)

    @property
    def placement(self) -> Placement | None:
        """Where it runs; None for the first device."""
        return None


@dataclasses.dataclass(frozen=True)
class ModelShapes:
    """What the buckets of one level are lowered from.

    Attributes:
      cfg: the model, or the level's sub-model.
      params: shapes of its parameters, or of those of the whole model.
      options: resolved options of the engine.
    """

    cfg: ModelConfig
    params: Params | CountedSubModel
    options: EngineOptions

    @classmethod
    def of(cls, cfg: ModelConfig, params: Params | CountedSubModel, options: EngineOptions) -> "ModelShapes":
        """The shapes of a model's parameters."""
        return cls(cfg, shapes_of(params), options)

    @property
    def dtype(self) -> jnp.dtype:
        """Of activations."""
        return jnp.dtype(self.options.activation_dtype)

    @property
    def empty_cache(self) -> Callable[..., KVCache]:
        """Makes an empty cache of so many `tokens`."""
        # Contexts that outlive a call are stored by what was attended to in them.
        return functools.partial(
            new_cache,
            self.cfg,
            batch=1,
            dtype=jnp.dtype(self.options.cache_dtype),
            mass=bool(self.options.kv_codec),
        )

    def cache(self, tokens: int) -> KVCache:
        """The shapes of a cache."""
        return jax.eval_shape(functools.partial(self.empty_cache, tokens=tokens))

    def layer_cache(self, layer: int, tokens: int) -> tuple[Any, Any]:
        """The shapes of one layer's keys and values."""
        cache = self.cache(tokens)
        return cache.keys[layer], cache.values[layer]

    @property
    def sampler(self) -> Any:
        """The shapes of a sampler's state."""
        return shapes_of(sampler_state(Sampling(), [], self.cfg.vocab_size, 0))

    def hidden(self, tokens: int) -> jax.ShapeDtypeStruct:
        """What a layer takes of so many tokens."""
        return jax.ShapeDtypeStruct((1, tokens, self.cfg.hidden_size), self.dtype)

    def jitted(self, step: Callable[..., Any], *donated: int) -> Any:
        """A step of the whole model, `(params, *rest, cfg=, dtype=)`, as a function of the level's parameters
        and the rest."""

        def run(params: Params | CountedSubModel, *rest: Any) -> Any:
            return step(sub_model(params, self.cfg), *rest, cfg=self.cfg, dtype=self.dtype)

        return jax.jit(run, donate_argnums=donated)

    def jitted_part(self, step: Callable[..., Any], *donated: int) -> Any:
        """A step `(params, *rest)` that takes some of the parameters: those of one layer, say."""

        def run(params: Params | CountedSubModel, *rest: Any) -> Any:
            return step(part_of_sub_model(params, self.cfg), *rest)

        return jax.jit(run, donate_argnums=donated)


SCALAR = jax.ShapeDtypeStruct((), jnp.int32)


def ids(*shape: int) -> jax.ShapeDtypeStruct:
    """The shape of token ids, positions or other int32 numbers."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def position_shapes(tokens: int, *, tree: bool = False, consecutive: bool = True) -> TokenPositions:
    """The shapes of where tokens stand: one behind the other, in any order, or as a tree."""
    if not tree:
        return TokenPositions(ids(tokens), SCALAR, consecutive=consecutive)  # pyright: ignore[reportArgumentType]
    rows = TreePositions(SCALAR, ids(tokens), jax.ShapeDtypeStruct((tokens, tokens), jnp.bool_))  # pyright: ignore
    return TokenPositions(ids(tokens), SCALAR, rows)  # pyright: ignore[reportArgumentType]


def mass_by_node(cache: KVCache, nodes: int) -> Any:
    """The shape of a cache's mass while a tree is read (see `KVCache`)."""
    if cache.mass is None:
        return None
    rows, capacity = cache.mass.shape
    return jax.ShapeDtypeStruct((rows, 1 + nodes, capacity), cache.mass.dtype)


def shapes_of(tree: Any) -> Any:
    """Shapes and dtypes instead of arrays."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), tree)


def tree_shapes(nodes: int) -> TokenTree:
    """The shapes of a tree."""
    return jax.eval_shape(functools.partial(new_tree, room=nodes), SCALAR)
