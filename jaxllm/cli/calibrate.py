"""`jaxllm calibrate`: measures a model on texts and writes a calibrated bundle."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from jaxllm.cli.shared_options import model_argument
from jaxllm.cli.training_options import (
    device_options,
    dry_run_option,
    name_option,
    one_device_option,
    output_option,
    pairs_options,
    run_option,
    set_devices,
    text_option,
    weights_option,
)
from jaxllm.formats import EXPERT_BITS
from jaxllm.int8_prefill.recipe import MOST_LOSS
from jaxllm.option_types import Share
from jaxllm.options import Command, click_option, combined
from jaxllm.training.calibration import (
    MEASURES,
    BundleOutput,
    ContextRecipe,
    ExpertWidthsRecipe,
    NestedRecipe,
    PairWidthsRecipe,
    PrefillRecipe,
    WidthTarget,
)


@click.group("calibrate")
def calibrate_command() -> None:
    """Measure a model on texts, and write a calibrated bundle."""


def _calibration(name: str, recipe: type, *, one_device: str = "") -> Callable[[Command], click.Command]:
    """Makes a subcommand with the options of all calibrations, from a function that returns facts to print.

    The function gets the model, the bundle to write and the given options; other options are left out.

    Args:
      recipe: dataclass that declares --tokens.
      one_device: why it runs on one device only; empty if it does not.
    """

    def decorate(command: Command) -> click.Command:
        @functools.wraps(command)
        def run(model: Path, output: Path, name: str, **options: Any) -> None:
            out = BundleOutput(output, options.pop("weights", None), name)
            given = {key: value for key, value in options.items() if value not in (None, (), False)}
            facts = command(model, out, **given)
            click.echo(json.dumps(facts if "dry_run" in given else {"bundle": str(output), **facts}))

        options = combined(
            model_argument(),
            output_option,
            text_option("measure on", "Python's language reference"),
            click_option(recipe, "tokens"),
            *([one_device_option(one_device)] if one_device else []),
            name_option,
        )
        return calibrate_command.command(name)(options(run))

    return decorate


def _max_loss_option(of: str, default: float) -> Callable[[Command], Command]:
    return click.option(
        "--max-loss",
        type=Share(above_zero=True, most=float("inf")),
        default=default,
        help=f"Maximum {of}.  [default: {default:.0%}]",
    )


@_calibration("prefill", PrefillRecipe, one_device="it measures one device's integer products, row after row")
@_max_loss_option("growth of the perplexity", MOST_LOSS)
@click_option(PrefillRecipe, "weight_scales")
def prefill_command(model: Path, out: BundleOutput, *, max_loss: float, **given: Any) -> dict[str, Any]:
    """Calibrate a model for integer prefill on a text, and write the bundle.

    Reads MODEL, a Hugging Face folder, a GGUF file or an 8-bit bundle without experts. Finds activation
    scales and outlier channels, and measures the loss of integer prefill on the text and on as much held-out
    text. Writes FILE, an 8-bit bundle for `jaxllm generate --prefill int8`, and prints a JSON object.

    \b
    Example:
      jaxllm calibrate prefill path/to/folder --output calibrated.jaxllm --text text.txt
    """
    # Imported here, so that --help and usage errors do not wait for JAX.
    from jaxllm.training.int8_prefill.prefill import calibrate_prefill

    recipe = PrefillRecipe(**_taken(given, "tokens", "weight_scales"))
    return calibrate_prefill(recipe, model, out, most_loss=max_loss, **given)


@_calibration(
    "contexts", ContextRecipe, one_device="errors are measured in the chunks that one service stores"
)
@click_option(ContextRecipe, "chunk_tokens")
@click_option(ContextRecipe, "ratio", type=Share(above_zero=True), default="50%")
def contexts_command(model: Path, out: BundleOutput, **given: Any) -> dict[str, Any]:
    """Choose how contexts of a model are stored, by measured errors, and write the bundle.

    Reads MODEL, a bundle, a Hugging Face folder or a GGUF file. Measures in each layer how much each codec
    and width of keys and values changes the output of attention, and how sensitive predictions are to that.
    Writes FILE, a bundle whose services store contexts with the best codec and error-based widths, and prints
    a JSON object.

    \b
    Example:
      jaxllm calibrate contexts model.jaxllm --output calibrated.jaxllm --text text.txt
    """
    # Imported here, so that --help and usage errors do not wait for JAX.
    from jaxllm.training.contexts.contexts import calibrate_contexts

    chunks = tuple(sorted(set(given.pop("chunk_tokens", ContextRecipe.chunk_tokens))))
    sizes = {"row_tokens": max(512, 2 * max(chunks)), "chunk_tokens": chunks}
    recipe = ContextRecipe(**sizes, **_taken(given, "tokens", "ratio"))
    return calibrate_contexts(recipe, model, out, **given)


@_calibration("nested", NestedRecipe, one_device="the model runs layer by layer, one text after the other")
def nested_command(model: Path, out: BundleOutput, **given: Any) -> dict[str, Any]:
    """Calibrate the upper 4 bits of nested weights on a text, for better drafts, and write the bundle.

    Reads MODEL, a Hugging Face folder, or a GGUF file or a bundle of int8-nested weights if there are no
    floats. Rounds weights by the inputs of their products on the text: a weight between two upper values gets
    the one that improves the products of the upper bits, and other weights compensate in both planes. Writes
    FILE, a bundle of the same size, and prints a JSON object.

    \b
    Example:
      jaxllm calibrate nested nested.jaxllm --output calibrated.jaxllm --text text.txt
    """
    # Imported here, so that --help and usage errors do not wait for JAX.
    from jaxllm.training.speculation.nested import calibrate_nested

    return calibrate_nested(NestedRecipe(**_taken(given, "tokens")), model, out, **given)


@_calibration("experts", ExpertWidthsRecipe)
@run_option
@_max_loss_option("growth of the perplexity, or loss of Rouge-2", WidthTarget.most_loss)
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
    model: Path, out: BundleOutput, *, run_dir: Path, max_loss: float, **given: Any
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
    from jaxllm.training.experts.expert_widths import (
        dry_run_experts,
        quantize_experts,
        quantize_seq2seq_experts,
    )
    from jaxllm.training.loop.parallel import MeshShape
    from jaxllm.training.loop.run_files import Run
    from jaxllm.training.seq2seq.pairs import read_pair_files

    pairs, devices = given.pop("pairs", None), given.pop("devices", None)
    if pairs is None and given.keys() & {"prefix", "measure"}:
        raise click.UsageError("--prefix and --measure go with --pairs")
    if pairs is not None and given.keys() & {"texts", "mesh", "dry_run"}:
        raise click.UsageError("--pairs goes with none of --text, --mesh and --dry-run")
    if devices:
        set_devices(devices)
    target = WidthTarget(most_loss=max_loss, uniform=int(given.pop("expert_bits", 0)))
    tokens = _taken(given, "tokens")
    if pairs is not None:
        return quantize_seq2seq_experts(
            PairWidthsRecipe(**tokens),
            model,
            out,
            Run(folder=run_dir),
            pairs=read_pair_files(*pairs),
            target=target,
            **given,
        )
    shape = MeshShape.parse(given.pop("mesh", "data=1"))
    # A batch that the mesh divides.
    divisor, rows = max(shape.data, 1) * shape.fsdp, ExpertWidthsRecipe.batch
    recipe = ExpertWidthsRecipe(batch=-(-rows // divisor) * divisor, **tokens)
    if device := given.pop("dry_run", ""):
        return dry_run_experts(recipe, model, mesh_shape=shape, device=device)
    run = Run(folder=run_dir, mesh_shape=shape)
    return quantize_experts(recipe, model, out, run, target=target, **given)


def _taken(given: dict[str, Any], *names: str) -> dict[str, Any]:
    """Takes the options of these names, if they were given."""
    return {name: given.pop(name) for name in names if name in given}
