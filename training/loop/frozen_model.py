"""Reads models that are not trained: for adapters over them, and for measurements."""

import dataclasses
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.bundle import Bundle, WeightFormat
from jaxllm.checkpoints import huggingface
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.parameters import Params
from jaxllm.prepare import prepare
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.training.data.documents import digesting, model_digest
from jaxllm.training.loop.parallel import laid_out, placed, require_divisible

# Formats that are read tensor by tensor onto devices.
_DENSE: dict[WeightFormat, str] = {"f32": "float32", "bf16": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class FrozenModel:
    """Untrained model: config, weights in any format, tokenizer and name.

    `digest` identifies weights that were read tensor by tensor; others are read again for it.
    """

    cfg: ModelConfig
    params: Params
    tokenizer: Tokenizer
    name: str
    digest: str = ""

    @classmethod
    def read_onto(
        cls, mesh: Mesh, model: Path, weights: WeightFormat | None = None, *, stack: bool = True
    ) -> "FrozenModel":
        """Reads a model onto the devices of a mesh, as `read` does.

        From a folder at `f32` or `bf16` the host holds one tensor at a time, and each device only its
        shards; off CPUs equal layers of decoder-only models are stacked if `stack`.

        Raises:
          CheckpointError, ConfigError: see `read`.
        """
        model = Path(model)
        if not model.is_dir() or weights not in (None, *_DENSE):
            return cls.read(model, weights)
        cfg, tokenizer = huggingface.read_config(model), Tokenizer(read_tokenizer(model))
        require_divisible(cfg, mesh)
        digests: dict[str, str] = {}
        dtype = jnp.dtype(_DENSE[weights or "f32"])
        tensors = digesting(huggingface.read_params(model, cfg), digests)
        params: Params = laid_out(tensors, cfg, mesh, dtype) if stack else placed(tensors, mesh, dtype)
        digest = model_digest({"model": cfg, "tensors": digests, "dtype": dtype.name})
        return cls(cfg, params, tokenizer, model.resolve().name, digest)

    @classmethod
    def read(cls, model: Path, weights: WeightFormat | None = None) -> "FrozenModel":
        """Reads a bundle, or a Hugging Face folder at the width `weights` (float32 by default).

        Raises:
          CheckpointError: there is no such model.
          ConfigError: a bundle is requested at another width than its own.
        """
        model = Path(model)
        if model.is_dir():
            if weights in (None, "f32"):
                cfg = huggingface.read_config(model)
                params = {
                    name: jnp.asarray(value, jnp.float32)
                    for name, value in huggingface.read_params(model, cfg)
                }
                return cls(cfg, params, Tokenizer(read_tokenizer(model)), model.resolve().name)
            with tempfile.TemporaryDirectory() as folder:
                prepare(model, Path(folder) / "base.jaxllm", weights=weights, name=model.resolve().name)
                return cls._of_bundle(Path(folder) / "base.jaxllm")
        return cls._of_bundle(model, weights)

    def fingerprint(self) -> str:
        """A hexadecimal name for the config and all weights."""
        return self.digest or model_digest(self.cfg, self.params)

    @classmethod
    def _of_bundle(cls, path: Path, weights: WeightFormat | None = None) -> "FrozenModel":
        bundle = Bundle.open(path)
        own = bundle.layout.weights
        if weights not in (None, own):
            raise ConfigError(
                f"{path} has {own} weights; to train over {weights} give its Hugging Face folder"
            )
        # Copied, because the file may be deleted before its mapping.
        params = jax.tree.map(lambda part: jnp.array(part, copy=True), bundle.load())
        return cls(bundle.cfg, params, Tokenizer(bundle.tokenizer_files()), bundle.layout.name)
