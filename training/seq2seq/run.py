"""Trains an encoder-decoder from pairs to a Hugging Face folder: tokenizer, rows, loop, export.

A run's folder has `recipe.json`, `tokenizer.json`, `checkpoints/`, `metrics.jsonl`, and at the end `hf/`
and `summary.json`. Calling `train_seq2seq` again on the same folder resumes. Models of one family share a
tokenizer (`tokenizer=`); a smaller one may learn from a larger (`teacher=`).
"""

from pathlib import Path
from typing import Any

import jax
from tokenizers import AddedToken, Tokenizer, processors

from jaxllm.checkpoints import huggingface, tokenizer_folder
from jaxllm.errors import ConfigError
from jaxllm.host_settings import own_jax_settings
from jaxllm.models import parameters
from jaxllm.text.tokenizer import TokenizerFiles
from jaxllm.training.data.tokenizer import END_OF_TEXT, PAD, token_id, train_tokenizer
from jaxllm.training.loop.fitting import (
    MODEL_FOLDER,
    TOKENIZER_FILE,
    export_best_of,
    fit,
    read_teacher,
    read_tokenizer_file,
)
from jaxllm.training.loop.run_files import Run, claimed, write_json, write_text
from jaxllm.training.loop.trainer import Trainer
from jaxllm.training.seq2seq.job import Seq2SeqRecipe, seq2seq_job
from jaxllm.training.seq2seq.pairs import PairRows, TextPairs, read_pairs, rows_of


@own_jax_settings()
def train_seq2seq(
    recipe: Seq2SeqRecipe, run: Run, *, tokenizer: Path | None = None, teacher: Path | None = None
) -> Path:
    """Trains a model from scratch, or resumes the run, and exports the best.

    Args:
      recipe: recipe of the run. On resumption only duration and logging may differ from the run's own.
      run: the run.
      tokenizer: `tokenizer.json` of another such run; None trains one.
      teacher: Hugging Face folder with the same tokenizer, for a recipe with a `teacher_share`.

    Returns:
      The Hugging Face folder, `hf` in the run's.

    Raises:
      ConfigError: the pairs or the recipe are unusable, or the folder belongs to another run.
    """
    if jax.process_count() > 1:
        raise ConfigError("encoder-decoders are trained by one process; start it without --coordinator")
    mesh = run.mesh(recipe)
    taught = read_teacher(teacher, share=recipe.teacher_share, vocab_size=recipe.cfg.vocab_size)
    pairs = read_pairs(recipe.sources, run.data)
    taken, kept = pairs.split(recipe.held_out_share)
    with claimed(run.folder, recipe, pairs=pairs.digest()) as resuming:
        if resuming:
            vocabulary = read_tokenizer_file(run.folder / TOKENIZER_FILE)
        elif tokenizer is not None:
            vocabulary = read_tokenizer_file(tokenizer)
        else:
            vocabulary = pair_tokenizer(taken, recipe)
        _require_vocabulary(vocabulary, recipe)
        write_text(run.folder / TOKENIZER_FILE, vocabulary.to_str(pretty=True))
    multiple = recipe.accumulate * mesh.shape["data"] * mesh.shape["fsdp"]
    rows, held_out = (encoded_rows(each, vocabulary, recipe, multiple) for each in (taken, kept))
    trainer = Trainer(seq2seq_job(recipe, taught), recipe, mesh)
    epoch, count = rows.batches_per_epoch, parameters.parameter_count(recipe.cfg)
    run.say(
        f"{count:,} parameters on {mesh.size} devices; {len(rows.pairs):,} "
        f"pairs to train on, {len(held_out.pairs):,} held out; {recipe.steps:,} steps of about "
        f"{recipe.batch * recipe.row_tokens:,} tokens on each side, {100 * rows.padding_share:.0f} % of them "
        f"padding; {recipe.steps / epoch:.1f} epochs of {epoch:,} steps"
    )
    names = [source.name for source in recipe.sources]
    best = fit(trainer, rows.batch_at, held_out.held_out, run, names)
    write_seq2seq(run.folder / MODEL_FOLDER, recipe, vocabulary, trainer.whole(best.params))
    _, by_source = trainer.evaluate(best.params, held_out.held_out())
    losses = {"all": best.loss, **{names[source]: loss for source, loss in by_source.items()}}
    summary: dict[str, Any] = {
        "parameters": count,
        "best_step": best.step,
        "epochs": round(best.step / epoch, 2),
        "pairs": {"training": len(rows.pairs), "held_out": len(held_out.pairs)},
        "held_out_nats_per_token": losses,
    }
    run.finish(summary)
    return run.folder / MODEL_FOLDER


def pair_tokenizer(pairs: TextPairs, recipe: Seq2SeqRecipe) -> Tokenizer:
    """Trains the tokenizer of both sides.

    The prefix of each task is a token, so that a source grows by one token; and every text ends in
    `<|endoftext|>`, as T5's do.

    Raises:
      ConfigError: the texts are too few for the vocabulary.
    """
    prefixes = sorted({source.prefix for source in recipe.sources})
    texts = (text for pair in pairs.texts for text in pair)
    tokenizer = train_tokenizer(texts, recipe.cfg.vocab_size - len(prefixes))
    # The text after a prefix is encoded like the beginning of a text.
    tokenizer.add_tokens([AddedToken(each, rstrip=True, normalized=False) for each in prefixes])
    end = token_id(tokenizer, END_OF_TEXT)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END_OF_TEXT}", special_tokens=[(END_OF_TEXT, end)]
    )
    return tokenizer


def encoded_rows(
    pairs: TextPairs, tokenizer: Tokenizer, recipe: Seq2SeqRecipe, rows_multiple: int
) -> PairRows:
    """Encodes pairs, each source after its prefix, and puts them into rows.

    Args:
      pairs: the texts.
      tokenizer: tokenizer of `pair_tokenizer`.
      rows_multiple: divisor of the number of rows of every batch.
    """
    leads = [f"{source.prefix} " for source in recipe.sources]

    def encode(texts: list[str]) -> list[list[int]]:
        return [each.ids for each in tokenizer.encode_batch_fast(texts)]

    start_id = token_id(tokenizer, PAD)
    return rows_of(pairs, leads, encode, recipe, recipe.lengths, rows_multiple, start_id)


def export_best_seq2seq(run_dir: Path, out: Path | None = None) -> Path:
    """Writes the checkpoint with the lowest held-out loss so far as a folder, by default
    `run_dir/hf`; also while the run continues in another process.

    Raises:
      CheckpointError: `run_dir` contains no run, or no checkpoint yet.
    """
    return export_best_of(run_dir, Seq2SeqRecipe, seq2seq_job, write_seq2seq, out)


def write_seq2seq(folder: Path, recipe: Seq2SeqRecipe, tokenizer: Tokenizer, params: Any) -> None:
    """Writes a Hugging Face folder: config with the prefix of each task, weights, tokenizer, and a generation
    config with start and end tokens and the first task's prefix."""
    end, start = (token_id(tokenizer, name) for name in (END_OF_TEXT, PAD))
    ids = {"eos_token_id": end, "pad_token_id": start, "decoder_start_token_id": start}
    tasks = {each.name: {"prefix": f"{each.prefix} "} for each in recipe.sources}
    extra = {**ids, "task_specific_params": tasks}
    huggingface.write_folder(folder, recipe.cfg, params, extra_config=extra)
    tokenizer_folder.write_tokenizer(
        folder,
        TokenizerFiles(
            tokenizer_json=tokenizer.to_str(pretty=True),
            special={"eos_token": END_OF_TEXT, "pad_token": PAD},
            eos_ids=(end,),
        ),
    )
    # No key of transformers' config, but its pipelines read the prefix of a task from it.
    write_json(Path(folder) / "generation_config.json", {**ids, "prefix": f"{recipe.sources[0].prefix} "})


def _require_vocabulary(tokenizer: Tokenizer, recipe: Seq2SeqRecipe) -> None:
    """Raises ConfigError unless a tokenizer has the recipe's size, and a token for each prefix."""
    if tokenizer.get_vocab_size() != recipe.cfg.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens, but the recipe's model has "
            f"{recipe.cfg.vocab_size}; give another --tokenizer, or set the model's vocab_size"
        )
    for name in (END_OF_TEXT, PAD, *(source.prefix for source in recipe.sources)):
        token_id(tokenizer, name)
