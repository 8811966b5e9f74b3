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
from training.data.corpus import Corpus
from training.data.digests import model_digest
from training.data.encoders import ModelEncoder
from training.data.packing import Splits
from training.elastic.importance import Importance, calibration_batches, magnitudes, measure, random_order
from training.elastic.job import joint_job
from training.elastic.recipe import ElasticRecipe
from training.loop.fitting import fit, fitted_to_window
from training.loop.frozen_model import FrozenModel
from training.loop.parallel import MeshShape, gathered, make_mesh
from training.loop.run_files import claimed, write_json
from training.loop.trainer import Trainer
from training.lora.job import FittedAdapter, fit_adapter, lora_job
from training.tiny_lm.recipe import TinyLmRecipe
from training.tiny_lm.run import train_tiny_lm
from training.tiny_lm.self_labels import ElasticModel
from training.tiny_lm.sources import TinyLmSources


def elasticize(
    recipe: ElasticRecipe,
    model: Path,
    out: Path,
    run_dir: Path,
    *,
    data: Path | None = None,
    weights: WeightFormat | None = None,
    name: str = "",
    tlm: TinyLmRecipe | None = None,
    encoder: Path | None = None,
    mesh_shape: MeshShape | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Makes an elastic bundle, or resumes the run in `run_dir`.

    Args:
      recipe: the run.
      model: a Hugging Face folder.
      out: the bundle's path; written whole or not at all.
      run_dir: the run's folder, made if missing.
      data: the folder that the recipe's sources are in.
      weights: width of the bundle's matrices; None keeps the checkpoint's own.
      name: the model's name, for people; the folder's own by default.
      tlm: the run of the bundle's tiny LM; None makes a bundle without one.
      encoder: a MobileBERT folder for the tiny LM to start from.
      mesh_shape: devices; all of them along `data` by default.
      console: where progress goes; the terminal's error stream by default.

    Returns:
      The summary: anchors, and for each level its share of parameters and held-out losses, in nats per token.

    Raises:
      ConfigError: a recipe or its sources do not fit the model, or `run_dir` belongs to another run.
      CheckpointError: the model or the encoder cannot be read.
    """
    console, run_dir, out = console or Console(stderr=True), Path(run_dir), Path(out)
    if not out.parent.is_dir():
        raise CheckpointError(f"{out.parent}: no such folder; create it first")
    if not Path(model).is_dir():
        raise CheckpointError(f"{model} is no Hugging Face folder; units are ordered before a bundle is made")
    if tlm is not None and data is None:
        raise ConfigError(
            "a tiny LM learns from tasks: say with --data where they are, or leave it out (--tiny-lm none)"
        )
    frozen = FrozenModel.read(model)
    recipe = fitted_to_window(recipe, frozen.cfg, console)
    # Read first, although it is trained last: a missing file shows before hours of work.
    tlm_sources = None
    if tlm is not None and data is not None:
        tlm = dataclasses.replace(tlm, levels=recipe.levels)
        tlm_sources = TinyLmSources.read(tlm, data, frozen.tokenizer, frozen.cfg.window_tokens, encoder)
    weights = weights or weight_format_of(model, frozen.cfg)
    mesh = make_mesh(mesh_shape or MeshShape(), recipe.batch // recipe.accumulate)
    corpus = Corpus.open(recipe.sources, data, recipe.held_out_share, shortened_share=recipe.shortened_share)
    identity = {"model": frozen.fingerprint(), "documents": corpus.digest(), "weights": weights}
    with claimed(run_dir, recipe, **identity):
        splits = Splits.of(corpus, ModelEncoder(frozen.tokenizer), recipe, run_dir / "tokens")

    importance = _importance(frozen, splits, recipe, run_dir / "importance.npz", console)
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
        ordered = _train_together(frozen, ordered, ladder, recipe, splits, run_dir / "joint", mesh, console)
    served = _as_stored(frozen, ordered, weights)
    for level in ladder.levels:
        found = _recover(frozen, served, ladder, level, recipe, splits, run_dir, mesh, console)
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
        out,
        cfg=frozen.cfg,
        params=((each, ordered[each]) for each in param_specs(frozen.cfg)),
        weights=weights,
        tokenizer=frozen.tokenizer.files,
        name=name or frozen.name,
        parts=parts,
    )
    write_json(run_dir / "summary.json", facts)
    return facts


@dataclasses.dataclass(frozen=True)
class _Level:
    """Result of a level's training: its adapter, if that lowers the loss, and facts for people."""

    recovery: Recovery | None
    facts: dict[str, Any]


def _importance(
    frozen: FrozenModel, splits: Splits, recipe: ElasticRecipe, path: Path, console: Console
) -> Importance:
    """Measures importances of units and layers, or reads them from `path`."""
    if path.exists():
        return Importance.read(path, frozen.cfg.layers)
    # One epoch at most: the same text again adds nothing.
    steps = -(-len(splits.train.epoch(0)) // recipe.batch)
    batches = (splits.train.batch_at(step) for step in range(steps))
    chosen = calibration_batches(batches, recipe.calibration_tokens)
    with ProgressBar(console=console, transient=True) as bar:
        task = bar.add_task("importance", total=len(chosen))
        found = measure(
            frozen.cfg,
            frozen.params,
            chosen,
            remat=recipe.remat,
            report=lambda done, total: bar.update(task, completed=done, total=total),
        )
    found.write(path)
    return found


def _train_together(
    frozen: FrozenModel,
    ordered: Mapping[str, np.ndarray],
    ladder: Ladder,
    recipe: ElasticRecipe,
    splits: Splits,
    folder: Path,
    mesh: jax.sharding.Mesh,
    console: Console,
) -> dict[str, np.ndarray]:
    """Trains all levels together; returns the whole model's weights."""
    console.print(f"training {len(ladder.levels)} levels together", soft_wrap=True)
    trainer = Trainer(joint_job(frozen.cfg, ordered, ladder, recipe), recipe, mesh)
    best = fit(trainer, splits.train.batch_at, splits.held_out_batches, folder, console, splits.source_names)
    return gathered(best.params)


def _recover(
    frozen: FrozenModel,
    served: Mapping[str, np.ndarray],
    ladder: Ladder,
    level: int,
    recipe: ElasticRecipe,
    splits: Splits,
    run_dir: Path,
    mesh: jax.sharding.Mesh,
    console: Console,
) -> _Level:
    """Measures a level, and trains its adapter if the recipe asks for one."""
    cfg = sub_config(frozen.cfg, ladder, level)
    params = sub_model({name: jnp.asarray(value) for name, value in served.items()}, cfg)
    trainer = Trainer(lora_job(cfg, params, recipe), recipe, mesh)
    share = layer_parameters(cfg) / layer_parameters(frozen.cfg)
    console.print(f"level {level}: {100 * share:.1f} % of the layers' parameters", soft_wrap=True)
    if level == WHOLE or recipe.recovery != "lora":
        loss, _ = trainer.evaluate(trainer.initial().params, splits.held_out_batches())
        return _Level(None, {"share": share, "held_out": loss})
    fitted = fit_adapter(trainer, splits, run_dir / "levels" / str(level), console)
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
