"""Provides a model's float checkpoint, from which all peers are made: they compute with the same weights.

A Hugging Face folder is one. A bundle is written as a folder, once, into the user's cache directory: exactly
if it holds floats; a quantized one is dequantized, so that a peer of the same width quantizes a second time
(rows then say so).
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.bundle import Bundle
from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError
from serving.bundles import default_bundle
from serving.host.progress import Progress
from serving.host.user_cache import cache_folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model and its float weights.

    Attributes:
      name: of the model, as rows have it.
      model: opened by our engine: a bundle, or a folder (then at any width).
      cfg: the model's config.
      stored: width of a bundle's weights; None for a folder.
    """

    name: str
    model: Path
    cfg: ModelConfig
    stored: str | None

    @property
    def quantized(self) -> bool:
        """Whether its weights have been quantized: those of a peer of few bits are then quantized twice."""
        return self.stored not in (None, "f32", "bf16")

    @classmethod
    def find(cls, model: Path | None) -> "Checkpoint":
        """Opens a model: a bundle, a folder, or None for the packaged model.

        Raises:
          JaxllmError: there is no such model, or its config is not supported.
        """
        from jaxllm.checkpoints.huggingface import read_config

        path = default_bundle() if model is None else Path(model)
        if path.is_dir():
            return cls(name=path.resolve().name, model=path, cfg=read_config(path), stored=None)
        if not path.exists():
            raise CheckpointError(
                f"{path}: no such file or folder; give a bundle made by `jaxllm prepare` or a Hugging Face "
                "model folder"
            )
        with Bundle.open(path) as bundle:
            return cls(name=bundle.layout.name, model=path, cfg=bundle.cfg, stored=bundle.layout.weights)

    def widths(self, wanted: tuple[str, ...]) -> tuple[str, ...]:
        """The widths to measure: those asked for, else the model's own.

        Raises:
          CheckpointError: a bundle holds another width.
        """
        from jaxllm.prepare import weight_format_of

        if self.stored is None:
            return tuple(dict.fromkeys(wanted)) or (weight_format_of(self.model, self.cfg),)
        if set(wanted) - {self.stored}:
            raise CheckpointError(
                f"{self.model} holds {self.stored} weights, not {' and '.join(wanted)}; give the original "
                "folder for other widths"
            )
        return (self.stored,)

    def folder(self, progress: Progress) -> Path:
        """The model as a Hugging Face folder of float weights.

        Args:
          progress: called with ("Writing float weights", parameters written, parameters in all).
        """
        if self.stored is None:
            return self.model
        with Bundle.open(self.model) as bundle:
            folder = cache_folder() / "benchmarks" / "floats" / bundle.fingerprint[:24]
            if not (folder / "config.json").exists():
                _write(bundle, folder, progress)
        return folder


def _write(bundle: Bundle, folder: Path, progress: Progress) -> None:
    import jax.numpy as jnp

    from jaxllm.checkpoints.huggingface import write_folder
    from jaxllm.checkpoints.tokenizer_folder import write_tokenizer
    from jaxllm.models.parameters import param_specs
    from jaxllm.quant import dequantize

    loaded, specs = bundle.load(), param_specs(bundle.cfg)
    params: dict[str, np.ndarray] = {}
    for name, spec in specs.items():
        params[name] = np.asarray(dequantize(loaded[name], jnp.dtype(jnp.float32))).reshape(spec.shape)
        progress("Writing float weights", len(params), len(specs))
    files = bundle.tokenizer_files()
    write_tokenizer(folder, files)
    if files.start_ids:
        # How an encoder-decoder is asked is in no file of the tokenizer.
        asked: dict[str, Any] = {
            "decoder_start_token_id": files.start_ids[0],
            "eos_token_id": list(files.eos_ids),
            "prefix": files.source_prefix,
        }
        if len(files.start_ids) > 1:
            asked["forced_bos_token_id"] = files.start_ids[1]
        (folder / "generation_config.json").write_text(json.dumps(asked) + "\n", encoding="utf-8")
    # The config comes last and whole: where it is, the folder is.
    write_folder(folder, bundle.cfg, params)
