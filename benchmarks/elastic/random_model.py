"""Makes elastic bundles of random weights, to time levels at sizes that are not trained."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np

from benchmarks.models.shapes import SHAPES, shape_folder
from jaxllm.bundle import Bundle, WeightFormat, write_bundle
from jaxllm.bundle.elastic import Recovery, elastic_parts, read_ladder, read_recovery
from jaxllm.checkpoints.huggingface import read_params
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer
from jaxllm.config import WHOLE, ModelConfig
from jaxllm.elastic.ladder import Ladder, sub_config
from jaxllm.errors import ConfigError
from jaxllm.models.lora import LoraConfig, init_adapter
from serving.host.progress import Progress

_ANCHOR_SHARE = 0.2
# Parameters with a row for each token.
_PER_TOKEN = ("embed.tokens", "head")
_RECOVERY = LoraConfig(rank=8)


def elastic_shape(
    name: str, weights: WeightFormat, progress: Progress, *, like: Bundle | None = None
) -> Path:
    """The bundle of a shape, made unless it is there.

    It has the default levels, or those of another bundle; the first layers and the last one are anchors, as
    many as `elasticize` has by default, and each level has an adapter of the size that recovery makes, unless
    the other bundle's has none. The order of units is arbitrary: speed does not depend on it.

    Args:
      name: of `SHAPES`.
      weights: width of its matrices.
      progress: of drawing the weights.
      like: an elastic bundle whose levels, tokenizer and vocabulary it takes.

    Raises:
      ConfigError: there is no such shape, it has fewer tokens than `like`, or that has no levels.
    """
    folder = shape_folder(name, progress)
    mark = "" if like is None else f"-{like.fingerprint[:12]}"
    bundle = folder.parent / f"{name}-elastic-{weights}{mark}.jaxllm"
    if not bundle.exists():
        cfg = SHAPES[name].cfg
        tokenizer, params = read_tokenizer(folder), read_params(folder, cfg)
        levels: tuple[int, ...] = Ladder().levels
        adapted = [level for level in levels if level != WHOLE]
        if like is not None:
            levels, tokenizer = _levels(like), like.tokenizer_files()
            adapted = [level for level in levels if read_recovery(like, level) is not None]
            params = _first_tokens(params, cfg.vocab_size, like.cfg.vocab_size)
            cfg = dataclasses.replace(cfg, vocab_size=like.cfg.vocab_size)
        anchors = max(1, round(_ANCHOR_SHARE * cfg.layers))
        ladder = Ladder(levels=levels, anchors=(*range(anchors - 1), cfg.layers - 1))
        recoveries = {level: _recovery(cfg, ladder, level) for level in adapted}
        write_bundle(
            bundle,
            cfg=cfg,
            params=params,
            weights=weights,
            tokenizer=tokenizer,
            name=f"{name}-elastic",
            parts=elastic_parts(ladder, recoveries),
        )
    return bundle


def _levels(bundle: Bundle) -> tuple[int, ...]:
    ladder = read_ladder(bundle)
    if ladder is None:
        raise ConfigError(f"{bundle.path} has no levels; make an elastic bundle with `jaxllm elasticize`")
    return ladder.levels


def _first_tokens(
    params: Iterable[tuple[str, np.ndarray]], words: int, kept: int
) -> Iterable[tuple[str, np.ndarray]]:
    """Parameters of a model with the first of its tokens alone."""
    if kept > words:
        raise ConfigError(f"a shape of {words} tokens cannot have a vocabulary of {kept}; take a larger one")
    for name, value in params:
        yield name, value[:kept] if name in _PER_TOKEN else value


def _recovery(cfg: ModelConfig, ladder: Ladder, level: int) -> Recovery:
    adapter = init_adapter(sub_config(cfg, ladder, level), _RECOVERY, jax.random.key(level))
    return Recovery({name: np.asarray(value) for name, value in adapter.items()}, _RECOVERY.scaling)
