"""Ends a run of a new model: its tokenizer read again, its best checkpoint as a folder, its summary."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from jaxllm.errors import CheckpointError
from jaxllm.files.input_files import read_text
from jaxllm.text.library_tokenizer import parse_tokenizer_json
from training.loop.checkpoints import read_best
from training.loop.parallel import MeshShape, make_mesh
from training.loop.run_files import checkpoints_of, write_json
from training.loop.trainer import Job, Trainer
from training.settings import TrainSettings

TOKENIZER_FILE = "tokenizer.json"
# The best checkpoint as a Hugging Face folder, in a run's folder.
MODEL_FOLDER = "hf"
Write = Callable[[Path, Mapping[str, np.ndarray]], None]


def read_tokenizer_file(path: Path) -> Tokenizer:
    """A `tokenizer.json`, a run's own or one that is to be shared.

    Raises:
      CheckpointError: it cannot be read.
    """
    try:
        return parse_tokenizer_json(read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read the tokenizer {path}: {error}") from error


def export_best_of(run_dir: Path, job: Job, settings: TrainSettings, write: Write) -> Path:
    """Writes the checkpoint with the lowest held-out loss so far as a folder; also while the run goes on in
    another process.

    Args:
      run_dir: the run's folder.
      job: of the run, for its parameters' shapes.
      settings: of the run.
      write: writes (a folder, the parameters).

    Returns:
      The folder that was written, `run_dir/hf`.

    Raises:
      CheckpointError: there is no checkpoint yet.
    """
    trainer = Trainer(job, settings, make_mesh(MeshShape(data=1), 1))
    best, _, _ = read_best(checkpoints_of(run_dir), trainer.abstract())
    write(run_dir / MODEL_FOLDER, trainer.whole(best.params))
    return run_dir / MODEL_FOLDER


def tell_summary(run_dir: Path, summary: Mapping[str, Any], console: Console) -> None:
    """Writes a run's `summary.json`, and prints it."""
    write_json(run_dir / "summary.json", summary)
    console.print_json(data=summary)
