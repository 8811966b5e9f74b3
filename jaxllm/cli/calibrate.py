"""`jaxllm calibrate`: measures a model on texts and writes a calibrated bundle."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxllm.cli.training_options import (
    device_options,
    dry_run_option,
    name_option,
    one_device_option,
    output_option,
    run_option,
    set_devices,
    text_option,
    weights_option,
)
from jaxllm.formats import EXPERT_BITS
from jaxllm.option_types import Share
from jaxllm.options import click_option
from jaxllm.tasks.pair_options import pairs_options
from jaxllm.training.calibration import ContextRecipe, ExpertWidthsRecipe, NestedRecipe, PrefillRecipe

if TYPE_CHECKING:
    from jaxllm.formats import WeightFormat

Command = Callable[..., Any]
MAX_PREFILL_LOSS = 0.01
MAX_EXPERT_LOSS = 0.05
MEASURES = ("perplexity", "rouge2")


@click.group("calibrate")
def calibrate_command() -> None:
    """Measure a model on texts, and write a calibrated bundle."""


def _calibration(name: str, recipe: type, *, one_device: str = "") -> Callable[[Command], click.Command]:
    """Makes a subcommand with the options of all calibrations, from a function that returns facts to print.

    Args:
      name: name of the subcommand.
      recipe: dataclass that declares --tokens.
      one_device: why it runs on one device only; empty if it does not.
    """

    def decorate(command: Command) -> click.Command:
        @functools.wraps(command)
        def run(output: Path, **options: Any) -> None:
            facts = command(output=output, **options)
            click.echo(json.dumps(facts if options.get("dry_run") else {"bundle": str(output), **facts}))

        options = [
            click.argument("model", type=click.Path(path_type=Path)),
            output_option,
            text_option("measure on", "Python's language reference"),
            click_option(recipe, "tokens"),
            *([one_device_option(one_device)] if one_device else []),
            name_option,
        ]
        decorated: Any = run
        for option in reversed(options):
            decorated = option(decorated)
        return calibrate_command.command(name)(decorated)

    return decorate


@_calibration("prefill", PrefillRecipe, one_device="it measures one device's integer products, row after row")
@click.option(
    "--max-loss",
    type=Share(above_zero=True, most=float("inf")),
    default=MAX_PREFILL_LOSS,
    help=f"Maximum growth of the perplexity.  [default: {MAX_PREFILL_LOSS:.0%}]",
)
@click_option(PrefillRecipe, "weight_scales")
def prefill_command(
    model: Path,
    output: Path,
    max_loss: float,
    texts: tuple[Path, ...],
    tokens: int | None,
    weight_scales: Any,
    name: str,
) -> dict[str, Any]:
    """Calibrate a model for integer prefill on a text, and write the bundle.

    Reads MODEL, a Hugging Face folder or an 8-bit bundle without experts. Finds activation scales and outlier
    channels, and measures the loss of integer prefill on the text and on as much held-out text. Writes FILE,
    an 8-bit bundle for `jaxllm generate --prefill int8`, and prints a JSON object.

    \b
    Example:
      jaxllm calibrate prefill path/to/folder --output calibrated.jaxllm --text text.txt
    """
    # Imported here, so that --help and usage errors do not wait for JAX.
    from jaxllm.training.int8_prefill.prefill import calibrate_prefill

    recipe = PrefillRecipe(**_given(tokens=tokens, weight_scales=weight_scales))
    return calibrate_prefill(recipe, model, output, most_loss=max_loss, texts=texts, name=name)


@_calibration(
    "contexts", ContextRecipe, one_device="errors are measured in the chunks that one service stores"
)
@click_option(ContextRecipe, "chunk_tokens")
@click_option(ContextRecipe, "ratio", type=Share(above_zero=True), default="50%")
def contexts_command(
    model: Path,
    output: Path,
    texts: tuple[Path, ...],
    tokens: int | None,
    chunk_tokens: tuple[int, ...],
    ratio: float | None,
    name: str,
) -> dict[str, Any]:
    """Choose how contexts of a model are stored, by measured errors, and write the bundle.

    Reads MODEL, a bundle. Measures in each layer how much each codec and width of keys and values changes the
    output of attention, and how sensitive predictions are to that. Writes FILE, a bundle whose services store
    contexts with the best codec and error-based widths, and prints a JSON object.

    \b
    Example:
      jaxllm calibrate contexts model.jaxllm --output calibrated.jaxllm --text text.txt
    """
    # Imported here, so that --help and usage errors do not wait for JAX.
    from jaxllm.training.contexts.contexts import calibrate_contexts

    chunks = tuple(sorted(set(chunk_tokens))) or ContextRecipe.chunk_tokens
    given = _given(tokens=tokens, ratio=ratio)
    recipe = ContextRecipe(row_tokens=max(512, 2 * max(chunks)), chunk_tokens=chunks, **given)
    return calibrate_contexts(recipe, model, output, texts=texts, name=name)


@_calibration("nested", NestedRecipe, one_device="the model runs layer by layer, one text after the other")
def nested_command(
    model: Path, output: Path, texts: tuple[Path, ...], tokens: int | None, name: str
) -> dict[str, Any]:
    """Calibrate the upper 4 bits of nested weights on a text, for better drafts, and write the bundle.

    Reads MODEL, a Hugging Face folder, or a bundle of int8-nested weights if there are no floats. Rounds
    weights by the inputs of their products on the text: a weight between two upper values gets the one that
    improves the products of the upper bits, and other weights compensate in both planes. Writes FILE, a
    bundle of the same size, and prints a JSON object.

    \b
    Example:
      jaxllm calibrate nested nested.jaxllm --output calibrated.jaxllm --text text.txt
    """
    # Imported here, so that --help and usage errors do not wait for JAX.
    from jaxllm.training.speculation.nested import calibrate_nested

    return calibrate_nested(NestedRecipe(**_given(tokens=tokens)), model, output, texts=texts, name=name)


@_calibration("experts", ExpertWidthsRecipe)
@run_option
@click.option(
    "--max-loss",
    type=Share(above_zero=True, most=float("inf")),
    default=MAX_EXPERT_LOSS,
    help=f"Maximum growth of the perplexity, or loss of Rouge-2.  [default: {MAX_EXPERT_LOSS:.0%}]",
)
@click.option(
    "--expert-bits",
    type=click.Choice([str(bits) for bits in EXPERT_BITS]),
    help="Give all experts this width, in bits, instead of a search.",
)
@pairs_options("measure on")
@click.option(
    "--measure",
    type=click.Choice(MEASURES),
    help="With --pairs: the loss to bound, that of the perplexity of the targets, or of Rouge-2 of the "
    "model's answers.  [default: perplexity]",
)
@weights_option("all matrices but experts")
@dry_run_option
@device_options("one device", "1")
def experts_command(
    model: Path,
    output: Path,
    run_dir: Path,
    weights: "WeightFormat | None",
    name: str,
    max_loss: float,
    expert_bits: str | None,
    **options: Any,
) -> dict[str, Any]:
    """Choose a width for each expert of a mixture, and write a bundle that runs in little memory.

    Reads MODEL, a Hugging Face folder or a bundle of a mixture of experts; experts of a bundle get narrower,
    never wider, and all other weights keep their width. Measures each expert's importance on a text, gives
    each the narrowest width within the loss, and counts which experts follow which, for prefetching. An
    encoder-decoder (Switch Transformers) is measured on pairs of sources and targets, including the experts
    of both sides. Writes FILE, and prints a JSON object.

    \b
    Example:
      jaxllm calibrate experts path/to/mixture --output mixture.jaxllm --run runs/widths --max-loss 5%
      jaxllm calibrate experts runs/switch/hf -o switch.jaxllm --run runs/widths --pairs val.de val.en
    """
    # Imported here, so that --help and usage errors do not wait for JAX.
    from jaxllm.training.calibration import BundleOutput, PairWidthsRecipe, WidthTarget
    from jaxllm.training.experts.expert_widths import (
        dry_run_experts,
        quantize_experts,
        quantize_seq2seq_experts,
    )
    from jaxllm.training.loop.parallel import MeshShape
    from jaxllm.training.seq2seq.pairs import read_pair_files

    target = WidthTarget(most_loss=max_loss, uniform=int(expert_bits or 0))
    tokens, texts = _given(tokens=options.pop("tokens")), options.pop("texts")
    mesh, devices, dry_run = (options.pop(key) for key in ("mesh", "devices", "dry_run"))
    if options["pairs"] is None and any(options.values()):
        raise click.UsageError("--prefix and --measure go with --pairs")
    if devices:
        set_devices(devices)
    out = BundleOutput(output, weights, name)
    if (pairs := options.pop("pairs")) is not None:
        if texts or mesh or dry_run:
            raise click.UsageError("--pairs goes with none of --text, --mesh and --dry-run")
        recipe, measure = PairWidthsRecipe(**tokens), options.pop("measure") or MEASURES[0]
        texts = read_pair_files(*pairs)
        return quantize_seq2seq_experts(
            recipe, model, out, run_dir, pairs=texts, target=target, measure=measure, **options
        )
    shape = MeshShape.parse(mesh or "data=1")
    # A batch that the mesh divides.
    divisor, rows = max(shape.data, 1) * shape.fsdp, ExpertWidthsRecipe.batch
    recipe = ExpertWidthsRecipe(batch=-(-rows // divisor) * divisor, **tokens)
    if dry_run:
        return dry_run_experts(recipe, model, mesh_shape=shape, device=dry_run)
    return quantize_experts(recipe, model, out, run_dir, target=target, texts=texts, mesh_shape=shape)


def _given(**values: Any) -> dict[str, Any]:
    return {name: each for name, each in values.items() if each is not None}
