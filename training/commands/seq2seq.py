"""`jaxllm seq2seq`: trains a small encoder-decoder on pairs of texts."""

import dataclasses
from pathlib import Path
from typing import Any

import click

from training.commands.shared_options import (
    checkpoints_option,
    data_option,
    device_options,
    keep_compilations,
    profile_option,
    recipe_option,
    run_option,
    set_devices,
    steps_option,
    teacher_option,
    tensorboard_option,
    tokenizer_option,
)


@click.command("seq2seq")
@run_option
@checkpoints_option
@recipe_option("translate")
@data_option
@tokenizer_option("another such run")
@teacher_option
@steps_option("the run")
@tensorboard_option
@profile_option
@device_options
def seq2seq_command(
    run_dir: Path,
    recipe_name: str,
    steps: int | None,
    mesh: str | None,
    devices: int | None,
    tensorboard: bool,
    profile: Path | None,
    checkpoints: str | None,
    **options: Any,
) -> None:
    """Train a small encoder-decoder from scratch, into a Hugging Face folder.

    Reads pairs of texts, such as sentences and their translations, from the files that the recipe names.
    Writes the run into RUN (checkpoints, metrics, a summary) and the best checkpoint as RUN/hf, whose path it
    prints.

    \b
    Example:
      jaxllm seq2seq --data DIR --run runs/translate
      jaxllm seq2seq --recipe switch --data DIR --run runs/switch --tokenizer runs/translate/tokenizer.json
    """
    # Here, so that --help and wrong usage do not wait for JAX and orbax.
    from training.loop.monitoring import Monitoring
    from training.loop.parallel import MeshShape
    from training.loop.run_files import keep_checkpoints_at
    from training.seq2seq.recipe import load_seq2seq_recipe
    from training.seq2seq.run import train_seq2seq

    recipe = load_seq2seq_recipe(recipe_name)
    recipe = recipe if steps is None else dataclasses.replace(recipe, steps=steps)
    set_devices(devices)
    keep_compilations()
    monitoring = Monitoring(tensorboard=tensorboard, profile=profile)
    shape = MeshShape.parse(mesh or "")
    keep_checkpoints_at(run_dir, checkpoints)
    click.echo(train_seq2seq(recipe, run_dir, mesh_shape=shape, monitoring=monitoring, **options))
