"""Prepares bundles from Hugging Face folders and GGUF files, and from a mixture's bundle one with its experts
stored apart."""

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from jaxllm.bundle import Bundle, Part, WeightFormat, lay_experts_apart, write_bundle
from jaxllm.bundle.images import StoredImageEncoder, image_encoder_parts
from jaxllm.bundle.writer import Kept
from jaxllm.checkpoints.gguf_file import is_gguf
from jaxllm.checkpoints.huggingface import quantization_of, read_config, read_params, read_stored_params
from jaxllm.checkpoints.smolvlm_folder import has_images, read_image_encoder, read_image_input
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer
from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.parameters import parameter_count, sparse_layers
from jaxllm.quant import QArray
from jaxllm.quant.weights import RowParts
from jaxllm.text.tokenizer import TokenizerFiles

Progress = Callable[[str, int, int], None]
# Config, tokenizer, parameters in order, and the format of matrices.
_Params = Iterator[tuple[str, np.ndarray | QArray | Kept | RowParts]]
_Source = tuple[ModelConfig, TokenizerFiles, _Params, WeightFormat]
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
    """Writes the model in `folder` as the bundle `out`, one tensor in memory at a time; for a SmolVLM
    folder with a `preprocessor_config.json` including its image encoder.

    Args:
      folder: folder with config.json, safetensors and a tokenizer; or the path of a GGUF file; or, with
        `expert_bits`, the path of a mixture's bundle, of which only experts that get fewer bits are
        converted.
      out: path of the bundle, which is written atomically.
      weights: format of matrices; None keeps the checkpoint's (float16 becomes f32). For a GGUF file None
        keeps each matrix's own, and its quantized blocks bit for bit if ours have the same format.
      name: the model's display name; the folder's or file's name by default.
      ignore_keys: keys of the config to ignore: unknown ones, and ones with unsupported values.
      expert_bits: bit width of separately stored experts, one for all or `[L_sparse, E]` (see
        `write_bundle`), so that the model runs in less memory; 0 stores experts together, in the format
        `weights`.
      parts: additions to the model, by name.
      progress: callback for ("prepare", parameters done, parameters in all).

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
    if folder.is_file() and not is_gguf(folder):
        return _experts_apart(folder, out, weights, name, ignore_keys, expert_bits, parts)
    if out.exists() and folder.is_file() and out.samefile(folder):
        raise CheckpointError(f"{out} is the model itself; name another file")
    source = _read_gguf if folder.is_file() else _read_folder
    cfg, tokenizer, params, weights = source(folder, weights, ignore_keys)
    parts = {**_image_parts(folder, tokenizer, ignore_keys), **(parts or {})}
    total, done = parameter_count(cfg), 0

    def counted():
        nonlocal done
        for param, value in params:
            yield param, value
            done += math.prod(value.shape)
            if progress is not None:
                progress("prepare", done, total)

    apart = bool(np.any(expert_bits))
    if apart and (folder.is_file() or quantization_of(folder) is not None):
        raise CheckpointError(
            f"{folder}: experts of quantized checkpoints are laid apart in a second step: prepare it without "
            "--expert-bits, then the bundle with them"
        )
    widths = np.broadcast_to(expert_bits, (len(sparse_layers(cfg)), cfg.experts))
    if apart and not cfg.experts:
        raise ConfigError(
            f"{folder} is no mixture of experts: there are none to store apart; prepare it "
            "without --expert-bits"
        )
    name = name or (folder.stem if folder.is_file() else folder.resolve().name)
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


def _image_parts(folder: Path, tokenizer: TokenizerFiles, ignore_keys: Collection[str]) -> dict[str, Part]:
    """The image encoder of a folder that has one and its preprocessing config; else nothing."""
    if not folder.is_dir() or not has_images(folder):
        return {}
    cfg, params = read_image_encoder(folder, widened=False, ignore_keys=ignore_keys)
    try:
        found = StoredImageEncoder(cfg=cfg, input=read_image_input(folder, tokenizer), params=params)
    except ConfigError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    return image_encoder_parts(found)


def _read_folder(folder: Path, weights: WeightFormat | None, ignore_keys: Collection[str]) -> _Source:
    """A Hugging Face folder's model."""
    cfg = read_config(folder, ignore_keys=ignore_keys)
    tokenizer = read_tokenizer(folder)
    own = weight_format_of(folder, cfg)
    quantized = quantization_of(folder) is not None
    if quantized and weights not in (None, own):
        return cfg, tokenizer, iter(read_params(folder, cfg)), weights
    params = read_stored_params(folder, cfg, by_rows=True)
    return cfg, tokenizer, _kept(params) if quantized and not weights else params, weights or own


def _read_gguf(path: Path, weights: WeightFormat | None, ignore_keys: Collection[str]) -> _Source:
    """A GGUF file's model."""
    from jaxllm.checkpoints.gguf_config import read_gguf_config
    from jaxllm.checkpoints.gguf_file import read_gguf
    from jaxllm.checkpoints.gguf_model import own_format, read_gguf_params
    from jaxllm.checkpoints.gguf_tokenizer import read_gguf_tokenizer

    file = read_gguf(path)
    cfg = read_gguf_config(file, ignore_keys=ignore_keys)
    tokenizer = read_gguf_tokenizer(file, cfg.vocab_size)
    params = read_gguf_params(file, cfg, weights, by_rows=True)
    return cfg, tokenizer, params if weights else _kept(params), weights or own_format(file)


def _kept(params: Iterable[tuple[str, np.ndarray | QArray | RowParts]]) -> _Params:
    """Parameters whose floats keep their width next to quantized ones."""

    def kept(value: np.ndarray | QArray) -> QArray | Kept:
        return value if isinstance(value, QArray) else Kept(value)

    for name, value in params:
        yield name, value.map(kept) if isinstance(value, RowParts) else kept(value)


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
        widths = np.broadcast_to(expert_bits, (len(sparse_layers(cfg)), cfg.experts))
        lay_experts_apart(out, bundle, widths, parts, name=name)


def weight_format_of(folder: str | os.PathLike[str], cfg: ModelConfig | None = None) -> WeightFormat:
    """The weight format that stores the checkpoint's first parameter without loss; for quantized weights the
    format of their matrices."""
    folder = Path(folder)
    quantization = quantization_of(folder)
    if quantization is not None:
        return quantization.form
    _, first = next(read_stored_params(folder, cfg or read_config(folder), by_rows=True))
    if isinstance(first, RowParts):
        first = next(iter(first.parts))
    assert isinstance(first, np.ndarray)  # it is not quantized
    return _OWN_FORMAT[first.dtype.name]
