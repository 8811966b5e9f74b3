"""Trains low-rank adapters on a frozen model, and saves them in PEFT's layout (LoRA, arXiv 2106.09685).

The model's weights may have any width; over 8 or 4 bits this is QLoRA (arXiv 2305.14314) without its paging.

A run's folder has `recipe.json`, `tokens/`, `checkpoints/`, `metrics.jsonl`, and at the end `adapter/` and
`summary.json`. The frozen weights are read from the model's folder or bundle and never written.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from jaxllm.bundle import WeightFormat
from jaxllm.checkpoints import huggingface, peft
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.host_settings import own_jax_settings
from jaxllm.models.features import require_decoder_alone, require_room
from jaxllm.models.lora import LoraConfig, adapt, adapted_parameters, init_adapter
from jaxllm.models.parameters import Params
from jaxllm.options import option
from jaxllm.training.data.corpus import Corpus
from jaxllm.training.data.encoders import ModelEncoder
from jaxllm.training.data.packing import Splits
from jaxllm.training.data.sources import Source
from jaxllm.training.loop.dry_run import estimate, frozen_shapes
from jaxllm.training.loop.fitting import FrozenModel, fit, fitted_to_window
from jaxllm.training.loop.hardware import step_flops_per_token
from jaxllm.training.loop.losses import next_token_losses
from jaxllm.training.loop.monitoring import Monitoring
from jaxllm.training.loop.parallel import MeshShape, make_mesh, own_rows
from jaxllm.training.loop.run_files import claimed, wait_for_first, write_json
from jaxllm.training.loop.trainer import Job, Trainer
from jaxllm.training.seq2seq.forward import AnyBatch, outputs_of_any
from jaxllm.training.seq2seq.job import FAMILIES
from jaxllm.training.seq2seq.pairs import PairSplits, read_splits
from jaxllm.training.settings import TrainSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraRecipe(TrainSettings):
    """One run of low-rank adaptation; the options' help describes it."""

    folder = "lora"

    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    sources: tuple[Source, ...] = option(help="Training documents.", entries=1)
    held_out_share: float = option(
        0.02, "Share of the documents that is not trained on and picks the best checkpoint.", above=0, below=1
    )
    loader: Literal["packed", "grain"] = option("packed", "Rows of packed documents, or windows by grain.")
    # An adapter is small and starts at zero.
    weight_decay: float = option(0.0, "Decay of matrices.", low=0)
    warmup_steps: int = option(20, "Steps of linear warm-up.", low=0)


def lora_job(cfg: ModelConfig, params: Params, recipe: LoraRecipe) -> Job:
    """Returns the job that trains an adapter over the frozen model."""
    dtype, scaling = jnp.dtype(recipe.computed_in), recipe.lora.scaling
    adapted_parameters(cfg, recipe.lora.targets)

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return init_adapter(cfg, recipe.lora, key)

    def losses(adapter: dict[str, jax.Array], frozen: Params, batch: AnyBatch) -> tuple[jax.Array, jax.Array]:
        params = adapt(frozen, adapter, scaling)
        outputs = outputs_of_any(params, batch, cfg=cfg, dtype=dtype, remat=recipe.remat)
        return next_token_losses(outputs, batch), jnp.zeros(())

    flops = step_flops_per_token(cfg, recipe.row_tokens, adapter=True)
    return Job(init, losses, dict(params), cfg=cfg, frozen_cfg=cfg, flops_per_token=flops)


@dataclasses.dataclass(frozen=True)
class FittedAdapter:
    """Result of training: the best adapter, its step, and held-out losses with and without it."""

    adapter: dict[str, Any]
    best_step: int
    loss: float
    without: float


def fit_adapter(
    trainer: Trainer, splits: Splits | PairSplits, folder: Path, monitoring: Monitoring
) -> FittedAdapter:
    """Trains an adapter, or resumes from the checkpoints in `folder`.

    Args:
      trainer: trainer of a `lora_job`.
      splits: tokens of the run.
      folder: folder of `checkpoints/` and `metrics.jsonl`, created if missing.
      monitoring: destinations of the progress.
    """
    # An untrained adapter changes nothing: this is the loss of the model without one.
    without, _ = trainer.evaluate(trainer.initial().params, splits.held_out_batches())
    best = fit(
        trainer, splits.train.batch_at, splits.held_out_batches, folder, splits.source_names, monitoring
    )
    return FittedAdapter(trainer.whole(best.params), best.step, best.loss, without)


@own_jax_settings()
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
      recipe: recipe of the run.
      model: Hugging Face folder or bundle.
      run_dir: folder of the run, created if missing.
      data: folder of the recipe's sources.
      weights: width of a folder's frozen matrices; None for that of the recipe's precision.
      mesh_shape: devices; all of them along `data` by default.
      monitoring: destinations of the progress; the terminal's error stream by default.

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
    if weights is None and Path(model).is_dir():
        weights = recipe.frozen_in
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
        peft.write_adapter(run_dir / "adapter", frozen.cfg, recipe.lora, fitted.adapter, base=str(model))
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
    """Estimates memory and time of a run from only the config of a folder; see
    `jaxllm.training.loop.dry_run`.

    Raises:
      ConfigError: the mesh does not fit, or the device or the weight format is unknown.
      CheckpointError: the config cannot be read.
    """
    cfg = huggingface.read_config(model)
    require_decoder_alone(cfg, "estimates of training", "train without --dry-run")
    recipe = recipe.within(cfg.window_tokens).on_accelerator()
    mesh = make_mesh(mesh_shape or MeshShape(), recipe.batch // recipe.accumulate)
    frozen = frozen_shapes(cfg, weights or recipe.frozen_in)
    return estimate(lora_job(cfg, {}, recipe), recipe, mesh, frozen=frozen, device=device).facts(recipe)


def require_trainable(cfg: ModelConfig, recipe: LoraRecipe, what: str) -> None:
    """Rejects encoder-decoders that cannot be trained here, and recipes that they do not support.

    Args:
      cfg: config of the model; decoder-only models are always accepted.
      recipe: recipe of the run.
      what: name of what is trained, such as "adapters".

    Raises:
      ConfigError: it is rejected.
    """
    if cfg.encoder is None:
        return
    if cfg.model_type not in FAMILIES:
        raise ConfigError(
            f"{what} of encoder-decoders are trained of {', '.join(FAMILIES)}, and this is {cfg.model_type}; "
            "take one of these"
        )
    if recipe.loader != "packed":
        raise ConfigError(
            f"pairs are read by themselves, not by {recipe.loader}; leave loader out of the recipe"
        )
    if jax.process_count() > 1:
        raise ConfigError("encoder-decoders are trained by one process; start it without --coordinator")


def claimed_splits(
    run_dir: Path,
    recipe: LoraRecipe,
    frozen: FrozenModel,
    mesh: Mesh,
    data: Path | None,
    console: Console,
    *,
    shortened_share: float = 0.0,
    weights: str = "",
) -> Splits | PairSplits:
    """Returns a run's training and held-out data; the first process claims its folder.

    Args:
      run_dir: folder of the run, created if missing.
      recipe: recipe of the run.
      frozen: the model; for an encoder-decoder the sources are of pairs.
      mesh: mesh that divides the rows of pairs.
      data: folder of the sources.
      console: console that malformed lines are printed on.
      shortened_share: see `Corpus`.
      weights: name of the output weights, if the run depends on them.

    Raises:
      ConfigError: a source is unusable, or the folder belongs to another run.
    """
    identity = {"model": frozen.fingerprint(), **({"weights": weights} if weights else {})}
    if frozen.cfg.encoder is not None:
        pairs = read_splits(
            recipe.sources,
            data,
            frozen.tokenizer,
            recipe,
            held_out_share=recipe.held_out_share,
            rows_multiple=recipe.accumulate * mesh.shape["data"] * mesh.shape["fsdp"],
        )
        with claimed(run_dir, recipe, **identity, documents=pairs.digest):
            pass
        return pairs
    corpus = Corpus.open(recipe.sources, data, recipe.held_out_share, shortened_share=shortened_share)
    corpus.tell(console)
    own = own_rows(mesh, recipe.batch, recipe.accumulate)
    with claimed(run_dir, recipe, **identity, documents=corpus.digest()):
        encoder, folder = ModelEncoder(frozen.tokenizer), run_dir / "tokens"
        splits = Splits.of(corpus, encoder, recipe, folder, loader=recipe.loader, own=own)
    wait_for_first("recipe")
    return splits


def _size(trainer: Trainer) -> int:
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(trainer.abstract().params))
