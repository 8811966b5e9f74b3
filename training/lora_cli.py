"""The `lora` command: `jaxllm lora ...`."""

import dataclasses
from pathlib import Path

import click

from jaxllm.bundle import WEIGHT_FORMATS
from training.cli import device_options, set_devices


@click.command("lora")
@click.option(
    "-m", "--model", required=True, type=click.Path(path_type=Path), help="A Hugging Face folder or a bundle."
)
@click.option("--recipe", "recipe_name", default="mood", show_default=True, help="A name, or a .toml file.")
@click.option("--data", type=click.Path(path_type=Path), help="The folder that the recipe's sources are in.")
@click.option("--run", "run_dir", required=True, type=click.Path(path_type=Path), help="The run's folder.")
@click.option(
    "--weights",
    type=click.Choice(WEIGHT_FORMATS),
    help="Width of a folder's frozen matrices.  [default: f32]",
)
@click.option("--rank", type=click.IntRange(min=1), help="Of the change.  [default: the recipe's]")
@click.option("--alpha", type=float, help="The change is scaled by alpha / rank.  [default: the recipe's]")
@click.option("--steps", type=click.IntRange(min=1), help="Train so many steps.  [default: the recipe's]")
@click.option("--tensorboard", is_flag=True, help="Also write TensorBoard's events into RUN/tensorboard.")
@device_options
def lora_command(
    model: Path,
    recipe_name: str,
    data: Path | None,
    run_dir: Path,
    weights: str | None,
    rank: int | None,
    alpha: float | None,
    steps: int | None,
    tensorboard: bool,
    mesh: str | None,
    devices: int | None,
) -> None:
    """Train a low-rank adapter of a model, into a folder in PEFT's layout (RUN/adapter).

    The same command on the same folder resumes. Use it with `jaxllm generate --adapter RUN/adapter`.
    """
    # Here, so that --help and wrong usage do not wait for JAX and orbax.
    from training.lora import load_lora_recipe, train_lora
    from training.parallel import MeshShape

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
        weights=weights,  # pyright: ignore[reportArgumentType]: one of the choices
        mesh_shape=MeshShape.parse(mesh or ""),
        tensorboard=tensorboard,
    )
    click.echo(folder)
