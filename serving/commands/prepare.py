"""`jaxllm prepare`: a Hugging Face folder becomes a bundle, or a mixture's bundle one with experts apart."""

from pathlib import Path

import click

from jaxllm.bundle import EXPERT_BITS, WEIGHT_FORMATS, Bundle
from jaxllm.prepare import prepare
from serving.console import progress_bars
from serving.models import find_model


@click.command("prepare")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The bundle to write.")
@click.option(
    "--weights", type=click.Choice(WEIGHT_FORMATS), help="Weight width. [default: the checkpoint's own]"
)
@click.option(
    "--expert-bits",
    type=click.Choice([str(bits) for bits in EXPERT_BITS]),
    help="Store each expert of a mixture by itself at this width, to run it in less memory than it takes.",
)
@click.option("--name", default="", help="The model's name, for people. [default: the folder's]")
@click.option(
    "--ignore-config-key",
    "ignore_keys",
    multiple=True,
    metavar="KEY",
    help="Ignore a config.json key that jaxllm does not know. Repeatable.",
)
def prepare_command(
    folder: Path,
    output: Path,
    weights: str | None,
    expert_bits: str | None,
    name: str,
    ignore_keys: tuple[str, ...],
) -> None:
    """Write the model in a Hugging Face FOLDER as one bundle file.

    With --expert-bits FOLDER may be a mixture's bundle, or the name of a packaged one: its weights stay
    as they are, but for experts that get narrower.
    """
    with progress_bars() as progress:
        prepare(
            folder if folder.exists() else find_model(folder),
            output,
            weights=weights,  # pyright: ignore[reportArgumentType]: one of the choices
            expert_bits=int(expert_bits or 0),
            name=name,
            ignore_keys=ignore_keys,
            progress=progress,
        )
    with Bundle.open(output) as bundle:
        size_mb = output.stat().st_size / 1e6
        click.echo(f"{output}: {bundle.layout.name}, {bundle.layout.weights} weights, {size_mb:.1f} MB")
