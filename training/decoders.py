"""Trains decoders on texts and on answers of conversations: from nothing, from a model, or adapters over one.

A new model goes from documents to a Hugging Face folder: tokenizer, token files, loop, export. Models of one
family share a tokenizer (`tokenizer=`); a smaller one may learn from a larger (`teacher=`). From a model
either all of its weights are trained, or low-rank adapters over them, in PEFT's layout (LoRA, arXiv
2106.09685). Frozen weights may have any width; over 8 or 4 bits this is QLoRA (arXiv 2305.14314) without its
paging. Encoder-decoders have adapters, too; new ones are trained by `jaxllm.training.seq2seq`.

A run's folder has `recipe.json`, `tokens/`, `checkpoints/`, `metrics.jsonl`, of a new model `tokenizer.json`,
and at the end `adapter/` or `hf/`, and `summary.json`. Calling again on the same folder resumes. The files of
the model that a run begins at are never written.
"""

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tokenizers import Tokenizer

from jaxllm.bundle import WeightFormat
from jaxllm.checkpoints import huggingface, peft, tokenizer_folder
from jaxllm.checkpoints.gguf_file import is_checkpoint
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.files.input_files import read_json
from jaxllm.host_settings import own_jax_settings
from jaxllm.models import parameters
from jaxllm.models.features import require_decoder_alone, require_feature
from jaxllm.models.lora import LoraConfig, adapt, adapted_parameters, init_adapter
from jaxllm.models.parameters import Params
from jaxllm.options import option
from jaxllm.text.library_tokenizer import parse_tokenizer_json
from jaxllm.text.tokenizer import TokenizerFiles
from jaxllm.training.data.corpus import Corpus, TokenizedDocuments, exchanged, write_tokens
from jaxllm.training.data.documents import (
    END_OF_TEXT,
    END_OF_TURN,
    PAD,
    ROLE_TEMPLATE,
    read_texts,
    text_document,
)
from jaxllm.training.data.encoders import ModelEncoder, PieceEncoder, token_id, train_tokenizer
from jaxllm.training.data.rows import Batch, Rows, Splits, evaluation_batches
from jaxllm.training.data.sources import Source, source_name
from jaxllm.training.loop.dry_run import estimate, frozen_shapes
from jaxllm.training.loop.fitting import (
    MODEL_FOLDER,
    TOKENIZER_FILE,
    Fitted,
    FrozenModel,
    export_best_of,
    fit,
    fitted_to_window,
    read_teacher,
    read_tokenizer_file,
)
from jaxllm.training.loop.hardware import step_flops_per_token
from jaxllm.training.loop.losses import distillation_losses, next_token_losses, outputs_of, router_penalty
from jaxllm.training.loop.parallel import ALL_DEVICES, MeshShape, mesh_for, own_rows
from jaxllm.training.loop.run_files import (
    Run,
    claimed,
    is_first,
    wait_for_first,
    write_json,
    write_text,
)
from jaxllm.training.loop.trainer import Job, Trainer
from jaxllm.training.seq2seq.forward import AnyBatch, outputs_of_any
from jaxllm.training.seq2seq.pairs import PairSplits, read_splits
from jaxllm.training.seq2seq.run import FAMILIES
from jaxllm.training.settings import TrainSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainRecipe(TrainSettings):
    """One pretraining run; the options' help describes it. A recipe without sources trains on any texts."""

    folder = "pretrain"

    model: ModelConfig
    sources: tuple[Source, ...] = option((), "Training documents, by paths under the folder of all data.")
    held_out_share: float = option(
        0.02, "Share of the documents that is not trained on and picks the best checkpoint.", above=0, below=1
    )
    loader: Literal["packed", "grain"] = option("packed", "Rows of packed documents, or windows by grain.")
    teacher_share: float = option(0.0, "Share of the loss from a teacher's distribution.", low=0, high=1)
    balance_weight: float = option(0.01, "Weight of the load-balancing loss of experts.", low=0)
    router_z_weight: float = option(0.001, "Weight of the routers' z-loss.", low=0)
    chat_template: str = option(
        ROLE_TEMPLATE, "Jinja template that renders messages, written into the tokenizer's config."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_window(self.model.window_tokens)


def pretrain_job(recipe: PretrainRecipe, teacher: FrozenModel | None = None) -> Job:
    """Returns the job that trains a recipe's model."""
    cfg, dtype = recipe.model, jnp.dtype(recipe.computed_in)

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return parameters.init_params(cfg, key)

    def losses(params: Params, frozen: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        outputs = outputs_of(params, batch, cfg=cfg, dtype=dtype, remat=recipe.remat)
        penalty = jnp.zeros(())
        if outputs.routing is not None:
            penalty = router_penalty(
                outputs.routing, balance_weight=recipe.balance_weight, z_weight=recipe.router_z_weight
            )
        if teacher is None:
            return next_token_losses(outputs, batch), penalty
        wanted = outputs_of(frozen, batch, cfg=teacher.cfg, dtype=dtype)
        return distillation_losses(outputs, wanted, batch, teacher_share=recipe.teacher_share), penalty

    flops = step_flops_per_token(cfg, recipe.row_tokens)
    if teacher is None:
        return Job(init, losses, cfg=cfg, flops_per_token=flops)
    # A teacher only runs forward.
    flops += step_flops_per_token(teacher.cfg, recipe.row_tokens) / 3
    return Job(init, losses, dict(teacher.params), cfg=cfg, frozen_cfg=teacher.cfg, flops_per_token=flops)


@own_jax_settings()
def pretrain(
    recipe: PretrainRecipe,
    run: Run,
    *,
    texts: Sequence[Path] = (),
    valid: Sequence[Path] = (),
    tokenizer: Path | None = None,
    teacher: Path | None = None,
) -> Path:
    """Trains a model from scratch, or resumes the run, and exports the best.

    Args:
      recipe: recipe of the run. On resumption only duration and logging may differ from the run's own.
      texts: UTF-8 files for a recipe without sources; Python's own documentation if empty.
      valid: text to report the final loss on, never trained on.
      tokenizer: `tokenizer.json` of this project; None trains one.
      teacher: Hugging Face folder with the same tokenizer, for a recipe with a `teacher_share`.

    Returns:
      The Hugging Face folder, `hf` in the run's.

    Raises:
      ConfigError: the sources or recipe are unusable, or the folder belongs to another run.
    """
    mesh = run.mesh(recipe)
    taught = read_teacher(teacher, share=recipe.teacher_share, vocab_size=recipe.model.vocab_size)
    if recipe.sources and texts:
        raise ConfigError("this recipe names its own sources: give --data and no --text")
    sources = recipe.sources or tuple(Source(text=source_name(path)) for path in texts)
    corpus = Corpus.open(sources, run.data, recipe.held_out_share)
    own = own_rows(mesh, recipe.batch, recipe.accumulate)
    vocabulary, splits = _prepare_run(recipe, corpus, run.folder, tokenizer, own)
    encoder = PieceEncoder(vocabulary)
    batches, training = splits.train, splits.train.documents
    trainer = Trainer(pretrain_job(recipe, taught), recipe, mesh)
    tokens_per_step, count = recipe.batch * recipe.row_tokens, parameters.parameter_count(recipe.model)
    run.say(
        f"{count:,} parameters on {mesh.size} devices; {splits.size()} to train on, "
        f"{len(splits.held_out.tokens):,} held out; {recipe.steps:,} steps of {tokens_per_step:,} tokens, "
        f"{batches.epochs_at(recipe.steps):.1f} epochs of {len(batches.epoch(0)):,} rows"
    )
    best = fit(trainer, batches.batch_at, splits.held_out_batches, run, splits.source_names)
    params, whole = best.params, trainer.whole(best.params)
    if is_first():
        write_model(run.folder / MODEL_FOLDER, recipe, vocabulary, whole)
    summary: dict[str, Any] = {
        "parameters": count,
        "best_step": best.step,
        "tokens_seen": best.step * tokens_per_step,
        "epochs": round(batches.epochs_at(best.step), 3),
        "training": _size(training),
        "held_out": {"weighted_loss": best.loss, **_losses(trainer, params, splits.held_out, own)},
    }
    if valid:
        folder = run.folder / "tokens" / "valid"
        if is_first():
            documents = (text_document(text) for path in valid for text in read_texts(path))
            shutil.rmtree(folder, ignore_errors=True)
            write_tokens(folder, ((0, each) for each in documents), encoder)
        wait_for_first("valid")
        summary["valid"] = _losses(trainer, params, TokenizedDocuments.read(folder), own)
    run.finish(summary)
    return run.folder / MODEL_FOLDER


def dry_run_pretrain(
    recipe: PretrainRecipe,
    model: Path | None = None,
    *,
    mesh_shape: MeshShape = ALL_DEVICES,
    device: str = "",
) -> dict[str, Any]:
    """Estimates memory and time of a run, without its teacher; see `jaxllm.training.loop.dry_run`.

    Args:
      model: a folder to train on; None: a new model, the recipe's.
      device: see `jaxllm.training.loop.dry_run.estimate`.

    Raises:
      ConfigError: the mesh does not fit, or the device is not known.
      CheckpointError: the folder's config cannot be read.
    """
    if model is not None:
        cfg = huggingface.read_config(model)
        recipe = dataclasses.replace(recipe.within(cfg.window_tokens), model=cfg)
    recipe = recipe.on_accelerator()
    mesh = mesh_for(mesh_shape, recipe)
    return estimate(pretrain_job(recipe), recipe, mesh, frozen=None, device=device).facts(recipe)


def export_best(run_dir: Path, out: Path | None = None) -> Path:
    """Writes the checkpoint with the lowest held-out loss so far as a folder, `run_dir/hf` by default.

    It may be called while the run continues in another process.

    Returns:
      The Hugging Face folder.

    Raises:
      CheckpointError: `run_dir` contains no run, or no checkpoint yet.
    """
    return export_best_of(run_dir, PretrainRecipe, pretrain_job, write_model, out)


def write_model(folder: Path, recipe: PretrainRecipe, tokenizer: Tokenizer, params: Any) -> None:
    """Writes a Hugging Face folder: config, weights, tokenizer with chat template, generation config."""
    # transformers uses the first as the end of a text, or of an answer.
    names = (
        [END_OF_TURN, END_OF_TEXT] if recipe.chat_template == ROLE_TEMPLATE else [END_OF_TEXT, END_OF_TURN]
    )
    ends = [token_id(tokenizer, name) for name in names]
    ids = {"eos_token_id": ends, "pad_token_id": token_id(tokenizer, PAD)}
    # Explicit, because transformers fills a missing begin token with a default id.
    huggingface.write_folder(folder, recipe.model, params, extra_config={"bos_token_id": None, **ids})
    tokenizer_folder.write_tokenizer(
        folder,
        TokenizerFiles(
            tokenizer_json=tokenizer.to_str(pretty=True),
            chat_template=recipe.chat_template,
            special={"eos_token": names[0], "pad_token": PAD},
            eos_ids=tuple(ends),
        ),
    )
    write_json(Path(folder) / "generation_config.json", ids)


def _prepare_run(
    recipe: PretrainRecipe, corpus: Corpus, run_dir: Path, tokenizer_file: Path | None, own: Rows
) -> tuple[Tokenizer, Splits]:
    """Writes the run's tokenizer, tokens and identity, or reads those of a resumed run; all processes
    together."""
    with claimed(run_dir, recipe, documents=corpus.digest()) as resuming:

        def tokenizer_json() -> bytes:
            if jax.process_index():
                return b""
            wanted, path = recipe.model.vocab_size, run_dir / TOKENIZER_FILE if resuming else tokenizer_file
            if path is None:
                return train_tokenizer(corpus.training_texts(), wanted).to_str(pretty=True).encode()
            tokenizer = read_tokenizer_file(path)
            if tokenizer.get_vocab_size() != wanted:
                raise ConfigError(
                    f"{path} has {tokenizer.get_vocab_size()} tokens, but the recipe's model has {wanted}; "
                    "give another --tokenizer, or set the model's vocab_size"
                )
            token_id(tokenizer, END_OF_TURN)
            return tokenizer.to_str(pretty=True).encode()

        text = exchanged(tokenizer_json)[0].decode()
        tokenizer = parse_tokenizer_json(text)
        encoder, folder = PieceEncoder(tokenizer), run_dir / "tokens"
        splits = Splits.of(corpus, encoder, recipe, folder, loader=recipe.loader, own=own)
        # Last, when sources and recipe have proved to fit.
        if jax.process_index() == 0:
            write_text(run_dir / TOKENIZER_FILE, text)
    wait_for_first("recipe")
    return tokenizer, splits


def _size(documents: TokenizedDocuments) -> dict[str, int]:
    return {"documents": len(documents), "tokens": len(documents.tokens), "bytes": documents.text_bytes}


def _losses(
    trainer: Trainer, params: dict[str, jax.Array], documents: TokenizedDocuments, own: Rows
) -> dict[str, float]:
    """Loss per token and per UTF-8 byte of text; special tokens cost nats but are no bytes."""
    shape = trainer.settings.row_tokens, trainer.settings.batch
    loss, _ = trainer.evaluate(params, evaluation_batches(documents, *shape, own=own))
    size = _size(documents)
    per_byte = loss * (size["tokens"] - size["documents"]) / max(size["bytes"], 1)
    return {"nats_per_token": loss, "nats_per_byte": per_byte, **size}


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
      model: Hugging Face folder, GGUF file or bundle.
      weights: width of a folder's or GGUF file's frozen matrices; None for that of the recipe's precision.

    Returns:
      The adapter's folder, `adapter` in the run's.

    Raises:
      ConfigError: the sources or recipe are unusable, or the folder belongs to another run.
      CheckpointError: the model cannot be read.
    """
    if weights is None and is_checkpoint(model):
        weights = recipe.frozen_in
    mesh = run.mesh(recipe)
    frozen = FrozenModel.read(model, weights, mesh=mesh, stack=True)
    require_feature(frozen.cfg, "adapters")
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
        """Writes a folder like the one that training started from, with new weights."""
        config = read_json(Path(model) / "config.json", "download the folder again")
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        ids = {"bos_token_id": None, **{name: config[name] for name in names if name in config}}
        huggingface.write_folder(folder, cfg, params, extra_config=ids)
        tokenizer_folder.write_tokenizer(folder, start.tokenizer.files)
        if (generation := Path(model) / "generation_config.json").is_file():
            shutil.copyfile(generation, folder / generation.name)

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
      model: the model; for an encoder-decoder the sources are of pairs.
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
    corpus.report_bad_lines(run.own_console)
    own = own_rows(mesh, recipe.batch, recipe.accumulate)
    with claimed(run.folder, recipe, **identity, documents=corpus.digest()):
        encoder, folder = ModelEncoder(model.tokenizer), run.folder / "tokens"
        splits = Splits.of(corpus, encoder, recipe, folder, loader=recipe.loader, own=own)
    wait_for_first("recipe")
    return splits
