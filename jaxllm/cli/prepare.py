"""`jaxllm prepare`: writes a Hugging Face folder, a GGUF file, or a mixture's bundle, as a bundle."""

import dataclasses
from pathlib import Path

import click

from jaxllm.cli.console import progress_bars
from jaxllm.cli.lazy import EngineCommand
from jaxllm.cli.shared_options import model_argument, path_option
from jaxllm.cli.training_options import text_option
from jaxllm.errors import ConfigError
from jaxllm.formats import AUTO, EXPERT_BITS, WEIGHT_FORMATS
from jaxllm.option_types import Share, Size


@click.command("prepare", cls=EngineCommand)
@model_argument()
@path_option("-o", "--output", required=True, help="The bundle to write.")
@click.option(
    "--weights",
    type=click.Choice((*WEIGHT_FORMATS, AUTO)),
    help="Width of weights; auto chooses it by --max-size or --max-loss.  [default: the checkpoint's own]",
)
@text_option("quantize by, whose activations weigh errors of 4 bits", "Python's language reference")
@click.option("--max-size", type=Size(), help="Largest bundle for auto, which uses as much of it as it can.")
@click.option(
    "--max-loss",
    type=Share(above_zero=True, most=float("inf")),
    help="Largest loss for auto, which takes the smallest bundle: divergence from the float weights, about "
    "the growth of the perplexity.  [default: 1%]",
)
@click.option(
    "--expert-bits",
    type=click.Choice([str(bits) for bits in EXPERT_BITS]),
    help="Store each expert of a mixture separately at this width, to run with less memory than its size.",
)
@click.option(
    "--elastic",
    metavar="KIT",
    help="Make the model elastic by a kit: a file of `jaxllm elasticize --kit`, or a packaged one's name.",
)
@click.option("--name", default="", metavar="NAME", help="The model's display name.  [default: the folder's]")
@click.option(
    "--ignore-config-key",
    "ignore_keys",
    multiple=True,
    metavar="KEY",
    help="Ignore a key of config.json or of a GGUF file that jaxllm does not know. Repeatable.",
)
def prepare_command(
    model: Path,
    output: Path,
    weights: str | None,
    texts: tuple[str, ...],
    max_size: int | None,
    max_loss: float | None,
    expert_bits: str | None,
    elastic: str | None,
    name: str,
    ignore_keys: tuple[str, ...],
) -> None:
    """Write a Hugging Face folder or a GGUF file as one bundle file.

    Reads the folder MODEL (config, safetensors, tokenizer) or the GGUF file MODEL, also by a name such as
    package:NAME or hf:OWNER/NAME, and writes FILE atomically. Q8_0, Q4_0 and Q4_1 blocks of a GGUF file stay
    bit for bit. With --expert-bits MODEL may be a mixture's bundle, or the name of a packaged one: its
    weights are unchanged, except experts that get narrower.

    \b
    Example:
      jaxllm prepare path/to/folder --output model.jaxllm --weights int8
      jaxllm prepare path/to/folder --output elastic.jaxllm --elastic mine.kit
    """
    from jaxllm.bundle import Bundle
    from jaxllm.bundle.kit import find_kit, read_kit
    from jaxllm.prepare import WeightRecipe, prepare
    from jaxllm.training.data.documents import read_texts

    kit = None if elastic is None else read_kit(find_kit(elastic))
    if (max_size or max_loss) and weights != AUTO:
        raise ConfigError(f"--max-size and --max-loss are for --weights {AUTO}; name it, or leave them out")
    if max_size and max_loss:
        raise ConfigError(
            "give --max-size or --max-loss: one takes the best weights of a size, the other the smallest of "
            "a loss"
        )
    recipe = WeightRecipe(
        weights=weights,  # pyright: ignore[reportArgumentType]: one of the choices
        texts=tuple(text for path in texts for text in read_texts(path)),
        most_bytes=max_size or 0,
    )
    if max_loss:
        recipe = dataclasses.replace(recipe, max_loss=max_loss)
    with progress_bars() as progress:
        chosen = prepare(
            model,
            output,
            weights=recipe,
            expert_bits=int(expert_bits or 0),
            name=name,
            ignore_keys=ignore_keys,
            parts=kit,
            progress=progress,
        )
    with Bundle.open(output) as bundle:
        size_mb = output.stat().st_size / 1e6
        click.echo(f"{output}: {bundle.layout.name}, {bundle.layout.weights} weights, {size_mb:.1f} MB")
    if chosen is not None:
        click.echo(chosen.in_words)
