"""Recurrent states: short causal convolutions, the gated delta rule, and states under a token tree."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.kv.states import States

# Both accept tokens `[B, T, ...]` with the state before them, and return outputs and the state after the
# first `valid` tokens: the rest is padding, which changes no state. Everything is float32. With `starts`
# tokens are packed documents, each of which begins without a state.


# Tokens of the delta rule that are computed together; chunks are computed one after another.
DELTA_CHUNK = 64


def short_convolution(
    x: jax.Array, before: jax.Array, kernel: jax.Array, valid: jax.Array, starts: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Causal convolution of each channel.

    Args:
      x: `[B, T, C]`, its inputs.
      before: `[B, taps - 1, C]`, the preceding inputs.
      kernel: `[C, taps]`, the last tap is the token's own.
      valid: int32 scalar, number of valid tokens.
      starts: `[B, T]` int32, per token the index of its document's beginning; None for one sequence.

    Returns:
      Outputs `[B, T, C]`, and the inputs `[B, taps - 1, C]` before the next token.
    """
    count, taps = x.shape[1], kernel.shape[1]
    inputs = jnp.concatenate([before, x.astype(jnp.float32)], axis=1)
    out = jnp.zeros(x.shape, jnp.float32)
    for tap in range(taps):
        seen = jax.lax.slice_in_dim(inputs, tap, tap + count, axis=1)
        if starts is not None:
            inside = jnp.arange(count, dtype=jnp.int32) - (taps - 1 - tap) >= starts
            seen = jnp.where(inside[..., None], seen, 0)
        out = out + seen * kernel[:, tap].astype(jnp.float32)
    return out, jax.lax.dynamic_slice_in_dim(inputs, valid, taps - 1, axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaInputs:
    """Updates of a layer's matrices by tokens, float32.

    Attributes:
      q, k: `[B, T, heads, key_dim]`.
      v: `[B, T, heads, value_dim]`.
      log_decay: `[B, T, heads]`, logarithm of a matrix's factor; 0 for padding.
      correction: `[B, T, heads]`, share of the error at a key that is corrected; 0 for padding.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    correction: jax.Array


def gated_delta_rule(
    tokens: DeltaInputs, matrix: jax.Array, starts: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Decays, corrects and reads matrices by each token (arXiv 2412.06464, equation 10): S <- a·S, S <- S +
    b·k (v - S^T k)^T, o = S^T q.

    Args:
      tokens: updates of the tokens.
      matrix: `[B, heads, key_dim, value_dim]`, S before the first token.
      starts: `[B, T]` int32, see `short_convolution`; the matrix is then not read.

    Returns:
      Outputs `[B, T, heads, value_dim]`, and S after the last token.
    """
    count = tokens.q.shape[1]
    if count == 1 and starts is None:
        columns = (tokens.q, tokens.k, tokens.v, jnp.exp(tokens.log_decay), tokens.correction)
        q, k, v, decay, correction = (each[:, 0] for each in columns)
        matrix = matrix * decay[..., None, None]
        error = (v - jnp.einsum("bnkv,bnk->bnv", matrix, k)) * correction[..., None]
        matrix = matrix + k[..., None] * error[..., None, :]
        return jnp.einsum("bnkv,bnk->bnv", matrix, q)[:, None], matrix
    # The corrections of a chunk of tokens solve one triangular system, in which each token meets the decayed
    # keys of those before it (the UT transform, arXiv 2406.06484, section 3.2).
    size = min(DELTA_CHUNK, count)
    fill = -count % size

    def chunks(each: jax.Array) -> jax.Array:
        """Reshapes `[B, T, heads, ...]` to `[chunks, B, heads, size, ...]`, padded with tokens without
        effect."""
        each = jnp.pad(each, [(0, 0), (0, fill), *[(0, 0)] * (each.ndim - 2)])
        each = each.reshape(each.shape[0], -1, size, *each.shape[2:])
        return jnp.moveaxis(each, (1, 3), (0, 2))

    inputs = jax.tree.map(chunks, tokens)
    first = jnp.arange(0, count + fill, size, dtype=jnp.int32)
    own = None
    if starts is not None:
        # What fills up is of the last document.
        own = jnp.pad(starts, ((0, 0), (0, fill)), mode="edge").reshape(starts.shape[0], -1, 1, size)
        own = jnp.moveaxis(own, 1, 0)

    def chunk(
        matrix: jax.Array, part: tuple[DeltaInputs, jax.Array, jax.Array | None]
    ) -> tuple[jax.Array, jax.Array]:
        """Tokens `[B, heads, size, ...]`, the first with the index `first`; `starts` `[B, 1, size]`."""
        of, first, starts = part
        total = jnp.cumsum(of.log_decay, axis=-1)
        reads: jax.Array | np.ndarray = np.tril(np.ones((size, size), bool))
        # Decay from the state before the chunk to a token, and from a token to the chunk's end.
        kept, left = jnp.exp(total), jnp.exp(total[..., -1:] - total)
        if starts is not None:
            reads = reads & (starts[..., :, None] == starts[..., None, :])
            kept = jnp.where(starts < first, kept, 0)
            left = jnp.where(starts == starts[..., -1:], left, 0)
        out, errors = corrected(of, total, kept, reads, matrix)
        matrix = matrix * kept[..., -1:, None]
        return matrix + jnp.einsum("bnik,bniv->bnkv", of.k * left[..., None], errors), out

    matrix, out = jax.lax.scan(chunk, matrix, (inputs, first, own))
    # [chunks, B, heads, size, value_dim]
    out = jnp.moveaxis(out, (0, 2), (1, 3))
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :count], matrix


def corrected(
    of: DeltaInputs, total: jax.Array, kept: jax.Array, reads: jax.Array | np.ndarray, matrix: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns outputs of tokens, and the corrected errors that they add to the state.

    Args:
      of: the tokens, `[B, heads, size, ...]`.
      total: `[B, heads, size]`, logarithms of the decay from before the tokens to each.
      kept: share of the state before the tokens that each reads, of the same shape.
      reads: `[..., size, size]`, tokens that each reads: itself, and some before it.
      matrix: the state before the tokens.
    """
    size = of.q.shape[2]
    # Masked before the exponential, which would overflow for tokens that are not read.
    decay = jnp.exp(jnp.where(reads, total[..., :, None] - total[..., None, :], -jnp.inf))
    strictly = np.tril(np.ones((size, size), np.float32), -1)
    keys = of.k * of.correction[..., None]
    system = jnp.einsum("bnik,bnjk->bnij", keys, of.k) * decay * strictly
    wanted = of.v * of.correction[..., None]
    wanted = wanted - jnp.einsum("bnik,bnkv->bniv", keys * kept[..., None], matrix)
    errors = _unit_lower_inverse(system) @ wanted
    out = jnp.einsum("bnik,bnkv->bniv", of.q * kept[..., None], matrix)
    scores = jnp.einsum("bnik,bnjk->bnij", of.q, of.k) * decay
    return out + jnp.einsum("bnij,bnjv->bniv", scores, errors), errors


def _unit_lower_inverse(below: jax.Array) -> jax.Array:
    """Returns the inverse of I + `below`, which is strictly lower triangular, `[..., size, size]`.

    Blocks double: for two blocks A and B with C next to them it is A^-1, B^-1 and -B^-1 C A^-1. These are
    only products, which are faster than XLA's solver on a CPU, and no powers of `below`, which grow.
    """
    size = below.shape[-1]
    inverse: jax.Array | np.ndarray = np.eye(size, dtype=np.float32)
    row, column = np.arange(size)[:, None], np.arange(size)[None]
    block = 1
    while block < size:
        beside = (row // (2 * block) == column // (2 * block)) & (row // block > column // block)
        inverse = inverse - inverse @ jnp.where(beside, below, 0) @ inverse
        block *= 2
    return jnp.asarray(inverse)


# States under a token tree: a node reads the state after its own path, and the accepted path is committed.
#
# Nodes' states are never materialized: a convolution gathers the last inputs of a node's path, and the delta
# rule solves the triangular system of a chunk (see `jaxllm.nn.states`) restricted to each node's ancestors.
# Nodes come after their parents.


def tree_convolution(x: jax.Array, before: jax.Array, kernel: jax.Array, ancestors: jax.Array) -> jax.Array:
    """Computes `short_convolution` of the path to each node.

    Args:
      x: `[B, M, C]`, the inputs of nodes.
      before: `[B, taps - 1, C]`, the inputs before the root.
      kernel: `[C, taps]`.
      ancestors: `[M, M]` bool, a node's ancestors and itself.

    Returns:
      Outputs `[B, M, C]`; undefined for missing nodes.
    """
    taps, x = kernel.shape[1], x.astype(jnp.float32)
    depth = jnp.sum(ancestors, axis=1, dtype=jnp.int32) - 1
    out = jnp.zeros(x.shape, jnp.float32)
    for tap in range(taps):
        # Depth of the node whose input this tap reads; negative before the root.
        at = depth - (taps - 1 - tap)
        node = jnp.argmax(ancestors & (depth[None, :] == at[:, None]), axis=1)
        earlier = before[:, jnp.clip(taps - 1 + at, 0, taps - 2)]
        seen = jnp.where((at < 0)[:, None], earlier, x[:, node])
        out = out + seen * kernel[:, tap].astype(jnp.float32)
    return out


def tree_delta_rule(nodes: DeltaInputs, matrix: jax.Array, ancestors: jax.Array) -> jax.Array:
    """Returns outputs `[B, M, heads, value_dim]` of `gated_delta_rule` of the path to each node; for the
    arguments see there and `tree_convolution`."""
    of = jax.tree.map(lambda each: jnp.moveaxis(each, 1, 2), nodes)
    total = jnp.einsum("ij,bnj->bni", ancestors.astype(jnp.float32), of.log_decay)
    out, _ = corrected(of, total, jnp.exp(total), ancestors, matrix)
    return jnp.moveaxis(out, 2, 1)


def after_path(states: States, path: jax.Array, count: jax.Array) -> States:
    """Returns the states after a path of the tree that they have nodes of.

    Args:
      states: states of all layers, with nodes.
      path: `[P]` int32, in order.
      count: int32 scalar, number of nodes of the path.
    """
    # The layers do not depend on each other: together they are a batch.
    lead = states.inputs.shape[:2]
    state = jax.tree.map(lambda each: each.reshape(-1, *each.shape[2:]), states)
    real = jnp.arange(len(path), dtype=jnp.int32) < count

    def on_path(each: jax.Array) -> jax.Array:
        return jnp.where(real.reshape(1, -1, *(1,) * (each.ndim - 2)), each[:, path], 0)

    along = jax.tree.map(on_path, state.nodes)
    no_kernel = np.zeros((along.inputs.shape[-1], state.inputs.shape[1] + 1), np.float32)
    _, inputs = short_convolution(along.inputs, state.inputs, jnp.asarray(no_kernel), count)
    after = States(inputs)
    if state.matrix is not None:
        tokens = DeltaInputs(along.k, along.k, along.v, along.log_decay, along.correction)
        after = States(inputs, gated_delta_rule(tokens, state.matrix)[1])
    return jax.tree.map(lambda each: each.reshape(*lead, *each.shape[1:]), after)
