"""`jaxllm pretrain`, `jaxllm lora` and `jaxllm elasticize`: train models and adapters."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxllm.cli.shared_options import MODEL, model_argument, path_option
from jaxllm.cli.training_options import (
    LOOP_SETTINGS,
    changed,
    chat_options,
    given_sources,
    keep_compilations,
    loop_options,
    machine_options,
    name_option,
    output_option,
    pairs_options,
    run_options,
    set_devices,
    teacher_option,
    tensorboard_option,
    text_option,
    tokenizer_option,
    weights_option,
)
from jaxllm.option_types import Levels
from jaxllm.options import click_options
from jaxllm.training.settings import LevelSettings

if TYPE_CHECKING:
    from jaxllm.formats import WeightFormat
    from jaxllm.training.elastic.tiny_lm.recipe import TinyLmRun
    from jaxllm.training.loop.parallel import MeshShape
    from jaxllm.training.loop.run_files import Run

_SOURCES = ("texts", "chats", "skip_bad", "pairs", "prefix")
# Options of a run that its fields have the names of.
_REPORTS = ("tensorboard", "profile")
_LEVEL_SETTINGS = ("recovery", "order", "units", "whole_kl_nats", "anchor_share")
_FROM_RECIPE = "  [default: the recipe's]"


@click.command("pretrain")
@run_options("stories")
@text_option("train on, for a recipe without sources", "Python's language reference")
@chat_options
@path_option(
    "--init-from",
    "model",
    type=MODEL,
    metavar="MODEL",
    help="A Hugging Face folder to continue from, with its own tokenizer, instead of a new model.",
)
@path_option(
    "--valid-text",
    "valid",
    multiple=True,
    help="A text file to report the final loss on, never trained on. Repeatable.",
)
@tokenizer_option
@teacher_option
@loop_options
@tensorboard_option
@machine_options
def pretrain_command(run_dir: Path, recipe_name: str, data: Path | None, **options: Any) -> None:
    """Train a small model from scratch, into a Hugging Face folder.

    Reads the recipe's data, or the given texts or conversations. With --init-from it continues from a
    folder's model. A recipe of an encoder-decoder (translate, switch) reads pairs of texts, such as sentences
    and their translations. Writes the run into RUN (checkpoints, metrics, a summary) and the best checkpoint
    as RUN/hf, whose path it prints.

    \b
    Example:
      jaxllm pretrain --run runs/mine
      jaxllm pretrain --recipe target --data DIR --run runs/target
      jaxllm pretrain --init-from path/to/folder --chat chats.jsonl --run runs/tuned
      jaxllm pretrain --recipe translate --data DIR --run runs/translate
    """
    # Imported here, so that --help and usage errors do not wait for JAX and orbax.
    from jaxllm.training.decoders import PretrainRecipe, dry_run_pretrain, pretrain, train_on
    from jaxllm.training.seq2seq.run import Seq2SeqRecipe, train_seq2seq
    from jaxllm.training.settings import load_recipe

    recipe = changed(load_recipe(recipe_name, PretrainRecipe, Seq2SeqRecipe), options, *LOOP_SETTINGS)
    shape, device = _begin(options), options.pop("dry_run")
    if isinstance(recipe, Seq2SeqRecipe):
        reports = {name: options.pop(name) for name in (*_REPORTS, "checkpoints")}
        shared = {name: options.pop(name) for name in ("tokenizer", "teacher")}
        _require_none(f"the recipe {recipe_name} of an encoder-decoder", **options, dry_run=device)
        click.echo(train_seq2seq(recipe, _run(run_dir, reports, data=data, mesh_shape=shape), **shared))
        return
    model = options.pop("model")
    if device:
        click.echo(json.dumps(dry_run_pretrain(recipe, model, mesh_shape=shape, device=device)))
        return
    run = _run(run_dir, options, data=data, mesh_shape=shape)
    texts, chats, skip_bad = (options.pop(name) for name in ("texts", "chats", "skip_bad"))
    if model is not None or chats:
        sources = given_sources(texts, chats, skip_bad)
        recipe, texts = dataclasses.replace(recipe, sources=sources or recipe.sources), ()
    if model is not None:
        _require_none("--init-from", **options)
        click.echo(train_on(recipe, model, run))
        return
    click.echo(pretrain(recipe, run, texts=texts, **options))


@click.command("lora")
@model_argument()
@run_options("mood")
@text_option("learn from", "the recipe's sources")
@chat_options
@pairs_options("learn from", several=True)
@weights_option("a folder's frozen matrices", "f32; bf16 where the precision is bfloat16")
@click.option("--rank", type=click.IntRange(min=1), help=f"Rank of the adapter.{_FROM_RECIPE}")
@click.option("--alpha", type=float, help=f"Scale the adapter's product by alpha / rank.{_FROM_RECIPE}")
@loop_options
@tensorboard_option
@machine_options
def lora_command(
    model: Path,
    run_dir: Path,
    recipe_name: str,
    data: Path | None,
    weights: "WeightFormat | None",
    **options: Any,
) -> None:
    """Train a low-rank adapter of a model, into a folder in PEFT's layout.

    Reads MODEL, a Hugging Face folder, a GGUF file or a bundle, whose weights are frozen, and the recipe's
    data; for an encoder-decoder (T5, mT5, Switch Transformers) pairs of sources and targets. Writes
    RUN/adapter and prints its path; `jaxllm generate --adapter RUN/adapter` runs it.

    \b
    Example:
      jaxllm lora path/to/folder --data DIR --run runs/mood
      jaxllm lora path/to/folder --chat chats.jsonl --run runs/chats
      jaxllm lora runs/translate/hf --pairs mine.de mine.en --run runs/mine
    """
    # Imported here, so that --help and usage errors do not wait for JAX and orbax.
    from jaxllm.training.decoders import LoraRecipe, dry_run_lora, train_lora

    recipe = changed(LoraRecipe.load(recipe_name), options, *LOOP_SETTINGS)
    sources = given_sources(*(options.pop(name) for name in _SOURCES))
    recipe = dataclasses.replace(
        recipe, lora=changed(recipe.lora, options, "rank", "alpha"), sources=sources or recipe.sources
    )
    shape = _begin(options)
    if device := options.pop("dry_run"):
        facts = dry_run_lora(recipe, model, weights=weights, mesh_shape=shape, device=device)
        click.echo(json.dumps(facts))
        return
    run = _run(run_dir, options, data=data, mesh_shape=shape)
    click.echo(train_lora(recipe, model, run, weights=weights))


@click.command("elasticize")
@model_argument()
@output_option
@run_options("family")
@text_option("learn from", "the recipe's sources")
@chat_options
@pairs_options("learn from", several=True)
@weights_option("the bundle's matrices")
@click.option("--levels", type=Levels(), help=f"Levels to make, ascending.{_FROM_RECIPE}")
@click_options(LevelSettings, *_LEVEL_SETTINGS, default="the recipe's")
@loop_options
@click.option(
    "--tiny-lm",
    "tlm_name",
    default="small",
    show_default=True,
    metavar="RECIPE",
    help="Recipe of the tiny LM that plans requests; none makes a bundle without one.",
)
@path_option(
    "--tiny-lm-encoder",
    "encoder",
    type=MODEL,
    metavar="MODEL",
    help="A MobileBERT folder for the tiny LM to start from.",
)
@path_option(
    "--questions",
    multiple=True,
    help="JSON lines of question, options and answer that the tiny LM learns decisions from. Repeatable.  "
    "[default: the recipe's tasks]",
)
@name_option
@path_option(
    "--kit",
    help="Also write what makes the same checkpoint elastic without training (`jaxllm prepare --elastic`): "
    "order, levels, adapters and tiny LM.",
)
@machine_options
def elasticize_command(
    model: Path,
    output: Path,
    run_dir: Path,
    recipe_name: str,
    data: Path | None,
    weights: "WeightFormat | None",
    name: str,
    kit: Path | None,
    **options: Any,
) -> None:
    """Make an elastic bundle: levels of one model, and the tiny LM that plans.

    Reads MODEL, a Hugging Face folder, and the recipe's data. Measures the importance of its units, orders
    them, trains each level's recovery, and trains the tiny LM. Writes FILE, and prints the loss of each level
    as a JSON object. An encoder-decoder (T5, mT5) learns from pairs of sources and targets, and has no tiny
    LM.

    \b
    Example:
      jaxllm elasticize path/to/folder --output elastic.jaxllm --data DIR --run runs/elastic
      jaxllm elasticize path/to/folder --output mine.jaxllm --text text.txt --tiny-lm none --run runs/mine
      jaxllm elasticize runs/translate/hf -o t.jaxllm --pairs t.de t.en --tiny-lm none --run runs/t
    """
    # Imported here, so that --help and usage errors do not wait for JAX and orbax.
    from jaxllm.training.calibration import BundleOutput
    from jaxllm.training.elastic.job import ElasticRecipe
    from jaxllm.training.elastic.run import dry_run_elastic, elasticize

    options["sources"] = given_sources(*(options.pop(each) for each in _SOURCES)) or None
    own = ("levels", "sources", *_LEVEL_SETTINGS)
    recipe = changed(ElasticRecipe.load(recipe_name), options, *LOOP_SETTINGS, *own)
    shape = _begin(options)
    if device := options.pop("dry_run"):
        click.echo(json.dumps(dry_run_elastic(recipe, model, mesh_shape=shape, device=device)))
        return
    run = _run(run_dir, options, data=data, mesh_shape=shape)
    tiny_lm = _tiny_lm(*(options.pop(each) for each in ("tlm_name", "encoder", "questions")))
    facts = elasticize(recipe, model, BundleOutput(output, weights, name, kit), run, tiny_lm=tiny_lm)
    click.echo(json.dumps({"bundle": str(output), **facts}))


def _begin(options: dict[str, Any]) -> "MeshShape":
    """Makes the devices and joins the processes given by the options; returns the mesh's shape."""
    from jaxllm.training.loop.parallel import MeshShape, start_process_group

    shape = MeshShape.parse(options.pop("mesh") or "")
    set_devices(options.pop("devices"))
    start_process_group(*(options.pop(name) for name in ("coordinator", "processes", "process")))
    keep_compilations()
    return shape


def _run(folder: Path, options: dict[str, Any], **more: Any) -> "Run":
    """The run given by the options, whose checkpoints are stored where --checkpoints says."""
    from jaxllm.training.loop.run_files import Run, keep_checkpoints_at

    keep_checkpoints_at(folder, options.pop("checkpoints"))
    return Run(folder=folder, **{name: options.pop(name) for name in _REPORTS if name in options}, **more)


def _tiny_lm(name: str, encoder: Path | None, questions: tuple[Path, ...]) -> "TinyLmRun | None":
    from jaxllm.training.elastic.tiny_lm.recipe import TinyLmRecipe, TinyLmRun

    if name == "none":
        if questions:
            raise click.UsageError("--questions are for a tiny LM, which --tiny-lm none leaves out")
        return None
    recipe = TinyLmRecipe.load(name)
    tasks = tuple(str(path.absolute()) for path in questions)
    return TinyLmRun(dataclasses.replace(recipe, tasks=tasks or recipe.tasks), encoder)


def _require_none(place: str, **options: Any) -> None:
    """Rejects options that are incompatible with `place`."""
    names = {"texts": "text", "chats": "chat", "model": "init-from", "valid": "valid-text"}
    for name, value in options.items():
        if value:
            flag = names.get(name, name.replace("_", "-"))
            raise click.UsageError(f"{place} does not go with --{flag}; leave it out")
