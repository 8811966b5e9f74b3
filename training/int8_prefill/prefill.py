"""Calibrates a model for integer prefill, and writes the bundle (mllm-NPU, arXiv 2407.05858, section 3.3).

The model runs in floats on a text, which gives the quantization steps of activations and the channels with
outliers. Layers get a shadow until the growth of the perplexity is within the limit, on that text and on as
much held-out text. The bundle has the 8-bit weights that it would have anyway, the steps, the float rows of
the channels with outliers, and both losses.

Float rows are the checkpoint's for a Hugging Face folder; for a bundle they are as exact as its weights.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jaxllm.bundle import Bundle, rewrite_bundle
from jaxllm.bundle.calibrations import has_channel_scales, prefill_parts
from jaxllm.bundle.levels import read_ladder, read_recovery
from jaxllm.checkpoints.gguf_file import is_checkpoint
from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.elastic.ladder import shared_sub_model, sub_config
from jaxllm.errors import ConfigError
from jaxllm.host_settings import own_jax_settings
from jaxllm.int8_prefill.fitting import Fitted, fit_calibration, product_weights, whole_rows
from jaxllm.int8_prefill.recipe import MOST_LOSS
from jaxllm.models.features import require_decoder_alone, require_feature
from jaxllm.models.lora import adapt
from jaxllm.models.parameters import Params
from jaxllm.quant import BlockedArray, dequantize
from jaxllm.training.calibration import BundleOutput, PrefillRecipe, bundle_of, text_tokens
from jaxllm.training.loop.fitting import FrozenModel


@own_jax_settings()
def calibrate_prefill(
    recipe: PrefillRecipe,
    model: Path,
    out: BundleOutput,
    *,
    most_loss: float = MOST_LOSS,
    texts: Sequence[Path] = (),
) -> dict[str, Any]:
    """Makes a bundle for integer prefill.

    Args:
      recipe: sizes of the calibration.
      model: Hugging Face folder or GGUF file, or a bundle of 8-bit weights (an elastic one keeps its levels).
      most_loss: tolerable growth of the perplexity, as a share, on the text and on held-out text: it
        determines the numbers of layers with a shadow, and then of channels.
      texts: files to calibrate on; Python's language reference if empty.

    Returns:
      The results: layers with shadow, channels, bytes, and losses by level.

    Raises:
      ConfigError: the model has experts or other weights, there is too little text, or the loss is too large.
      CheckpointError: the model cannot be read.
    """
    console, model = Console(stderr=True), Path(model)
    floats = None
    if is_checkpoint(model):
        frozen = FrozenModel.read(model)
        require_feature(frozen.cfg, "integer prefill")
        floats = frozen.params
    with bundle_of(model, "int8", out.name) as bundle:
        require_decoder_alone(bundle.cfg, "integer prefill")
        fitted, facts, weights = _calibrated(bundle, floats, recipe, most_loss, texts, console)
        calibration = fitted.calibration
        if FULL_LEVEL in fitted.lossy:
            raise ConfigError(
                f"integer prefill makes the perplexity grow by {calibration.loss(FULL_LEVEL):.2%} however "
                f"much is left to shadows, and {most_loss:.2%} were allowed; allow more (--max-loss "
                "SHARE), or calibrate on more text of the kind that the model reads (--tokens, --text)"
            )
        rewrite_bundle(out.path, bundle, prefill_parts(calibration, facts), name=out.name, instead=weights)
    most = max(calibration.loss(level) for level in calibration.levels if level not in fitted.lossy)
    if most > MOST_LOSS:
        console.print(
            f"{out.path} loses {most:.2%}: engines compute its prompts in integers where the user allows "
            f"that loss (--max-prefill-loss {math.ceil(1000 * most) / 10:g}%)"
        )
    if fitted.lossy:
        console.print(
            f"level {', '.join(map(str, fitted.lossy))} loses more than {most_loss:.2%} whatever is left to "
            "shadows: engines compute its prompts in floats"
        )
    channels = sum(int((each >= 0).sum()) for each in calibration.channels.values())
    return {
        **facts,
        "layers_with_shadow": sum(calibration.shadowed),
        "layers_clipped": sum(fitted.clipped),
        "layers": len(calibration.shadowed),
        "channels": channels,
        "row_bytes": calibration.row_bytes,
        "losses": {level: [round(each, 5) for each in pair] for level, pair in calibration.losses.items()},
    }


def _calibrated(
    bundle: Bundle,
    floats: Params | None,
    recipe: PrefillRecipe,
    most_loss: float,
    texts: Sequence[Path],
    console: Console,
) -> tuple[Fitted, dict[str, Any], dict[str, BlockedArray]]:
    """Returns the calibration, facts about it, and its weights if they differ from the bundle's."""
    cfg = bundle.cfg
    require_feature(cfg, "integer prefill")
    if bundle.layout.weights != "int8":
        raise ConfigError(
            f"integer prefill multiplies 8-bit weights, and {bundle.path} has {bundle.layout.weights}; give "
            "the Hugging Face folder, or a bundle made with --weights int8"
        )
    rows, held_out = _texts(bundle, recipe, texts)
    stored = bundle.load()
    if floats is None:
        floats = {each: dequantize(weight, jnp.dtype(jnp.float32)) for each, weight in stored.items()}
    per_tensor, weights = recipe.weight_scales == "tensor", {}
    if per_tensor or not has_channel_scales(bundle):
        # Of a quantized checkpoint, such as a GGUF file, a bundle has the groups.
        weights = product_weights(cfg, floats, per_tensor=per_tensor)
    stored = {**stored, **{name: jax.tree.map(jnp.asarray, each) for name, each in weights.items()}}
    with console.status("calibrating"):
        fitted = fit_calibration(
            cfg,
            floats,
            stored,
            rows,
            held_out,
            recipe=recipe.shadow,
            most_loss=most_loss,
            sub_models=_sub_models(bundle, stored),
        )
    facts = {
        **dataclasses.asdict(fitted.recipe),
        "weight_scales": recipe.weight_scales,
        "most_loss": most_loss,
        "tokens": sum(map(len, rows)),
        "held_out_tokens": sum(map(len, held_out)),
    }
    return fitted, facts, weights


def _sub_models(bundle: Bundle, stored: Params) -> dict[int, tuple[ModelConfig, Params]]:
    """The levels of an elastic bundle besides the whole model, each with its recovery."""
    ladder = read_ladder(bundle)
    found: dict[int, tuple[ModelConfig, Params]] = {}
    for level in () if ladder is None else ladder.levels:
        if level == FULL_LEVEL or ladder is None:
            continue
        cfg = sub_config(bundle.cfg, ladder, level)
        params, own = shared_sub_model(stored, cfg), read_recovery(bundle, level)
        if own is not None:
            # Stored in half precision; an engine computes in float32.
            wide = {name: value.astype(np.float32) for name, value in own.adapter.items()}
            params = adapt(params, wide, own.scaling)
        found[level] = cfg, params
    return found


def _texts(
    bundle: Bundle, recipe: PrefillRecipe, paths: Sequence[Path]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Rows to calibrate on, and rows that are held out."""
    tokens = text_tokens(bundle, 2 * recipe.tokens, paths)
    length = min(recipe.row_tokens, bundle.cfg.window_tokens)
    rows = whole_rows(tokens, length)
    # Alternates, so that both have all kinds of the text.
    return rows[::2], rows[1::2]
