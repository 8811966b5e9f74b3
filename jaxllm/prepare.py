"""Prepares bundles from Hugging Face folders and GGUF files, and from a mixture's bundle one with its experts
stored separately."""

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import numpy as np

from jaxllm.bundle import Bundle, Part, WeightFormat, lay_experts_apart, write_bundle
from jaxllm.bundle.images import StoredImageEncoder, image_encoder_parts
from jaxllm.bundle.kit import Kit
from jaxllm.bundle.writer import Kept
from jaxllm.checkpoints.encoder_folders import has_images, read_image_encoder, read_image_input
from jaxllm.checkpoints.gguf_file import is_gguf
from jaxllm.checkpoints.huggingface import Checkpoint
from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.features import require_feature
from jaxllm.models.parameters import parameter_count, sparse_layers
from jaxllm.quant import QArray
from jaxllm.quant.weights import RowParts

Progress = Callable[[str, int, int], None]
_Stored = np.ndarray | QArray | RowParts


def prepare(
    model: str | os.PathLike[str] | Checkpoint,
    out: str | os.PathLike[str],
    *,
    weights: WeightFormat | None = None,
    name: str = "",
    ignore_keys: Collection[str] = (),
    expert_bits: int | np.ndarray = 0,
    parts: Mapping[str, Part] | None = None,
    kit: Kit | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes a model as the bundle `out`, one tensor in memory at a time; for a SmolVLM folder with a
    `preprocessor_config.json` including its image encoder.

    Args:
      model: folder with config.json, safetensors and a tokenizer, or its `Checkpoint`; or the path of a GGUF
        file; or, with `expert_bits`, the path of a mixture's bundle, of which only experts that get fewer
        bits are converted.
      out: path of the bundle, which is written atomically.
      weights: format of matrices; None keeps the checkpoint's (float16 becomes f32). For a GGUF file None
        keeps each matrix's own, and its quantized blocks bit for bit if ours have the same format.
      name: the model's display name; the folder's or file's name by default.
      ignore_keys: keys of the config to ignore: unknown ones, and ones with unsupported values.
      expert_bits: bit width of separately stored experts, one for all or `[L_sparse, E]` (see
        `write_bundle`), so that the model runs in less memory; 0 stores experts together, in the format
        `weights`.
      parts: additions to the model, by name.
      kit: kit that makes the model elastic: its units are put in order, and so quantized anew, at 8 bits if
        the checkpoint is quantized and `weights` is None.
      progress: callback for ("prepare", parameters done, parameters in all).

    Raises:
      CheckpointError, ConfigError: the folder's model is missing, malformed or unsupported.
    """
    folder, out = Path(model.folder if isinstance(model, Checkpoint) else model), Path(out)
    if not out.parent.is_dir():
        raise CheckpointError(f"{out.parent}: no such folder; create it first")
    if out.is_dir():
        raise CheckpointError(f"{out} is a folder; name the bundle's file, such as {out / 'model.jaxllm'}")
    if out.resolve().parent == folder.resolve() and out.suffix in (".safetensors", ".json", ".jinja"):
        raise CheckpointError(f"{out} would replace a file of the model itself; name another file")
    apart, parts = bool(np.any(expert_bits)), dict(parts or {})
    if folder.is_file() and not is_gguf(folder):
        with Bundle.open(folder) as bundle:
            own, cfg = bundle.layout.weights, bundle.cfg
            if not apart:
                raise CheckpointError(
                    f"{folder} is a bundle; of a mixture, name --expert-bits to lay its separate experts"
                )
            if weights not in (None, own) or ignore_keys:
                raise CheckpointError(
                    f"{folder} is a bundle of {own} weights, which stay as they are; for others give the "
                    "Hugging Face folder that it was made of"
                )
            return lay_experts_apart(out, bundle, _widths(cfg, expert_bits), parts, name=name)
    if out.exists() and folder.is_file() and out.samefile(folder):
        raise CheckpointError(f"{out} is the model itself; name another file")
    if folder.is_file():
        from jaxllm.checkpoints.gguf_config import read_gguf_config
        from jaxllm.checkpoints.gguf_file import read_gguf
        from jaxllm.checkpoints.gguf_model import own_format, read_gguf_params
        from jaxllm.checkpoints.gguf_tokenizer import read_gguf_tokenizer

        file, quantized, keeps = read_gguf(folder), True, not weights
        cfg = read_gguf_config(file, ignore_keys=ignore_keys)
        tokenizer = read_gguf_tokenizer(file, cfg.vocab_size)
        if kit is not None:
            keeps, quantized, weights = False, False, weights or "int8"
            params = kit.ordered(cfg, read_gguf_params(file, cfg, "f32"))
        else:
            params = read_gguf_params(file, cfg, weights, by_rows=True)
        form = weights or own_format(file)
    else:
        checkpoint = model if isinstance(model, Checkpoint) else Checkpoint(folder, ignore_keys=ignore_keys)
        cfg, tokenizer, own = checkpoint.cfg, checkpoint.tokenizer, checkpoint.weight_format
        quantized, form = checkpoint.quantization is not None, weights or own
        # Whether floats keep their width next to quantized matrices.
        keeps = quantized and not weights
        floats = quantized and form != own
        if kit is not None:
            keeps, form = False, weights or ("int8" if quantized else own)
            params = kit.ordered(cfg, checkpoint.params())
        else:
            params = checkpoint.params() if floats else checkpoint.stored_params(by_rows=True)
        if has_images(checkpoint):
            images, values = read_image_encoder(checkpoint)
            try:
                found = StoredImageEncoder(cfg=images, input=read_image_input(checkpoint), params=values)
            except ConfigError as error:
                raise CheckpointError(f"{folder}: {error}") from error
            parts = {**image_encoder_parts(found), **parts}
    if apart and kit is not None:
        raise CheckpointError(
            f"{folder}: experts of a model with levels are stored together; give --expert-bits or a kit"
        )
    if apart and quantized:
        raise CheckpointError(
            f"{folder}: experts of quantized checkpoints are stored separately in a second step: prepare it "
            "without --expert-bits, then the bundle with them"
        )
    if apart:
        require_feature(cfg, "separate experts")
    if kit is not None:
        parts = {**parts, **kit.parts}
    total = parameter_count(cfg)

    def counted() -> Iterator[tuple[str, _Stored | Kept]]:
        done = 0
        for param, value in params:
            yield param, _kept(value) if keeps else value
            done += math.prod(value.shape)
            if progress is not None:
                progress("prepare", done, total)

    try:
        write_bundle(
            out,
            cfg=cfg,
            params=counted(),
            weights=form,
            tokenizer=tokenizer,
            name=name or model_name(folder),
            parts=parts,
            expert_bits=_widths(cfg, expert_bits) if apart else None,
        )
    except ConfigError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def model_name(path: Path) -> str:
    """Display name of a model: that of its file or folder; in Hugging Face's cache, where folders are named
    by commits, that of the repository."""
    if path.is_file():
        return path.stem
    path = path.resolve()
    repository = path.parent.parent.name
    in_cache = path.parent.name == "snapshots" and repository.startswith("models--")
    return repository.rpartition("--")[2] if in_cache else path.name


def _kept(value: _Stored) -> _Stored | Kept:
    """A parameter whose floats keep their width next to quantized ones."""
    if isinstance(value, RowParts):
        return value.map(_kept)
    return value if isinstance(value, QArray) else Kept(value)


def _widths(cfg: ModelConfig, expert_bits: int | np.ndarray) -> np.ndarray:
    return np.broadcast_to(expert_bits, (len(sparse_layers(cfg)), cfg.experts))
