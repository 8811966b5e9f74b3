"""`jaxllm calibrate-contexts`: chooses how contexts of a model are stored."""

import json
from pathlib import Path

import click

from jaxllm.option_types import Share
from training.commands.shared_options import name_option, one_device_option, output_option, text_option

RATIO = 0.5
TOKENS = 2048
CHUNK_TOKENS = (16,)


@click.command("calibrate-contexts")
@click.argument("model", type=click.Path(path_type=Path))
@output_option
@text_option("measure on", "Python's language reference")
@click.option(
    "--tokens", type=click.IntRange(min=1), default=TOKENS, show_default=True, help="Tokens to measure on."
)
@click.option(
    "--chunk-tokens",
    type=click.IntRange(min=1),
    multiple=True,
    help="Length of chunks to choose from: longer ones share scales among more tokens. Repeatable.  "
    f"[default: {CHUNK_TOKENS[0]}]",
)
@click.option(
    "--ratio",
    type=Share(above_zero=True),
    default=RATIO,
    help="Bytes at which codecs are compared, scales included, relative to chunks of 16 tokens at 8 bits.  "
    f"[default: {RATIO:.0%}]",
)
@one_device_option("errors are measured in the chunks that one service stores")
@name_option
def calibrate_contexts_command(
    model: Path,
    output: Path,
    texts: tuple[Path, ...],
    tokens: int,
    chunk_tokens: tuple[int, ...],
    ratio: float,
    name: str,
) -> None:
    """Choose how contexts of a model are stored, by measured errors, and write the bundle.

    Reads MODEL, a bundle. Measures in each layer what keys and values of each codec and width change in the
    output of attention, and how much that matters to predictions. Writes FILE, a bundle whose services store
    contexts by the best codec, with widths of chunks by what they keep of this model, and prints what was
    found as a JSON object.

    \b
    Example:
      jaxllm calibrate-contexts model.jaxllm --output calibrated.jaxllm --text text.txt
    """
    # Here, so that --help and wrong usage do not wait for JAX.
    from training.calibrate.contexts import ContextRecipe, calibrate_contexts

    recipe = ContextRecipe(
        tokens=tokens,
        row_tokens=max(512, 2 * max(chunk_tokens or CHUNK_TOKENS)),
        chunk_tokens=tuple(sorted(set(chunk_tokens))) or CHUNK_TOKENS,
        ratio=ratio,
    )
    facts = calibrate_contexts(recipe, model, output, texts=texts, name=name)
    click.echo(json.dumps({"bundle": str(output), **facts}))
