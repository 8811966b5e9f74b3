"""The `pretrain` command (`jaxllm pretrain ...`, or `python -m training.cli`), and what commands share."""

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from jaxllm.errors import JaxllmError


def device_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--mesh and --devices."""
    for option in (
        click.option(
            "--devices",
            type=click.IntRange(min=1),
            help="CPU devices to make of this machine.  [default: one per core]",
        ),
        click.option(
            "--mesh", help="Devices per axis, such as data=2,fsdp=2,tensor=2.  [default: all along data]"
        ),
    ):
        command = option(command)
    return command


def set_devices(devices: int | None) -> None:
    """Makes so many CPU devices of this process; possible only before JAX touches one."""
    import jax

    from jaxllm.kernels import native

    cores = _cores()
    jax.config.update("jax_num_cpu_devices", devices or cores)
    # Each CPU device is a stream of its own: together they shall keep every core busy, and no more.
    native.set_threads(max(1, cores // (devices or cores)))


@click.command("pretrain")
@click.option("--recipe", "recipe_name", help="A recipe's name or a .toml file.  [default: stories]")
@click.option("--data", type=click.Path(path_type=Path), help="The folder that the recipe's sources are in.")
@click.option(
    "--text",
    "text_paths",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A UTF-8 text file to train on, for a recipe without sources; may be repeated.  "
    "[default: Python's language reference]",
)
@click.option(
    "--valid",
    "valid_paths",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A text file to report the final loss on, never trained on; may be repeated.",
)
@click.option(
    "--tokenizer", type=click.Path(path_type=Path), help="A tokenizer.json of this project to share."
)
@click.option(
    "--teacher",
    type=click.Path(path_type=Path),
    help="A Hugging Face folder of the same tokenizer to learn from.",
)
@click.option("--run", "run_dir", required=True, type=click.Path(path_type=Path), help="The run's folder.")
@click.option(
    "--steps", type=click.IntRange(min=1), help="Train so many steps in all.  [default: the recipe's]"
)
@click.option(
    "--accumulate",
    type=click.IntRange(min=1),
    help="Take a step's rows in so many parts.  [default: the recipe's]",
)
@click.option("--precision", type=click.Choice(["float32", "bfloat16"]), help="Of activations and products.")
@click.option("--remat", is_flag=True, help="Compute layers twice rather than keep their activations.")
@device_options
@click.option("--coordinator", help="HOST:PORT of the first of several processes.")
@click.option("--processes", type=click.IntRange(min=1), help="How many processes there are.")
@click.option("--process", type=click.IntRange(min=0), help="This process's number, from 0.")
@click.option("--tensorboard", is_flag=True, help="Also write TensorBoard's events into RUN/tensorboard.")
@click.option("--export-only", is_flag=True, help="Only write RUN/hf from the best checkpoint so far.")
def pretrain_command(
    recipe_name: str | None,
    data: Path | None,
    text_paths: tuple[Path, ...],
    valid_paths: tuple[Path, ...],
    tokenizer: Path | None,
    teacher: Path | None,
    run_dir: Path,
    steps: int | None,
    accumulate: int | None,
    precision: str | None,
    remat: bool,
    mesh: str | None,
    devices: int | None,
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    tensorboard: bool,
    export_only: bool,
) -> None:
    """Train a small model from nothing, into a Hugging Face folder (RUN/hf).

    The same command on the same folder resumes.
    """
    given = (recipe_name, data, text_paths, valid_paths, tokenizer, teacher, steps, mesh, coordinator)
    if export_only and any(given):
        raise click.UsageError("--export-only takes the run as it is: give it --run alone")
    # Here, so that --help and wrong usage do not wait for JAX and orbax.
    from training.parallel import MeshShape, start_process_group
    from training.pretrain import export_best, pretrain
    from training.recipe import load_recipe

    recipe = load_recipe(recipe_name or "stories")
    changes = {"steps": steps, "accumulate": accumulate, "precision": precision, "remat": remat or None}
    recipe = dataclasses.replace(recipe, **{name: each for name, each in changes.items() if each is not None})
    set_devices(devices)
    start_process_group(coordinator, processes, process)
    if export_only:
        folder = export_best(run_dir)
    else:
        folder = pretrain(
            recipe,
            run_dir,
            data=data,
            text_paths=text_paths,
            valid_paths=valid_paths,
            tokenizer=tokenizer,
            teacher=teacher,
            mesh_shape=MeshShape.parse(mesh or ""),
            tensorboard=tensorboard,
        )
    click.echo(folder)


def main() -> None:
    """Runs the command alone: an expected error is one line and exit status 1."""
    try:
        pretrain_command()
    except JaxllmError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)


def _cores() -> int:
    # In a container or under taskset a process may use fewer cores than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    main()
