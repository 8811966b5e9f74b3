"""`jaxllm pretrain`: trains a small model from scratch."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

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
    teacher_option,
    tensorboard_option,
    text_option,
    tokenizer_option,
)

_CHANGES = ("steps", "accumulate", "precision", "remat", "evaluation_batches")


@click.command("pretrain")
@run_option
@checkpoints_option
@recipe_option("stories")
@data_option
@text_option("train on, for a recipe without sources", "Python's language reference")
@chat_options
@click.option(
    "--init-from",
    "model",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A Hugging Face folder to train on, with its own tokenizer, instead of a new model.",
)
@click.option(
    "--valid-text",
    "valid_paths",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A text file to report the final loss on, never trained on. Repeatable.",
)
@tokenizer_option("another run")
@teacher_option
@steps_option("the run")
@click.option(
    "--accumulate",
    type=click.IntRange(min=1),
    metavar="PARTS",
    help="Split each step's batch into so many parts, whose gradients add up.  [default: the recipe's]",
)
@click.option(
    "--precision",
    type=click.Choice(["float32", "bfloat16"]),
    help="Type of activations and products.  [default: the recipe's]",
)
@click.option(
    "--remat",
    type=click.Choice(["none", "dots", "full"]),
    help="Recompute activations in the backward pass rather than keep them: none, all but the results of "
    "products with weights, or all.  [default: the recipe's]",
)
@eval_batches_option
@tensorboard_option
@profile_option
@dry_run_option
@device_options
@process_options
def pretrain_command(
    run_dir: Path,
    recipe_name: str,
    mesh: str | None,
    devices: int | None,
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    **options: Any,
) -> None:
    """Train a small model from scratch, into a Hugging Face folder.

    Reads the recipe's data, or the texts or conversations given. With --init-from it trains a folder's model
    on. Writes the run into RUN (checkpoints, metrics, a summary) and the best checkpoint as RUN/hf, whose
    path it prints.

    \b
    Example:
      jaxllm pretrain --run runs/mine
      jaxllm pretrain --recipe target --data DIR --run runs/target
      jaxllm pretrain --init-from path/to/folder --chat chats.jsonl --run runs/tuned
    """
    # Here, so that --help and wrong usage do not wait for JAX and orbax.
    from training.loop.monitoring import Monitoring
    from training.loop.parallel import MeshShape, start_process_group
    from training.loop.run_files import keep_checkpoints_at
    from training.pretrain.continued import train_on
    from training.pretrain.recipe import load_pretrain_recipe
    from training.pretrain.run import PretrainTexts, pretrain

    changes = {name: options.pop(name) for name in _CHANGES}
    recipe = load_pretrain_recipe(recipe_name)
    recipe = dataclasses.replace(recipe, **{name: each for name, each in changes.items() if each is not None})
    set_devices(devices)
    start_process_group(coordinator, processes, process)
    keep_compilations()
    model, chats, skip_bad = (options.pop(name) for name in ("model", "chats", "skip_bad"))
    data, texts, valid = (options.pop(name) for name in ("data", "texts", "valid_paths"))
    checkpoints = options.pop("checkpoints")
    shape = MeshShape.parse(mesh or "")
    monitoring = Monitoring(**{name: options.pop(name) for name in ("tensorboard", "profile")})
    if device := options.pop("dry_run"):
        from training.pretrain.run import dry_run_pretrain

        facts = dry_run_pretrain(recipe, model, mesh_shape=shape, device=device)
        click.echo(json.dumps(facts))
        return
    keep_checkpoints_at(run_dir, checkpoints)
    if model is not None:
        if taken := [name for name in ("tokenizer", "teacher") if options.pop(name)] + ["valid-text"] * bool(
            valid
        ):
            raise click.UsageError(f"--init-from takes no --{taken[0]}")
        sources = given_sources(texts, chats, skip_bad)
        recipe = dataclasses.replace(recipe, sources=sources or recipe.sources)
        click.echo(train_on(recipe, model, run_dir, data=data, mesh_shape=shape, monitoring=monitoring))
        return
    if chats:
        sources = given_sources(texts, chats, skip_bad)
        recipe, texts = dataclasses.replace(recipe, sources=sources), ()
    click.echo(
        pretrain(
            recipe,
            run_dir,
            texts=PretrainTexts(data, texts, valid),
            mesh_shape=shape,
            monitoring=monitoring,
            **options,
        )
    )
