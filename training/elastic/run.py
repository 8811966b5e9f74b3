"""Makes an elastic bundle of a Hugging Face folder: importance, order, levels, recovery (ELMS, section 3).

A run's folder has `recipe.json`, `tokens/`, `importance.npz`, `levels/{level}/` or `joint/` with the
recovery's checkpoints and metrics, `tlm-{digest}/` with the tiny LM's run, and at the end `summary.json`. A
resumed run reads the results of finished steps there.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.bundle import write_bundle
from jaxllm.bundle.levels import Recovery, elastic_parts
from jaxllm.bundle.tiny_lm import TinyLm, tiny_lm_parts
from jaxllm.checkpoints import huggingface
from jaxllm.config import WHOLE, ModelConfig
from jaxllm.elastic.ladder import Ladder, chosen_ladder
from jaxllm.elastic.units import UnitOrder, reorder
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.host_settings import own_jax_settings
from jaxllm.models.features import require_decoder_alone, require_room
from jaxllm.models.lora import init_adapter
from jaxllm.models.scanned_layers import is_stacked, stacked
from jaxllm.training.calibration import BundleOutput
from jaxllm.training.data.documents import digesting, model_digest
from jaxllm.training.elastic.importance import Importance, magnitudes, random_order, unit_step
from jaxllm.training.elastic.job import ElasticRecipe, joint_job, level_counts, level_job
from jaxllm.training.elastic.recovery import (
    ElasticRun,
    Tensors,
    as_stored,
    importance_of,
    recover_levels,
    train_together,
)
from jaxllm.training.elastic.tiny_lm.recipe import TinyLmRun
from jaxllm.training.elastic.tiny_lm.run import train_tiny_lm
from jaxllm.training.elastic.tiny_lm.self_labels import ElasticModel
from jaxllm.training.elastic.tiny_lm.start import TinyLmSources
from jaxllm.training.loop.dry_run import (
    Estimate,
    estimate,
    estimate_of,
    frozen_shapes,
    known_figures,
    placed_shapes,
    recomputed_share,
    rows_shapes,
)
from jaxllm.training.loop.fitting import FrozenModel, fitted_to_window
from jaxllm.training.loop.hardware import step_flops_per_token
from jaxllm.training.loop.monitoring import Monitoring
from jaxllm.training.loop.parallel import MeshShape, laid_out, make_mesh, placed, require_divisible
from jaxllm.training.loop.run_files import wait_for_first, write_json
from jaxllm.training.lora.run import claimed_splits, require_trainable


@own_jax_settings()
def elasticize(
    recipe: ElasticRecipe,
    model: Path,
    out: BundleOutput,
    run_dir: Path,
    *,
    data: Path | None = None,
    tiny_lm: TinyLmRun | None = None,
    mesh_shape: MeshShape | None = None,
    monitoring: Monitoring | None = None,
) -> dict[str, Any]:
    """Makes an elastic bundle, or resumes the run in `run_dir`.

    Args:
      recipe: recipe of the run.
      model: Hugging Face folder.
      out: path of the bundle.
      run_dir: folder of the run, created if missing.
      data: folder of the recipe's sources.
      tiny_lm: training of the bundle's tiny LM; None makes a bundle without one.
      mesh_shape: devices; all of them along `data` by default.
      monitoring: destinations of the progress; the terminal's error stream by default.

    Returns:
      The summary: anchors, and for each level its share of parameters and held-out losses, in nats per token.

    Raises:
      ConfigError: a recipe or its sources do not fit the model, or `run_dir` belongs to another run.
      CheckpointError: the model or the encoder cannot be read.
    """
    run_dir, first = Path(run_dir), jax.process_index() == 0
    monitoring = monitoring or Monitoring()
    console = monitoring.own_console()
    model = Path(model)
    if not model.is_dir():
        raise CheckpointError(
            f"{model} is no Hugging Face folder; units are ordered before a bundle is made: give the folder "
            "that it was prepared from"
        )
    if tiny_lm is not None and data is None:
        raise ConfigError(
            "a tiny LM learns from tasks: say with --data where they are, or leave it out (--tiny-lm none)"
        )
    if tiny_lm is not None and jax.process_count() > 1:
        raise ConfigError(
            "a tiny LM is trained in one process: leave it out (--tiny-lm none), and run the same command in "
            "one process for it when the levels are done"
        )
    cfg = huggingface.read_config(model)
    require_room(cfg, "levels")
    require_trainable(cfg, recipe, "levels")
    if cfg.encoder is not None:
        _require_pairs_recipe(recipe, tiny_lm)
    recipe = fitted_to_window(recipe, cfg, console)
    mesh = make_mesh(mesh_shape or MeshShape(), recipe.batch // recipe.accumulate)
    frozen = FrozenModel.read_onto(mesh, model, recipe.frozen_in)
    # Read first, although it is trained last: a missing file shows before hours of work.
    tlm_sources = None
    if tiny_lm is not None and data is not None:
        tlm = dataclasses.replace(tiny_lm.recipe, levels=recipe.levels)
        tlm_sources = TinyLmSources.read(tlm, data, frozen.tokenizer, cfg.window_tokens, tiny_lm.encoder)
    weights = out.weights or huggingface.Checkpoint(model, cfg=cfg).weight_format
    splits = claimed_splits(
        run_dir, recipe, frozen, mesh, data, console, shortened_share=recipe.shortened_share, weights=weights
    )
    run = ElasticRun(cfg, recipe, splits, run_dir, mesh, console, monitoring)
    importance = importance_of(run, frozen.params)
    tokenizer, name = frozen.tokenizer, frozen.name
    # Read again in order, instead of permuted: so there is only one copy on host and devices.
    del frozen
    order = _order(run, importance, model)
    if recipe.units == "global":
        ladder = chosen_ladder(cfg, recipe.levels, importance.groups, importance.neurons)
    else:
        ladder = importance.ladder(recipe.levels, recipe.anchor_share)

    def ordered() -> Iterator[tuple[str, np.ndarray]]:
        return reorder(cfg, huggingface.read_params(model, cfg), order)

    tensors: Tensors = ordered
    # Growth of the loss without each layer, in nats per token.
    facts: dict[str, Any] = {
        "anchors": list(ladder.anchors),
        "layer_importance": importance.layers.tolist(),
    }
    if importance.encoder is not None and ladder.encoder is not None:
        facts["encoder"] = {
            "anchors": list(ladder.encoder.anchors),
            "layer_importance": importance.encoder.layers.tolist(),
        }
    facts["levels"] = {}
    if recipe.recovery == "joint":
        tensors, measured = train_together(run, ordered, ladder)
        facts |= measured
    digests: dict[str, str] = {}
    served = laid_out(digesting(as_stored(cfg, tensors(), weights), digests), cfg, mesh, run.dtype)
    recoveries: dict[int, Recovery] = {}
    for level, recovery, own in recover_levels(run, served, ladder):
        facts["levels"][str(level)] = own
        if recovery is not None:
            recoveries[level] = recovery
    parts = elastic_parts(
        ladder, recoveries, order=order, facts={"recovery": recipe.recovery, "order": recipe.order, **facts}
    )
    if tlm_sources is not None:
        if is_stacked(served):
            served = placed(as_stored(cfg, tensors(), weights), mesh, run.dtype)
        elastic = ElasticModel(
            cfg=cfg, params=_near(served), ladder=ladder, tokenizer=tokenizer, recoveries=recoveries
        )
        parts |= tiny_lm_parts(_trained_tiny_lm(run, tlm_sources, elastic, digests, mesh_shape))
    pairs = tensors()
    if first:
        write_bundle(
            out.path,
            cfg=cfg,
            params=pairs,
            weights=weights,
            tokenizer=tokenizer.files,
            name=out.name or name,
            parts=parts,
        )
        write_json(run_dir / "summary.json", facts)
    else:
        # All processes have to gather tensors that are divided over processes.
        for _ in pairs:
            pass
    wait_for_first("bundle")
    return facts


def _order(run: ElasticRun, importance: Importance, model: Path) -> UnitOrder:
    """Returns the recipe's order of units."""
    if run.recipe.order == "magnitude":
        return magnitudes(run.cfg, huggingface.read_params(model, run.cfg))
    if run.recipe.order == "random":
        return random_order(run.cfg, run.recipe.seed)
    return importance.order(run.cfg)


def _require_pairs_recipe(recipe: ElasticRecipe, tiny_lm: TinyLmRun | None) -> None:
    """Rejects options that encoder-decoders do not support.

    Raises:
      ConfigError: the recipe or the command has such an option.
    """
    if tiny_lm is not None:
        raise ConfigError(
            "a tiny LM shortens prompts of decoders alone; make the levels of an encoder-decoder without one "
            "(--tiny-lm none)"
        )
    if recipe.units != "equal":
        raise ConfigError("levels of an encoder-decoder are an equal share of each layer: take --units equal")
    if recipe.shortened_share:
        raise ConfigError("sources do not lose words: set shortened_share to 0 in the recipe")


def _near(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns parameters for steps that run once: replicated ones only on the first device."""
    return {
        name: value.addressable_data(0) if value.is_fully_replicated else value
        for name, value in params.items()
    }


def _trained_tiny_lm(
    run: ElasticRun,
    sources: TinyLmSources,
    model: ElasticModel,
    digests: dict[str, str],
    mesh_shape: MeshShape | None,
) -> TinyLm:
    """Trains the tiny LM of an elastic model with these tensor digests."""
    # Named by the levels' weights and adapters, which make the labels.
    recoveries = model.recoveries
    digest = model_digest(
        {"model": model.cfg, "ladder": model.ladder, "recovered": sorted(recoveries), "tensors": digests},
        *(recoveries[level].adapter for level in sorted(recoveries)),
    )
    # One folder for each model, because a resumed recovery may lead to other adapters.
    folder = run.folder / f"tlm-{digest[:12]}"
    monitoring = run.monitoring.untraced()
    return train_tiny_lm(sources, model, folder, name=digest, mesh_shape=mesh_shape, monitoring=monitoring)


def dry_run_elastic(
    recipe: ElasticRecipe, model: Path, *, mesh_shape: MeshShape | None = None, device: str = ""
) -> dict[str, Any]:
    """Estimates memory and time of the stages of a run: importance, then joint recovery or levels' adapters.

    Only the folder's config is read, and no parameter is allocated; for the accuracy of figures compiled on
    CPUs see `jaxllm.training.loop.dry_run`. The tiny LM, which is small, is left out.

    Returns:
      The fields of `Estimate` and its advice by stage; `device_hours` of all stages.

    Raises:
      ConfigError: the mesh does not fit, or the device is unknown.
      CheckpointError: the config cannot be read.
    """
    known_figures(device)
    cfg = huggingface.read_config(model)
    require_room(cfg, "levels")
    require_decoder_alone(cfg, "estimates of training", "make levels without --dry-run")
    recipe = recipe.within(cfg.window_tokens).on_accelerator()
    mesh = make_mesh(mesh_shape or MeshShape(), recipe.batch // recipe.accumulate)
    require_divisible(cfg, mesh)
    ladder = Ladder(levels=recipe.levels)
    stages = {"importance": _importance(cfg, recipe, mesh, device)}
    if recipe.recovery == "joint":
        stages["joint recovery"] = _joint(cfg, ladder, recipe, mesh, device)
    if recipe.recovery == "lora":
        stages["adapters of levels"] = _levels(cfg, ladder, recipe, mesh, device)
    hours = sum(each.device_hours for each in stages.values())
    return {"stages": {name: each.facts(recipe) for name, each in stages.items()}, "device_hours": hours}


def _importance(cfg: ModelConfig, recipe: ElasticRecipe, mesh: jax.sharding.Mesh, device: str) -> Estimate:
    params = placed_shapes(frozen_shapes(cfg, recipe.frozen_in), mesh)
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
    frozen = frozen_shapes(cfg, recipe.frozen_in) if bound else None
    return estimate(job, recipe, mesh, frozen=frozen, device=device)


def _levels(
    cfg: ModelConfig, ladder: Ladder, recipe: ElasticRecipe, mesh: jax.sharding.Mesh, device: str
) -> Estimate:
    job = level_job(cfg, {}, ladder, recipe, adapters=False)
    job = dataclasses.replace(job, init=lambda key: init_adapter(cfg, recipe.lora, key))
    counts = jax.eval_shape(lambda: stacked(level_counts(cfg, ladder, WHOLE), cfg))
    frozen = {**frozen_shapes(cfg, recipe.frozen_in), **counts}
    found = estimate(job, recipe, mesh, frozen=frozen, device=device)
    # One level after the other; the whole model gets none.
    return dataclasses.replace(found, device_hours=found.device_hours * (len(ladder.levels) - 1))
