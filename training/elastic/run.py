"""Makes an elastic bundle of a Hugging Face folder: importance, order, levels, recovery (ELMS, section 3).

A run's folder holds `recipe.json`, `tokens/`, `importance.npz`, `levels/{level}/` or `joint/` with the
recovery's checkpoints and metrics, `tlm-{digest}/` with the tiny LM's run, and at the end `summary.json`. A
resumed run reads every step that is done there.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress as ProgressBar

from jaxllm.bundle import WeightFormat, write_bundle
from jaxllm.bundle.elastic import Recovery, elastic_parts
from jaxllm.bundle.tiny_lm import tiny_lm_parts
from jaxllm.bundle.writer import stored_form
from jaxllm.config import WHOLE
from jaxllm.elastic.ladder import Ladder, layer_parameters, sub_config
from jaxllm.elastic.submodel import sub_model
from jaxllm.elastic.units import reorder
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.parameters import param_specs
from jaxllm.prepare import weight_format_of
from jaxllm.quant import dequantize
from training.bundle_output import BundleOutput
from training.data.corpus import Corpus
from training.data.digests import model_digest
from training.data.encoders import ModelEncoder
from training.data.packing import Splits
from training.elastic.importance import Importance, calibration_batches, magnitudes, measure, random_order
from training.elastic.job import joint_job
from training.elastic.recipe import ElasticRecipe
from training.loop.fitting import fit, fitted_to_window
from training.loop.frozen_model import FrozenModel
from training.loop.parallel import MeshShape, make_mesh
from training.loop.run_files import claimed, write_json
from training.loop.trainer import Trainer
from training.lora.job import FittedAdapter, fit_adapter, lora_job
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
    console: Console | None = None,
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
      console: where progress goes; the terminal's error stream by default.

    Returns:
      The summary: anchors, and for each level its share of parameters and held-out losses, in nats per token.

    Raises:
      ConfigError: a recipe or its sources do not fit the model, or `run_dir` belongs to another run.
      CheckpointError: the model or the encoder cannot be read.
    """
    console, run_dir = console or Console(stderr=True), Path(run_dir)
    if not Path(model).is_dir():
        raise CheckpointError(f"{model} is no Hugging Face folder; units are ordered before a bundle is made")
    if tiny_lm is not None and data is None:
        raise ConfigError(
            "a tiny LM learns from tasks: say with --data where they are, or leave it out (--tiny-lm none)"
        )
    frozen = FrozenModel.read(model)
    recipe = fitted_to_window(recipe, frozen.cfg, console)
    # Read first, although it is trained last: a missing file shows before hours of work.
    tlm_sources = None
    if tiny_lm is not None and data is not None:
        tlm = dataclasses.replace(tiny_lm.recipe, levels=recipe.levels)
        window = frozen.cfg.window_tokens
        tlm_sources = TinyLmSources.read(tlm, data, frozen.tokenizer, window, tiny_lm.encoder)
    weights = out.weights or weight_format_of(model, frozen.cfg)
    mesh = make_mesh(mesh_shape or MeshShape(), recipe.batch // recipe.accumulate)
    corpus = Corpus.open(recipe.sources, data, recipe.held_out_share, shortened_share=recipe.shortened_share)
    corpus.tell(console)
    identity = {"model": frozen.fingerprint(), "documents": corpus.digest(), "weights": weights}
    with claimed(run_dir, recipe, **identity):
        splits = Splits.of(corpus, ModelEncoder(frozen.tokenizer), recipe, run_dir / "tokens")

    run = _Run(frozen, recipe, splits, run_dir, mesh, console)
    importance = _importance(run)
    ladder = Ladder(levels=recipe.levels, anchors=importance.anchors(recipe.anchor_share))
    orders = {
        "importance": importance.order,
        "magnitude": lambda: magnitudes(frozen.cfg, frozen.params),
        "random": lambda: random_order(frozen.cfg, recipe.seed),
    }
    order = orders[recipe.order]()
    ordered = {
        each: np.asarray(value) for each, value in reorder(frozen.cfg, _on_host(frozen.params).items(), order)
    }
    recoveries: dict[int, Recovery] = {}
    facts: dict[str, Any] = {
        "anchors": list(ladder.anchors),
        # Growth of the loss without each layer, in nats per token.
        "layer_importance": importance.layers.tolist(),
        "levels": {},
    }
    if recipe.recovery == "joint":
        ordered = _train_together(run, ordered, ladder)
    served = _as_stored(frozen, ordered, weights)
    for level in ladder.levels:
        found = _recover(run, served, ladder, level)
        facts["levels"][str(level)] = found.facts
        if found.recovery is not None:
            recoveries[level] = found.recovery
    told = {"recovery": recipe.recovery, "order": recipe.order, **facts}
    parts = elastic_parts(ladder, recoveries, order=order, facts=told)
    if tlm_sources is not None:
        elastic = ElasticModel(
            cfg=frozen.cfg,
            params={each: jnp.asarray(value) for each, value in served.items()},
            ladder=ladder,
            tokenizer=frozen.tokenizer,
            recoveries=recoveries,
        )
        # Named by the levels' weights and adapters, which make the labels.
        digest = model_digest(
            {"model": frozen.cfg, "ladder": ladder, "recovered": sorted(recoveries)},
            served,
            *(recoveries[level].adapter for level in sorted(recoveries)),
        )
        # One folder for each model, because a resumed recovery may lead to other adapters.
        folder = run_dir / f"tlm-{digest[:12]}"
        trained = train_tiny_lm(
            tlm_sources, elastic, folder, name=digest, mesh_shape=mesh_shape, console=console
        )
        parts |= tiny_lm_parts(trained)
    write_bundle(
        out.path,
        cfg=frozen.cfg,
        params=((each, ordered[each]) for each in param_specs(frozen.cfg)),
        weights=weights,
        tokenizer=frozen.tokenizer.files,
        name=out.name or frozen.name,
        parts=parts,
    )
    write_json(run_dir / "summary.json", facts)
    return facts


@dataclasses.dataclass(frozen=True)
class _Run:
    """What all steps of a run share."""

    frozen: FrozenModel
    recipe: ElasticRecipe
    splits: Splits
    folder: Path
    mesh: jax.sharding.Mesh
    console: Console


@dataclasses.dataclass(frozen=True)
class _Level:
    """Result of a level's training: its adapter, if that lowers the loss, and facts for people."""

    recovery: Recovery | None
    facts: dict[str, Any]


def _importance(run: _Run) -> Importance:
    """Measures importances of units and layers, or reads what was measured before."""
    frozen, recipe, path = run.frozen, run.recipe, run.folder / "importance.npz"
    if path.exists():
        return Importance.read(path, frozen.cfg.layers)
    # One epoch at most: the same text again adds nothing.
    train = run.splits.train
    steps = -(-len(train.epoch(0)) // recipe.batch)
    batches = (train.batch_at(step) for step in range(steps))
    chosen = calibration_batches(batches, recipe.calibration_tokens)
    with ProgressBar(console=run.console, transient=True) as bar:
        task = bar.add_task("importance", total=len(chosen))
        found = measure(
            frozen.cfg,
            frozen.params,
            chosen,
            mesh=run.mesh,
            remat=recipe.remat,
            report=lambda done, total: bar.update(task, completed=done, total=total),
        )
    found.write(path)
    return found


def _train_together(run: _Run, ordered: Mapping[str, np.ndarray], ladder: Ladder) -> dict[str, np.ndarray]:
    """Trains all levels together; returns the whole model's weights."""
    splits, console, folder = run.splits, run.console, run.folder / "joint"
    console.print(f"training {len(ladder.levels)} levels together", soft_wrap=True)
    trainer = Trainer(joint_job(run.frozen.cfg, ordered, ladder, run.recipe), run.recipe, run.mesh)
    best = fit(trainer, splits.train.batch_at, splits.held_out_batches, folder, console, splits.source_names)
    return trainer.whole(best.params)


def _recover(run: _Run, served: Mapping[str, np.ndarray], ladder: Ladder, level: int) -> _Level:
    """Measures a level, and trains its adapter if the recipe asks for one."""
    frozen, recipe, splits = run.frozen, run.recipe, run.splits
    cfg = sub_config(frozen.cfg, ladder, level)
    params = sub_model({name: jnp.asarray(value) for name, value in served.items()}, cfg)
    trainer = Trainer(lora_job(cfg, params, recipe), recipe, run.mesh)
    share = layer_parameters(cfg) / layer_parameters(frozen.cfg)
    run.console.print(f"level {level}: {100 * share:.1f} % of the layers' parameters", soft_wrap=True)
    if level == WHOLE or recipe.recovery != "lora":
        loss, _ = trainer.evaluate(trainer.initial().params, splits.held_out_batches())
        return _Level(None, {"share": share, "held_out": loss})
    fitted = fit_adapter(trainer, splits, run.folder / "levels" / str(level), run.console)
    facts = {
        "share": share,
        "held_out": fitted.without,
        "recovered": fitted.loss,
        "best_step": fitted.best_step,
    }
    return _Level(_worthwhile(fitted, recipe), facts)


def _worthwhile(fitted: FittedAdapter, recipe: ElasticRecipe) -> Recovery | None:
    if fitted.loss >= fitted.without:
        return None
    return Recovery(_on_host(fitted.adapter), recipe.lora.scaling)


def _as_stored(
    frozen: FrozenModel, params: Mapping[str, np.ndarray], weights: WeightFormat
) -> dict[str, np.ndarray]:
    """The parameters dequantized from their stored width, as an adapter will see them."""
    specs = param_specs(frozen.cfg)
    return {
        name: np.asarray(dequantize(stored_form(params[name], spec, weights), jnp.float32))  # pyright: ignore
        for name, spec in specs.items()
    }


def _on_host(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in params.items()}
