"""Defines the steps of exported programs that decode several tokens in one dispatch, with sampling inside.

They accept the last token `[1, 1]` and its position `[1]`, as a decode step does, and the arrays of
`jaxllm.export.folder_format.controls`; they return the caches, `next_tokens` `[1, T]` and `count` `[1]`
int32. The caches must have room for `limit` tokens.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm.axes import Axes
from jaxllm.config import ModelConfig
from jaxllm.export.folder_format.adapters import AdapterInputs
from jaxllm.export.folder_format.controls import COUNT, NEXT_TOKENS
from jaxllm.export.folder_format.manifest import Signature
from jaxllm.export.steps.exported import Arrays, ParamsOf, run_encode, run_step, run_tree
from jaxllm.export.steps.portable_sampling import choose, one_by_one
from jaxllm.sampling import by_loop
from jaxllm.sampling_state import NO_TOKEN


@dataclasses.dataclass(frozen=True)
class BlockOptions:
    """Options of a program that decodes several tokens: the model, the dtype of its activations, and the
    maximum number of tokens."""

    cfg: ModelConfig
    dtype: DTypeLike
    tokens: int


def step_of(
    signature: Signature,
    cfg: ModelConfig,
    dtype: DTypeLike,
    *,
    loops: bool = True,
    adapters: AdapterInputs | None = None,
) -> Callable[..., dict[str, jax.Array]]:
    """Returns the function `(weights, caches, tokens, input_pos[, mask or controls][, adapter][, source])`
    of a signature, for a level's model; without `loops` for a runtime that has none, with `adapters` for
    programs that accept them as an input. An encode step has `source_tokens` in place of `input_pos`, and
    no source.
    """
    if signature.kind == "encode":
        return functools.partial(run_encode, cfg=cfg, dtype=dtype)
    if signature.kind == "verify":
        step = functools.partial(run_tree, cfg=cfg, dtype=dtype)
    elif signature.kind == "block":
        block = run_block if loops else run_unrolled_block
        step = functools.partial(block, options=BlockOptions(cfg, dtype, signature.tokens))
    else:
        step = functools.partial(run_step, cfg=cfg, dtype=dtype, with_logits=signature.kind == "decode")
    if adapters is not None:
        step = functools.partial(_with_adapter, step, adapters, signature.level)
    return step if cfg.encoder is None else functools.partial(_with_source, step)


def _with_adapter(
    step: Callable[..., dict[str, jax.Array]],
    adapters: AdapterInputs,
    level: int,
    weights: Arrays,
    caches: Arrays,
    *inputs: Any,
    **options: Any,
) -> dict[str, jax.Array]:
    """Step with an adapter as last input, whose factors are added to the weights."""
    return step({**weights, **adapters.split(level, inputs[-1])}, caches, *inputs[:-1], **options)


def _with_source(
    step: Callable[..., dict[str, jax.Array]],
    weights: Arrays,
    caches: Arrays,
    *inputs: Any,
    **options: Any,
) -> dict[str, jax.Array]:
    """Step with the source as last input, whose arrays are added to the weights."""
    return step({**weights, **inputs[-1]}, caches, *inputs[:-1], **options)


def run_block(
    weights: Arrays,
    caches: Arrays,
    tokens: jax.Array,
    input_pos: jax.Array,
    controls: Arrays,
    *,
    options: BlockOptions,
    params_of: ParamsOf | None = None,
) -> dict[str, jax.Array]:
    """Decodes up to `controls["limit"]` of at most `options.tokens` tokens in a loop, and stops after a
    stop token.

    Other arguments are those of `run_step`. The caller updates the sampler's state: `count` tokens were
    sampled.
    """
    _check(tokens, input_pos, controls)
    step = _step(weights, options, params_of)

    def more(carry):
        done, _, running = carry[:3]
        return running & (done < controls["limit"][0])

    def one(carry):
        done, token, _, rows, counts, caches = carry
        logits, caches = step(caches, token, input_pos + done)
        token = choose(logits, controls, counts, done, by_loop)
        counts = _counted(counts, token)
        rows = jax.lax.dynamic_update_slice_in_dim(rows, token[None], done, axis=1)
        return done + 1, token, ~_stops(token, controls), rows, counts, caches

    start = (
        jnp.zeros((), jnp.int32), tokens[0], jnp.ones((), jnp.bool_),
        jnp.full((1, options.tokens), NO_TOKEN, jnp.int32), controls["counts"], dict(caches),
    )  # fmt: skip
    done, _, _, rows, _, caches = jax.lax.while_loop(more, one, start)
    return {**caches, NEXT_TOKENS: rows, COUNT: done[None]}


def run_unrolled_block(
    weights: Arrays,
    caches: Arrays,
    tokens: jax.Array,
    input_pos: jax.Array,
    controls: Arrays,
    *,
    options: BlockOptions,
    params_of: ParamsOf | None = None,
) -> dict[str, jax.Array]:
    """Computes the results of `run_block` without a loop, for runtimes that have none: after the last token
    the remaining steps repeat the last one, which changes nothing."""
    _check(tokens, input_pos, controls)
    step = _step(weights, options, params_of)
    token, at, counts = tokens[0], input_pos, controls["counts"]
    running, done, found, kept = jnp.ones((), jnp.bool_), jnp.zeros((), jnp.int32), [], dict(caches)
    for index in range(options.tokens):
        logits, kept = step(kept, token, at)
        drawn = choose(logits, controls, counts, jnp.int32(index), one_by_one)
        found.append(jnp.where(running, drawn, NO_TOKEN))
        counts = _counted(counts, found[-1])
        done = done + running.astype(jnp.int32)
        running = running & ~_stops(drawn, controls) & (index + 1 < controls["limit"][0])
        token, at = jnp.where(running, drawn, token), jnp.where(running, at + 1, at)
    return {**kept, NEXT_TOKENS: jnp.stack(found, axis=1), COUNT: done[None]}


def _check(tokens: jax.Array, input_pos: jax.Array, controls: Arrays) -> None:
    axes = Axes("run_block")
    axes.check(jnp.int32, "1 1", tokens=tokens)
    axes.check(jnp.int32, "1", input_pos=input_pos, limit=controls["limit"])
    axes.check(jnp.int32, "1 V", counts=controls["counts"])


def _step(
    weights: Arrays, options: BlockOptions, params_of: ParamsOf | None
) -> Callable[[Mapping[str, jax.Array], jax.Array, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]:
    """The step `(caches, token [1], position [1])` -> logits `[1, V]`, caches."""

    def step(
        caches: Mapping[str, jax.Array], token: jax.Array, at: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        out = run_step(
            weights,
            caches,
            token[None],
            at,
            cfg=options.cfg,
            dtype=options.dtype,
            with_logits=True,
            params_of=params_of,
        )
        return out.pop("logits")[0], out

    return step


def _counted(counts: jax.Array, token: jax.Array) -> jax.Array:
    """`counts` `[1, V]` with a token `[1]` more."""
    index = jnp.arange(counts.shape[-1], dtype=jnp.int32)[None]
    return counts + (index == token[:, None]).astype(jnp.int32)


def _stops(token: jax.Array, controls: Arrays) -> jax.Array:
    """Whether a token `[1]` ends the answer."""
    # NO_TOKEN pads the stop tokens, and ends an answer, too.
    same = (controls["stop_ids"] == token).astype(jnp.int32)
    return (jnp.max(same) > 0) | (token[0] == NO_TOKEN)
