"""Defines the steps of exported programs: functions of (weights, caches, inputs) to caches and outputs, each
arrays by name (see `jaxllm.export.folder_format.signature` for names and shapes).

A token is valid if its position is that of the first token plus its index; any other number in `input_pos`
after the prompt's end marks padding, which is not written to the caches. A decode step returns `logits` `[1,
T, V]` float32, a prefill step does not. Shapes are static, layers are unrolled, and only blocks have loops.

For an encoder-decoder an encode step accepts `tokens` `[1, T]` and `source_tokens` `[1]` int32, the number
of valid ones, and returns `source_k_i` and `source_v_i` `[1, K, T, H]` of each layer of the decoder. Its
other steps accept these, padded with zeros to R rows, and `source_tokens`, and only read them.

A block decodes several tokens in one dispatch, with sampling inside: it accepts the last token `[1, 1]` and
its position `[1]`, as a decode step does, and the controls; it returns the caches, `next_tokens` `[1, T]` and
`count` `[1]` int32. The caches must have room for `limit` tokens. Sampling has no kernels and no nested
branches, which few runtimes support: a seed gives the same answer as the live service, except where the
rounding of a sum or a logarithm decides.

A step that encodes chunks accepts caches, and `chunks` `[n]` int32, numbers of chunks within them. It
returns, for keys and values of each layer, packed levels `[n, K, C, H·bits/8]` uint8, and `[n, 2, ...]`
float32, their lows and scales, each of them a float16 number; `jaxllm.export.folder_format.signature` makes
the bytes of blobs from both. A step that loads chunks accepts these in addition, and returns the caches with
the chunks in their places. A repeated number is the same chunk. There are no bit operations: a byte is a sum
of levels times powers of two.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import dynamic_slice_in_dim as slice_in_dim
from jax.lax import dynamic_update_slice_in_dim as update_slice_in_dim
from jax.typing import DTypeLike

from jaxllm.axes import Axes
from jaxllm.config import ModelConfig
from jaxllm.contexts.codecs import AXES, Sharing
from jaxllm.contexts.coding import quantized_part
from jaxllm.export.folder_format.parts import ADAPTER, INPUT_LEFT, INPUT_RIGHT, LEFT, RIGHT, AdapterInputs
from jaxllm.export.folder_format.signature import (
    CHUNKS,
    COUNT,
    FACTORS,
    KEYS,
    LEVELS,
    LOGITS,
    MASK,
    NEXT_TOKENS,
    POSITIONS,
    SOURCE_KEYS,
    SOURCE_TOKENS,
    SOURCE_VALUES,
    TOKENS,
    VALUES,
    Signature,
    chunk_format,
    sampler_of,
)
from jaxllm.kv.cache import KVCache, TokenPositions, TreePositions
from jaxllm.kv.states import SourceLayers
from jaxllm.models.decoder import forward_at, logits
from jaxllm.models.encoder_decoder import encode, encoder_params, with_source
from jaxllm.models.parameters import Params, param_specs
from jaxllm.quant import Adapted, Weight
from jaxllm.sampling import BITS, Repeat, by_loop, filtered, gumbel_noise, largest, only_if
from jaxllm.sampling_state import NO_TOKEN, penalize

Arrays = Mapping[str, jax.Array]
Step = Callable[[Arrays, Arrays, Arrays], dict[str, jax.Array]]
ParamsOf = Callable[[Mapping[str, Weight], ModelConfig], Params]


def with_adapters(weights: Mapping[str, Weight], cfg: ModelConfig) -> dict[str, Weight]:
    """Returns the model's parameters: weights with an adapter become `Adapted`, and those with an
    additional adapter as an input (see `jaxllm.export.folder_format.parts`) once more."""
    params: dict[str, Weight] = {}
    for name in param_specs(cfg):
        if name not in weights:
            # A stage has the parameters of its own.
            continue
        params[name] = weights[name]
        for sides in ((LEFT, RIGHT), (INPUT_LEFT, INPUT_RIGHT)):
            left, right = (weights.get(f"{name}{side}") for side in sides)
            if left is not None:
                params[name] = Adapted(params[name], left, right)  # pyright: ignore[reportArgumentType]: arrays
    return params


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Options that the steps of a model share.

    Attributes:
      cfg: config of the model, or of the sub-model with the weights' shapes.
      dtype: dtype of the activations.
      params_of: function that makes the model's parameters from the weights.
    """

    cfg: ModelConfig
    dtype: DTypeLike
    params_of: ParamsOf = with_adapters


def step_of(
    signature: Signature, options: StepOptions, *, loops: bool = True, adapters: AdapterInputs | None = None
) -> Step:
    """Returns the step of a signature, for a level's model; without `loops` for a runtime that has none,
    with `adapters` for programs that accept them as an input."""
    if signature.kind == "encode":
        return functools.partial(run_encode, options=options)
    if signature.kind == "verify":
        step = functools.partial(run_tree, options=options)
    elif signature.kind == "block":
        block = run_block if loops else run_unrolled_block
        step = functools.partial(block, options=options, count=signature.tokens)
    else:
        step = functools.partial(run_step, options=options, with_logits=signature.kind == "decode")
    if adapters is None:
        return step

    def adapted(weights: Arrays, caches: Arrays, inputs: Arrays) -> dict[str, jax.Array]:
        return step({**weights, **adapters.split(signature.level, inputs[ADAPTER])}, caches, inputs)

    return adapted


def run_step(
    weights: Arrays, caches: Arrays, inputs: Arrays, *, options: StepOptions, with_logits: bool
) -> dict[str, jax.Array]:
    """Runs consecutive tokens through the model.

    Args:
      weights: parameters by name, and the two factors of each adapter.
      caches: `kv_cache_k_i`, `kv_cache_v_i` `[1, K, S, H]`.
      inputs: `tokens` and `input_pos` (see the module), for an encoder-decoder the source's arrays; for
        runtimes that make the attention mask themselves `mask` `[1, 1, T, S]` bool, the positions that each
        token attends to, instead of all up to its own; padding is then written, too, into rows that the
        caches must have.
      with_logits: whether to run the head.

    Returns:
      The caches with the tokens' rows, and `logits` if `with_logits`.
    """
    tokens, positions = inputs[TOKENS], inputs[POSITIONS]
    axes = Axes("run_step")
    axes.check(jnp.int32, "1 T", tokens=tokens)
    axes.check(jnp.int32, "T", input_pos=positions)
    count = tokens.shape[1]
    if MASK in inputs:
        # Each token has the angles of its own position: accelerators take no dynamic shapes or scalars.
        at = TokenPositions(positions, jnp.int32(count), None, True, inputs[MASK][0, 0], roomy=True)
    else:
        real = positions == positions[0] + jnp.arange(count, dtype=jnp.int32)
        at = TokenPositions.after(positions[0], count, jnp.sum(real, dtype=jnp.int32))
    return _step(weights, caches, inputs, at, options, with_logits)


def run_tree(
    weights: Arrays, caches: Arrays, inputs: Arrays, *, options: StepOptions
) -> dict[str, jax.Array]:
    """Runs a token tree after the sequence in the caches; returns logits after each node.

    Args:
      weights, caches, options: see `run_step`.
      inputs: `tokens` `[1, M]` int32, the nodes from the root on, in consecutive rows of the cache;
        `input_pos` `[M]` int32, their positions in a sequence, of which the root's is the length of the
        cached sequence; and `mask` `[M, M]` bool, the nodes that each node attends to, with itself, all False
        for padding.

    Returns:
      The caches with the nodes' rows, and `logits` `[1, M, V]`.
    """
    tokens, positions, mask = inputs[TOKENS], inputs[POSITIONS], inputs[MASK]
    axes = Axes("run_tree")
    axes.check(jnp.int32, "1 M", tokens=tokens)
    axes.check(jnp.int32, "M", input_pos=positions)
    axes.check(jnp.bool_, "M M", mask=mask)
    rows = positions[0] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    real = jnp.sum(jnp.any(mask, axis=1), dtype=jnp.int32)
    tree = TreePositions(positions[0], rows, mask)
    at = TokenPositions(positions, real, tree, consecutive=True)
    return _step(weights, caches, inputs, at, options, True)


def run_encode(
    weights: Arrays, caches: Arrays, inputs: Arrays, *, options: StepOptions
) -> dict[str, jax.Array]:
    """Encodes a source, and projects its hidden states for each layer of the decoder.

    Args:
      weights, options: see `run_step`.
      caches: empty, because a source has none.
      inputs: `tokens` `[1, T]` int32, and `source_tokens` `[1]` int32, number of valid tokens.

    Returns:
      `source_k_i`, `source_v_i` `[1, K, T, H]`.
    """
    del caches
    tokens, count, cfg = inputs[TOKENS], inputs[SOURCE_TOKENS], options.cfg
    axes = Axes("run_encode")
    axes.check(jnp.int32, "1 T", tokens=tokens)
    axes.check(jnp.int32, "1", source_tokens=count)
    assert cfg.encoder is not None
    params, valid, dtype = options.params_of(weights, cfg), count[0], options.dtype
    # Programs have no loops.
    hidden = encode(encoder_params(params), tokens, valid, cfg=cfg.encoder, dtype=dtype, block_tokens=0)
    empty = (jnp.zeros(0, dtype),) * cfg.layers
    source = with_source(params, hidden, valid, SourceLayers(empty, empty, valid), cfg=cfg)
    return _by_layer((SOURCE_KEYS, tuple(source.keys)), (SOURCE_VALUES, tuple(source.values)))


def run_block(
    weights: Arrays, caches: Arrays, inputs: Arrays, *, options: StepOptions, count: int
) -> dict[str, jax.Array]:
    """Decodes up to `inputs["limit"]` of at most `count` tokens in a loop, and stops after a stop token.

    Other arguments are those of `run_step`. The caller updates the sampler's state: `count` tokens were
    sampled.
    """
    step = _block_step(weights, inputs, options)

    def more(carry: Any) -> jax.Array:
        done, _, running = carry[:3]
        return running & (done < inputs["limit"][0])

    def one(carry: Any) -> Any:
        done, token, _, rows, counts, caches = carry
        logits, caches = step(caches, token, inputs[POSITIONS] + done)
        token = choose(logits, inputs, counts, done, by_loop)
        counts = _counted(counts, token)
        rows = update_slice_in_dim(rows, token[None], done, axis=1)
        return done + 1, token, ~_stops(token, inputs), rows, counts, caches

    start = (
        jnp.zeros((), jnp.int32), inputs[TOKENS][0], jnp.ones((), jnp.bool_),
        jnp.full((1, count), NO_TOKEN, jnp.int32), inputs["counts"], dict(caches),
    )  # fmt: skip
    done, _, _, rows, _, caches = jax.lax.while_loop(more, one, start)
    return {**caches, NEXT_TOKENS: rows, COUNT: done[None]}


def run_unrolled_block(
    weights: Arrays, caches: Arrays, inputs: Arrays, *, options: StepOptions, count: int
) -> dict[str, jax.Array]:
    """Computes the results of `run_block` without a loop, for runtimes that have none: after the last token
    the remaining steps repeat the last one, which changes nothing."""
    step = _block_step(weights, inputs, options)
    token, at, counts = inputs[TOKENS][0], inputs[POSITIONS], inputs["counts"]
    running, done, found, kept = jnp.ones((), jnp.bool_), jnp.zeros((), jnp.int32), [], dict(caches)
    for index in range(count):
        logits, kept = step(kept, token, at)
        drawn = choose(logits, inputs, counts, jnp.int32(index), one_by_one)
        found.append(jnp.where(running, drawn, NO_TOKEN))
        counts = _counted(counts, found[-1])
        done = done + running.astype(jnp.int32)
        running = running & ~_stops(drawn, inputs) & (index + 1 < inputs["limit"][0])
        token, at = jnp.where(running, drawn, token), jnp.where(running, at + 1, at)
    return {**kept, NEXT_TOKENS: jnp.stack(found, axis=1), COUNT: done[None]}


def _block_step(
    weights: Arrays, inputs: Arrays, options: StepOptions
) -> Callable[[Arrays, jax.Array, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]:
    """The step `(caches, token [1], position [1])` -> logits `[1, V]`, caches."""
    axes = Axes("run_block")
    axes.check(jnp.int32, "1 1", tokens=inputs[TOKENS])
    axes.check(jnp.int32, "1", input_pos=inputs[POSITIONS], limit=inputs["limit"])
    axes.check(jnp.int32, "1 V", counts=inputs["counts"])

    def step(caches: Arrays, token: jax.Array, at: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        own = {**inputs, TOKENS: token[None], POSITIONS: at}
        out = run_step(weights, caches, own, options=options, with_logits=True)
        return out.pop(LOGITS)[0], out

    return step


def _counted(counts: jax.Array, token: jax.Array) -> jax.Array:
    index = jnp.arange(counts.shape[-1], dtype=jnp.int32)[None]
    return counts + (index == token[:, None]).astype(jnp.int32)


def _stops(token: jax.Array, controls: Arrays) -> jax.Array:
    # NO_TOKEN pads the stop tokens, and ends an answer, too.
    same = (controls["stop_ids"] == token).astype(jnp.int32)
    return (jnp.max(same) > 0) | (token[0] == NO_TOKEN)


def _step(
    weights: Arrays,
    caches: Arrays,
    inputs: Arrays,
    at: TokenPositions,
    options: StepOptions,
    with_logits: bool,
) -> dict[str, jax.Array]:
    """Runs the tokens of the inputs, at positions, with any source among the inputs."""
    cfg = options.cfg
    params = options.params_of(weights, cfg)

    def layers(arrays: Arrays, name: str) -> tuple[jax.Array, ...]:
        return tuple(arrays[name.format(layer)] for layer in range(cfg.layers))

    source = None
    if cfg.encoder is not None:
        keys, values = layers(inputs, SOURCE_KEYS), layers(inputs, SOURCE_VALUES)
        source = SourceLayers(keys, values, inputs[SOURCE_TOKENS][0])
    keys, values = layers(caches, KEYS), layers(caches, VALUES)
    # XNNPACK multiplies float16 numbers as fast as others, but nothing widens them quickly. Masks are for
    # GPUs, whose runtime only has products of float32.
    at = dataclasses.replace(at, narrow=keys[0].dtype == jnp.float16 and at.mask is None)
    cache = KVCache(keys=keys, values=values, length=at.positions[0], source=source)
    hidden, cache = forward_at(params, inputs[TOKENS], cache, at, cfg=cfg, dtype=options.dtype)
    out = _by_layer((KEYS, cache.keys), (VALUES, cache.values))
    return {**out, LOGITS: logits(params, hidden, cfg=cfg)} if with_logits else out


def _by_layer(*stacks: tuple[str, tuple[jax.Array, ...]]) -> dict[str, jax.Array]:
    return {name.format(layer): each for name, arrays in stacks for layer, each in enumerate(arrays)}


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
    axes = Axes("choose")
    axes.check(jnp.float32, "1 V", logits=logits)
    axes.check(jnp.int32, "1 V", counts=counts)
    state = sampler_of(controls, counts, done)
    draws = state.temperature > 0

    def noised(logits: jax.Array) -> jax.Array:
        return logits + gumbel_noise(state.seed, state.drawn, logits.shape)

    # Branches are not nested: LiteRT's converter gives inner ones wrong constants.
    logits = only_if(state.penalized, lambda x: penalize(x, state, jnp.where), logits)
    # Relative to the largest, so that division by a small temperature gives no positive infinity.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / state.temperature
    logits = filtered(jnp.where(draws, scaled, logits), state, draws, repeat)
    token = largest(only_if(draws, noised, logits), portable=True)
    index = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    found = jnp.max(jnp.where(index == token[:, None], logits, -jnp.inf), axis=-1)
    return jnp.where(jnp.abs(found) < jnp.inf, token, NO_TOKEN)


def run_chunks(
    weights: Arrays, caches: Arrays, inputs: Arrays, *, cfg: ModelConfig, signature: Signature
) -> dict[str, jax.Array]:
    """Encodes chunks of all layers at the signature's width, or loads them into caches (see the module);
    `weights` is empty."""
    chunks, form, bits = inputs[CHUNKS], chunk_format(signature.codec), signature.bits
    Axes("run_chunks").check(jnp.int32, "n", chunks=chunks)
    step, planes, found = np.float32(2**bits), 8 // bits, {}
    sides: tuple[tuple[str, Sharing], ...] = ((KEYS, form.codec.keys), (VALUES, form.codec.values))
    for layer in range(cfg.layers):
        for name, sharing in sides:
            side = name.format(layer)
            levels, factors, whole = LEVELS.format(side), FACTORS.format(side), caches[side]
            if signature.kind == "encode_chunks":
                taken = [slice_in_dim(whole, at * form.tokens, form.tokens, axis=2) for at in chunks]
                # No constant for converters, which would multiply by its reciprocal and so round otherwise.
                most = jax.lax.optimization_barrier(jnp.float32(2**bits - 1))
                rows = form.codec.transformed(jnp.concatenate(taken).astype(jnp.float32))
                codes, low, scale = quantized_part(rows, AXES[sharing], most)
                packed, *rest = jnp.split(codes, planes, axis=-1)
                # The first channels are in the lowest bits.
                for index, plane in enumerate(rest, start=1):
                    packed = packed + plane * np.float32(2 ** (index * bits))
                found[levels] = packed.astype(jnp.uint8)
                found[factors] = jnp.stack([low, scale], axis=1).astype(jnp.float32)
                continue
            packed, parts = inputs[levels].astype(jnp.float32), []
            for _ in range(planes):
                above = jnp.floor(packed / step)
                parts.append(packed - above * step)
                packed = above
            low, scale = inputs[factors][:, 0], inputs[factors][:, 1]
            rows = form.codec.transformed(low + scale * jnp.concatenate(parts, axis=-1)).astype(whole.dtype)
            for place in range(chunks.shape[0]):
                at = chunks[place] * form.tokens
                whole = update_slice_in_dim(whole, rows[place : place + 1], at, axis=2)
            found[side] = whole
    return found
