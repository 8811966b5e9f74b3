"""Random weights with outliers put into them, calibrated: for the speed of integer prefill alone."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from benchmarks.shapes import SHAPES, shape_folder
from jaxllm.bundle import write_bundle
from jaxllm.bundle.prefill import prefill_parts
from jaxllm.checkpoints.huggingface import read_params
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer
from jaxllm.prefill.calibration import ShadowRecipe, shadow_counts
from jaxllm.prefill.fitting import LEAST_TOKENS, random_calibration
from jaxllm.prefill.outliers import OutlierRecipe, with_outliers
from serving.models import cache_folder
from serving.progress import Progress

# As much text as any calibration takes: channels that it does not show are outliers when they come.
_ROWS, _ROW_TOKENS = LEAST_TOKENS // 256, 256
# Of the files, whenever they would be made in another way.
_VERSION = 2


def calibrated_shapes(name: str, progress: Progress) -> tuple[Path, Path]:
    """A bundle of a shape at 8 bits with a calibration, and one of the same weights in floats; made once.

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
    for path, weights, parts in ((floats, "f32", {}), (integer, "int8", prefill_parts(calibration))):
        write_bundle(
            path,
            cfg=cfg,
            params=params.items(),
            weights=weights,
            tokenizer=read_tokenizer(source),
            name=f"{name} with outliers",
            parts=parts,
        )
    return integer, floats
