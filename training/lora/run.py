"""Trains low-rank adapters on a frozen model, and saves them in PEFT's layout (LoRA, arXiv 2106.09685).

The model's weights may have any width; over 8 or 4 bits this is QLoRA (arXiv 2305.14314) without its paging.

A run's folder holds `recipe.json`, `tokens/`, `checkpoints/`, `metrics.jsonl`, and at the end `adapter/` and
`summary.json`. The frozen weights are read from the model's folder or bundle and never written.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.bundle import WeightFormat
from jaxllm.checkpoints import huggingface, peft_folder
from jaxllm.models.rooms import require_decoder_alone, require_room
from training.loop.dry_run import estimate, frozen_shapes
from training.loop.fitting import fitted_to_window
from training.loop.frozen_model import FrozenModel
from training.loop.monitoring import Monitoring
from training.loop.parallel import MeshShape, make_mesh
from training.loop.run_files import wait_for_first, write_json
from training.loop.trainer import Trainer
from training.lora.job import fit_adapter, lora_job
from training.lora.recipe import LoraRecipe
from training.lora.run_splits import claimed_splits, require_trainable


def train_lora(
    recipe: LoraRecipe,
    model: Path,
    run_dir: Path,
    *,
    data: Path | None = None,
    weights: WeightFormat | None = None,
    mesh_shape: MeshShape | None = None,
    monitoring: Monitoring | None = None,
) -> Path:
    """Trains an adapter, or resumes the run in `run_dir`, and writes the best.

    Args:
      recipe: the run.
      model: a Hugging Face folder, or a bundle.
      run_dir: the run's folder, made if missing.
      data: the folder that the recipe's sources are in.
      weights: width of a folder's frozen matrices.
      mesh_shape: devices; all of them along `data` by default.
      monitoring: where progress goes; the terminal's error stream by default.

    Returns:
      The adapter's folder, `run_dir/adapter`.

    Raises:
      ConfigError: the sources or recipe are unusable, or `run_dir` belongs to another run.
      CheckpointError: the model cannot be read.
    """
    run_dir, first = Path(run_dir), jax.process_index() == 0
    monitoring = monitoring or Monitoring()
    console = monitoring.own_console()
    mesh = make_mesh(mesh_shape or MeshShape(), recipe.batch // recipe.accumulate)
    frozen = FrozenModel.read_onto(mesh, model, weights)
    require_room(frozen.cfg, "adapters")
    require_trainable(frozen.cfg, recipe, "adapters")
    # Shorter rows are a multiple of as many, which the mesh divides as well.
    recipe = fitted_to_window(recipe, frozen.cfg, console)
    job = lora_job(frozen.cfg, frozen.params, recipe)
    splits = claimed_splits(run_dir, recipe, frozen, mesh, data, console)
    trainer = Trainer(job, recipe, mesh)
    console.print(
        f"{_size(trainer):,} parameters of rank {recipe.lora.rank} on {frozen.name}; {splits.size()}; "
        f"{recipe.steps:,} steps, {splits.epochs_at(recipe.steps):.1f} epochs",
        soft_wrap=True,
    )
    fitted = fit_adapter(trainer, splits, run_dir, monitoring)
    summary = {
        "parameters": _size(trainer),
        "best_step": fitted.best_step,
        "held_out": {"without": fitted.without, "with": fitted.loss},
    }
    if first:
        peft_folder.write_adapter(
            run_dir / "adapter", frozen.cfg, recipe.lora, fitted.adapter, base=str(model)
        )
        write_json(run_dir / "summary.json", summary)
    wait_for_first("adapter")
    console.print_json(data=summary)
    return run_dir / "adapter"


def dry_run_lora(
    recipe: LoraRecipe,
    model: Path,
    *,
    weights: WeightFormat | None = None,
    mesh_shape: MeshShape | None = None,
    device: str = "",
) -> dict[str, Any]:
    """Estimates memory and time of a run by the config of a folder alone; see `training.loop.dry_run`.

    Raises:
      ConfigError: the mesh does not fit, or the device or the weights are not known.
      CheckpointError: the config cannot be read.
    """
    cfg = huggingface.read_config(model)
    require_decoder_alone(cfg, "estimates of training", "train without --dry-run")
    recipe = recipe.within(cfg.window_tokens)
    mesh = make_mesh(mesh_shape or MeshShape(), recipe.batch // recipe.accumulate)
    frozen = frozen_shapes(cfg, weights or "f32")
    found = estimate(lora_job(cfg, {}, recipe), recipe, mesh, frozen=frozen, device=device)
    return {**dataclasses.asdict(found), "advice": found.advice()}


def _size(trainer: Trainer) -> int:
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(trainer.abstract().params))
