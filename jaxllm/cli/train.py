"""`jaxllm pretrain`, `jaxllm lora` and `jaxllm elasticize`: train models and adapters."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxllm.cli.shared_options import path_argument, path_option
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
from jaxllm.option_types import Levels, Share

if TYPE_CHECKING:
    from jaxllm.formats import WeightFormat
    from jaxllm.training.elastic.tiny_lm.recipe import TinyLmRun
    from jaxllm.training.loop.parallel import MeshShape

_SOURCES = ("texts", "chats", "skip_bad", "pairs", "prefix")
_FROM_RECIPE = "  [default: the recipe's]"


@click.command("pretrain")
@run_options("stories")
@text_option("train on, for a recipe without sources", "Python's language reference")
@chat_options
@path_option(
    "--init-from",
    "model",
    metavar="DIR",
    help="A Hugging Face folder to continue from, with its own tokenizer, instead of a new model.",
)
@path_option(
    "--valid-text",
    "valid_paths",
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
    from jaxllm.training.loop.monitoring import Monitoring
    from jaxllm.training.loop.run_files import keep_checkpoints_at
    from jaxllm.training.pretrain.run import (
        PretrainRecipe,
        PretrainTexts,
        dry_run_pretrain,
        pretrain,
        train_on,
    )
    from jaxllm.training.seq2seq.job import Seq2SeqRecipe
    from jaxllm.training.seq2seq.run import train_seq2seq
    from jaxllm.training.settings import load_recipe

    recipe = changed(load_recipe(recipe_name, PretrainRecipe, Seq2SeqRecipe), options, *LOOP_SETTINGS)
    shape, device = _begin(options), options.pop("dry_run")
    monitoring = Monitoring(**{name: options.pop(name) for name in ("tensorboard", "profile")})
    checkpoints = options.pop("checkpoints")
    if isinstance(recipe, Seq2SeqRecipe):
        shared = {name: options.pop(name) for name in ("tokenizer", "teacher")}
        _require_none(f"the recipe {recipe_name} of an encoder-decoder", **options, dry_run=device)
        keep_checkpoints_at(run_dir, checkpoints)
        click.echo(
            train_seq2seq(recipe, run_dir, data=data, mesh_shape=shape, monitoring=monitoring, **shared)
        )
        return
    model = options.pop("model")
    if device:
        click.echo(json.dumps(dry_run_pretrain(recipe, model, mesh_shape=shape, device=device)))
        return
    keep_checkpoints_at(run_dir, checkpoints)
    texts, chats, skip_bad, valid = (
        options.pop(name) for name in ("texts", "chats", "skip_bad", "valid_paths")
    )
    if model is not None or chats:
        sources = given_sources(texts, chats, skip_bad)
        recipe, texts = dataclasses.replace(recipe, sources=sources or recipe.sources), ()
    if model is not None:
        _require_none("--init-from", **options, valid_text=valid)
        click.echo(train_on(recipe, model, run_dir, data=data, mesh_shape=shape, monitoring=monitoring))
        return
    texts = PretrainTexts(data, texts, valid)
    click.echo(pretrain(recipe, run_dir, texts=texts, mesh_shape=shape, monitoring=monitoring, **options))


@click.command("lora")
@path_argument("model")
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

    Reads MODEL, a Hugging Face folder or a bundle, whose weights are frozen, and the recipe's data; for an
    encoder-decoder (T5, mT5, Switch Transformers) pairs of sources and targets. Writes RUN/adapter and prints
    its path; `jaxllm generate --adapter RUN/adapter` runs it.

    \b
    Example:
      jaxllm lora path/to/folder --data DIR --run runs/mood
      jaxllm lora path/to/folder --chat chats.jsonl --run runs/chats
      jaxllm lora runs/translate/hf --pairs mine.de mine.en --run runs/mine
    """
    # Imported here, so that --help and usage errors do not wait for JAX and orbax.
    from jaxllm.training.loop.monitoring import Monitoring
    from jaxllm.training.loop.run_files import keep_checkpoints_at
    from jaxllm.training.lora.run import LoraRecipe, dry_run_lora, train_lora

    recipe = changed(LoraRecipe.load(recipe_name), options, *LOOP_SETTINGS)
    sources = given_sources(*(options.pop(name) for name in _SOURCES))
    recipe = dataclasses.replace(
        recipe, lora=changed(recipe.lora, options, "rank", "alpha"), sources=sources or recipe.sources
    )
    shape, checkpoints = _begin(options), options.pop("checkpoints")
    if device := options.pop("dry_run"):
        facts = dry_run_lora(recipe, model, weights=weights, mesh_shape=shape, device=device)
        click.echo(json.dumps(facts))
        return
    keep_checkpoints_at(run_dir, checkpoints)
    monitoring = Monitoring(**options)
    click.echo(
        train_lora(
            recipe, model, run_dir, data=data, weights=weights, mesh_shape=shape, monitoring=monitoring
        )
    )


@click.command("elasticize")
@path_argument("model")
@output_option
@run_options("family")
@text_option("learn from", "the recipe's sources")
@chat_options
@pairs_options("learn from", several=True)
@weights_option("the bundle's matrices")
@click.option("--levels", type=Levels(), help=f"Levels to make, ascending.{_FROM_RECIPE}")
@click.option(
    "--recovery",
    type=click.Choice(["lora", "joint", "none"]),
    help="Train an adapter for each level (as in the recipe `adapters`), all levels' weights jointly, or "
    f"neither.{_FROM_RECIPE}",
)
@click.option(
    "--order",
    type=click.Choice(["importance", "magnitude", "random"]),
    help=f"Order units by their importance to the loss; magnitude and random are baselines.{_FROM_RECIPE}",
)
@click.option(
    "--units",
    type=click.Choice(["equal", "global"]),
    help="Choose a level's units as an equal share of each layer, or across layers by importance per "
    f"parameter.{_FROM_RECIPE}",
)
@click.option(
    "--whole-kl",
    "whole_kl_nats",
    type=click.FloatRange(min=0),
    metavar="NATS",
    help="With --recovery joint, maximum divergence of the whole model's next-token distribution from the "
    f"original one, on held-out text; 0 sets no bound.{_FROM_RECIPE}",
)
@click.option(
    "--anchor-share",
    type=Share(),
    help=f"Layers to keep whole at every level, the most important ones.{_FROM_RECIPE}",
)
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
    "--tiny-lm-encoder", "encoder", metavar="DIR", help="A MobileBERT folder for the tiny LM to start from."
)
@path_option(
    "--questions",
    multiple=True,
    help="JSON lines of question, options and answer that the tiny LM learns decisions from. Repeatable.  "
    "[default: the recipe's tasks]",
)
@name_option
@machine_options
def elasticize_command(
    model: Path,
    output: Path,
    run_dir: Path,
    recipe_name: str,
    data: Path | None,
    weights: "WeightFormat | None",
    name: str,
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
    from jaxllm.training.loop.monitoring import Monitoring
    from jaxllm.training.loop.run_files import keep_checkpoints_at

    options["sources"] = given_sources(*(options.pop(each) for each in _SOURCES)) or None
    own = ("levels", "recovery", "order", "units", "whole_kl_nats", "anchor_share", "sources")
    recipe = changed(ElasticRecipe.load(recipe_name), options, *LOOP_SETTINGS, *own)
    shape, checkpoints = _begin(options), options.pop("checkpoints")
    if device := options.pop("dry_run"):
        click.echo(json.dumps(dry_run_elastic(recipe, model, mesh_shape=shape, device=device)))
        return
    keep_checkpoints_at(run_dir, checkpoints)
    facts = elasticize(
        recipe,
        model,
        BundleOutput(output, weights, name),
        run_dir,
        data=data,
        tiny_lm=_tiny_lm(options.pop("tlm_name"), options.pop("encoder"), options.pop("questions")),
        mesh_shape=shape,
        monitoring=Monitoring(**options),
    )
    click.echo(json.dumps({"bundle": str(output), **facts}))


def _begin(options: dict[str, Any]) -> "MeshShape":
    """Makes the devices and joins the processes given by the options; returns the mesh's shape."""
    from jaxllm.training.loop.parallel import MeshShape, start_process_group

    shape = MeshShape.parse(options.pop("mesh") or "")
    set_devices(options.pop("devices"))
    start_process_group(*(options.pop(name) for name in ("coordinator", "processes", "process")))
    keep_compilations()
    return shape


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
    names = {"texts": "text", "chats": "chat", "model": "init-from", "valid_paths": "valid-text"}
    for name, value in options.items():
        if value:
            flag = names.get(name, name.replace("_", "-"))
            raise click.UsageError(f"{place} does not go with --{flag}; leave it out")
