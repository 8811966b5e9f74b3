"""`jaxllm calibrate-prefill`: calibrates a model for integer prefill."""

import json
from pathlib import Path
from typing import Literal

import click

from jaxllm.option_types import Share
from training.commands.shared_options import name_option, one_device_option, output_option, text_option

MAX_LOSS = 0.01
TOKENS = 8192
WEIGHT_SCALES = ("channel", "tensor")


@click.command("calibrate-prefill")
@click.argument("model", type=click.Path(path_type=Path))
@output_option
@click.option(
    "--max-loss",
    type=Share(above_zero=True, most=float("inf")),
    default=MAX_LOSS,
    help=f"Growth of the perplexity to allow.  [default: {MAX_LOSS:.0%}]",
)
@text_option("calibrate on", "Python's language reference")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=TOKENS,
    show_default=True,
    help="Tokens of text to calibrate on, and as many to hold out.",
)
@click.option(
    "--weight-scales",
    type=click.Choice(WEIGHT_SCALES),
    default="channel",
    show_default=True,
    help="Quantize a weight with a scale for each output channel, or with one for all.",
)
@one_device_option("what is measured is one device's integer products, row after row")
@name_option
def calibrate_prefill_command(
    model: Path,
    output: Path,
    max_loss: float,
    texts: tuple[Path, ...],
    tokens: int,
    weight_scales: Literal["channel", "tensor"],
    name: str,
) -> None:
    """Calibrate a model for integer prefill on a text, and write the bundle.

    Reads MODEL, a Hugging Face folder or a bundle of 8 bits without experts. Finds the scales of activations
    and the channels with outliers, and measures what integer prefill loses on the text and on as much held
    out. Writes FILE, a bundle of 8 bits for `jaxllm generate --prefill int8`, and prints what was found as a
    JSON object.

    \b
    Example:
      jaxllm calibrate-prefill path/to/folder --output calibrated.jaxllm --text text.txt
    """
    # Here, so that --help and wrong usage do not wait for JAX.
    from training.calibrate.prefill import PrefillRecipe, calibrate_prefill

    recipe = PrefillRecipe(tokens=tokens, weight_scales=weight_scales)
    facts = calibrate_prefill(recipe, model, output, most_loss=max_loss, texts=texts, name=name)
    click.echo(json.dumps({"bundle": str(output), **facts}))
