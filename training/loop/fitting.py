"""Trains in a run's folder, from the first step or the last checkpoint, to the best parameters; and reads
models that are not trained, for adapters over them and for measurements.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import tokenizers
from jax.sharding import Mesh

from jaxllm.bundle import Bundle, WeightFormat
from jaxllm.checkpoints.gguf_file import is_checkpoint
from jaxllm.checkpoints.huggingface import Checkpoint
from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files.input_files import read_text
from jaxllm.models.parameters import Params
from jaxllm.prepare import prepare
from jaxllm.text.library_tokenizer import parse_tokenizer_json
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.training.data.documents import digesting, model_digest
from jaxllm.training.loop.checkpoints import read_best
from jaxllm.training.loop.parallel import MeshShape, laid_out, make_mesh, placed, require_divisible
from jaxllm.training.loop.run_files import Log, Run, checkpoints_of, read_identity
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
    def read(
        cls,
        model: Path,
        weights: WeightFormat | None = None,
        *,
        mesh: Mesh | None = None,
        stack: bool = False,
    ) -> "FrozenModel":
        """Reads a bundle, or a Hugging Face folder or GGUF file at the width `weights` (float32 by default).

        From a folder at `f32` or `bf16` the host holds one tensor at a time, and each device of `mesh` (one
        by default) only its shards; with `stack` equal layers of decoder-only models are stacked off CPUs.

        Raises:
          CheckpointError: there is no such model.
          ConfigError: a bundle is requested at another width than its own, or the mesh does not divide the
            model.
        """
        model = Path(model)
        if not is_checkpoint(model):
            return cls._of_bundle(model, weights)
        name, weights = model.resolve().name.removesuffix(".gguf"), weights or "f32"
        if weights not in _DENSE or not model.is_dir():
            with tempfile.TemporaryDirectory() as folder:
                prepare(model, Path(folder) / "base.jaxllm", weights=weights, name=name)
                return cls._of_bundle(Path(folder) / "base.jaxllm")
        mesh = mesh or make_mesh(MeshShape(data=1), 1)
        checkpoint, dtype = Checkpoint(model), jnp.dtype(_DENSE[weights])
        cfg, tokenizer = checkpoint.cfg, Tokenizer(checkpoint.tokenizer)
        require_divisible(cfg, mesh)
        digests: dict[str, str] = {}
        tensors = digesting(checkpoint.params(), digests)
        params: Params = laid_out(tensors, cfg, mesh, dtype) if stack else placed(tensors, mesh, dtype)
        digest = model_digest({"model": cfg, "tensors": digests, "dtype": dtype.name})
        return cls(cfg, params, tokenizer, name, digest)

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
    run: Run,
    sources: Sequence[str],
) -> Fitted:
    """Trains to the last step, or resumes from the run's checkpoints.

    Args:
      trainer: job, settings and devices.
      batch_at, held_out: see `jaxllm.training.loop.trainer.train`.
      run: the run; its folder gets `metrics.jsonl`, which only the first process writes, and `checkpoints/`,
        unless the run stores them elsewhere (see `keep_checkpoints_at`).
      sources: names of the batches' sources, by number.

    Raises:
      ConfigError: no step is left to trace.
      JaxllmError: the loss is no longer finite.
      CheckpointError: a checkpoint cannot be read.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    checkpoints = checkpoints_of(run.folder)
    with Log(run, trainer.settings.steps, sources) as log:
        train(trainer, batch_at, held_out, checkpoints, log, profile=run.profile)
    best, step, loss = read_best(checkpoints, trainer.abstract())
    return Fitted(best.params, step, loss)


def fitted_to_window(recipe: Settings, cfg: ModelConfig, run: Run) -> Settings:
    """Fits a recipe's rows to a model's window (see `TrainSettings.within`), and prints the changes."""
    fitted = recipe.within(cfg.window_tokens)
    if fitted is not recipe:
        run.say(
            f"the model's window is {fitted.row_tokens:,} tokens: a step has {fitted.batch} rows of as many, "
            f"instead of {recipe.batch} of {recipe.row_tokens:,}"
        )
    return fitted


TOKENIZER_FILE = "tokenizer.json"
# The best checkpoint as a Hugging Face folder, in a run's folder.
MODEL_FOLDER = "hf"
Write = Callable[[Path, Settings, tokenizers.Tokenizer, Any], None]


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
    run_dir: Path,
    kind: type[Settings],
    job_of: Callable[[Settings], Job],
    write: Write[Settings],
    out: Path | None,
) -> Path:
    """Writes the checkpoint with the lowest held-out loss so far as a folder; also while another process
    continues the run.

    Args:
      kind: class of the run's recipe.
      job_of: function from the recipe to the job of the run, for its parameters' shapes.
      write: function of (a folder, the recipe, the run's tokenizer, the parameters) that writes them.
      out: folder to write; None for `hf` in the run's.

    Returns:
      The folder that was written.

    Raises:
      CheckpointError: `run_dir` contains no run, or no checkpoint yet.
    """
    run_dir = Path(run_dir)
    recipe = kind.from_json(read_identity(run_dir)["recipe"])
    tokenizer = read_tokenizer_file(run_dir / TOKENIZER_FILE)
    trainer = Trainer(job_of(recipe), recipe, make_mesh(MeshShape(data=1), 1))
    best, _, _ = read_best(checkpoints_of(run_dir), trainer.abstract())
    out = out or run_dir / MODEL_FOLDER
    write(out, recipe, tokenizer, trainer.whole(best.params))
    return out


def read_teacher(folder: Path | None, *, share: float, vocab_size: int) -> FrozenModel | None:
    """Reads the teacher in a Hugging Face folder; None for a recipe without one.

    Args:
      folder: the folder, if one was given.
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
    teacher = FrozenModel.read(folder)
    if teacher.cfg.vocab_size != vocab_size:
        raise ConfigError(
            f"the teacher has {teacher.cfg.vocab_size} tokens, the recipe's model {vocab_size}; "
            "train both with one tokenizer"
        )
    return teacher
