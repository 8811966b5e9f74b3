"""States of state layers: what they keep of all tokens so far, in memory of fixed size.

Keys and values of a token stay as they are while tokens follow, so that a cache can be cut, moved and filled
in any order. A state has gone on: it is that after the last token that was fed, and of no token before. A
cache with states therefore goes on at its length, or begins anew at 0.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import Axes
from jaxllm.config import ModelConfig

# Stands for the stack of states among the stacks of a cache.
STATES = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StateNodes:
    """What the nodes of a token tree would do to a state: those of the accepted path do it, once it is known.

    Attributes:
      inputs: `[B, M, C]` float32, of the convolution.
      k, v, log_decay, correction: `[B, M, heads, ...]` (see `jaxllm.nn.states.DeltaInputs`); None where a
        layer is a convolution alone.
    """

    inputs: jax.Array
    k: jax.Array | None = None
    v: jax.Array | None = None
    log_decay: jax.Array | None = None
    correction: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerState:
    """The state of one layer.

    Attributes:
      inputs: `[B, taps - 1, C]` float32, the last inputs of the convolution; before the first token zeros.
      matrix: `[B, heads, key_dim, value_dim]` float32; None where a layer is a convolution alone.
      nodes: of a tree that is verified; else None.
    """

    inputs: jax.Array
    matrix: jax.Array | None = None
    nodes: StateNodes | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class States:
    """The states of all state layers of a model, in one stack.

    Attributes:
      inputs: `[n, B, taps - 1, C]` (see `LayerState`).
      matrix: `[n, B, heads, key_dim, value_dim]`; None where layers are convolutions alone.
      nodes: with a leading axis of layers, from the verification of a tree until a path of it is kept.
    """

    inputs: jax.Array
    matrix: jax.Array | None = None
    nodes: StateNodes | None = None

    def of_slot(self, slot: jax.Array | np.integer, fresh: jax.Array) -> LayerState:
        """The state of a layer.

        Args:
          slot: int32 scalar, its index in the stack.
          fresh: bool scalar; true where a sequence begins: zeros.
        """

        def row(stack: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(stack, slot, 0, keepdims=False)

        def begin(stacks: States) -> States:
            return jax.tree.map(lambda stack: jnp.zeros(stack.shape[1:], stack.dtype), stacks)

        def read(stacks: States) -> States:
            return jax.tree.map(row, stacks)

        # Not by selecting: XLA fuses a slice into all that reads it, also behind the layer's own update of
        # the stack, which then copies the whole stack. Nothing is fused with a branch.
        own = jax.lax.cond(fresh, begin, read, States(self.inputs, self.matrix))
        return LayerState(own.inputs, own.matrix, jax.tree.map(row, self.nodes))

    def with_slot(self, slot: jax.Array | np.integer, state: LayerState) -> "States":
        """With another state of a layer."""

        def put(rows: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(rows, new.astype(rows.dtype), slot, 0)

        return jax.tree.map(put, self, States(state.inputs, state.matrix, state.nodes))

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
        """Asserts the shapes above, where a step that takes them is traced."""
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
