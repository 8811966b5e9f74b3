"""`jaxllm calibrate-nested`: makes the high planes of nested weights better drafts, by a text."""

import json
from pathlib import Path

import click

from training.commands.shared_options import name_option, one_device_option, output_option, text_option

TOKENS = 16384


@click.command("calibrate-nested")
@click.argument("model", type=click.Path(path_type=Path))
@output_option
@text_option("calibrate on", "Python's language reference")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=TOKENS,
    show_default=True,
    help="Tokens to calibrate on, an eighth of them held out.",
)
@one_device_option("the model runs layer by layer, one text after the other")
@name_option
def calibrate_nested_command(
    model: Path, output: Path, texts: tuple[Path, ...], tokens: int, name: str
) -> None:
    """Make the high planes of nested weights draft better, by a text, and write the bundle.

    Reads MODEL, a Hugging Face folder, or a bundle of int8-nested weights where there are no floats. Rounds
    weights by what their products read in the text: a level at the border of two high levels takes the one
    with which the outputs of the high planes are better, and others make up for it in both planes. Writes
    FILE, a bundle of the same size, and prints what was found as a JSON object.

    \b
    Example:
      jaxllm calibrate-nested nested.jaxllm --output calibrated.jaxllm --text text.txt
    """
    # Here, so that --help and wrong usage do not wait for JAX.
    from training.calibrate.nested import NestedRecipe, calibrate_nested

    facts = calibrate_nested(NestedRecipe(tokens=tokens), model, output, texts=texts, name=name)
    click.echo(json.dumps({"bundle": str(output), **facts}))
