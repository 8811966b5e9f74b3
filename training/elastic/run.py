"""Makes an elastic bundle of a Hugging Face folder: importance, order, levels, recovery (ELMS, section 3).

A run's folder has `recipe.json`, `tokens/`, `importance.npz`, `levels/{level}/` or `joint/` with the
recovery's checkpoints and metrics, `tlm-{digest}/` with the tiny LM's run, and at the end `summary.json`. A
resumed run reads the results of finished steps there. Weights are streams of tensors, each of which is
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

from jaxllm.bundle import WeightFormat, write_bundle
from jaxllm.bundle.kit import write_kit
from jaxllm.bundle.levels import Recovery, elastic_parts
from jaxllm.bundle.tiny_lm import tiny_lm_parts
from jaxllm.bundle.writer import stored_form
from jaxllm.checkpoints import huggingface
from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.elastic.ladder import Ladder, chosen_ladder, layer_parameters, layers_ladder, sub_config
from jaxllm.elastic.units import reorder
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.host_settings import own_jax_settings
from jaxllm.models.features import require_decoder_alone, require_feature
from jaxllm.models.lora import init_adapter
from jaxllm.models.parameters import Params, param_specs
from jaxllm.models.scanned_layers import is_stacked, stacked
from jaxllm.quant import dequantize
from jaxllm.training.calibration import BundleOutput
from jaxllm.training.data.documents import digesting, model_digest
from jaxllm.training.data.rows import Splits
from jaxllm.training.decoders import claimed_splits, require_trainable, tune
from jaxllm.training.elastic.importance import (
    Importance,
    calibration_batches,
    magnitudes,
    measure,
    random_order,
    unit_step,
)
from jaxllm.training.elastic.job import (
    ElasticRecipe,
    adapter_of_level,
    cut_adapter,
    cut_level_job,
    divergence_job,
    joint_job,
    level_counts,
    level_job,
    wide_adapter,
)
from jaxllm.training.elastic.tiny_lm.labels import ElasticModel
from jaxllm.training.elastic.tiny_lm.recipe import TinyLmRun
from jaxllm.training.elastic.tiny_lm.run import TinyLmSources, train_tiny_lm
from jaxllm.training.loop.dry_run import (
    estimate,
    estimate_of,
    frozen_shapes,
    known_figures,
    placed_shapes,
    recomputed_share,
    rows_shapes,
)
from jaxllm.training.loop.fitting import FrozenModel, fit, fitted_to_window
from jaxllm.training.loop.hardware import step_flops_per_token
from jaxllm.training.loop.parallel import (
    ALL_DEVICES,
    MeshShape,
    laid_out,
    mesh_for,
    one_by_one,
    placed,
    require_divisible,
)
from jaxllm.training.loop.run_files import Run, is_first, progress_bar, wait_for_first, write_json
from jaxllm.training.loop.trainer import Trainer
from jaxllm.training.seq2seq.pairs import PairSplits

# Function that reads a model's tensors anew, in the order of `param_specs`.
Tensors = Callable[[], Iterator[tuple[str, np.ndarray]]]
Dense = dict[str, jax.Array]
# The whole model goes back to the one before by halving this often.
_HALVINGS = 8


@dataclasses.dataclass(frozen=True)
class ElasticRun:
    """State that all stages of a run share; the first training stage is traced if `run` is."""

    cfg: ModelConfig
    recipe: ElasticRecipe
    splits: Splits | PairSplits
    mesh: Mesh
    run: Run

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of weights that are not trained."""
        return jnp.dtype(self.recipe.computed_in)


def importance_of(state: ElasticRun, params: Params) -> Importance:
    """Measures importances of units and layers, or reads earlier results."""
    recipe, path = state.recipe, state.run.folder / "importance.npz"
    wait_for_first("importance")
    if path.exists():
        return Importance.read(path, state.cfg)
    # One epoch at most: repeating the text adds nothing.
    chosen = calibration_batches(state.splits.first_epoch(), recipe.calibration_tokens)
    with progress_bar(state.run.own_console, "importance") as report:
        found = measure(
            state.cfg,
            params,
            chosen,
            mesh=state.mesh,
            remat=recipe.remat,
            by=recipe.importance,
            report=report,
        )
    if is_first():
        found.write(path)
    return found


def train_together(state: ElasticRun, tensors: Tensors, ladder: Ladder) -> tuple[Tensors, dict[str, float]]:
    """Trains all levels together.

    Returns:
      The whole model's new weights, and facts: with a bound, the actual divergence.
    """
    splits, recipe, cfg = state.splits, state.recipe, state.cfg
    state.run.say(f"training {len(ladder.levels)} levels together")
    wide, bound = jnp.dtype(jnp.float32), recipe.whole_kl_nats
    before = laid_out(tensors(), cfg, state.mesh, state.dtype) if bound else None
    # The first step donates its initial parameters.
    job = joint_job(cfg, laid_out(tensors(), cfg, state.mesh, wide), ladder, recipe, original=before)
    trainer = Trainer(job, recipe, state.mesh)
    batches = splits.train.batch_at, splits.held_out_batches
    best = fit(trainer, *batches, state.run.stage("joint"), splits.source_names)
    if before is None:
        return (lambda: one_by_one(best.params, cfg)), {}
    del job, trainer
    meter = Trainer(divergence_job(cfg, before, recipe), recipe, state.mesh)
    start = laid_out(tensors(), cfg, state.mesh, wide)
    kept, share, nats = within_bound(
        start, best.params, lambda params: meter.evaluate(params, splits.held_out_batches())[0], bound
    )
    state.run.say(f"the whole model is {nats:.4f} nats from the one before, {100 * share:.1f} % of the way")
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
        yield name, np.asarray(dequantize(stored_form(name, value, specs[name], weights), jnp.float32))  # pyright: ignore


def recover_levels(
    state: ElasticRun, served: Params, ladder: Ladder
) -> Iterator[tuple[int, Recovery | None, dict[str, Any]]]:
    """Measures every level, and trains its adapter if the recipe has one; one compiled step serves all.
    Yields each level, its adapter, if that lowers the loss, and facts for the summary.

    Args:
      served: the whole model's parameters on the mesh, as served.
    """
    cfg, recipe, splits = state.cfg, state.recipe, state.splits
    adapters = recipe.recovery == "lora"
    # From the largest on, whose adapters smaller ones begin at.
    largest_first = ladder.levels[::-1]
    cut = adapters and cfg.encoder is None and not is_stacked(served)
    counted = adapters and not cut
    whole = Trainer(level_job(cfg, served, ladder, recipe, adapters=counted), recipe, state.mesh)
    adapter: dict[str, np.ndarray] = {}
    for level in largest_first:
        part = sub_config(cfg, ladder, level)
        share = layer_parameters(part) / layer_parameters(cfg)
        state.run.say(f"level {level}: {100 * share:.1f} % of the layers' parameters")
        if cut and level != FULL_LEVEL:
            trainer = Trainer(cut_level_job(cfg, served, ladder, level, recipe, adapter), recipe, state.mesh)
        else:
            new = counted and not adapter
            init = (
                adapter_of_level(cfg, part, recipe.lora, recipe.seed) if new else wide_adapter(cfg, adapter)
            )
            trainer = whole.beside(init, level_counts(cfg, ladder, level))
        if level == FULL_LEVEL or not adapters:
            loss, _ = trainer.evaluate(trainer.initial().params, splits.held_out_batches())
            yield level, None, {"share": share, "held_out": loss}
            continue
        stage = state.run.stage("levels", str(level), traced=level == largest_first[1])
        start, best = tune(trainer, splits, stage)
        loss = start
        if adapter:
            # It began at the adapter of a larger level; a new one changes nothing.
            without = jax.tree.map(jnp.zeros_like, trainer.initial().params)
            loss, _ = trainer.evaluate(without, splits.held_out_batches())
        adapter = cut_adapter(part, trainer.whole(best.params))
        facts = {"share": share, "held_out": loss, "start": start, "recovered": best.loss}
        found = Recovery(adapter, recipe.lora.scaling) if best.loss < loss else None
        yield level, found, {**facts, "best_step": best.step}


@own_jax_settings()
def elasticize(
    recipe: ElasticRecipe,
    model: Path,
    out: BundleOutput,
    run: Run,
    *,
    tiny_lm: TinyLmRun | None = None,
) -> dict[str, Any]:
    """Makes an elastic bundle, or resumes the run.

    Args:
      tiny_lm: training of the bundle's tiny LM; None makes a bundle without one.

    Returns:
      The summary: anchors, and for each level its share of parameters and held-out losses, in nats per token.

    Raises:
      ConfigError: a recipe or its sources do not fit the model, or the folder belongs to another run.
      CheckpointError: the model or the encoder cannot be read.
    """
    model = Path(model)
    if not model.is_dir():
        raise CheckpointError(
            f"{model} is no Hugging Face folder; units are ordered before a bundle is made: give the folder "
            "that it was prepared from"
        )
    if tiny_lm is not None and run.data is None:
        raise ConfigError(
            "a tiny LM learns from tasks: say with --data where they are, or leave it out (--tiny-lm none)"
        )
    if tiny_lm is not None and jax.process_count() > 1:
        raise ConfigError(
            "a tiny LM is trained in one process: leave it out (--tiny-lm none), and run the same command in "
            "one process for it when the levels are done"
        )
    checkpoint = huggingface.Checkpoint(model)
    cfg = checkpoint.cfg
    require_feature(cfg, "levels")
    require_trainable(cfg, recipe, "levels")
    if cfg.encoder is not None and tiny_lm is not None:
        raise ConfigError(
            "a tiny LM shortens prompts of decoders alone; make the levels of an encoder-decoder without one "
            "(--tiny-lm none)"
        )
    if out.kit is not None and recipe.recovery == "joint":
        raise ConfigError(
            "a kit has no weights, and a joint recovery changes them; take --recovery lora, or no --kit"
        )
    if cfg.encoder is not None and recipe.units != "equal":
        raise ConfigError("levels of an encoder-decoder are an equal share of each layer: take --units equal")
    if cfg.encoder is not None and recipe.shortened_share:
        raise ConfigError("sources do not lose words: set shortened_share to 0 in the recipe")
    recipe = fitted_to_window(recipe, cfg, run)
    mesh = run.mesh(recipe)
    frozen = FrozenModel.read(model, recipe.frozen_in, mesh=mesh, stack=True)
    # Read first, although it is trained last: a missing file shows before hours of work.
    tlm_sources = None
    if tiny_lm is not None and run.data is not None:
        tlm = dataclasses.replace(tiny_lm.recipe, levels=recipe.levels)
        tlm_sources = TinyLmSources.read(tlm, run.data, frozen.tokenizer, cfg.window_tokens, tiny_lm.encoder)
    weights = out.weights or checkpoint.weight_format
    splits = claimed_splits(
        run, recipe, frozen, mesh, shortened_share=recipe.shortened_share, weights=weights
    )
    state = ElasticRun(cfg, recipe, splits, mesh, run)
    importance = importance_of(state, frozen.params)
    tokenizer, name = frozen.tokenizer, frozen.name
    # Read again in order, instead of permuted: so there is only one copy on host and devices.
    del frozen
    if recipe.order == "magnitude":
        order = magnitudes(cfg, checkpoint.params())
    else:
        order = random_order(cfg, recipe.seed) if recipe.order == "random" else importance.order(cfg)
    if recipe.units == "global":
        scores = importance.groups, importance.neurons
        ladder = chosen_ladder(cfg, recipe.levels, *scores, depth=recipe.depth)
    elif recipe.units == "layers":
        ladder = layers_ladder(cfg, recipe.levels, importance.layers)
    else:
        ladder = importance.ladder(recipe.levels, recipe.anchor_share)

    def ordered() -> Iterator[tuple[str, np.ndarray]]:
        return reorder(cfg, checkpoint.params(), order)

    tensors: Tensors = ordered
    facts = {**_side_facts(ladder, importance), "levels": {}}
    if recipe.recovery == "joint":
        tensors, measured = train_together(state, ordered, ladder)
        facts |= measured
    digests: dict[str, str] = {}
    served = laid_out(digesting(as_stored(cfg, tensors(), weights), digests), cfg, mesh, state.dtype)
    recoveries: dict[int, Recovery] = {}
    for level, recovery, own in recover_levels(state, served, ladder):
        facts["levels"][str(level)] = own
        if recovery is not None:
            recoveries[level] = recovery
    parts = elastic_parts(
        ladder, recoveries, order=order, facts={"recovery": recipe.recovery, "order": recipe.order, **facts}
    )
    if tlm_sources is not None:
        if is_stacked(served):
            served = placed(as_stored(cfg, tensors(), weights), mesh, state.dtype)
        # Steps that run once use replicated parameters only on the first device.
        near = {
            name: each.addressable_data(0) if each.is_fully_replicated else each
            for name, each in served.items()
        }
        elastic = ElasticModel(
            cfg=cfg, params=near, ladder=ladder, tokenizer=tokenizer, recoveries=recoveries
        )
        # Named by the levels' weights and adapters, which make the labels. One folder for each model, because
        # a resumed recovery may lead to other adapters.
        identity = {"model": cfg, "ladder": ladder, "recovered": sorted(recoveries), "tensors": digests}
        digest = model_digest(identity, *(recoveries[level].adapter for level in sorted(recoveries)))
        stage = run.stage(f"tlm-{digest[:12]}", traced=False)
        parts |= tiny_lm_parts(train_tiny_lm(tlm_sources, elastic, stage, name=digest))
    pairs = tensors()
    if is_first():
        write_bundle(
            out.path,
            cfg=cfg,
            params=pairs,
            weights=weights,
            tokenizer=tokenizer.files,
            name=out.name or name,
            parts=parts,
        )
        if out.kit is not None:
            write_kit(out.kit, cfg, checkpoint.params(), parts)
        write_json(run.folder / "summary.json", facts)
    else:
        # All processes have to gather tensors that are divided over processes.
        for _ in pairs:
            pass
    wait_for_first("bundle")
    return facts


def _side_facts(ladder: Ladder, importance: Importance) -> dict[str, Any]:
    """Anchors, and the growth of the loss without each layer in nats per token; likewise of an encoder."""
    facts = {"anchors": list(ladder.anchors), "layer_importance": importance.layers.tolist()}
    if importance.encoder is not None and ladder.encoder is not None:
        facts["encoder"] = _side_facts(ladder.encoder, importance.encoder)
    return facts


def dry_run_elastic(
    recipe: ElasticRecipe, model: Path, *, mesh_shape: MeshShape = ALL_DEVICES, device: str = ""
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
    require_feature(cfg, "levels")
    require_decoder_alone(cfg, "estimates of training", "make levels without --dry-run")
    recipe = recipe.within(cfg.window_tokens).on_accelerator()
    mesh = mesh_for(mesh_shape, recipe)
    require_divisible(cfg, mesh)
    ladder = Ladder(levels=recipe.levels)
    frozen: Any = frozen_shapes(cfg, recipe.frozen_in)
    with jax.set_mesh(mesh):
        step: Any = unit_step(cfg, mesh, remat=recipe.remat, by=recipe.importance)
        rows = rows_shapes(recipe.batch, recipe.row_tokens, mesh)
        compiled = step.trace(placed_shapes(frozen, mesh), rows).lower().compile()
    tokens = recipe.batch * recipe.row_tokens
    gradient = step_flops_per_token(cfg, recipe.row_tokens) * tokens
    # The loss is computed without each layer as well, and of the whole model: a third of a gradient each.
    flops = gradient * (1 + recomputed_share(recipe.remat, 1 / 3) + (cfg.layers + 1) / 3)
    steps = -(-recipe.calibration_tokens // tokens)
    stages = {"importance": estimate_of(compiled, mesh, device=device, step_flops=flops, steps=steps)}
    if recipe.recovery == "joint":
        bound = recipe.whole_kl_nats > 0
        # The trainer stacks equal layers itself.
        whole = frozen_shapes(cfg, "f32", stack=False)
        job = joint_job(cfg, whole, ladder, recipe, original={} if bound else None)
        given = frozen if bound else None
        stages["joint recovery"] = estimate(job, recipe, mesh, frozen=given, device=device)
    if recipe.recovery == "lora":
        job = level_job(cfg, {}, ladder, recipe, adapters=False)
        job = dataclasses.replace(job, init=lambda key: init_adapter(cfg, recipe.lora, key))
        counts = jax.eval_shape(lambda: stacked(level_counts(cfg, ladder, FULL_LEVEL), cfg))
        found = estimate(job, recipe, mesh, frozen={**frozen, **counts}, device=device)
        # One level after the other; the whole model gets none.
        hours = found.device_hours * (len(ladder.levels) - 1)
        stages["adapters of levels"] = dataclasses.replace(found, device_hours=hours)
    hours = sum(each.device_hours for each in stages.values())
    return {"stages": {name: each.facts(recipe) for name, each in stages.items()}, "device_hours": hours}
