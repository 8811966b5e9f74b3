"""Rounds nested weights by the inputs of their products on a text, so that high planes draft better (see
`jaxllm.quant.nested`), and writes the bundle.

The model runs layer by layer over the text, all rows through one layer before the next, so that only one
layer's floats and sums over its inputs are in memory at a time. Scales, sizes and the format stay.
"""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.status import Status

from jaxllm.bundle import Bundle, rewrite_bundle
from jaxllm.checkpoints.huggingface import Checkpoint
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.host_settings import own_jax_settings
from jaxllm.int8_prefill.fitting import whole_rows
from jaxllm.int8_prefill.reference import layer_by_rule, plain_rule
from jaxllm.int8_prefill.shadow import PRODUCTS, product_names
from jaxllm.kv.cache import TokenPositions
from jaxllm.models.decoder import embed_tokens
from jaxllm.models.features import feature_refusal
from jaxllm.models.parameters import Params
from jaxllm.quant import BlockedArray
from jaxllm.quant.nested import calibrated_levels, output_errors
from jaxllm.quant.parts import by_outputs, levels_by_outputs, with_levels
from jaxllm.training.calibration import BundleOutput, NestedRecipe, bundle_of, text_tokens

# One of so many rows is held out, to detect choices that fit only one text.
_HELD_OUT = 8
# Of a row.
_LEAST_TOKENS = 16


@own_jax_settings()
def calibrate_nested(
    recipe: NestedRecipe,
    model: Path,
    out: BundleOutput,
    *,
    texts: Sequence[Path] = (),
) -> dict[str, Any]:
    """Makes a bundle of nested weights with better high planes.

    Args:
      recipe: sizes of the calibration.
      model: Hugging Face folder, or a bundle of nested weights, whose two planes then replace the floats.
      texts: files to calibrate on; Python's language reference if empty.

    Returns:
      The results: tokens; the share of changed levels; and squared errors of the outputs of high planes
        relative to those before, on the text and on the held-out rows.

    Raises:
      ConfigError: weights are not nested, the model is not supported, or there is too little text.
      CheckpointError: the model cannot be read.
    """
    console, model, floats = Console(stderr=True), Path(model), None
    if model.is_dir():
        checkpoint = Checkpoint(model)
        _require_room(model, checkpoint.cfg)
        floats = checkpoint.params()
    with bundle_of(model, "int8-nested", out.name) as bundle:
        if (weights := bundle.layout.weights) != "int8-nested":
            raise ConfigError(
                f"{bundle.path} has {weights} weights, of which nothing is nested; prepare the model with "
                "--weights int8-nested"
            )
        _require_room(bundle.path, bundle.cfg)
        # Rows of equal length, shorter ones of a short text.
        tokens = text_tokens(bundle, recipe.tokens, texts)
        length = min(recipe.row_tokens, bundle.cfg.window_tokens, len(tokens) // _HELD_OUT)
        if length < _LEAST_TOKENS:
            raise ConfigError(
                f"calibrate on at least {_HELD_OUT * _LEAST_TOKENS} tokens of text, got {len(tokens)}; give "
                "more (--tokens, --text)"
            )
        rows = whole_rows(tokens, length)
        with console.status("calibrating") as status:
            facts, better = _calibrated(bundle, floats, rows, status)
        rewrite_bundle(out.path, bundle, {}, name=out.name, instead=better)
    return {"tokens": sum(map(len, rows)), **facts}


def _calibrated(
    bundle: Bundle, floats: Iterator[tuple[str, np.ndarray]] | None, rows: list[np.ndarray], status: Status
) -> tuple[dict[str, float], dict[str, BlockedArray]]:
    """Returns the results, and the weights by name; without floats a weight's two planes replace them."""
    cfg, weights, levels_count, moved = bundle.cfg, {}, 0, 0
    # Of each weight the high plane's errors, relative to those before: on the text, and held out.
    left: list[list[float]] = []
    run = _Layers(cfg, jax.tree.map(jnp.asarray, bundle.load()), rows)
    for layer in range(cfg.layers):
        status.update(f"calibrating, layer {layer + 1} of {cfg.layers}")
        sums = run.layer(layer)
        products = {
            name: product for product in range(len(PRODUCTS)) for name in product_names(layer, product, cfg)
        }
        targets: dict[str, np.ndarray] = {}
        # Parameters come one by one, in the order of a pass.
        while floats is not None and products.keys() - targets.keys():
            name, value = next(floats)
            if name in products:
                targets[name] = np.asarray(value, np.float32)
        for name, product in products.items():
            stored = bundle.stored(name)
            assert isinstance(stored, BlockedArray)
            levels, scale = levels_by_outputs(stored)
            target = levels * scale if floats is None else by_outputs(targets.pop(name), stored.axis)
            found = calibrated_levels(levels, scale, target, sums[0][product])
            levels_count, moved = levels_count + levels.size, moved + int((found != levels).sum())
            errors = [
                [output_errors(each, scale, target, grams[product])[1] for each in (levels, found)]
                for grams in sums
            ]
            left.append([after / before if before else 1.0 for before, after in errors])
            weights[name] = with_levels(stored, found)
    on_text, held_out = np.mean(left, axis=0).tolist()
    facts = {
        "moved": round(moved / levels_count, 4),
        "high_plane_error": round(on_text, 4),
        "high_plane_error_held_out": round(held_out, 4),
    }
    return facts, weights


def _require_room(path: Path, cfg: ModelConfig) -> None:
    reason = feature_refusal(cfg, "integer prefill")
    if reason is not None:
        raise ConfigError(
            f"{path}: nested weights are calibrated in models that integer prefill takes, and others stay as "
            f"they were prepared ({reason})"
        )


class _Layers:
    """Runs a model over rows layer by layer, and sums products of the inputs of weights."""

    def __init__(self, cfg: ModelConfig, params: Params, rows: Sequence[np.ndarray]) -> None:
        self._cfg, self._params = cfg, params
        outer = {name: each for name, each in params.items() if not name.startswith("layers.")}
        begin = jax.jit(
            lambda outer, row: embed_tokens(
                outer, row, jnp.arange(row.shape[1], dtype=jnp.int32)[None], cfg=cfg
            )
        )
        self._x = [begin(outer, row[None]) for row in rows]
        # Equal layers share compiled code: their parameters have the names of the first of them.
        self._like: dict[object, int] = {}
        self._run = jax.jit(functools.partial(_run, cfg=cfg), static_argnames="like")

    def layer(self, layer: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Runs the next layer; per product, sums `[inputs, inputs]` over rows, and over held out rows."""
        cfg, prefix = self._cfg, f"layers.{layer}."
        key = cfg.units(layer), cfg.attention_windows[layer], cfg.layer_rope(layer)
        like = self._like.setdefault(key, layer)
        own = {
            f"layers.{like}.{name.removeprefix(prefix)}": each
            for name, each in self._params.items()
            if name.startswith(prefix)
        }
        sums: list[list[np.ndarray]] = [[], []]
        for place, x in enumerate(self._x):
            self._x[place], grams = self._run(own, x, like=like)
            which, grams = place % _HELD_OUT == _HELD_OUT - 1, [np.asarray(each) for each in grams]
            known = sums[which]
            sums[which] = [a + b for a, b in zip(known, grams, strict=True)] if known else grams
        return sums[0], sums[1]


def _run(own: Params, x: jax.Array, *, cfg: ModelConfig, like: int) -> tuple[jax.Array, list[jax.Array]]:
    """A layer's output, and of each product the sum of the products of any two inputs."""
    count = x.shape[1]
    at = TokenPositions.after(jnp.zeros((), jnp.int32), count, jnp.asarray(count, jnp.int32))
    grams: list[jax.Array] = []
    multiply = plain_rule(own, cfg)

    def rule(layer: int, product: int, inputs: jax.Array) -> Sequence[jax.Array]:
        wide = inputs.astype(jnp.float32)
        grams.append(jnp.matmul(wide.T, wide, precision=jax.lax.Precision.HIGHEST))
        return multiply(layer, product, inputs)

    return layer_by_rule(own, x, at, rule, cfg=cfg, layer=like), grams
