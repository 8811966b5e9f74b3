"""Makes an elastic bundle of a Hugging Face folder: importance, order, levels, recovery (ELMS, section 3).

A run's folder holds `recipe.json`, `tokens/`, `importance.npz`, `levels/{level}/` or `joint/` with the
recovery's checkpoints and metrics, `tlm-{digest}/` with the tiny LM's run, and at the end `summary.json`. A
resumed run reads every step that is done there.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.bundle import write_bundle
from jaxllm.bundle.elastic import Recovery, elastic_parts
from jaxllm.bundle.tiny_lm import TinyLm, tiny_lm_parts
from jaxllm.checkpoints import huggingface
from jaxllm.elastic.knapsack import chosen_ladder
from jaxllm.elastic.units import UnitOrder, reorder
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.rooms import require_room
from jaxllm.models.scanned_layers import is_stacked
from jaxllm.prepare import weight_format_of
from training.bundle_output import BundleOutput
from training.data.digests import digesting, model_digest
from training.elastic.importance import Importance, magnitudes, random_order
from training.elastic.recipe import ElasticRecipe
from training.elastic.recovery import (
    ElasticRun,
    Tensors,
    as_stored,
    importance_of,
    recover_levels,
    train_together,
)
from training.loop.fitting import fitted_to_window
from training.loop.frozen_model import FrozenModel
from training.loop.monitoring import Monitoring
from training.loop.parallel import MeshShape, make_mesh
from training.loop.placing import laid_out, placed
from training.loop.run_files import wait_for_first, write_json
from training.lora.run_splits import claimed_splits, require_trainable
from training.tiny_lm.recipe import TinyLmRun
from training.tiny_lm.run import train_tiny_lm
from training.tiny_lm.self_labels import ElasticModel
from training.tiny_lm.sources import TinyLmSources


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
      recipe: the run.
      model: a Hugging Face folder.
      out: the bundle.
      run_dir: the run's folder, made if missing.
      data: the folder that the recipe's sources are in.
      tiny_lm: the training of the bundle's tiny LM; None makes a bundle without one.
      mesh_shape: devices; all of them along `data` by default.
      monitoring: where progress goes; the terminal's error stream by default.

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
    frozen = FrozenModel.read_onto(mesh, model, "f32" if recipe.precision == "float32" else "bf16")
    # Read first, although it is trained last: a missing file shows before hours of work.
    tlm_sources = None
    if tiny_lm is not None and data is not None:
        tlm = dataclasses.replace(tiny_lm.recipe, levels=recipe.levels)
        tlm_sources = TinyLmSources.read(tlm, data, frozen.tokenizer, cfg.window_tokens, tiny_lm.encoder)
    weights = out.weights or weight_format_of(model, cfg)
    splits = claimed_splits(
        run_dir, recipe, frozen, mesh, data, console, shortened_share=recipe.shortened_share, weights=weights
    )
    run = ElasticRun(cfg, recipe, splits, run_dir, mesh, console, monitoring.profile)
    importance = importance_of(run, frozen.params)
    tokenizer, name = frozen.tokenizer, frozen.name
    # Read again in order, instead of moved: there is then one copy, wherever it is.
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
        tensors, told = train_together(run, ordered, ladder)
        facts |= told
    digests: dict[str, str] = {}
    served = laid_out(digesting(as_stored(cfg, tensors(), weights), digests), cfg, mesh, run.dtype)
    recoveries: dict[int, Recovery] = {}
    for level, found in recover_levels(run, served, ladder):
        facts["levels"][str(level)] = found.facts
        if found.recovery is not None:
            recoveries[level] = found.recovery
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
        # Tensors that are divided over processes are gathered by all of them.
        for _ in pairs:
            pass
    wait_for_first("bundle")
    return facts


def _order(run: ElasticRun, importance: Importance, model: Path) -> UnitOrder:
    """The order of units that the recipe asks for."""
    if run.recipe.order == "magnitude":
        return magnitudes(run.cfg, huggingface.read_params(model, run.cfg))
    if run.recipe.order == "random":
        return random_order(run.cfg, run.recipe.seed)
    return importance.order(run.cfg)


def _require_pairs_recipe(recipe: ElasticRecipe, tiny_lm: TinyLmRun | None) -> None:
    """Refuses what is not there for encoder-decoders.

    Raises:
      ConfigError: the recipe or the command asks for it.
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
    """Parameters for steps that are computed once: those that every device has, on the first alone."""
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
    """Trains the tiny LM of an elastic model, whose tensors have these digests."""
    # Named by the levels' weights and adapters, which make the labels.
    recoveries = model.recoveries
    digest = model_digest(
        {"model": model.cfg, "ladder": model.ladder, "recovered": sorted(recoveries), "tensors": digests},
        *(recoveries[level].adapter for level in sorted(recoveries)),
    )
    # One folder for each model, because a resumed recovery may lead to other adapters.
    folder = run.folder / f"tlm-{digest[:12]}"
    return train_tiny_lm(sources, model, folder, name=digest, mesh_shape=mesh_shape, console=run.console)
