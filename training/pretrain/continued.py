"""Continues to train a folder's model: pretraining on texts, full fine-tuning on answers of conversations.

A run's folder has the files of `jaxllm.training.pretrain.run`, except the tokenizer, which is the model's
own.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax

from jaxllm.checkpoints import huggingface, tokenizer_folder
from jaxllm.errors import ConfigError
from jaxllm.files.input_files import read_json
from jaxllm.host_settings import own_jax_settings
from jaxllm.models import parameters
from jaxllm.models.features import require_decoder_alone
from jaxllm.training.data.corpus import Corpus
from jaxllm.training.data.encoders import ModelEncoder
from jaxllm.training.data.packing import Splits
from jaxllm.training.loop.fitting import MODEL_FOLDER, fit, fitted_to_window, tell_summary
from jaxllm.training.loop.frozen_model import FrozenModel
from jaxllm.training.loop.monitoring import Monitoring
from jaxllm.training.loop.parallel import MeshShape, make_mesh, own_rows
from jaxllm.training.loop.run_files import claimed, wait_for_first
from jaxllm.training.loop.trainer import Trainer
from jaxllm.training.pretrain.job import PretrainRecipe, pretrain_job


@own_jax_settings()
def train_on(
    recipe: PretrainRecipe,
    model: Path,
    run_dir: Path,
    *,
    data: Path | None = None,
    mesh_shape: MeshShape | None = None,
    monitoring: Monitoring | None = None,
) -> Path:
    """Trains all weights of a model, or resumes the run in `run_dir`, and exports the best.

    Args:
      recipe: recipe of the run; its model is replaced by the folder's.
      model: Hugging Face folder to start from.
      run_dir: folder of the run, created if missing.
      data: folder of the recipe's sources.
      mesh_shape: devices; all of them along `data` by default.
      monitoring: destinations of the progress; the terminal's error stream by default.

    Returns:
      The Hugging Face folder, `run_dir/hf`.

    Raises:
      ConfigError: the sources or recipe are unusable, or `run_dir` belongs to another run.
      CheckpointError: the model cannot be read.
    """
    run_dir, first = Path(run_dir), jax.process_index() == 0
    monitoring = monitoring or Monitoring()
    console = monitoring.own_console()
    if recipe.teacher_share:
        raise ConfigError("a model that is trained on has no teacher: take a recipe with teacher_share = 0")
    if not recipe.sources:
        raise ConfigError("say with --text or --chat what to learn, or take a recipe that names its sources")
    cfg = huggingface.read_config(model)
    require_decoder_alone(cfg, "training all weights of a model", "train an adapter (jaxllm lora --pairs)")
    recipe = dataclasses.replace(fitted_to_window(recipe, cfg, console), model=cfg)
    mesh = make_mesh(mesh_shape or MeshShape(), recipe.batch // recipe.accumulate)
    start = FrozenModel.read_onto(mesh, model, "f32")
    corpus = Corpus.open(recipe.sources, data, recipe.held_out_share).tell(console)
    encoder, identity = (
        ModelEncoder(start.tokenizer),
        {"model": start.fingerprint(), "documents": corpus.digest()},
    )
    own = own_rows(mesh, recipe.batch, recipe.accumulate)
    with claimed(run_dir, recipe, **identity):
        splits = Splits.of(corpus, encoder, recipe, run_dir / "tokens", loader=recipe.loader, own=own)
    wait_for_first("recipe")
    job = dataclasses.replace(pretrain_job(recipe), init=dict(start.params))
    trainer = Trainer(job, recipe, mesh)
    console.print(
        f"{parameters.parameter_count(cfg):,} parameters of {start.name} on {mesh.size} devices; "
        f"{splits.size()}; {recipe.steps:,} steps, "
        f"{splits.train.epochs_at(recipe.steps):.1f} epochs",
        soft_wrap=True,
    )
    before, _ = trainer.evaluate(trainer.initial().params, splits.held_out_batches())
    best = fit(
        trainer, splits.train.batch_at, splits.held_out_batches, run_dir, splits.source_names, monitoring
    )
    whole = trainer.whole(best.params)
    if first:
        _write(run_dir / MODEL_FOLDER, Path(model), recipe, start, whole)
        held_out = {"before": before, "after": best.loss}
        summary = {
            "parameters": parameters.parameter_count(cfg),
            "best_step": best.step,
            "held_out": held_out,
        }
        tell_summary(run_dir, summary, console)
    return run_dir / MODEL_FOLDER


def _write(folder: Path, model: Path, recipe: PretrainRecipe, start: FrozenModel, params: Any) -> None:
    """Writes a folder like the one that training started from, with new weights."""
    told = read_json(model / "config.json", "download the folder again")
    ids = {name: told[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in told}
    huggingface.write_folder(folder, recipe.model, params, extra_config={"bos_token_id": None, **ids})
    tokenizer_folder.write_tokenizer(folder, start.tokenizer.files)
    if (model / "generation_config.json").is_file():
        shutil.copyfile(model / "generation_config.json", folder / "generation_config.json")
