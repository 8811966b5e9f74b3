"""Says what each stage of an elastic run would take on a mesh, from the model's config alone."""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from jaxllm.checkpoints import huggingface
from jaxllm.config import WHOLE, ModelConfig
from jaxllm.elastic.ladder import Ladder
from jaxllm.models.lora import init_adapter
from jaxllm.models.rooms import require_decoder_alone, require_room
from jaxllm.models.scanned_layers import stacked
from training.elastic.importance import unit_step
from training.elastic.job import joint_job, level_job
from training.elastic.levels import level_counts
from training.elastic.recipe import ElasticRecipe
from training.loop.dry_run import (
    Estimate,
    estimate,
    estimate_of,
    frozen_shapes,
    known_figures,
    placed_shapes,
    recomputed_share,
    rows_shapes,
)
from training.loop.hardware import step_flops_per_token
from training.loop.parallel import MeshShape, make_mesh, require_divisible

_STORED = {"float32": "f32", "bfloat16": "bf16"}


def dry_run_elastic(
    recipe: ElasticRecipe, model: Path, *, mesh_shape: MeshShape | None = None, device: str = ""
) -> dict[str, Any]:
    """Estimates memory and time of the stages of a run: importance, then joint recovery or levels' adapters.

    Nothing is read but the folder's config, and no parameter is allocated; see `training.loop.dry_run` for
    what figures compiled on CPUs are worth. The tiny LM, which is small, is left out.

    Returns:
      By stage what `Estimate` has and its advice; `device_hours` of all stages.

    Raises:
      ConfigError: the mesh does not fit, or the device is not known.
      CheckpointError: the config cannot be read.
    """
    known_figures(device)
    cfg = huggingface.read_config(model)
    require_room(cfg, "levels")
    require_decoder_alone(cfg, "estimates of training", "make levels without --dry-run")
    recipe = recipe.within(cfg.window_tokens)
    mesh = make_mesh(mesh_shape or MeshShape(), recipe.batch // recipe.accumulate)
    require_divisible(cfg, mesh)
    ladder = Ladder(levels=recipe.levels)
    stages = {"importance": _importance(cfg, recipe, mesh, device)}
    if recipe.recovery == "joint":
        stages["joint recovery"] = _joint(cfg, ladder, recipe, mesh, device)
    if recipe.recovery == "lora":
        stages["adapters of levels"] = _levels(cfg, ladder, recipe, mesh, device)
    hours = sum(each.device_hours for each in stages.values())
    told = {name: {**dataclasses.asdict(each), "advice": each.advice()} for name, each in stages.items()}
    return {"stages": told, "device_hours": hours}


def _importance(cfg: ModelConfig, recipe: ElasticRecipe, mesh: jax.sharding.Mesh, device: str) -> Estimate:
    params = placed_shapes(frozen_shapes(cfg, _STORED[recipe.precision]), mesh)
    rows = rows_shapes(recipe.batch, recipe.row_tokens, mesh)
    with jax.set_mesh(mesh):
        step: Any = unit_step(cfg, mesh, remat=recipe.remat, by=recipe.importance)
        compiled = step.trace(params, rows).lower().compile()
    tokens = recipe.batch * recipe.row_tokens
    gradient = step_flops_per_token(cfg, recipe.row_tokens) * tokens
    # The loss is computed without each layer as well, and of the whole model: a third of a gradient each.
    flops = gradient * (1 + recomputed_share(recipe.remat, 1 / 3) + (cfg.layers + 1) / 3)
    steps = -(-recipe.calibration_tokens // tokens)
    return estimate_of(compiled, mesh, device=device, step_flops=flops, steps=steps)


def _joint(
    cfg: ModelConfig, ladder: Ladder, recipe: ElasticRecipe, mesh: jax.sharding.Mesh, device: str
) -> Estimate:
    bound = recipe.whole_kl_nats > 0
    # The trainer stacks equal layers itself.
    whole = frozen_shapes(cfg, "f32", stack=False)
    job = joint_job(cfg, whole, ladder, recipe, original={} if bound else None)
    frozen = frozen_shapes(cfg, _STORED[recipe.precision]) if bound else None
    return estimate(job, recipe, mesh, frozen=frozen, device=device)


def _levels(
    cfg: ModelConfig, ladder: Ladder, recipe: ElasticRecipe, mesh: jax.sharding.Mesh, device: str
) -> Estimate:
    job = level_job(cfg, {}, ladder, recipe, adapters=False)
    job = dataclasses.replace(job, init=lambda key: init_adapter(cfg, recipe.lora, key))
    counts = jax.eval_shape(lambda: stacked(level_counts(cfg, ladder, WHOLE), cfg))
    frozen = {**frozen_shapes(cfg, _STORED[recipe.precision]), **counts}
    found = estimate(job, recipe, mesh, frozen=frozen, device=device)
    # One level after the other; the whole model gets none.
    return dataclasses.replace(found, device_hours=found.device_hours * (len(ladder.levels) - 1))
