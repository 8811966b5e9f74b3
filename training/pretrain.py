"""Pretraining from text to a model folder: tokenizer, token files, loop, Hugging Face folder.

Everything of a run is in its folder: `recipe.json`, `tokenizer.json`, `tokens/`, `checkpoints/`,
`metrics.jsonl`, and at the end `hf/` and `summary.json`. Calling `pretrain` again on the same folder
goes on where it stopped. It does not choose the text, and never trains on `valid_paths`.
"""

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from tokenizers import Tokenizer

from jaxllm.checkpoints import huggingface, tokenizer_folder
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models import decoder
from jaxllm.tokenizer import TokenizerFiles, parse_tokenizer_json
from training import data, loop
from training.recipe import Recipe
from training.tokenizer import END_OF_TEXT, PAD, end_of_text_id, train_tokenizer

RECIPE_FILE = "recipe.json"
TOKENIZER_FILE = "tokenizer.json"


def pretrain(
    recipe: Recipe,
    text_paths: Sequence[Path],
    run_dir: Path,
    *,
    valid_paths: Sequence[Path] = (),
    console: Console | None = None,
) -> Path:
    """Trains a model from nothing, or goes on with the run in `run_dir`, and exports the best.

    Args:
      recipe: the run. Resuming, only its `steps` may differ from the run's own.
      text_paths: UTF-8 files, see `training.data.read_documents`; none means `builtin_text`.
      run_dir: the run's folder, made if missing.
      valid_paths: text to report the final loss on, never trained on.
      console: where progress goes; the terminal's error stream by default.

    Returns:
      The Hugging Face folder, `run_dir/hf`.

    Raises:
      ConfigError: the text or recipe is unusable, or `run_dir` belongs to another run.
    """
    console = console or Console(stderr=True)
    run_dir = Path(run_dir)
    documents = data.read_documents(text_paths) if text_paths else data.builtin_text()
    valid_documents = data.read_documents(valid_paths) if valid_paths else []
    train_documents, held_out_documents = data.split_documents(documents, recipe.held_out_share)
    run_dir.mkdir(parents=True, exist_ok=True)
    identity = {"recipe": recipe.to_json(), "text": data.text_digest(documents)}
    if (run_dir / RECIPE_FILE).exists():
        _check_same_run(run_dir, recipe, identity["text"])
        tokenizer = _read_tokenizer(run_dir)
    else:
        tokenizer = train_tokenizer(train_documents, recipe.model.vocab_size)
    train_tokens, held_out_tokens = (
        data.token_file(run_dir / "tokens", name, each, tokenizer)
        for name, each in (("train", train_documents), ("held_out", held_out_documents))
    )
    windows = data.TrainingWindows(train_tokens, recipe.window_tokens, recipe.batch, recipe.seed)
    # Last, when text and recipe have shown that they fit: a folder is claimed only by a run that starts.
    _write_text(run_dir / TOKENIZER_FILE, tokenizer.to_str(pretty=True))
    _write_json(run_dir / RECIPE_FILE, identity)
    console.print(
        f"{decoder.parameter_count(recipe.model):,} parameters; {len(train_documents):,} documents, "
        f"{len(train_tokens):,} tokens to train on, {len(held_out_tokens):,} held out; "
        f"{recipe.steps:,} steps of {recipe.batch * recipe.window_tokens:,} tokens",
        soft_wrap=True,
    )
    with _Log(run_dir / "metrics.jsonl", recipe.steps, console) as log:
        loop.train(recipe, windows.batch_at, held_out_tokens, run_dir / "checkpoints", log)

    params, best_step, held_out_loss = best_params(run_dir, recipe)
    folder = run_dir / "hf"
    write_model(folder, recipe, tokenizer, params)
    summary: dict[str, Any] = {
        "parameters": decoder.parameter_count(recipe.model),
        "best_step": best_step,
        "tokens_seen": best_step * recipe.batch * recipe.window_tokens,
        "training": _size(train_tokens, train_documents),
        "held_out": _losses(held_out_loss, held_out_tokens, held_out_documents),
    }
    if valid_documents:
        valid_tokens = data.token_file(run_dir / "tokens", "valid", valid_documents, tokenizer)
        loss = loop.evaluate(params, valid_tokens, recipe=recipe)
        summary["valid"] = _losses(loss, valid_tokens, valid_documents)
    _write_json(run_dir / "summary.json", summary)
    console.print_json(data=summary)
    return folder


def export_best(run_dir: Path) -> Path:
    """Writes the checkpoint with the lowest held-out loss so far as a folder, `run_dir/hf`.

    It may be called while the run goes on in another process.

    Returns:
      The Hugging Face folder.

    Raises:
      CheckpointError: `run_dir` holds no run, or no checkpoint yet.
    """
    run_dir = Path(run_dir)
    recipe = run_recipe(run_dir)
    params, _, _ = best_params(run_dir, recipe)
    write_model(run_dir / "hf", recipe, _read_tokenizer(run_dir), params)
    return run_dir / "hf"


def write_model(folder: Path, recipe: Recipe, tokenizer: Tokenizer, params: loop.Params) -> None:
    """Writes a Hugging Face folder: config, weights, tokenizer with chat template, generation config."""
    ids = {"eos_token_id": end_of_text_id(tokenizer), "pad_token_id": tokenizer.token_to_id(PAD)}
    # Spelled out, because transformers fills a missing begin token with a default id.
    config = {"bos_token_id": None, **ids}
    huggingface.write_folder(folder, recipe.model, params, extra_config=config)
    tokenizer_folder.write_tokenizer(
        folder,
        TokenizerFiles(
            tokenizer_json=tokenizer.to_str(pretty=True),
            chat_template=recipe.chat_template,
            special={"eos_token": END_OF_TEXT, "pad_token": PAD},
            eos_ids=(ids["eos_token_id"],),
        ),
    )
    _write_json(Path(folder) / "generation_config.json", ids)


def run_recipe(run_dir: Path) -> Recipe:
    """The recipe of the run in `run_dir`.

    Raises:
      CheckpointError: there is no run in `run_dir`.
      ConfigError: its recipe is of another version of this project.
    """
    return Recipe.from_json(_read_identity(run_dir)["recipe"])


def best_params(run_dir: Path, recipe: Recipe) -> tuple[loop.Params, int, float]:
    """The parameters of the best checkpoint, its step and its held-out loss in nats per token.

    Raises:
      CheckpointError: there is no checkpoint yet.
    """
    folder = Path(run_dir) / "checkpoints"
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint in {folder} yet; train first")
    with loop.Checkpoints(folder) as checkpoints:
        step, loss = checkpoints.best()
        state = checkpoints.restore(step, recipe, loop.data_mesh(recipe.batch))
    return state.params, step, loss


class _Log:
    """Metrics to `metrics.jsonl` and the console, and a progress bar."""

    def __init__(self, path: Path, steps: int, console: Console) -> None:
        self._path, self._console = path, console
        self._bar = ProgressBar(
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=steps)
        self._last: int | None = None

    def __enter__(self) -> "_Log":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, progress: loop.Progress) -> None:
        if self._last is None:
            _forget_metrics_from(self._path, progress.step)
        self._last = progress.step
        record = {"unix_time_s": round(time.time(), 1), **dataclasses.asdict(progress)}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        line = (
            f"step {progress.step}  loss {progress.loss:.4f}  lr {progress.learning_rate:.2e}  "
            f"grad {progress.gradient_norm:.3f}  {progress.tokens_per_s:,.0f} tokens/s"
        )
        self._bar.update(self._task, completed=progress.step, description=f"loss {progress.loss:.3f}")
        if progress.held_out_loss is not None:
            line += f"  held-out {progress.held_out_loss:.4f}"
        if progress.held_out_loss is not None or not self._console.is_terminal:
            self._console.print(line, highlight=False, soft_wrap=True)


def _forget_metrics_from(path: Path, step: int) -> None:
    """Drops the lines of steps that a killed run had done after its last checkpoint."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        # A killed run may have left half a line.
        try:
            earlier = json.loads(line)["step"] < step
        except (ValueError, KeyError, TypeError):
            continue
        if earlier:
            kept.append(line + "\n")
    path.write_text("".join(kept), encoding="utf-8")


def _check_same_run(run_dir: Path, recipe: Recipe, text: str) -> None:
    earlier = dataclasses.replace(run_recipe(run_dir), steps=recipe.steps)
    differing = [
        field.name
        for field in dataclasses.fields(Recipe)
        if getattr(earlier, field.name) != getattr(recipe, field.name)
    ]
    if _read_identity(run_dir)["text"] != text:
        differing.append("the training text")
    if differing:
        raise ConfigError(
            f"{run_dir} holds another run, it differs in {', '.join(differing)}; give another --run "
            "folder, or the same recipe and text to resume"
        )


def _read_identity(run_dir: Path) -> dict[str, Any]:
    try:
        identity = json.loads((Path(run_dir) / RECIPE_FILE).read_text(encoding="utf-8"))
        return {"recipe": identity["recipe"], "text": identity["text"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{run_dir} is not the folder of a pretraining run: {error}") from error


def _read_tokenizer(run_dir: Path) -> Tokenizer:
    try:
        return parse_tokenizer_json((run_dir / TOKENIZER_FILE).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read the tokenizer of the run in {run_dir}: {error}") from error


def _size(tokens: np.ndarray, documents: Sequence[str]) -> dict[str, int]:
    return {
        "documents": len(documents),
        "tokens": len(tokens),
        "bytes": sum(len(document.encode()) for document in documents),
    }


def _losses(loss: float, tokens: np.ndarray, documents: Sequence[str]) -> dict[str, float]:
    """Loss per token and per UTF-8 byte of text; the end-of-text tokens cost nats but are no bytes."""
    size = _size(tokens, documents)
    per_byte = loss * (size["tokens"] - 1) / size["bytes"]
    return {"nats_per_token": loss, "nats_per_byte": per_byte, **size}


def _write_json(path: Path, value: Any) -> None:
    _write_text(path, json.dumps(value, indent=2) + "\n")


def _write_text(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
