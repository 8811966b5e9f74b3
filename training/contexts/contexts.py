"""Calibrates the storage of a model's contexts, and writes the bundle with the choice.

See `jaxllm.contexts.tolerance` for the choice, and `context_errors` for the measurement.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jaxllm.bundle import Bundle, rewrite_bundle
from jaxllm.bundle.calibrations import contexts_parts
from jaxllm.config import ModelConfig
from jaxllm.contexts import CHUNK_TOKENS
from jaxllm.contexts.codecs import CODECS, WIDTHS, ChunkFormat, ChunkShape
from jaxllm.contexts.tolerance import PARTS, Candidate, ContextCalibration, choose, kept_shares
from jaxllm.errors import ConfigError
from jaxllm.host_settings import own_jax_settings
from jaxllm.int8_prefill.fitting import whole_rows
from jaxllm.kernels.native_call import UsedUnits
from jaxllm.kv.chunks import chunk_shapes
from jaxllm.models.decoder import embed_tokens, final_normed, logits
from jaxllm.models.features import require_decoder_alone, require_feature
from jaxllm.models.layer import attention_options, grown, query_growth, rotary_by_rope, run_layer
from jaxllm.models.layer_stack import LayerParams
from jaxllm.models.parameters import Params
from jaxllm.nn.documents import document_attention
from jaxllm.nn.layers import Heads, rotate
from jaxllm.training.calibration import BundleOutput, ContextRecipe, bundle_of, text_tokens


@own_jax_settings()
def calibrate_contexts(
    recipe: ContextRecipe,
    model: Path,
    out: BundleOutput,
    *,
    texts: Sequence[Path] = (),
) -> dict[str, Any]:
    """Makes a bundle with calibrated settings for storing its contexts.

    Args:
      recipe: sizes of the calibration.
      model: bundle, Hugging Face folder or GGUF file, of which a bundle of the same width is written.
      texts: files to measure on; Python's language reference if empty.

    Returns:
      The results: the choice, each candidate's loss at the ratio and shares by width, and sensitivities.

    Raises:
      ConfigError: there is too little text, or no codec reaches the ratio.
      CheckpointError: the model cannot be read.
    """
    console, model = Console(stderr=True), Path(model)
    with bundle_of(model, None, out.name) as bundle:
        require_feature(bundle.cfg, "contexts")
        if bundle.cfg.states is not None:
            raise ConfigError(
                f"contexts of {bundle.cfg.model_type} are kept as they are, with their states: there is no "
                "codec to choose; serve the model without a calibration"
            )
        require_decoder_alone(bundle.cfg, "calibration of contexts", "services keep its contexts without one")
        rows = _rows(bundle, recipe, texts)
        params = jax.tree.map(jnp.asarray, bundle.load())
        candidates = [Candidate(codec, size) for size in recipe.chunk_tokens for codec in CODECS]
        with console.status("measuring") as status:
            errors, sensitivity = context_errors(
                bundle.cfg,
                params,
                rows,
                candidates,
                sensitivity_rows=recipe.sensitivity_rows,
                progress=lambda done, total: status.update(f"measuring, layer {done} of {total}"),
            )
        shapes = chunk_shapes(bundle.cfg, tokens=CHUNK_TOKENS, dtype="float32")
        chosen, lost = choose(errors, sensitivity, shapes, recipe.ratio)
        calibration = ContextCalibration(chosen=chosen, errors=errors, sensitivity=sensitivity)
        facts = {"ratio": recipe.ratio, "tokens": sum(map(len, rows))}
        rewrite_bundle(out.path, bundle, contexts_parts(calibration, facts), name=out.name)
    return {
        **facts,
        "codec": chosen.codec,
        "chunk_tokens": chosen.chunk_tokens,
        "lost": {_named(each): float(f"{share:.3g}") for each, share in lost.items() if np.isfinite(share)},
        "kept": {
            _named(each): {
                str(bits): round(share, 6) for bits, share in kept_shares(own, sensitivity).items()
            }
            for each, own in errors.items()
        },
        "sensitivity": {
            part: [float(f"{each:.3g}") for each in sensitivity[:, place].tolist()]
            for place, part in enumerate(PARTS)
        },
    }


def _named(candidate: Candidate) -> str:
    return f"{candidate.codec}, {candidate.chunk_tokens} tokens"


def _rows(bundle: Bundle, recipe: ContextRecipe, paths: Sequence[Path]) -> list[np.ndarray]:
    """Contexts of equal length."""
    longest = max(recipe.chunk_tokens)
    length = min(recipe.row_tokens, bundle.cfg.window_tokens) // longest * longest
    tokens = text_tokens(bundle, recipe.tokens, paths)
    if not length or len(tokens) < length:
        raise ConfigError(
            f"{len(tokens)} tokens of text are too few for contexts of {length or longest}; give more "
            "(--text), or shorter chunks (--chunk-tokens)"
        )
    return whole_rows(tokens, length)


@dataclasses.dataclass(frozen=True)
class _Coded:
    """Keys or values that attention reads in their stored form."""

    candidate: Candidate
    bits: int
    part: str


def context_errors(
    cfg: ModelConfig,
    params: Params,
    rows: Sequence[np.ndarray],
    candidates: Sequence[Candidate],
    *,
    sensitivity_rows: int,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> tuple[dict[Candidate, np.ndarray], np.ndarray]:
    """Errors by candidate `[L, 3, 2]` and sensitivities `[L, 2]` (see `ContextCalibration`).

    Args:
      cfg: the model, a decoder.
      params: its weights, in any format.
      rows: texts of equal length `[T]` int32, a multiple of the candidates' chunks.
      candidates: codecs and lengths of chunks.
      sensitivity_rows: number of first rows to measure sensitivities on, with the first candidate.
    """
    head = {name: each for name, each in params.items() if not name.startswith("layers.")}
    prefixes = [f"layers.{layer}." for layer in range(cfg.layers)]
    layers = [
        {name.removeprefix(each): value for name, value in params.items() if name.startswith(each)}
        for each in prefixes
    ]
    # Equal layers share compiled code: their parameters are named within a layer.
    first: dict[object, int] = {}
    like = [
        first.setdefault(
            (cfg.units(each), cfg.attention_windows[each], cfg.layer_rope(each), cfg.is_sparse(each)), each
        )
        for each in range(cfg.layers)
    ]
    run = jax.jit(functools.partial(_run, cfg=cfg), static_argnames=("like", "coded", "disturb"))
    end = jax.jit(
        lambda head, x: jax.nn.log_softmax(logits(head, final_normed(head, x, cfg=cfg)[0], cfg=cfg))
    )
    begin = jax.jit(
        lambda head, ids: embed_tokens(head, ids, jnp.arange(ids.shape[1], dtype=jnp.int32)[None], cfg=cfg)
    )

    def output(
        x: jax.Array, layer: int, coded: tuple[_Coded, ...] = (), *, disturb: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        return run(layers[layer], x, like=like[layer], coded=coded, disturb=disturb)

    coded = [_Coded(each, bits, part) for each in candidates for bits in WIDTHS for part in PARTS]
    narrowest = [_Coded(candidates[0], min(WIDTHS), part) for part in PARTS]
    errors, diverged = np.zeros((cfg.layers, len(coded))), np.zeros((cfg.layers, len(PARTS)))
    for number, row in enumerate(rows):
        x = begin(head, np.asarray(row, np.int32)[None])
        inputs = []
        for layer in range(cfg.layers):
            inputs.append(x)
            x, found = output(x, layer, tuple(coded))
            errors[layer] += np.asarray(found, np.float64) / len(rows)
            progress(number * cfg.layers + layer + 1, len(rows) * cfg.layers)
        if number >= sensitivity_rows:
            continue
        exact = end(head, x)
        for layer, begun in enumerate(inputs):
            for place, each in enumerate(narrowest):
                x, _ = output(begun, layer, (each,), disturb=True)
                for later in range(layer + 1, cfg.layers):
                    x, _ = output(x, later)
                diverged[layer, place] += float(_divergence(exact, end(head, x)))
    measured = min(len(rows), sensitivity_rows)
    by_candidate = errors.reshape(cfg.layers, len(candidates), len(WIDTHS), len(PARTS)).astype(np.float32)
    least = by_candidate[:, 0, WIDTHS.index(min(WIDTHS))]
    sensitivity = (diverged / measured / np.maximum(least, np.float32(1e-12))).astype(np.float32)
    return {each: by_candidate[:, place] for place, each in enumerate(candidates)}, sensitivity


def _run(
    own: Params, x: jax.Array, *, cfg: ModelConfig, like: int, coded: tuple[_Coded, ...], disturb: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns a layer's output and errors; with `disturb` the output is that of the one in `coded`."""
    positions, starts = jnp.arange(x.shape[1], dtype=jnp.int32)[None], jnp.zeros(x.shape[:2], jnp.int32)
    rope = cfg.layer_rope(like)

    def stored(k: jax.Array, v: jax.Array, each: _Coded) -> tuple[jax.Array, jax.Array]:
        """Keys and values `[1, T, K, H]`, with one part as read from storage."""
        size, (_, count, heads, width) = each.candidate.chunk_tokens, k.shape
        codec = ChunkFormat.named(each.candidate.codec, size).codec
        shape = ChunkShape(heads=heads, tokens=size, width=width)
        own_keys, own_values = (
            rows[0].astype(jnp.float32).reshape(count // size, size, heads, width).swapaxes(1, 2)
            for rows in (k, v)
        )
        blobs = codec.encode(own_keys, own_values, shape, each.bits)
        decoded = codec.decode(blobs, shape, each.bits)
        keys, values = (rows.swapaxes(1, 2).reshape(k.shape).astype(k.dtype) for rows in decoded)
        return (keys, v) if each.part == "keys" else (k, values)

    def attend(new: Heads, used: UsedUnits | None) -> tuple[jax.Array, jax.Array]:
        # All units are used.
        del used
        q, k, v, _ = grown(new, query_growth(positions, rope))
        options = attention_options(cfg, cfg.attention_windows[like], new)
        attention = functools.partial(document_attention, starts=starts, options=options)
        if rope is not None:
            cos_sin = rotary_by_rope(positions, cfg)[rope]
            q, k = rotate(q, *cos_sin), rotate(k, *cos_sin)
        exact, errors, out = attention(q, k, v), [], None
        for each in coded:
            out = attention(q, *stored(k, v, each))
            errors.append(jnp.sum(jnp.square(out - exact)) / jnp.sum(jnp.square(exact)))
        return out if disturb and out is not None else exact, jnp.stack(errors) if errors else jnp.zeros(0)

    x, errors, _ = run_layer(LayerParams(own, ""), x, cfg, like, attend)
    return x, errors


@jax.jit
def _divergence(exact: jax.Array, other: jax.Array) -> jax.Array:
    """Mean Kullback-Leibler divergence of predictions `[T, V]` from the exact ones, in nats per token."""
    return jnp.mean(jnp.sum(jnp.exp(exact) * (exact - other), axis=-1))
