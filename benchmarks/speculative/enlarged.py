"""Makes a trained model many times as large without changing its answers.

The gain of drafts depends on how much smaller they are than their target, and on how well they predict it.
The papers' targets have ten times and more the weights of their drafts, the packaged ones have not; random
weights of any size cannot be predicted. So a trained target is enlarged: neurons and whole layers are added
in pairs that read the same and write the opposite, and so cancel. They cost storage, memory and processors as
much as any weights, and answers stay those of the trained model (up to rounding). Rows name enlarged models.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxllm.bundle import Bundle, write_bundle
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.parameters import param_specs
from jaxllm.models.rooms import require_decoder_alone
from jaxllm.quant import dequantize
from serving.host.progress import Progress
from serving.host.user_cache import cache_folder

_VERSION = 1
# Added units read with half the trained deviation, so that scales of activations stay the same.
_READS_SCALE = np.float32(0.5)


def enlarged_bundle(model: Path, times: int, progress: Progress | None = None) -> Path:
    """The bundle of a model with `times` as many layers, each with `times` as many neurons, made unless it is
    there.

    Args:
      model: a bundle; the larger one has its width.
      times: at least 2.
      progress: of drawing the weights.

    Raises:
      ConfigError: the model has experts or is a sub-model, or its units do not come in pairs.
      CheckpointError: it cannot be read.
    """
    bundle = Bundle.open(model)
    require_decoder_alone(bundle.cfg, "enlarged models")
    path = (
        cache_folder() / "benchmarks" / "enlarged" / f"v{_VERSION}-{bundle.fingerprint[:16]}-{times}.jaxllm"
    )
    if not path.exists():
        params = {
            name: np.asarray(dequantize(value, jnp.dtype(jnp.float32)))
            for name, value in bundle.load().items()
        }
        cfg, enlarged = enlarge(bundle.cfg, params, times, progress)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bundle(
            path,
            cfg=cfg,
            params=enlarged,
            weights=bundle.layout.weights,
            tokenizer=bundle.tokenizer_files(),
            name=f"{bundle.layout.name}, {times} times as deep and wide",
        )
    return path


def enlarge(
    cfg: ModelConfig, params: Mapping[str, np.ndarray], times: int, progress: Progress | None = None
) -> tuple[ModelConfig, Iterator[tuple[str, np.ndarray]]]:
    """The larger model's config, and its parameters as they are drawn (see `enlarged_bundle`).

    Args:
      cfg: the trained model.
      params: its float32 parameters.
      times: at least 2.
      progress: called with ("Enlarging the model", parameters drawn, parameters in all).
    """
    added = (times - 1) * cfg.ffn_size
    if times < 2 or cfg.experts or cfg.layer_units or added % 2:
        raise ConfigError(
            "a model is enlarged 2 times and more, without experts and by an even number of neurons; got "
            f"{times} times, {cfg.experts} experts, {added} neurons"
        )
    if cfg.heads // cfg.kv_heads % 2 and cfg.kv_heads % 2:
        raise ConfigError(
            f"{cfg.heads} heads of {cfg.kv_heads} kv heads do not come in pairs, so the model cannot be "
            "enlarged"
        )
    large = dataclasses.replace(
        cfg,
        layers=times * cfg.layers,
        ffn_size=times * cfg.ffn_size,
        attention_windows=tuple(window for window in cfg.attention_windows for _ in range(times)),
    )
    return large, _enlarged(cfg, large, params, times, progress)


def _enlarged(
    cfg: ModelConfig,
    large: ModelConfig,
    params: Mapping[str, np.ndarray],
    times: int,
    progress: Progress | None,
) -> Iterator[tuple[str, np.ndarray]]:
    specs = param_specs(large)
    for number, (name, spec) in enumerate(specs.items()):
        # A generator for each: the draw of one does not depend on the others' sizes.
        draw = np.random.default_rng((_VERSION, number))
        if not name.startswith("layers."):
            value = params[name]
        else:
            _, layer, part = name.split(".", 2)
            origin = params[f"layers.{int(layer) // times}.{part}"]
            if int(layer) % times:
                value = _cancelling(part, origin, spec.shape, cfg, draw)
            elif part.startswith("ffn.") and origin.shape != spec.shape:
                rest = (spec.shape[0] - origin.shape[0], *spec.shape[1:])
                value = np.concatenate([origin, _cancelling(part, origin, rest, cfg, draw)])
            else:
                value = origin
        yield name, value
        if progress is not None:
            progress("Enlarging the model", number + 1, len(specs))


def _cancelling(
    part: str, origin: np.ndarray, shape: tuple[int, ...], cfg: ModelConfig, draw: np.random.Generator
) -> np.ndarray:
    """A parameter of units in pairs, of which one subtracts what the other adds."""
    if "norm" in part:
        return origin
    if "bias" in part or origin.ndim < 2:
        return np.zeros(shape, np.float32)
    writes = part in ("attn.o", "ffn.down")
    deviation = np.float32(origin.std()) * (np.float32(1) if writes else _READS_SCALE)
    sign = np.float32(-1 if writes else 1)
    # Pairs are neighbours: neurons, the query heads of a kv-group, or else whole kv-groups.
    queries = cfg.heads // cfg.kv_heads
    by_heads = part in ("attn.q", "attn.o") and queries % 2 == 0
    lone = part in ("attn.k", "attn.v") and queries % 2 == 0
    if lone:
        return deviation * draw.standard_normal(shape, np.float32)
    split = (shape[0] * queries, -1, *shape[2:]) if by_heads else shape
    units = np.zeros(shape, np.float32).reshape(split)
    units[::2] = deviation * draw.standard_normal(units[::2].shape, np.float32)
    units[1::2] = sign * units[::2]
    return units.reshape(shape)
