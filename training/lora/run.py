"""Trains from a model: low-rank adapters over its frozen weights, in PEFT's layout (LoRA, arXiv 2106.09685),
or all of its weights, on texts and on answers of conversations.

Frozen weights may have any width; over 8 or 4 bits this is QLoRA (arXiv 2305.14314) without its paging.

A run's folder has `recipe.json`, `tokens/`, `checkpoints/`, `metrics.jsonl`, and at the end `adapter/` or
`hf/`, and `summary.json`. The model's own files are never written.
"""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxllm.bundle import WeightFormat
from jaxllm.checkpoints import huggingface, peft, tokenizer_folder
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.files.input_files import read_json
from jaxllm.host_settings import own_jax_settings
from jaxllm.models.features import require_decoder_alone, require_room
from jaxllm.models.lora import LoraConfig, adapt, adapted_parameters, init_adapter
from jaxllm.models.parameters import Params
from jaxllm.options import option
from jaxllm.text.tokenizer import TokenizerFiles
from jaxllm.training.data.corpus import Corpus
from jaxllm.training.data.encoders import ModelEncoder
from jaxllm.training.data.rows import Splits
from jaxllm.training.data.sources import Source
from jaxllm.training.loop.dry_run import estimate, frozen_shapes
from jaxllm.training.loop.fitting import MODEL_FOLDER, Fitted, FrozenModel, fit, fitted_to_window
from jaxllm.training.loop.hardware import step_flops_per_token
from jaxllm.training.loop.losses import next_token_losses
from jaxllm.training.loop.parallel import ALL_DEVICES, MeshShape, mesh_for, own_rows
from jaxllm.training.loop.run_files import Run, claimed, is_first, wait_for_first
from jaxllm.training.loop.trainer import Job, Trainer
from jaxllm.training.pretrain.run import PretrainRecipe, pretrain_job
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


def tune(trainer: Trainer, splits: Splits | PairSplits, run: Run) -> tuple[float, Fitted]:
    """Trains from a model, or resumes from the checkpoints of `run`.

    Args:
      trainer: trainer of a job whose initial parameters compute what the model computes.
      splits: tokens of the run.
      run: the run.

    Returns:
      The model's held-out loss before, in nats per token, and the best checkpoint.
    """
    before, _ = trainer.evaluate(trainer.initial().params, splits.held_out_batches())
    batches = splits.train.batch_at, splits.held_out_batches
    return before, fit(trainer, *batches, run, splits.source_names)


@own_jax_settings()
def train_lora(recipe: LoraRecipe, model: Path, run: Run, *, weights: WeightFormat | None = None) -> Path:
    """Trains an adapter, or resumes the run, and writes the best.

    Args:
      recipe: recipe of the run.
      model: Hugging Face folder or bundle.
      run: the run.
      weights: width of a folder's frozen matrices; None for that of the recipe's precision.

    Returns:
      The adapter's folder, `adapter` in the run's.

    Raises:
      ConfigError: the sources or recipe are unusable, or the folder belongs to another run.
      CheckpointError: the model cannot be read.
    """
    if weights is None and Path(model).is_dir():
        weights = recipe.frozen_in
    mesh = run.mesh(recipe)
    frozen = FrozenModel.read(model, weights, mesh=mesh, stack=True)
    require_room(frozen.cfg, "adapters")
    require_trainable(frozen.cfg, recipe, "adapters")
    # Shorter rows are a multiple of as many, which the mesh divides as well.
    recipe = fitted_to_window(recipe, frozen.cfg, run)
    job, adapter = lora_job(frozen.cfg, frozen.params, recipe), run.folder / "adapter"

    def write(params: dict[str, Any]) -> None:
        peft.write_adapter(adapter, frozen.cfg, recipe.lora, params, base=str(model))

    what = f"of rank {recipe.lora.rank} on {frozen.name}"
    _train_over(frozen, recipe, job, run, mesh, what=what, losses=("without", "with"), write=write)
    return adapter


@own_jax_settings()
def train_on(recipe: PretrainRecipe, model: Path, run: Run) -> Path:
    """Trains all weights of a model, or resumes the run, and exports the best.

    Args:
      recipe: recipe of the run; its model is replaced by the folder's.
      model: Hugging Face folder to start from.
      run: the run.

    Returns:
      The Hugging Face folder, `hf` in the run's.

    Raises:
      ConfigError: the sources or recipe are unusable, or the folder belongs to another run.
      CheckpointError: the model cannot be read.
    """
    if recipe.teacher_share:
        raise ConfigError("a model that is trained on has no teacher: take a recipe with teacher_share = 0")
    if not recipe.sources:
        raise ConfigError("say with --text or --chat what to learn, or take a recipe that names its sources")
    cfg = huggingface.read_config(model)
    require_decoder_alone(cfg, "training all weights of a model", "train an adapter (jaxllm lora --pairs)")
    recipe = dataclasses.replace(fitted_to_window(recipe, cfg, run), model=cfg)
    mesh = run.mesh(recipe)
    start = FrozenModel.read(model, "f32", mesh=mesh, stack=True)
    job = dataclasses.replace(pretrain_job(recipe), init=dict(start.params))
    folder, what = run.folder / MODEL_FOLDER, f"of {start.name}"

    def write(params: dict[str, Any]) -> None:
        _write_like(folder, Path(model), cfg, start.tokenizer.files, params)

    _train_over(start, recipe, job, run, mesh, what=what, losses=("before", "after"), write=write)
    return folder


def _train_over(
    model: FrozenModel,
    recipe: LoraRecipe | PretrainRecipe,
    job: Job,
    run: Run,
    mesh: Mesh,
    *,
    what: str,
    losses: tuple[str, str],
    write: Callable[[dict[str, Any]], None],
) -> None:
    """Trains a job that begins at a model, writes the best parameters in the first process, and reports the
    run: `what` describes the parameters, `losses` names the held-out losses before and after."""
    splits = claimed_splits(run, recipe, model, mesh)
    trainer = Trainer(job, recipe, mesh)
    count = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(trainer.abstract().params))
    run.say(
        f"{count:,} parameters {what} on {mesh.size} devices; {splits.size()}; {recipe.steps:,} steps, "
        f"{splits.epochs_at(recipe.steps):.1f} epochs"
    )
    before, best = tune(trainer, splits, run)
    whole = trainer.whole(best.params)
    if is_first():
        write(whole)
    held_out = dict(zip(losses, (before, best.loss), strict=True))
    run.finish({"parameters": count, "best_step": best.step, "held_out": held_out})
    wait_for_first("result")


def _write_like(folder: Path, model: Path, cfg: ModelConfig, files: TokenizerFiles, params: Any) -> None:
    """Writes a folder like the one that training started from, with new weights."""
    config = read_json(model / "config.json", "download the folder again")
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config}
    huggingface.write_folder(folder, cfg, params, extra_config={"bos_token_id": None, **ids})
    tokenizer_folder.write_tokenizer(folder, files)
    if (model / "generation_config.json").is_file():
        shutil.copyfile(model / "generation_config.json", folder / "generation_config.json")


def dry_run_lora(
    recipe: LoraRecipe,
    model: Path,
    *,
    weights: WeightFormat | None = None,
    mesh_shape: MeshShape = ALL_DEVICES,
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
    mesh = mesh_for(mesh_shape, recipe)
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
    run: Run,
    recipe: LoraRecipe | PretrainRecipe,
    model: FrozenModel,
    mesh: Mesh,
    *,
    shortened_share: float = 0.0,
    weights: str = "",
) -> Splits | PairSplits:
    """Returns a run's training and held-out data, and prints what was left out; the first process claims the
    run's folder.

    Args:
      run: the run.
      recipe: recipe of the run.
      model: the model; for an encoder-decoder the sources are of pairs.
      mesh: mesh that divides the rows.
      shortened_share: see `Corpus`.
      weights: name of the output weights, if the run depends on them.

    Raises:
      ConfigError: a source is unusable, or the folder belongs to another run.
    """
    identity = {"model": model.fingerprint(), **({"weights": weights} if weights else {})}
    if model.cfg.encoder is not None:
        pairs = read_splits(
            recipe.sources,
            run.data,
            model.tokenizer,
            recipe,
            held_out_share=recipe.held_out_share,
            rows_multiple=recipe.accumulate * mesh.shape["data"] * mesh.shape["fsdp"],
        )
        with claimed(run.folder, recipe, **identity, documents=pairs.digest):
            pass
        return pairs
    corpus = Corpus.open(recipe.sources, run.data, recipe.held_out_share, shortened_share=shortened_share)
    corpus.tell(run.own_console)
    own = own_rows(mesh, recipe.batch, recipe.accumulate)
    with claimed(run.folder, recipe, **identity, documents=corpus.digest()):
        encoder, folder = ModelEncoder(model.tokenizer), run.folder / "tokens"
        splits = Splits.of(corpus, encoder, recipe, folder, loader=recipe.loader, own=own)
    wait_for_first("recipe")
    return splits
