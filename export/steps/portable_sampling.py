"""Samples tokens by the functions of `jaxllm.sampling`, as every runtime of programs supports them: without
kernels and nested branches, one sequence at a time.

A seed gives the same answer as the live service, except where the rounding of a sum or a logarithm decides.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.axes import Axes
from jaxllm.export.folder_format.signature import DRAWN, OPTIONS, PENALIZED, SEED, TOP_K
from jaxllm.sampling import BITS, Repeat, filtered, gumbel_noise, largest, only_if
from jaxllm.sampling_state import NO_TOKEN, SamplerState, penalize


def one_by_one(body: Callable[[Any, jax.Array], jax.Array], start: jax.Array) -> jax.Array:
    """Repeats a body for each bit without a loop, for runtimes without loops."""
    for bit in BITS:
        start = body(bit, start)
    return start


def choose(
    logits: jax.Array, controls: Mapping[str, jax.Array], counts: jax.Array, done: Any, repeat: Repeat
) -> jax.Array:
    """Returns the next token `[1]` int32, or `NO_TOKEN` (see `jaxllm.sampling.sample`).

    Args:
      logits: `[1, V]` float32.
      controls: see `jaxllm.export.folder_format.signature`.
      counts: `[1, V]` int32, number of each token in the answer so far.
      done: int32 scalar, number of tokens sampled since `controls` were made.
      repeat: `jaxllm.sampling.by_loop` or `one_by_one`.
    """
    axes, draw = Axes("choose"), controls["draw"]
    axes.check(jnp.float32, "1 V", logits=logits)
    axes.check(jnp.int32, "1 V", counts=counts)
    state = SamplerState(
        **dict(zip(OPTIONS, controls["options"], strict=True)),
        top_k=draw[TOP_K],
        penalized=draw[PENALIZED] > 0,
        bias=controls["bias"],
        in_prompt=controls["in_prompt"],
        counts=counts,
        seed=draw[SEED],
        drawn=draw[DRAWN] + done,
    )
    draws = state.temperature > 0

    def noised(logits: jax.Array) -> jax.Array:
        return logits + gumbel_noise(state.seed, state.drawn, logits.shape, portable=True)

    # Branches are not nested: LiteRT's converter gives inner ones wrong constants.
    logits = only_if(state.penalized, lambda x: penalize(x, state, jnp.where), logits)
    # Relative to the largest, so that division by a small temperature gives no positive infinity.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / state.temperature
    logits = filtered(jnp.where(draws, scaled, logits), state, draws, repeat)
    token = largest(only_if(draws, noised, logits), portable=True)
    index = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    found = jnp.max(jnp.where(index == token[:, None], logits, -jnp.inf), axis=-1)
    return jnp.where(jnp.abs(found) < jnp.inf, token, NO_TOKEN)
