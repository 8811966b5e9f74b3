"""Defines the recurrent states of a cache, and keys and values of an encoder's source."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm.axes import Axes
from jaxllm.config import ModelConfig

# Recurrent states of state layers, of fixed size for any number of tokens.
#
# Keys and values of a token do not change when tokens follow, so that a cache can be cut, moved and filled
# in any order. A state is that after the last fed token, and cannot be rolled back. A cache with states
# therefore continues at its length, or restarts at 0.


# Index of the stack of states among the stacks of a cache.
STATES = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StateNodes:
    """State updates by the nodes of a token tree; those of the accepted path are applied.

    Attributes:
      inputs: `[B, M, C]` float32, inputs of the convolution.
      k, v, log_decay, correction: `[B, M, heads, ...]` (see `jaxllm.nn.states.DeltaInputs`); None for a
        convolution layer.
    """

    inputs: jax.Array
    k: jax.Array | None = None
    v: jax.Array | None = None
    log_decay: jax.Array | None = None
    correction: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class States:
    """The states of all state layers of a model, in one stack; or of one layer, without the leading axis.

    Attributes:
      inputs: `[n, B, taps - 1, C]` float32, the last inputs of the convolution; zeros before the first token.
      matrix: `[n, B, heads, key_dim, value_dim]` float32; None for convolution layers.
      nodes: updates by the nodes of a tree, from its verification until a path of it is kept; else None.
    """

    inputs: jax.Array
    matrix: jax.Array | None = None
    nodes: StateNodes | None = None

    def of_slot(self, slot: jax.Array | np.integer, fresh: jax.Array) -> "States":
        """The state of a layer.

        Args:
          slot: int32 scalar, index of the layer in the stack.
          fresh: bool scalar, whether a sequence begins: zeros.
        """

        def row(stack: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(stack, slot, 0, keepdims=False)

        def begin(stacks: States) -> States:
            return jax.tree.map(lambda stack: jnp.zeros(stack.shape[1:], stack.dtype), stacks)

        def read(stacks: States) -> States:
            return jax.tree.map(row, stacks)

        # Not by `where`: XLA fuses a slice into all of its uses, also after the layer's own update of the
        # stack, which then copies the whole stack. Nothing is fused with a branch.
        own = jax.lax.cond(fresh, begin, read, States(self.inputs, self.matrix))
        return dataclasses.replace(own, nodes=jax.tree.map(row, self.nodes))

    def with_slot(self, slot: jax.Array | np.integer, state: "States") -> "States":
        """With another state of a layer."""

        def put(rows: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(rows, new.astype(rows.dtype), slot, 0)

        return jax.tree.map(put, self, state)

    def with_nodes(self, count: int) -> "States":
        """With room for the nodes of a tree."""

        def zeros(*axes: int) -> jax.Array:
            return jnp.zeros((*self.inputs.shape[:2], count, *axes), jnp.float32)

        nodes = StateNodes(zeros(self.inputs.shape[-1]))
        if self.matrix is not None:
            heads, keys, values = self.matrix.shape[2:]
            more = {"log_decay": zeros(heads), "correction": zeros(heads)}
            nodes = StateNodes(nodes.inputs, zeros(heads, keys), zeros(heads, values), **more)
        return dataclasses.replace(self, nodes=nodes)

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above at trace time."""
        axes.check(jnp.float32, "* B * *", inputs=self.inputs)
        axes.check(jnp.float32, "* B * * *", matrix=self.matrix)


def no_states(cfg: ModelConfig, batch: int) -> States:
    """The states before the first token."""
    assert cfg.states is not None
    states, count = cfg.states, sum(cfg.state_layers)
    inputs = jnp.zeros((count, batch, states.taps - 1, states.channels(cfg.hidden_size)), jnp.float32)
    if states.kind == "short_conv":
        return States(inputs)
    shape = (count, batch, states.value_heads, states.key_dim, states.value_dim)
    return States(inputs, jnp.zeros(shape, jnp.float32))


def states_bytes(cfg: ModelConfig) -> int:
    """Bytes of the states of a sequence; 0 for models without state layers."""
    return sum(cfg.state_layers) * cfg.states.state_bytes(cfg.hidden_size) if cfg.states else 0


# Keys and values of a source, which an encoder-decoder's layers attend to besides their own tokens.
#
# They are projected once per prompt from the encoder's outputs, and do not change while the cache grows.


class _Mask:
    length: jax.Array

    @property
    def capacity_tokens(self) -> int:
        """Maximum number of tokens (R)."""
        return jax.tree.leaves(self)[0].shape[-2]

    @property
    def mask(self) -> jax.Array:
        """`[1, R]` bool, True for the source's tokens."""
        return jnp.arange(self.capacity_tokens, dtype=jnp.int32)[None, :] < self.length


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SourceKV(_Mask):
    """Keys and values of a source in all layers of the decoder.

    Attributes:
      keys, values: `[L, B, K, R, H]`, for sources of up to R tokens.
      length: int32 scalar, number of tokens of the source; rows from there on are never attended to.
      layer: int32 scalar, the attending layer (see `in_layer`); None for all.
    """

    keys: jax.Array
    values: jax.Array
    length: jax.Array
    layer: jax.Array | np.integer | None = None

    def in_layer(self, layer: jax.Array | int | None) -> "SourceKV":
        """The view of one attending layer; None for all layers."""
        number = np.int32(layer) if isinstance(layer, int) else layer
        return dataclasses.replace(self, layer=number)

    @property
    def own(self) -> tuple[jax.Array, jax.Array]:
        """Keys and values of the attending layer, `[B, K, R, H]`."""
        assert self.layer is not None
        index = functools.partial(jax.lax.dynamic_index_in_dim, index=self.layer, keepdims=False)
        return index(self.keys), index(self.values)

    def with_layer(
        self, layer: jax.Array | np.integer | int, keys: jax.Array, values: jax.Array
    ) -> "SourceKV":
        """Sets keys and values `[B, K, T, H]` of the first T tokens in a layer; T is at most R."""
        number, zero = np.int32(layer) if isinstance(layer, int) else layer, np.int32(0)
        at = (number, zero, zero, zero, zero)

        def put(rows: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(rows, new[None].astype(rows.dtype), at)

        return dataclasses.replace(self, keys=put(self.keys, keys), values=put(self.values, values))

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above at trace time."""
        axes.check(jnp.floating, "* B * R H", keys=self.keys, values=self.values)
        axes.check(jnp.int32, "", length=self.length, layer=self.layer)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SourceLayers(_Mask):
    """A `SourceKV` whose layers are separate arrays, as in exported programs.

    Attributes:
      keys, values: per layer `[B, K, R, H]`; empty arrays until they are written.
      length: see `SourceKV`.
      layer: the attending layer (see `SourceKV`).
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    length: jax.Array
    layer: int | None = dataclasses.field(default=None, metadata={"static": True})

    def in_layer(self, layer: Any) -> "SourceLayers":
        """See `SourceKV`."""
        return dataclasses.replace(self, layer=layer)

    @property
    def own(self) -> tuple[jax.Array, jax.Array]:
        """See `SourceKV`."""
        assert self.layer is not None
        return self.keys[self.layer], self.values[self.layer]

    def with_layer(self, layer: Any, keys: jax.Array, values: jax.Array) -> "SourceLayers":
        """With keys and values `[B, K, T, H]` as those of a layer, for sources of up to T tokens."""

        def put(rows: tuple[jax.Array, ...], new: jax.Array) -> tuple[jax.Array, ...]:
            return (*rows[:layer], new, *rows[layer + 1 :])

        return dataclasses.replace(self, keys=put(self.keys, keys), values=put(self.values, values))

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above at trace time."""
        for keys, values in zip(self.keys, self.values, strict=True):
            axes.check(jnp.floating, "B * R H", keys=keys, values=values)
        axes.check(jnp.int32, "", length=self.length)


Source = SourceKV | SourceLayers


def no_source(cfg: ModelConfig, batch: int, tokens: int, dtype: DTypeLike) -> SourceKV:
    """Room for a source of `tokens` tokens (R)."""
    shape = (cfg.layers, batch, cfg.kv_heads, tokens, cfg.head_dim)
    return SourceKV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32))
