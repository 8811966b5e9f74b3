"""The `pretrain` command: `jaxllm pretrain ...`, or `python -m training.cli`."""

import dataclasses
import os
import sys
from pathlib import Path

import click

from jaxllm.errors import JaxllmError


@click.command("pretrain")
@click.option("--recipe", "recipe_name", help="A recipe's name or a .toml file.  [default: stories]")
@click.option(
    "--text",
    "text_paths",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A UTF-8 text file to train on; may be repeated.  [default: Python's language reference]",
)
@click.option(
    "--valid",
    "valid_paths",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A text file to report the final loss on, never trained on; may be repeated.",
)
@click.option("--run", "run_dir", required=True, type=click.Path(path_type=Path), help="The run's folder.")
@click.option(
    "--steps", type=click.IntRange(min=1), help="Train so many steps in all.  [default: the recipe's]"
)
@click.option(
    "--devices",
    type=click.IntRange(min=1),
    help="CPU devices to divide a batch over.  [default: one per core]",
)
@click.option("--export-only", is_flag=True, help="Only write RUN/hf from the best checkpoint so far.")
def pretrain_command(
    recipe_name: str | None,
    text_paths: tuple[Path, ...],
    valid_paths: tuple[Path, ...],
    run_dir: Path,
    steps: int | None,
    devices: int | None,
    export_only: bool,
) -> None:
    """Train a small model from nothing, into a Hugging Face folder (RUN/hf).

    The same command on the same folder resumes.
    """
    if export_only and (recipe_name or text_paths or valid_paths or steps):
        raise click.UsageError("--export-only takes the run as it is: give it --run alone")
    # Here, so that --help and wrong usage do not wait for JAX and orbax.
    import jax

    from training.pretrain import export_best, pretrain
    from training.recipe import load_recipe

    recipe = load_recipe(recipe_name or "stories")
    if steps is not None:
        recipe = dataclasses.replace(recipe, steps=steps)
    # One process-wide setting, possible only before JAX touches a device. Harmless with accelerators.
    jax.config.update("jax_num_cpu_devices", devices or _cores())
    if export_only:
        folder = export_best(run_dir)
    else:
        folder = pretrain(recipe, text_paths, run_dir, valid_paths=valid_paths)
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
