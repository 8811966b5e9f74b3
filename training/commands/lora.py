"""`jaxllm lora`: trains a low-rank adapter."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from training.commands.shared_options import (
    data_option,
    device_options,
    recipe_option,
    run_option,
    set_devices,
    steps_option,
    tensorboard_option,
    weights_option,
)

if TYPE_CHECKING:
    from jaxllm.formats import WeightFormat


@click.command("lora")
@click.argument("model", type=click.Path(path_type=Path))
@run_option
@recipe_option("mood")
@data_option
@weights_option("a folder's frozen matrices", "f32")
@click.option("--rank", type=click.IntRange(min=1), help="Rank of the adapter.  [default: the recipe's]")
@click.option(
    "--alpha", type=float, help="Scale the adapter's product by alpha / rank.  [default: the recipe's]"
)
@steps_option("the run")
@tensorboard_option
@device_options
def lora_command(
    model: Path,
    run_dir: Path,
    recipe_name: str,
    data: Path | None,
    weights: "WeightFormat | None",
    rank: int | None,
    alpha: float | None,
    steps: int | None,
    tensorboard: bool,
    mesh: str | None,
    devices: int | None,
) -> None:
    """Train a low-rank adapter of a model, into a folder in PEFT's layout.

    Reads MODEL, a Hugging Face folder or a bundle, whose weights stay as they are, and the recipe's data.
    Writes RUN/adapter and prints its path; `jaxllm generate --adapter RUN/adapter` runs it.

    \b
    Example:
      jaxllm lora path/to/folder --data DIR --run runs/mood
    """
    # Here, so that --help and wrong usage do not wait for JAX and orbax.
    from training.loop.parallel import MeshShape
    from training.lora.recipe import load_lora_recipe
    from training.lora.run import train_lora

    recipe = load_lora_recipe(recipe_name)
    changes = {name: each for name, each in {"rank": rank, "alpha": alpha}.items() if each is not None}
    recipe = dataclasses.replace(
        recipe, lora=dataclasses.replace(recipe.lora, **changes), steps=steps or recipe.steps
    )
    set_devices(devices)
    folder = train_lora(
        recipe,
        model,
        run_dir,
        data=data,
        weights=weights,
        mesh_shape=MeshShape.parse(mesh or ""),
        tensorboard=tensorboard,
    )
    click.echo(folder)
