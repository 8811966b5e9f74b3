"""`jaxllm quantize-experts`: finds a width for each expert of a mixture."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxllm.formats import EXPERT_BITS
from jaxllm.option_types import Share
from jaxllm.tasks.pair_options import pairs_options
from training.commands.shared_options import (
    calibration_device_options,
    dry_run_option,
    name_option,
    output_option,
    run_option,
    set_devices,
    text_option,
    weights_option,
)

if TYPE_CHECKING:
    from jaxllm.formats import WeightFormat
    from training.bundle_output import BundleOutput
    from training.calibrate.expert_widths import WidthTarget

MAX_LOSS = 0.05
TOKENS = 8192
MEASURES = ("perplexity", "rouge2")


@click.command("quantize-experts")
@click.argument("model", type=click.Path(path_type=Path))
@output_option
@run_option
@click.option(
    "--max-loss",
    type=Share(above_zero=True, most=float("inf")),
    default=MAX_LOSS,
    help=f"Growth of the perplexity to allow, or loss of Rouge-2.  [default: {MAX_LOSS:.0%}]",
)
@click.option(
    "--expert-bits",
    type=click.Choice([str(bits) for bits in EXPERT_BITS]),
    help="Give all experts this width, in bits, instead of a search.",
)
@text_option("measure on", "Python's language reference")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=TOKENS,
    show_default=True,
    help="Tokens of text, or of targets, to measure on, and as many to hold out.",
)
@pairs_options("measure on")
@click.option(
    "--measure",
    type=click.Choice(MEASURES),
    help="With --pairs: what may be lost, perplexity of the targets, or Rouge-2 of the model's answers.  "
    "[default: perplexity]",
)
@weights_option("all matrices but experts")
@name_option
@dry_run_option
@calibration_device_options
def quantize_experts_command(
    model: Path,
    output: Path,
    run_dir: Path,
    max_loss: float,
    expert_bits: str | None,
    texts: tuple[Path, ...],
    tokens: int,
    weights: "WeightFormat | None",
    name: str,
    dry_run: str | None,
    mesh: str | None,
    devices: int | None,
    **seq2seq: Any,
) -> None:
    """Find a width for each expert of a mixture, and write a bundle that runs in little memory.

    Reads MODEL, a Hugging Face folder or a bundle of a mixture of experts; of a bundle experts get narrower,
    never wider, and all other weights stay as they are. Measures on a text how much each expert matters,
    gives each the narrowest width that the loss allows, and counts which experts follow which, so that they
    can be prefetched. An encoder-decoder (Switch Transformers) is measured on pairs of sources and targets,
    the experts of both sides. Writes FILE, and prints what was found as a JSON object.

    \b
    Example:
      jaxllm quantize-experts path/to/mixture --output mixture.jaxllm --run runs/widths --max-loss 5%
      jaxllm quantize-experts runs/switch/hf -o switch.jaxllm --run runs/widths --pairs val.de val.en
    """
    # Here, so that --help and wrong usage do not wait for JAX.
    from training.bundle_output import BundleOutput
    from training.calibrate.expert_widths import (
        ExpertWidthsRecipe,
        WidthTarget,
        dry_run_experts,
        quantize_experts,
    )
    from training.loop.parallel import MeshShape

    target = WidthTarget(most_loss=max_loss, uniform=int(expert_bits or 0))
    if seq2seq["pairs"] is None and any(seq2seq.values()):
        raise click.UsageError("--prefix and --measure go with --pairs")
    if devices:
        set_devices(devices)
    out = BundleOutput(output, weights, name)
    if seq2seq["pairs"] is not None:
        if texts or mesh or dry_run:
            raise click.UsageError("--pairs goes with none of --text, --mesh and --dry-run")
        facts = _on_pairs(model, out, run_dir, target, tokens, **seq2seq)
        click.echo(json.dumps({"bundle": str(output), **facts}))
        return
    shape = MeshShape.parse(mesh or "data=1")
    # As many rows as the mesh divides.
    divisor, rows = max(shape.data, 1) * shape.fsdp, ExpertWidthsRecipe.batch
    recipe = ExpertWidthsRecipe(tokens=tokens, batch=-(-rows // divisor) * divisor)
    if dry_run:
        click.echo(json.dumps(dry_run_experts(recipe, model, mesh_shape=shape, device=dry_run)))
        return
    facts = quantize_experts(
        recipe,
        model,
        out,
        run_dir,
        target=target,
        texts=texts,
        mesh_shape=shape,
    )
    click.echo(json.dumps({"bundle": str(output), **facts}))


def _on_pairs(
    model: Path,
    out: "BundleOutput",
    run_dir: Path,
    target: "WidthTarget",
    tokens: int,
    *,
    pairs: tuple[Path, Path],
    prefix: str | None,
    measure: str | None,
) -> dict[str, Any]:
    """Measures an encoder-decoder on the pairs of two files; what was found."""
    from training.calibrate.seq2seq_widths import PairWidthsRecipe, quantize_seq2seq_experts
    from training.seq2seq.pairs import read_pair_files

    return quantize_seq2seq_experts(
        PairWidthsRecipe(tokens=tokens),
        model,
        out,
        run_dir,
        pairs=read_pair_files(*pairs),
        prefix=prefix,
        target=target,
        measure=measure or MEASURES[0],
    )
