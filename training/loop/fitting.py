"""Trains in a run's folder, from the first step or the last checkpoint, to the best parameters; and reads
models that are not trained, for adapters over them and for measurements.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jax.sharding import Mesh
from rich.console import Console

from jaxllm.bundle import Bundle, WeightFormat
from jaxllm.checkpoints import huggingface
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer
from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files.input_files import read_text
from jaxllm.models.parameters import Params
from jaxllm.prepare import prepare
from jaxllm.text.library_tokenizer import parse_tokenizer_json
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.training.data.documents import digesting, model_digest
from jaxllm.training.loop.checkpoints import read_best
from jaxllm.training.loop.monitoring import Log, Monitoring
from jaxllm.training.loop.parallel import MeshShape, laid_out, make_mesh, placed, require_divisible
from jaxllm.training.loop.run_files import checkpoints_of, write_json
from jaxllm.training.loop.trainer import Batch, Job, Trainer, train
from jaxllm.training.settings import TrainSettings

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


Settings = TypeVar("Settings", bound=TrainSettings)


@dataclasses.dataclass(frozen=True, eq=False)
class Fitted:
    """The best checkpoint of a training.

    Attributes:
      params: parameters on the trainer's mesh.
      step: steps done at this checkpoint.
      loss: held-out loss in nats per token.
    """

    params: dict[str, jax.Array]
    step: int
    loss: float


def fit(
    trainer: Trainer,
    batch_at: Callable[[int], Batch],
    held_out: Callable[[], Iterable[Batch]],
    folder: Path,
    sources: Sequence[str],
    monitoring: Monitoring,
) -> Fitted:
    """Trains to the last step, or resumes from the checkpoints in `folder`.

    Args:
      trainer: job, settings and devices.
      batch_at, held_out: see `jaxllm.training.loop.trainer.train`.
      folder: folder of `metrics.jsonl`, which only the first process writes, and of `checkpoints/`, unless
        the run stores them elsewhere (see `keep_checkpoints_at`); created if missing.
      sources: names of the batches' sources, by number.
      monitoring: destinations of the progress.

    Raises:
      ConfigError: no step is left to trace.
      JaxllmError: the loss is no longer finite.
      CheckpointError: a checkpoint cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    metrics, console = folder if jax.process_index() == 0 else None, monitoring.own_console()
    with Log(metrics, trainer.settings.steps, console, sources, tensorboard=monitoring.tensorboard) as log:
        train(trainer, batch_at, held_out, checkpoints_of(folder), log, profile=monitoring.profile)
    best, step, loss = read_best(checkpoints_of(folder), trainer.abstract())
    return Fitted(best.params, step, loss)


def fitted_to_window(recipe: Settings, cfg: ModelConfig, console: Console) -> Settings:
    """Fits a recipe's rows to a model's window (see `TrainSettings.within`), and prints the changes."""
    fitted = recipe.within(cfg.window_tokens)
    if fitted is not recipe:
        console.print(
            f"the model's window is {fitted.row_tokens:,} tokens: a step has {fitted.batch} rows of as many, "
            f"instead of {recipe.batch} of {recipe.row_tokens:,}",
            soft_wrap=True,
        )
    return fitted


TOKENIZER_FILE = "tokenizer.json"
# The best checkpoint as a Hugging Face folder, in a run's folder.
MODEL_FOLDER = "hf"
Write = Callable[[Path, Mapping[str, np.ndarray]], None]


def read_tokenizer_file(path: Path) -> tokenizers.Tokenizer:
    """Reads a `tokenizer.json`, a run's own or one that is to be shared.

    Raises:
      CheckpointError: it cannot be read.
    """
    try:
        return parse_tokenizer_json(read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read the tokenizer {path}: {error}") from error


def export_best_of(
    run_dir: Path, job: Job, settings: TrainSettings, write: Write, out: Path | None = None
) -> Path:
    """Writes the checkpoint with the lowest held-out loss so far as a folder; also while another process
    continues the run.

    Args:
      run_dir: the run's folder.
      job: job of the run, for its parameters' shapes.
      settings: settings of the run.
      write: function of (a folder, the parameters) that writes them.
      out: folder to write; `run_dir/hf` by default.

    Returns:
      The folder that was written.

    Raises:
      CheckpointError: there is no checkpoint yet.
    """
    trainer = Trainer(job, settings, make_mesh(MeshShape(data=1), 1))
    best, _, _ = read_best(checkpoints_of(run_dir), trainer.abstract())
    out = out or run_dir / MODEL_FOLDER
    write(out, trainer.whole(best.params))
    return out


def report_summary(run_dir: Path, summary: Mapping[str, Any], console: Console) -> None:
    """Writes a run's `summary.json`, and prints it."""
    write_json(run_dir / "summary.json", summary)
    console.print_json(data=summary)


def read_teacher(folder: Path | None, read: Callable[[Path], Any], *, share: float, vocab_size: int) -> Any:
    """Reads the teacher in a folder; None for a recipe without one.

    Args:
      folder: a Hugging Face folder, if one was given.
      read: function that reads the teacher, which has a `cfg`.
      share: the recipe's `teacher_share`.
      vocab_size: vocabulary size of the recipe's model.

    Raises:
      ConfigError: a folder without a share, a share without a folder, or different vocabulary sizes.
    """
    if (folder is not None) != (share > 0):
        raise ConfigError(
            f"the recipe's teacher_share is {share}: "
            + ("say with --teacher whom to learn from" if folder is None else "it takes no --teacher")
        )
    if folder is None:
        return None
    teacher = read(folder)
    if teacher.cfg.vocab_size != vocab_size:
        raise ConfigError(
            f"the teacher has {teacher.cfg.vocab_size} tokens, the recipe's model {vocab_size}; "
            "train both with one tokenizer"
        )
    return teacher
