"""Runs the stages that make a model elastic: importance, joint recovery, and each level's adapter.

Every stage resumes from its files in the run's folder. Weights are streams of tensors, each of which is
sharded over the mesh; no stage has a whole model on the host.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from jaxllm.bundle import WeightFormat
from jaxllm.bundle.levels import Recovery
from jaxllm.bundle.writer import stored_form
from jaxllm.config import WHOLE, ModelConfig
from jaxllm.elastic.ladder import Ladder, layer_parameters, sub_config
from jaxllm.models.parameters import Params, param_specs
from jaxllm.quant import dequantize
from jaxllm.training.data.packing import Splits
from jaxllm.training.elastic.importance import Importance, calibration_batches, measure
from jaxllm.training.elastic.job import (
    ElasticRecipe,
    adapter_of_level,
    cut_adapter,
    divergence_job,
    joint_job,
    level_counts,
    level_job,
)
from jaxllm.training.loop.fitting import fit
from jaxllm.training.loop.monitoring import Monitoring, progress_bar
from jaxllm.training.loop.parallel import laid_out, one_by_one
from jaxllm.training.loop.run_files import wait_for_first
from jaxllm.training.loop.trainer import Trainer
from jaxllm.training.lora.run import fit_adapter
from jaxllm.training.seq2seq.pairs import PairSplits

# Function that reads a model's tensors anew, in the order of `param_specs`.
Tensors = Callable[[], Iterator[tuple[str, np.ndarray]]]
Dense = dict[str, jax.Array]
# The whole model goes back to the one before by halving this often.
_HALVINGS = 8


@dataclasses.dataclass(frozen=True)
class ElasticRun:
    """State that all stages of a run share; the first training stage is traced if `monitoring` traces."""

    cfg: ModelConfig
    recipe: ElasticRecipe
    splits: Splits | PairSplits
    folder: Path
    mesh: Mesh
    console: Console
    monitoring: Monitoring

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of weights that are not trained."""
        return jnp.dtype(self.recipe.computed_in)


def importance_of(run: ElasticRun, params: Params) -> Importance:
    """Measures importances of units and layers, or reads earlier results."""
    recipe, path = run.recipe, run.folder / "importance.npz"
    wait_for_first("importance")
    if path.exists():
        return Importance.read(path, run.cfg)
    # One epoch at most: repeating the text adds nothing.
    chosen = calibration_batches(run.splits.first_epoch(), recipe.calibration_tokens)
    with progress_bar(run.console, "importance") as report:
        found = measure(
            run.cfg, params, chosen, mesh=run.mesh, remat=recipe.remat, by=recipe.importance, report=report
        )
    if jax.process_index() == 0:
        found.write(path)
    return found


def train_together(run: ElasticRun, tensors: Tensors, ladder: Ladder) -> tuple[Tensors, dict[str, float]]:
    """Trains all levels together.

    Returns:
      The whole model's new weights, and facts: with a bound, the actual divergence.
    """
    splits, console, recipe, cfg = run.splits, run.console, run.recipe, run.cfg
    console.print(f"training {len(ladder.levels)} levels together", soft_wrap=True)
    wide, bound = jnp.dtype(jnp.float32), recipe.whole_kl_nats
    before = laid_out(tensors(), cfg, run.mesh, run.dtype) if bound else None
    # The first step donates its initial parameters.
    job = joint_job(cfg, laid_out(tensors(), cfg, run.mesh, wide), ladder, recipe, original=before)
    trainer = Trainer(job, recipe, run.mesh)
    batches, names = (splits.train.batch_at, splits.held_out_batches), splits.source_names
    best = fit(trainer, *batches, run.folder / "joint", names, run.monitoring)
    if before is None:
        return (lambda: one_by_one(best.params, cfg)), {}
    del job, trainer
    meter = Trainer(divergence_job(cfg, before, recipe), recipe, run.mesh)
    start = laid_out(tensors(), cfg, run.mesh, wide)
    kept, share, nats = within_bound(
        start, best.params, lambda params: meter.evaluate(params, splits.held_out_batches())[0], bound
    )
    console.print(
        f"the whole model is {nats:.4f} nats from the one before, {100 * share:.1f} % of the way",
        soft_wrap=True,
    )
    return (lambda: one_by_one(kept, cfg)), {"whole_kl_nats": nats, "whole_share": share}


def within_bound(
    start: Dense, end: Dense, divergence: Callable[[Dense], float], bound: float
) -> tuple[Dense, float, float]:
    """Returns the parameters on the line from `start` to `end` that go as far as a bound allows.

    Args:
      start: float32 arrays.
      end: likewise, under the same names.
      divergence: function from parameters to their divergence from `start`, in nats.
      bound: upper bound of the divergence, above 0.

    Returns:
      The parameters, their share of the way in [0, 1], and their divergence: at most the bound, or that of
        `start` by rounding only.
    """
    between = jax.jit(
        lambda start, end, share: jax.tree.map(lambda one, other: one + share * (other - one), start, end)
    )
    found = end, 1.0, divergence(end)
    if found[2] <= bound:
        return found
    low, high, best = 0.0, 1.0, None
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        params = between(start, end, np.float32(share))
        nats = divergence(params)
        if nats <= bound:
            low, best = share, (params, share, nats)
        else:
            high = share
    return best or (start, 0.0, divergence(start))


def as_stored(
    cfg: ModelConfig, tensors: Iterable[tuple[str, np.ndarray]], weights: WeightFormat
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors dequantized from their stored width, as an adapter will see them."""
    specs = param_specs(cfg)
    for name, value in tensors:
        yield name, np.asarray(dequantize(stored_form(value, specs[name], weights), jnp.float32))  # pyright: ignore


def recover_levels(
    run: ElasticRun, served: Params, ladder: Ladder
) -> Iterator[tuple[int, Recovery | None, dict[str, Any]]]:
    """Measures every level, and trains its adapter if the recipe has one; one compiled step serves all.
    Yields each level, its adapter, if that lowers the loss, and facts for the summary.

    Args:
      run: state of the run.
      served: the whole model's parameters on the mesh, as served.
      ladder: the levels.
    """
    cfg, recipe, splits = run.cfg, run.recipe, run.splits
    adapters = recipe.recovery == "lora"
    whole = Trainer(level_job(cfg, served, ladder, recipe, adapters=adapters), recipe, run.mesh)
    first = ladder.levels[0]
    for level in ladder.levels:
        part = sub_config(cfg, ladder, level)
        share = layer_parameters(part) / layer_parameters(cfg)
        run.console.print(f"level {level}: {100 * share:.1f} % of the layers' parameters", soft_wrap=True)
        init = adapter_of_level(cfg, part, recipe.lora, recipe.seed) if adapters else {}
        trainer = whole.beside(init, level_counts(cfg, ladder, level))
        if level == WHOLE or not adapters:
            loss, _ = trainer.evaluate(trainer.initial().params, splits.held_out_batches())
            yield level, None, {"share": share, "held_out": loss}
            continue
        monitoring = run.monitoring if level == first else run.monitoring.untraced()
        fitted = fit_adapter(trainer, splits, run.folder / "levels" / str(level), monitoring)
        adapter = cut_adapter(part, fitted.adapter)
        facts = {
            "share": share,
            "held_out": fitted.without,
            "recovered": fitted.loss,
            "best_step": fitted.best_step,
        }
        helps = fitted.loss < fitted.without
        yield level, Recovery(adapter, recipe.lora.scaling) if helps else None, facts
