"""`jaxllm lora`: trains a low-rank adapter."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

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
    process_options,
    profile_option,
    recipe_option,
    run_option,
    set_devices,
    steps_option,
    tensorboard_option,
    text_option,
    weights_option,
)

if TYPE_CHECKING:
    from jaxllm.formats import WeightFormat


@click.command("lora")
@click.argument("model", type=click.Path(path_type=Path))
@run_option
@checkpoints_option
@recipe_option("mood")
@data_option
@text_option("learn from", "the recipe's sources")
@chat_options
@pairs_options("learn from", several=True)
@weights_option("a folder's frozen matrices", "f32")
@click.option("--rank", type=click.IntRange(min=1), help="Rank of the adapter.  [default: the recipe's]")
@click.option(
    "--alpha", type=float, help="Scale the adapter's product by alpha / rank.  [default: the recipe's]"
)
@steps_option("the run")
@eval_batches_option
@tensorboard_option
@profile_option
@dry_run_option
@device_options
@process_options
def lora_command(
    model: Path,
    run_dir: Path,
    recipe_name: str,
    data: Path | None,
    weights: "WeightFormat | None",
    mesh: str | None,
    devices: int | None,
    **options: Any,
) -> None:
    """Train a low-rank adapter of a model, into a folder in PEFT's layout.

    Reads MODEL, a Hugging Face folder or a bundle, whose weights stay as they are, and the recipe's data; for
    an encoder-decoder (T5, mT5, Switch Transformers) pairs of sources and targets. Writes RUN/adapter and
    prints its path; `jaxllm generate --adapter RUN/adapter` runs it.

    \b
    Example:
      jaxllm lora path/to/folder --data DIR --run runs/mood
      jaxllm lora path/to/folder --chat chats.jsonl --run runs/chats
      jaxllm lora runs/translate/hf --pairs mine.de mine.en --run runs/mine
    """
    # Here, so that --help and wrong usage do not wait for JAX and orbax.
    from training.loop.monitoring import Monitoring
    from training.loop.parallel import MeshShape, start_process_group
    from training.loop.run_files import keep_checkpoints_at
    from training.lora.recipe import load_lora_recipe
    from training.lora.run import train_lora

    recipe = load_lora_recipe(recipe_name)
    changes = {name: options.pop(name) for name in ("rank", "alpha")}
    changes = {name: each for name, each in changes.items() if each is not None}
    sources = given_sources(
        *(options.pop(name) for name in ("texts", "chats", "skip_bad", "pairs", "prefix"))
    )
    settings = {name: options.pop(name) for name in ("steps", "evaluation_batches")}
    recipe = dataclasses.replace(
        recipe,
        **{name: each for name, each in settings.items() if each is not None},
        lora=dataclasses.replace(recipe.lora, **changes),
        sources=sources or recipe.sources,
    )
    set_devices(devices)
    start_process_group(*(options.pop(name) for name in ("coordinator", "processes", "process")))
    keep_compilations()
    shape, checkpoints = MeshShape.parse(mesh or ""), options.pop("checkpoints")
    if device := options.pop("dry_run"):
        from training.lora.run import dry_run_lora

        facts = dry_run_lora(recipe, model, weights=weights, mesh_shape=shape, device=device)
        click.echo(json.dumps(facts))
        return
    keep_checkpoints_at(run_dir, checkpoints)
    folder = train_lora(
        recipe,
        model,
        run_dir,
        data=data,
        weights=weights,
        mesh_shape=shape,
        monitoring=Monitoring(**options),
    )
    click.echo(folder)
