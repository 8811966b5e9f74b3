"""`jaxllm elasticize`: makes an elastic bundle."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxllm.option_types import Levels, Share
from jaxllm.tasks.pair_options import pairs_options
from training.commands.shared_options import (
    chat_options,
    checkpoints_option,
    data_option,
    device_options,
    dry_run_option,
    eval_batches_option,
    given_sources,
    keep_compilations,
    name_option,
    output_option,
    process_options,
    profile_option,
    recipe_option,
    run_option,
    set_devices,
    steps_option,
    text_option,
    weights_option,
)

if TYPE_CHECKING:
    from jaxllm.formats import WeightFormat


@click.command("elasticize")
@click.argument("model", type=click.Path(path_type=Path))
@output_option
@run_option
@checkpoints_option
@recipe_option("family")
@data_option
@text_option("learn from", "the recipe's sources")
@chat_options
@pairs_options("learn from", several=True)
@weights_option("the bundle's matrices")
@click.option("--levels", type=Levels(), help="Levels to make, ascending.  [default: the recipe's]")
@click.option(
    "--recovery",
    type=click.Choice(["lora", "joint", "none"]),
    help="Train an adapter for each level (as in the recipe `adapters`), all levels' weights together, or "
    "neither.  [default: the recipe's]",
)
@click.option(
    "--order",
    type=click.Choice(["importance", "magnitude", "random"]),
    help="Order units by their importance to the loss; magnitude and random are there to compare with.  "
    "[default: the recipe's]",
)
@click.option(
    "--units",
    type=click.Choice(["equal", "global"]),
    help="Choose a level's units as an equal share of each layer, or of all layers those that matter most "
    "per parameter.  [default: the recipe's]",
)
@click.option(
    "--whole-kl",
    "whole_kl_nats",
    type=click.FloatRange(min=0),
    metavar="NATS",
    help="With --recovery joint, how far the whole model's distribution over the next token may go from the "
    "one before, on held-out text; 0 sets no bound.  [default: the recipe's]",
)
@click.option(
    "--anchor-share",
    type=Share(),
    help="Layers to keep whole at every level, the most important ones.  [default: the recipe's]",
)
@steps_option("each level's training")
@click.option(
    "--tiny-lm",
    "tlm_name",
    default="small",
    show_default=True,
    metavar="RECIPE",
    help="Recipe of the tiny LM that plans requests; none makes a bundle without one.",
)
@click.option(
    "--tiny-lm-encoder",
    "encoder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A MobileBERT folder for the tiny LM to start from.",
)
@click.option(
    "--questions",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="JSON lines of question, options and answer that the tiny LM learns decisions from. Repeatable.  "
    "[default: the recipe's tasks]",
)
@name_option
@eval_batches_option
@profile_option
@dry_run_option
@device_options
@process_options
def elasticize_command(
    model: Path,
    output: Path,
    run_dir: Path,
    recipe_name: str,
    tlm_name: str,
    texts: tuple[Path, ...],
    data: Path | None,
    weights: "WeightFormat | None",
    encoder: Path | None,
    questions: tuple[Path, ...],
    name: str,
    mesh: str | None,
    devices: int | None,
    **changes: Any,
) -> None:
    """Make an elastic bundle: levels of one model, and the tiny LM that plans.

    Reads MODEL, a Hugging Face folder, and the recipe's data. Measures how much its units matter, orders
    them, trains what each level lacks, and trains the tiny LM. Writes FILE, and prints the loss of each level
    as a JSON object. An encoder-decoder (T5, mT5) learns from pairs of sources and targets, and has no tiny
    LM.

    \b
    Example:
      jaxllm elasticize path/to/folder --output elastic.jaxllm --data DIR --run runs/elastic
      jaxllm elasticize path/to/folder --output mine.jaxllm --text text.txt --tiny-lm none --run runs/mine
      jaxllm elasticize runs/translate/hf -o t.jaxllm --pairs t.de t.en --tiny-lm none --run runs/t
    """
    # Here, so that --help and wrong usage do not wait for JAX and orbax.
    from training.bundle_output import BundleOutput
    from training.elastic.recipe import load_elastic_recipe
    from training.elastic.run import elasticize
    from training.loop.monitoring import Monitoring
    from training.loop.parallel import MeshShape, start_process_group
    from training.loop.run_files import keep_checkpoints_at
    from training.tiny_lm.recipe import TinyLmRun, load_tiny_lm_recipe

    recipe, device = load_elastic_recipe(recipe_name), changes.pop("dry_run")
    monitoring, checkpoints = Monitoring(profile=changes.pop("profile")), changes.pop("checkpoints")
    group = [changes.pop(name) for name in ("coordinator", "processes", "process")]
    named = [changes.pop(name) for name in ("chats", "skip_bad", "pairs", "prefix")]
    changes["sources"] = given_sources(texts, *named) or None
    recipe = dataclasses.replace(recipe, **{key: each for key, each in changes.items() if each is not None})
    set_devices(devices)
    start_process_group(*group)
    keep_compilations()
    shape = MeshShape.parse(mesh or "")
    if device:
        from training.elastic.dry_run import dry_run_elastic

        click.echo(json.dumps(dry_run_elastic(recipe, model, mesh_shape=shape, device=device)))
        return
    keep_checkpoints_at(run_dir, checkpoints)
    tiny_lm = None
    if tlm_name != "none":
        own = load_tiny_lm_recipe(tlm_name)
        asked = tuple(str(path.absolute()) for path in questions)
        tiny_lm = TinyLmRun(dataclasses.replace(own, tasks=asked or own.tasks), encoder)
    elif questions:
        raise click.UsageError("--questions are for a tiny LM, which --tiny-lm none leaves out")
    facts = elasticize(
        recipe,
        model,
        BundleOutput(output, weights, name),
        run_dir,
        data=data,
        tiny_lm=tiny_lm,
        mesh_shape=shape,
        monitoring=monitoring,
    )
    click.echo(json.dumps({"bundle": str(output), **facts}))
