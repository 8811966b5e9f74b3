"""Defines `Bucket`, the base of all bucket families, the shapes that buckets are lowered from, and the
parameters of buckets of one layer, of an embedding or of an expert.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.elastic.ladder import sub_model
from jaxllm.host_settings import own_jax_settings
from jaxllm.kernels import native
from jaxllm.kernels.native import NO_CHUNKS
from jaxllm.kv.cache import KVCache, Past, TokenPositions, TreePositions, new_cache
from jaxllm.models.layer_stack import STACK, LayerStack, StackedLayers
from jaxllm.models.parameters import Params, head_name
from jaxllm.quant import PANEL, BlockedArray, QArray, Weight, blocked_shapes
from jaxllm.sampling import Sampling, sampler_state
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.host.machine import Device

if TYPE_CHECKING:
    from jaxllm.contexts.coded import QuantizedPrefix
    from jaxllm.speculation.tree import TokenTree

# Layers that one dispatch runs at most.
MOST_LAYERS = 4
EXPERT_PARTS = ("gate", "up", "down")
# Forms of experts besides bitwidths: of two planes, and the high plane of one alone.
NESTED, HIGH = "nested", "high"
SCALAR = jax.ShapeDtypeStruct((), jnp.int32)
FLAG = jax.ShapeDtypeStruct((), jnp.bool_)


@dataclasses.dataclass(frozen=True)
class Placement:
    """The device and compiler options of a bucket, if they are not the default.

    Attributes:
      blocks: whether its weights are in blocks, the format of native kernels.
    """

    device: Device
    blocks: bool = True
    compiler_options: tuple[tuple[str, str | bool], ...] = ()

    def facts(self) -> list[Any]:
        """All fields as plain data, for the key of a bucket on disk."""
        device = self.device
        known = [device.platform, device.device_kind, device.id, device.client.platform_version]
        return [known, self.blocks, self.compiler_options]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucket(abc.ABC):
    """One compiled static shape. Subclasses are its families; the family and its fields identify a bucket
    among those of its model.

    Attributes:
      level: level of its parameters and caches, in percent; 100 if all levels share the bucket.
    """

    level: int = FULL_LEVEL

    @abc.abstractmethod
    def lower(self, model: Any, /) -> jax.stages.Lowered:
        """Traces and lowers it.

        Args:
          model: shapes of its arguments; a `ModelShapes` of the bucket's level unless the family says
            otherwise.
        """

    def compile(self, model: Any, /) -> jax.stages.Compiled:
        """Compiles it for its placement."""
        where = self.placement
        options = None if where is None else dict(where.compiler_options)
        with own_jax_settings():
            return self.lower(model).compile(compiler_options=options or None)

    @property
    def placement(self) -> Placement | None:
        """The device and compiler options; None for the first device and the default options."""
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheBucket(Bucket):
    """A family with a cache.

    Attributes:
      cache_tokens: length of the cache (S).
    """

    cache_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokensBucket(Bucket):
    """A family that runs tokens without a cache.

    Attributes:
      tokens: number of tokens, including padding (T).
    """

    tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkBucket(CacheBucket):
    """A family that runs a chunk of tokens, or a token tree, after the sequence in a cache.

    Attributes:
      tokens: length of the chunk, including padding, or of a source (T); or capacity of the tree (M).
    """

    tokens: int


@dataclasses.dataclass(frozen=True)
class ModelShapes:
    """Shapes and options from which the buckets of one level are lowered.

    Attributes:
      params: shapes of its parameters, or of the whole model's, as inputs of buckets.
      weights: shapes of its parameters by name, which are `params` unless these are by address.
      encoder: shapes of the parameters of its encoder, as inputs of buckets; None if it has none.
    """

    cfg: ModelConfig
    params: Params
    options: EngineOptions
    weights: Params
    encoder: Params | None = None

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of activations."""
        return jnp.dtype(self.options.activation_dtype)

    @property
    def empty_cache(self) -> Callable[..., KVCache]:
        """A function of `tokens` that makes an empty cache of that length."""
        # The widths of stored contexts depend on the attention mass of their chunks.
        return functools.partial(
            new_cache,
            self.cfg,
            batch=1,
            dtype=jnp.dtype(self.options.cache_dtype),
            mass=bool(self.options.kv_codec) and self.cfg.states is None,
            # Native attention updates a stack in place; without it only a loop over layers does.
            stacked=STACK in self.params or native.kernels().native,
            coded=no_chunks(self.options) if self.options.attend_quantized_kv else None,
            source_tokens=self.options.source_tokens(self.cfg),
        )

    def cache(self, tokens: int) -> KVCache:
        """Shapes of a cache of `tokens` positions."""
        return jax.eval_shape(functools.partial(self.empty_cache, tokens=tokens))

    def past(self, layer: int, tokens: int) -> Past:
        """Shapes of the keys and values of a layer of such a cache."""
        past = self.cache(tokens).past(layer)
        coded = None if past.coded is None else dataclasses.replace(past.coded, layer=SCALAR)  # pyright: ignore
        slot = None if past.slot is None else SCALAR
        source = None if past.source is None else past.source.in_layer(SCALAR)  # pyright: ignore
        return dataclasses.replace(past, slot=slot, coded=coded, source=source)  # pyright: ignore

    @property
    def sampler(self) -> tuple[Any, Any]:
        """Shapes of a sampler's fixed part and of its progress, the arguments of `with_sampler`."""
        state = shapes_of(sampler_state(Sampling(), [], self.cfg.vocab_size, 0))
        return state.fixed, state.progress

    def hidden(self, tokens: int) -> jax.ShapeDtypeStruct:
        """Shape of a layer's input, `[1, T, D]`."""
        return jax.ShapeDtypeStruct((1, tokens, self.cfg.hidden_size), self.dtype)

    def jitted(self, step: Callable[..., Any], *donated: int) -> Any:
        """Jits a step of the whole model, `(params, *rest, cfg=, dtype=)`, as `(level's params, *rest)`.

        Args:
          step: a pure function.
          donated: indices of arguments whose buffers are reused.
        """
        return self.jitted_part(functools.partial(step, cfg=self.cfg, dtype=self.dtype), *donated)

    def lowered(
        self, step: Callable[..., Any], *shapes: Any, donated: tuple[int, ...] = ()
    ) -> jax.stages.Lowered:
        """Lowers `jitted` for shapes of its arguments after the parameters."""
        return self.jitted(step, *donated).lower(self.params, *shapes)

    def jitted_part(self, step: Callable[..., Any], *donated: int) -> Any:
        """Jits a step `(params, *rest)` of some of the parameters, such as one layer's."""

        def run(params: Params, *rest: Any) -> Any:
            return step(sub_model(params, self.cfg), *rest)

        return jax.jit(run, donate_argnums=donated)


def with_sampler(step: Callable[..., Any], at: int) -> Callable[..., Any]:
    """A step that samples, as a bucket's function: a sampler's state is two arguments, its fixed part and its
    progress, which alone is returned and can be donated.

    Args:
      step: a function whose last result is the sampler's next state.
      at: index of its argument that is the sampler's state.
    """

    def run(*arguments: Any, **static: Any) -> Any:
        fixed, progress = arguments[at : at + 2]
        *found, state = step(*arguments[:at], fixed.after(progress), *arguments[at + 2 :], **static)
        return *found, state.progress

    return run


def no_chunks(options: EngineOptions) -> "QuantizedPrefix":
    """An empty list of chunks before a cache, for caches that may have some (see
    `EngineOptions.attend_quantized_kv`)."""
    from jaxllm.contexts.coded import QuantizedPrefix

    most = -(-options.context_tokens // options.kv_chunk_tokens)
    mass = np.zeros((1, most), np.float32)
    return QuantizedPrefix(np.int32(0), NO_CHUNKS, options.chunk_format, mass=mass)


def ids(*shape: int) -> jax.ShapeDtypeStruct:
    """Shape of int32 token ids or positions."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def position_shapes(tokens: int, *, tree: bool = False, consecutive: bool = True) -> TokenPositions:
    """Shapes of the positions of `tokens` tokens: consecutive, in any order, or of a token tree."""
    if not tree:
        return TokenPositions(ids(tokens), SCALAR, consecutive=consecutive)  # pyright: ignore[reportArgumentType]
    rows = TreePositions(SCALAR, ids(tokens), jax.ShapeDtypeStruct((tokens, tokens), jnp.bool_))  # pyright: ignore
    return TokenPositions(ids(tokens), SCALAR, rows)  # pyright: ignore[reportArgumentType]


def mass_shape(cache: KVCache, nodes: int | None = None) -> Any:
    """Shape of a cache's attention mass, or of that by node of a tree, `[B, 1 + M, S]` (see `KVCache`); None
    without mass."""
    if cache.mass is None or nodes is None:
        return cache.mass
    rows, capacity = cache.mass.shape
    return jax.ShapeDtypeStruct((rows, 1 + nodes, capacity), cache.mass.dtype)


def shapes_of(tree: Any) -> Any:
    """The tree with a `ShapeDtypeStruct` for each array."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), tree)


def tree_shapes(nodes: int) -> "TokenTree":
    """The shapes of a tree."""
    from jaxllm.speculation.tree import new_tree

    return jax.eval_shape(functools.partial(new_tree, room=nodes), SCALAR)


def expert_parts(cfg: ModelConfig) -> tuple[str, ...]:
    """The matrices of an expert, in file order."""
    return EXPERT_PARTS if cfg.gated_ffn else EXPERT_PARTS[1:]


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
            shape,
            bits=weight.bits,
            group=weight.group,
            axis=weight.axis,
            nested=weight.nested,
            minima=weight.minima,
        )
        data, scale = (
            jax.ShapeDtypeStruct(part, leaf.dtype)
            for part, leaf in zip(parts, (weight.data, weight.scale), strict=True)
        )
        low = None if weight.low is None else data
        return dataclasses.replace(weight, data=data, scale=scale, shape=shape, low=low)  # pyright: ignore
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), weight)
