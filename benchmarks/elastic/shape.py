"""An elastic bundle of random weights: what levels cost at a size for which nobody has trained one."""

from pathlib import Path

import jax
import numpy as np

from benchmarks.shapes import SHAPES, shape_folder
from jaxllm.bundle import WeightFormat, write_bundle
from jaxllm.bundle.elastic import Recovery, elastic_parts
from jaxllm.checkpoints.huggingface import read_params
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer
from jaxllm.config import ModelConfig
from jaxllm.elastic.ladder import WHOLE, Ladder, sub_config
from jaxllm.lora import LoraConfig, init_adapter
from serving.progress import Progress

_ANCHOR_SHARE = 0.2
_RECOVERY = LoraConfig(rank=8)


def elastic_shape(name: str, weights: WeightFormat, progress: Progress) -> Path:
    """The bundle of a shape, made unless it is there.

    It has the default levels; the first layers and the last are anchors, as many as `elasticize` has by
    default, and each level has an adapter as large as recovery leaves it. Units are in no order: speed does
    not depend on it.

    Args:
      name: of `SHAPES`.
      weights: width of its matrices.
      progress: of drawing the weights.

    Raises:
      ConfigError: there is no such shape.
    """
    folder = shape_folder(name, progress)
    bundle = folder.parent / f"{name}-elastic-{weights}.jaxllm"
    if not bundle.exists():
        cfg = SHAPES[name].cfg
        anchors = max(1, round(_ANCHOR_SHARE * cfg.layers))
        ladder = Ladder(anchors=(*range(anchors - 1), cfg.layers - 1))
        recoveries = {level: _recovery(cfg, ladder, level) for level in ladder.levels if level != WHOLE}
        write_bundle(
            bundle,
            cfg=cfg,
            params=read_params(folder, cfg),
            weights=weights,
            tokenizer=read_tokenizer(folder),
            name=f"{name}-elastic",
            parts=elastic_parts(ladder, recoveries),
        )
    return bundle


def _recovery(cfg: ModelConfig, ladder: Ladder, level: int) -> Recovery:
    adapter = init_adapter(sub_config(cfg, ladder, level), _RECOVERY, jax.random.key(level))
    return Recovery({name: np.asarray(value) for name, value in adapter.items()}, _RECOVERY.scaling)
