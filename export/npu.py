"""Makes the three models that LiteRT-LM's executor for NPUs requires in one file, in floats.

`EMBEDDER` looks tokens up; `AUX` makes masks and angles, and writes slices into caches; `PREFILL_DECODE`
runs on the NPU. A vendor's plugin then quantizes the last one and compiles it for one SoC, which requires the
vendor's SDK. In floats all three run on a CPU, too.

The NPU's part has no tokens, positions or caches to write, because NPUs are slow at look-ups, scatters and
trigonometry. Its inputs are `embeddings` `[1, T, D]`, the angles `pos_emb_cos`, `pos_emb_sin` `[1, 1, T,
R]` (and `pos_emb_local_cos`, `pos_emb_local_sin` of layers with a window that have a rotary embedding of
their own), `mask_global` and `mask_local` `[1, 1, T, S + T]` bool, True = attend, over the cache followed
by the new tokens, and the caches `kv_cache_k_i` `[1, K, S, H]` and `kv_cache_v_i` `[1, K, H, S]`. It
returns `kv_slice_k_i` `[1, K, T, H]` and `kv_slice_v_i` `[1, K, H, T]` of the new tokens, and in decoding
the `logits`. The other steps make these. All accept (weights, inputs by name), and return results by name.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import WHOLE, ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.export.converter import Sharing, Traced, convert, share_buffers, traced
from jaxllm.export.folder_format.signature import KEYS, LOGITS, VALUES
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.steps.exported import Arrays, with_adapters
from jaxllm.export.subject import Subject
from jaxllm.kv.cache import Past, TokenPositions, write_rows
from jaxllm.models.decoder import embed_tokens, forward_layer, logits
from jaxllm.models.features import require_room
from jaxllm.models.layer import CosSin, LayerParams, rotary_by_rope
from jaxllm.models.layer_stack import layer_of
from jaxllm.nn.layers import normalize
from jaxllm.serving.host.progress import Progress

EMBEDDER, AUX, PREFILL_DECODE = "EMBEDDER", "AUX", "PREFILL_DECODE"
SLICE_KEYS, SLICE_VALUES = "kv_slice_k_{}", "kv_slice_v_{}"
EMBEDDINGS = "embeddings"
MASKS = ("mask_global", "mask_local")
ANGLES = (("pos_emb_cos", "pos_emb_sin"), ("pos_emb_local_cos", "pos_emb_local_sin"))
Shapes = dict[str, jax.ShapeDtypeStruct]


def npu_models(
    subject: Subject, plan: ExportPlan, progress: Progress | None = None
) -> tuple[dict[str, bytes], Sharing]:
    """The models of the whole model of a subject, by type, and the bytes of the NPU's weights; `plan` is
    resolved.

    Raises:
      ConfigError: the model cannot be divided so, or the plan has several lengths of chunks.
    """
    require_divisible(subject.cfg)
    if len(plan.chunk_tokens) != 1:
        raise ConfigError(
            f"the models of an NPU have one length of chunks, not {plan.chunk_tokens}; give one "
            "--chunk-tokens, as 128"
        )
    parts, weights = list(_parts(subject.cfg, plan)), subject.weights(WHOLE)
    embedding = {name: each for name, each in weights.items() if name.startswith("embed.")}
    given = {EMBEDDER: embedding, AUX: {}, PREFILL_DECODE: weights}
    made: dict[str, list[Traced]] = {model: [] for model in given}
    for done, (model, name, step, shapes) in enumerate(parts):
        made[model].append(traced(name, step, given[model], shapes))
        if progress is not None:
            progress("export", done + 1, len(parts))
    halves = [each for each in subject.arrays.values() if each.dtype == np.float16]
    shared = {model: share_buffers(convert(each), halves) for model, each in made.items()}
    return {model: each for model, (each, _) in shared.items()}, shared[PREFILL_DECODE][1]


def _parts(cfg: ModelConfig, plan: ExportPlan) -> Iterator[tuple[str, str, Any, Shapes]]:
    """Each signature: its model and name, its step, and the shapes of its inputs."""
    room = plan.context_tokens
    for suffix, tokens in ((f"_{plan.chunk_tokens[0]}", plan.chunk_tokens[0]), ("", 1)):
        kind = "prefill" if suffix else "decode"
        row = jax.ShapeDtypeStruct((1, tokens), np.int32)
        position = {"input_pos": jax.ShapeDtypeStruct((tokens,), np.int32)}
        asked = {"time_step": jax.ShapeDtypeStruct((1,), np.int32), "input_tokens": row}
        caches = _cache_shapes(cfg, room, KEYS, VALUES)
        kept = {**caches, **_cache_shapes(cfg, tokens, SLICE_KEYS, SLICE_VALUES), **position}
        run = functools.partial(run_layers, cfg=cfg, with_logits=not suffix)
        masks = functools.partial(run_masks, cfg=cfg, cache_tokens=room)
        angles, update, embed = (
            functools.partial(each, cfg=cfg) for each in (run_angles, run_cache_update, run_embedder)
        )
        yield EMBEDDER, f"{kind}_embedder{suffix}", embed, {"token_ids": row}
        yield AUX, f"{kind}_mask{suffix}", masks, asked
        yield AUX, f"{kind}_rope{suffix}", angles, position
        yield AUX, f"{kind}_cache_update{suffix}", update, kept
        embedded = jax.ShapeDtypeStruct((1, tokens, cfg.hidden_size), np.float32)
        aux = {**jax.eval_shape(angles, {}, position), **jax.eval_shape(masks, {}, asked)}
        yield PREFILL_DECODE, f"{kind}{suffix}", run, {EMBEDDINGS: embedded, **aux, **caches}


def require_divisible(cfg: ModelConfig) -> None:
    """Checks that a model can be divided so.

    Raises:
      ConfigError: its positions are not only angles, or its layers have windows of several lengths.
    """
    require_room(cfg, "tflite")
    ropes = [each for each in (cfg.rope, cfg.local_rope) if each is not None]
    windows = {each for each in cfg.attention_windows if each}
    for lacking, feature in (
        (cfg.encoder is not None, "an encoder"),
        (not ropes or cfg.learned_positions, "positions that are no rotation"),
        (any(each.query_growth for each in ropes), "queries that grow with their position"),
        (len(windows) > 1, "windows of several lengths"),
    ):
        if lacking:
            raise ConfigError(
                f"the models of an NPU take no {feature}, as {cfg.model_type} has; export without --npu"
            )


def run_embedder(weights: Arrays, inputs: Arrays, *, cfg: ModelConfig) -> Arrays:
    """`token_ids` `[1, T]` int32 -> `embeddings`."""
    tokens = inputs["token_ids"]
    at = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    return {EMBEDDINGS: embed_tokens(dict(weights), tokens, at, cfg=cfg)}


def run_angles(weights: Arrays, inputs: Arrays, *, cfg: ModelConfig) -> Arrays:
    """`input_pos` `[T]` int32 -> the angles."""
    del weights
    found, known = {}, rotary_by_rope(inputs["input_pos"], cfg)
    for rope, names in zip((cfg.rope, cfg.local_rope), ANGLES, strict=True):
        if rope is not None:
            found |= {name: each[None, None] for name, each in zip(names, known[rope], strict=True)}
    return found


def run_masks(weights: Arrays, inputs: Arrays, *, cfg: ModelConfig, cache_tokens: int) -> Arrays:
    """`time_step` `[1]` int32, the position of the first new token, and `input_tokens` `[1, T]` int32,
    negative for tokens that none attends to -> the masks."""
    del weights
    first, tokens = inputs["time_step"][0], inputs["input_tokens"][0]
    count = tokens.shape[0]
    new = jnp.arange(count, dtype=jnp.int32)
    key = jnp.arange(cache_tokens, dtype=jnp.int32)
    cached = jnp.broadcast_to(key < first, (count, cache_tokens))
    inside = (new[None] <= new[:, None]) & ((tokens >= 0)[None] | (new[None] == new[:, None]))
    whole = jnp.concatenate([cached, inside], axis=1)
    found = {MASKS[0]: whole[None, None]}
    window = max(cfg.attention_windows)
    if window:
        stands = jnp.concatenate([key, first + new])
        near = stands[None] > (first + new)[:, None] - np.int32(window)
        found[MASKS[1]] = (whole & near)[None, None]
    return found


def run_cache_update(weights: Arrays, inputs: Arrays, *, cfg: ModelConfig) -> Arrays:
    """`input_pos` `[T]` int32, the caches and the slices -> the caches with the slices of valid tokens,
    whose position is that of the first one plus their index."""
    del weights
    position, found = inputs["input_pos"], {}
    real = position == position[0] + jnp.arange(position.shape[0], dtype=jnp.int32)
    valid = jnp.sum(real, dtype=jnp.int32)
    for layer in range(cfg.layers):
        keys, values = KEYS.format(layer), VALUES.format(layer)
        found[keys] = write_rows(inputs[keys], inputs[SLICE_KEYS.format(layer)], position[0], valid)
        rows, new = _turned(inputs[values]), _turned(inputs[SLICE_VALUES.format(layer)])
        found[values] = _turned(write_rows(rows, new, position[0], valid))
    return found


def run_layers(weights: Arrays, inputs: Arrays, *, cfg: ModelConfig, with_logits: bool) -> Arrays:
    """The NPU's part (see the module)."""
    params, x = with_adapters(weights, cfg), inputs[EMBEDDINGS]
    count, found = x.shape[1], {}
    # Masks have the windows, and angles are known.
    plain = dataclasses.replace(cfg, attention_windows=(), local_rope=None)
    for layer in range(cfg.layers):
        rotary, mask = _angles(inputs, cfg, layer), inputs[MASKS[bool(cfg.attention_windows[layer])]][0, 0]
        keys, values = inputs[KEYS.format(layer)], _turned(inputs[VALUES.format(layer)])
        room = keys.shape[2]
        # New tokens come after the cache, and overwrite none of its rows.
        past = Past(_lengthened(keys, count), _lengthened(values, count))
        at = TokenPositions(
            jnp.arange(room, room + count, dtype=jnp.int32), jnp.int32(count), consecutive=True, mask=mask
        )
        own = layer_of(params, layer)
        x, past, _ = forward_layer(own, x, at, past, cfg=plain, layer=layer, order=rotary)
        found[SLICE_KEYS.format(layer)] = past.keys[:, :, room:]
        found[SLICE_VALUES.format(layer)] = _turned(past.values[:, :, room:])
    if with_logits:
        hidden = normalize(x, LayerParams(params, "").norm("final_norm", cfg))
        found[LOGITS] = logits(params, hidden, cfg=cfg)
    return found


def _angles(inputs: Mapping[str, jax.Array], cfg: ModelConfig, layer: int) -> CosSin | None:
    rope = cfg.layer_rope(layer)
    if rope is None:
        return None
    cos, sin = ANGLES[rope is not cfg.rope]
    return inputs[cos][0, 0], inputs[sin][0, 0]


def _cache_shapes(cfg: ModelConfig, tokens: int, keys: str, values: str) -> Shapes:
    found = {}
    for layer in range(cfg.layers):
        heads, width = cfg.units(layer).kv_heads, cfg.head_dim
        found[keys.format(layer)] = jax.ShapeDtypeStruct((1, heads, tokens, width), np.float32)
        found[values.format(layer)] = jax.ShapeDtypeStruct((1, heads, width, tokens), np.float32)
    return found


def _lengthened(rows: jax.Array, count: int) -> jax.Array:
    more = jnp.zeros((*rows.shape[:2], count, rows.shape[3]), rows.dtype)
    return jnp.concatenate([rows, more], axis=2)


def _turned(values: jax.Array) -> jax.Array:
    return jnp.swapaxes(values, 2, 3)
