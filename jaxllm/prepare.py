"""Prepares bundles from Hugging Face folders, and from a mixture's bundle one with its experts stored
apart."""

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np

from jaxllm.bundle import Bundle, Part, WeightFormat, lay_experts_apart, write_bundle
from jaxllm.checkpoints.huggingface import read_config, read_params
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer
from jaxllm.config import ModelConfig, require_decoder_alone
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.parameters import parameter_count

Progress = Callable[[str, int, int], None]
_OWN_FORMAT: dict[str, WeightFormat] = {"float32": "f32", "float16": "f32", "bfloat16": "bf16"}


def prepare(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    weights: WeightFormat | None = None,
    name: str = "",
    ignore_keys: Collection[str] = (),
    expert_bits: int | np.ndarray = 0,
    parts: Mapping[str, Part] | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes the model in `folder` as the bundle `out`, one tensor in memory at a time.

    Args:
      folder: with config.json, safetensors and a tokenizer; or, with `expert_bits`, the path of a mixture's
        bundle, of which only experts that get fewer bits are converted.
      out: the bundle's path; it is written whole or not at all.
      weights: format of matrices; None keeps the checkpoint's (float16 becomes f32).
      name: the model's name, for people; the folder's name by default.
      ignore_keys: unknown config keys to ignore.
      expert_bits: to store each expert of a mixture by itself with this bitwidth, one for all or `[L_sparse,
        E]` (see `write_bundle`), so that the model runs in less memory; 0 stores experts together, in the
        format `weights`.
      parts: additions to the model, by name.
      progress: called with ("prepare", parameters done, parameters in all).

    Raises:
      CheckpointError, ConfigError: the folder's model is missing, malformed or unsupported.
    """
    folder, out = Path(folder), Path(out)
    if not out.parent.is_dir():
        raise CheckpointError(f"{out.parent}: no such folder; create it first")
    if out.is_dir():
        raise CheckpointError(f"{out} is a folder; name the bundle's file, such as {out / 'model.jaxllm'}")
    if out.resolve().parent == folder.resolve() and out.suffix in (".safetensors", ".json", ".jinja"):
        raise CheckpointError(f"{out} would replace a file of the model itself; name another file")
    if folder.is_file():
        return _experts_apart(folder, out, weights, name, ignore_keys, expert_bits, parts)
    cfg = read_config(folder, ignore_keys=ignore_keys)
    tokenizer = read_tokenizer(folder)
    weights = weights or weight_format_of(folder, cfg)
    total, done = parameter_count(cfg), 0

    def counted():
        nonlocal done
        for param, value in read_params(folder, cfg):
            yield param, value
            done += value.size
            if progress is not None:
                progress("prepare", done, total)

    apart = bool(np.any(expert_bits))
    widths = np.broadcast_to(expert_bits, (sum(map(cfg.is_sparse, range(cfg.layers))), cfg.experts))
    if apart:
        require_decoder_alone(cfg, "experts stored apart")
    if apart and not cfg.experts:
        raise ConfigError(f"{folder} is no mixture of experts: there are none to store apart")
    name = name or folder.resolve().name
    try:
        write_bundle(
            out,
            cfg=cfg,
            params=counted(),
            weights=weights,
            tokenizer=tokenizer,
            name=name,
            parts=parts,
            expert_bits=widths if apart else None,
        )
    except ConfigError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def _experts_apart(
    path: Path,
    out: Path,
    weights: WeightFormat | None,
    name: str,
    ignore_keys: Collection[str],
    expert_bits: int | np.ndarray,
    parts: Mapping[str, Part] | None,
) -> None:
    """`prepare` from a bundle."""
    with Bundle.open(path) as bundle:
        own, cfg = bundle.layout.weights, bundle.cfg
        if not np.any(expert_bits):
            raise CheckpointError(
                f"{path} is a bundle; of a mixture, name --expert-bits to lay its experts apart"
            )
        if weights not in (None, own) or ignore_keys:
            raise CheckpointError(
                f"{path} is a bundle of {own} weights, which stay as they are; for others give the "
                "Hugging Face folder that it was made of"
            )
        widths = np.broadcast_to(expert_bits, (sum(map(cfg.is_sparse, range(cfg.layers))), cfg.experts))
        lay_experts_apart(out, bundle, widths, parts, name=name)


def weight_format_of(folder: str | os.PathLike[str], cfg: ModelConfig | None = None) -> WeightFormat:
    """The weight format that stores the checkpoint's first parameter without loss."""
    folder = Path(folder)
    _, first = next(iter(read_params(folder, cfg or read_config(folder))))
    return _OWN_FORMAT[first.dtype.name]
