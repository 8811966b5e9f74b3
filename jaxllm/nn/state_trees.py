"""States under a token tree: a node reads the state as its own path leaves it, and the accepted path stays.

No node's state is ever made: a convolution gathers the last inputs of a node's path, and the delta rule
solves the triangular system of a chunk (see `jaxllm.nn.states`) in which a node meets its ancestors alone.
Nodes come after their parents.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.kv.states import LayerState, StateNodes, States
from jaxllm.nn.states import DeltaInputs, corrected, gated_delta_rule, short_convolution


def tree_convolution(x: jax.Array, before: jax.Array, kernel: jax.Array, ancestors: jax.Array) -> jax.Array:
    """`short_convolution` of the path to each node.

    Args:
      x: `[B, M, C]`, the inputs of nodes.
      before: `[B, taps - 1, C]`, the inputs before the root.
      kernel: `[C, taps]`.
      ancestors: `[M, M]` bool, a node's ancestors and itself.

    Returns:
      Outputs `[B, M, C]`; of nodes that are not there undefined.
    """
    taps, x = kernel.shape[1], x.astype(jnp.float32)
    depth = jnp.sum(ancestors, axis=1, dtype=jnp.int32) - 1
    out = jnp.zeros(x.shape, jnp.float32)
    for tap in range(taps):
        # The depth of the node whose input this tap takes; negative before the root.
        at = depth - (taps - 1 - tap)
        node = jnp.argmax(ancestors & (depth[None, :] == at[:, None]), axis=1)
        earlier = before[:, jnp.clip(taps - 1 + at, 0, taps - 2)]
        seen = jnp.where((at < 0)[:, None], earlier, x[:, node])
        out = out + seen * kernel[:, tap].astype(jnp.float32)
    return out


def tree_delta_rule(nodes: DeltaInputs, matrix: jax.Array, ancestors: jax.Array) -> jax.Array:
    """Outputs `[B, M, heads, value_dim]` of `gated_delta_rule` of the path to each node; for the arguments
    see there and `tree_convolution`."""
    of = jax.tree.map(lambda each: jnp.moveaxis(each, 1, 2), nodes)
    total = jnp.einsum("ij,bnj->bni", ancestors.astype(jnp.float32), of.log_decay)
    out, _ = corrected(of, total, jnp.exp(total), ancestors, matrix)
    return jnp.moveaxis(out, 2, 1)


def after_path(states: States, path: jax.Array, count: jax.Array) -> States:
    """The states after a path of the tree whose nodes they have.

    Args:
      states: of all layers, with nodes.
      path: `[P]` int32, in order.
      count: int32 scalar; the first `count` nodes are of the path.
    """
    # The layers do not depend on each other: together they are a batch.
    lead = states.inputs.shape[:2]
    flat = jax.tree.map(lambda each: each.reshape(-1, *each.shape[2:]), states)
    after = _after_path(LayerState(flat.inputs, flat.matrix), flat.nodes, path, count)
    after = jax.tree.map(lambda each: each.reshape(*lead, *each.shape[1:]), after)
    return States(after.inputs, after.matrix)


def _after_path(state: LayerState, nodes: StateNodes, path: jax.Array, count: jax.Array) -> LayerState:
    real = jnp.arange(len(path), dtype=jnp.int32) < count

    def on_path(each: jax.Array) -> jax.Array:
        return jnp.where(real.reshape(1, -1, *(1,) * (each.ndim - 2)), each[:, path], 0)

    along: StateNodes = jax.tree.map(on_path, nodes)
    no_kernel = np.zeros((along.inputs.shape[-1], state.inputs.shape[1] + 1), np.float32)
    _, inputs = short_convolution(along.inputs, state.inputs, jnp.asarray(no_kernel), count)
    if state.matrix is None:
        return LayerState(inputs)
    assert along.k is not None
    assert along.v is not None
    assert along.log_decay is not None
    assert along.correction is not None
    tokens = DeltaInputs(along.k, along.k, along.v, along.log_decay, along.correction)
    return LayerState(inputs, gated_delta_rule(tokens, state.matrix)[1])
