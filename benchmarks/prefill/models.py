"""Provides calibrated models at 8 bits and in floats: trained ones, and random weights with outliers."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import tokenizers

from benchmarks.models.checkpoint import Checkpoint
from benchmarks.models.shapes import SHAPES, shape_folder
from jaxllm.bundle import Part, WeightFormat, write_bundle
from jaxllm.bundle.prefill import prefill_parts, read_prefill
from jaxllm.checkpoints.huggingface import read_params
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer
from jaxllm.errors import ConfigError
from jaxllm.int8_prefill.calibration import shadow_counts
from jaxllm.int8_prefill.fitting import LEAST_TOKENS, random_calibration
from jaxllm.int8_prefill.outliers import OutlierRecipe, with_outliers
from jaxllm.int8_prefill.recipe import ShadowRecipe
from jaxllm.text.tokenizer import TokenizerFiles
from serving.bundles import open_model
from serving.host.progress import Progress
from serving.host.user_cache import cache_folder

# The least text that a calibration takes: channels that are small in it are outliers later.
_ROWS, _ROW_TOKENS = LEAST_TOKENS // 256, 256
# Of the files; a change of this function needs another one.
_VERSION = 3


def calibrated_model(model: Path, progress: Progress) -> tuple[Path, Path]:
    """The bundle of a calibrated model, and one of the same weights in floats, made unless it is there.

    Args:
      model: a bundle.
      progress: called with (stage, done, total).

    Raises:
      ConfigError: it has no calibration.
    """
    with open_model(model) as bundle:
        if read_prefill(bundle) is None:
            raise ConfigError(
                f"{model} is not calibrated for integer prefill; give a bundle that is, or --only accuracy"
            )
    with open_model(Checkpoint.find(model).folder(progress), weights="f32", progress=progress) as floats:
        return model, floats.path


def calibrated_shapes(name: str, progress: Progress) -> tuple[Path, Path]:
    """The bundle of a shape with outliers at 8 bits with a calibration, and one in floats, made unless there.

    Args:
      name: of `SHAPES`.
      progress: called with (stage, done, total).
    """
    folder = cache_folder() / "benchmarks" / "prefill" / f"v{_VERSION}"
    integer, floats = folder / f"{name}-int8.jaxllm", folder / f"{name}-f32.jaxllm"
    if integer.exists() and floats.exists():
        return integer, floats
    source, cfg = shape_folder(name, progress), SHAPES[name].cfg
    folder.mkdir(parents=True, exist_ok=True)
    params = {each: np.asarray(value, np.float32) for each, value in read_params(source, cfg)}
    params = with_outliers(cfg, params, OutlierRecipe())
    recipe = ShadowRecipe()
    draw = np.random.default_rng(0)
    texts = list(draw.integers(0, cfg.vocab_size, (_ROWS, _ROW_TOKENS)).astype(np.int32))
    calibration = random_calibration(
        cfg,
        {each: jnp.asarray(value) for each, value in params.items()},
        texts,
        shadows=shadow_counts(cfg.layers, recipe.pruned_share)[0],
        recipe=recipe,
    )
    forms: dict[WeightFormat, tuple[Path, dict[str, Part]]] = {
        "f32": (floats, {}),
        "int8": (integer, prefill_parts(calibration)),
    }
    for weights, (path, parts) in forms.items():
        write_bundle(
            path,
            cfg=cfg,
            params=params.items(),
            weights=weights,
            tokenizer=_split_at_spaces(read_tokenizer(source)),
            name=f"{name} with outliers",
            parts=parts,
        )
    return integer, floats


def _split_at_spaces(files: TokenizerFiles) -> TokenizerFiles:
    """A tokenizer of words that reads them from a text, which w8a8 programs are calibrated on."""
    library = tokenizers.Tokenizer.from_str(files.tokenizer_json)
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return dataclasses.replace(files, tokenizer_json=library.to_str())
