"""The `calibrate` command: `jaxllm calibrate ...`."""

import json
from pathlib import Path
from typing import Any

import click

from jaxllm.bundle import EXPERT_BITS, WEIGHT_FORMATS


@click.command("calibrate")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="The bundle's path.")
@click.option(
    "--prefill",
    is_flag=True,
    help="Calibrate integer prefill of a model without experts, a folder or a bundle of 8 bits.",
)
@click.option(
    "--run", "run_dir", type=click.Path(path_type=Path), help="The run's folder; not with --prefill."
)
@click.option(
    "--loss",
    "percent",
    type=click.FloatRange(min=0, min_open=True),
    help="By how many percent the perplexity may grow.  [default: 5, with --prefill 1]",
)
@click.option(
    "--text",
    "texts",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A UTF-8 text file to calibrate on; may be repeated.  [default: Python's language reference]",
)
@click.option(
    "--tokens", type=click.IntRange(min=1), help="Of text to calibrate on, and as many to hold out."
)
@click.option(
    "--weights",
    type=click.Choice(WEIGHT_FORMATS),
    help="Width of all matrices but experts.  [default: the checkpoint's own]",
)
@click.option(
    "--uniform",
    type=click.Choice([str(bits) for bits in EXPERT_BITS]),
    help="One width for all experts, in bits, instead of a search.",
)
@click.option(
    "--weight-scales",
    type=click.Choice(["channel", "tensor"]),
    help="Of --prefill: a scale for each output channel of a weight, or one for all.  [default: channel]",
)
@click.option("--name", default="", help="The model's name, for people.  [default: the folder's own]")
def calibrate_command(
    model: Path,
    out: Path,
    prefill: bool,
    run_dir: Path | None,
    percent: float | None,
    texts: tuple[Path, ...],
    tokens: int | None,
    weights: str | None,
    uniform: str | None,
    weight_scales: str | None,
    name: str,
) -> None:
    """Make a bundle of the mixture of experts MODEL, to run it in little memory.

    MODEL is a folder in Hugging Face's layout, or a bundle, whose experts get narrower, never wider, and
    whose other weights stay as they are. Measures what each expert matters on a text, gives each the width it
    deserves, and counts which experts follow which, so that they can be foreseen. The same command on the
    same folder resumes. Prints a JSON object with what was found.

    With --prefill instead: make a bundle whose prompts can be read in integers. Finds the steps of
    activations and the channels with outliers on a text, and measures what that loses there and on as much
    held out.
    """
    if prefill and (run_dir or uniform or weights not in (None, "int8")):
        raise click.UsageError("--prefill takes 8-bit weights, and neither --run nor --uniform")
    if not prefill and weight_scales:
        raise click.UsageError("--weight-scales are those of --prefill")
    if not prefill and run_dir is None:
        raise click.UsageError("widths of experts are searched in a folder: name one with --run")
    amount: dict[str, Any] = {} if tokens is None else {"tokens": tokens}
    if prefill:
        from training.calibrate_prefill import PrefillRecipe, calibrate_prefill

        recipe = PrefillRecipe(**amount, weight_scales=weight_scales or "channel")  # pyright: ignore[reportArgumentType]: one of the choices
        most = (1.0 if percent is None else percent) / 100
        facts = calibrate_prefill(recipe, model, out, most_loss=most, texts=texts, name=name)
        click.echo(json.dumps({"bundle": str(out), **facts}))
        return
    assert run_dir is not None
    # Here, so that --help and wrong usage do not wait for JAX.
    from training.calibrate import CalibrationRecipe, calibrate

    facts = calibrate(
        CalibrationRecipe(**amount),
        model,
        out,
        run_dir,
        most_loss=(5.0 if percent is None else percent) / 100,
        texts=texts,
        weights=weights,  # pyright: ignore[reportArgumentType]: one of the choices
        uniform=int(uniform or 0),
        name=name,
    )
    click.echo(json.dumps({"bundle": str(out), **facts}))
