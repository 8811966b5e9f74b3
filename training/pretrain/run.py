"""Trains a decoder from documents to a Hugging Face folder: tokenizer, token files, loop, export.

A run's folder has `recipe.json`, `tokenizer.json`, `tokens/`, `checkpoints/`, `metrics.jsonl`, and at the end
`hf/` and `summary.json`. Calling `pretrain` again on the same folder resumes.

Models of one family share a tokenizer (`tokenizer=`); a smaller one may learn from a larger (`teacher=`).
"""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

from jaxllm.checkpoints import huggingface, tokenizer_folder
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.host_settings import own_jax_settings
from jaxllm.models import parameters
from jaxllm.options import option
from jaxllm.text.library_tokenizer import parse_tokenizer_json
from jaxllm.text.tokenizer import TokenizerFiles
from jaxllm.training.data.corpus import Corpus, TokenizedDocuments, exchanged, write_tokens
from jaxllm.training.data.documents import read_texts, text_document
from jaxllm.training.data.encoders import PieceEncoder
from jaxllm.training.data.rows import Batch, Rows, Splits, evaluation_batches
from jaxllm.training.data.sources import Source, source_name
from jaxllm.training.data.tokenizer import (
    END_OF_TEXT,
    END_OF_TURN,
    PAD,
    ROLE_TEMPLATE,
    token_id,
    train_tokenizer,
)
from jaxllm.training.loop.checkpoints import Params
from jaxllm.training.loop.dry_run import estimate
from jaxllm.training.loop.fitting import (
    MODEL_FOLDER,
    TOKENIZER_FILE,
    FrozenModel,
    export_best_of,
    fit,
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

    def init(key: jax.Array) -> Params:
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
      run: the run.
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
      recipe: the run.
      model: a folder to train on; None: a new model, the recipe's.
      mesh_shape: devices.
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
            if resuming:
                tokenizer = read_tokenizer_file(run_dir / TOKENIZER_FILE)
            elif tokenizer_file is not None:
                tokenizer = _given_tokenizer(tokenizer_file, recipe.model.vocab_size)
            else:
                tokenizer = train_tokenizer(corpus.training_texts(), recipe.model.vocab_size)
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


def _given_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    tokenizer = read_tokenizer_file(path)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ConfigError(
            f"{path} has {tokenizer.get_vocab_size()} tokens, but the recipe's model has {vocab_size}; "
            "give another --tokenizer, or set the model's vocab_size"
        )
    token_id(tokenizer, END_OF_TURN)
    return tokenizer


def _size(documents: TokenizedDocuments) -> dict[str, int]:
    return {"documents": len(documents), "tokens": len(documents.tokens), "bytes": documents.text_bytes}


def _losses(trainer: Trainer, params: Params, documents: TokenizedDocuments, own: Rows) -> dict[str, float]:
    """Loss per token and per UTF-8 byte of text; special tokens cost nats but are no bytes."""
    shape = trainer.settings.row_tokens, trainer.settings.batch
    loss, _ = trainer.evaluate(params, evaluation_batches(documents, *shape, own=own))
    size = _size(documents)
    per_byte = loss * (size["tokens"] - size["documents"]) / max(size["bytes"], 1)
    return {"nats_per_token": loss, "nats_per_byte": per_byte, **size}
