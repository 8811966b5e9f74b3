"""`jaxllm export`: a bundle becomes programs."""

import sys
from pathlib import Path

import click

from export import extras, quantized, signatures
from export.stablehlo import DTYPES, PLATFORMS, export_stablehlo
from export.subject import Subject, read_subject
from jaxllm.errors import ConfigError
from jaxllm.programs.manifest import Manifest
from jaxllm.tokenizer import Tokenizer

FORMATS = ("stablehlo", "tflite", "litertlm", "iree")
PRECISIONS = ("f32", "bf16", "int8", "w8a8")
# Enough for the largest magnitudes of a text to have been seen.
_CALIBRATION_TOKENS = 4096
_MAX_TEXT_BYTES = 1 << 20


@click.command("export")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="The folder to write, or the file of a LiteRT-LM bundle.",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(FORMATS),
    default="stablehlo",
    show_default=True,
    help="StableHLO for JAX, a TFLite model for LiteRT, a bundle for LiteRT-LM, or modules of IREE.",
)
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    default="f32",
    show_default=True,
    help="Of products: stablehlo takes f32 and bf16, tflite and litertlm f32, int8 (weights) and w8a8 "
    "(weights and activations).",
)
@click.option(
    "--calibrate",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="w8a8: a UTF-8 text to find the activations' scales on.",
)
@click.option(
    "--platform",
    "platforms",
    multiple=True,
    type=click.Choice(PLATFORMS),
    help="stablehlo: for these devices. Repeatable. [default: all]",
)
@click.option(
    "--context",
    "context_tokens",
    type=int,
    default=0,
    metavar="TOKENS",
    help="Most tokens of prompt and answer together. [default: the model's window, up to 2048]",
)
@click.option(
    "--chunk",
    "chunks",
    multiple=True,
    type=click.IntRange(min=2),
    default=signatures.DEFAULT_CHUNKS,
    show_default=True,
    help="A length of prefill chunks. Repeatable.",
)
@click.option(
    "--verify",
    "trees",
    multiple=True,
    type=click.IntRange(min=2),
    help="A size of token trees to verify in one step. Repeatable. [default: none]",
)
@click.option(
    "--level",
    "levels",
    multiple=True,
    type=click.IntRange(1, 100),
    help="A sub-model of an elastic bundle, in percent. Repeatable. [default: the whole model alone]",
)
@click.option(
    "--adapter",
    type=click.Path(path_type=Path),
    help="A low-rank adapter in PEFT's layout, to be folded into the weights.",
)
def export_command(
    bundle: Path,
    output: Path,
    kind: str,
    precision: str,
    calibrate: Path | None,
    platforms: tuple[str, ...],
    context_tokens: int,
    chunks: tuple[int, ...],
    trees: tuple[int, ...],
    levels: tuple[int, ...],
    adapter: Path | None,
) -> None:
    """Write the model in BUNDLE as programs for devices that compile nothing."""
    if kind != "stablehlo" and platforms:
        raise click.UsageError("--platform goes with --format stablehlo")
    if (precision == "w8a8") != (calibrate is not None):
        raise click.UsageError("--precision w8a8 and --calibrate FILE go together")
    allowed = {"stablehlo": tuple(DTYPES), "iree": ("f32",)}.get(kind, ("f32", "int8", "w8a8"))
    if precision not in allowed:
        raise click.UsageError(f"--format {kind} takes --precision {', '.join(allowed)}, not {precision}")
    plan = signatures.ExportPlan(
        context_tokens=context_tokens,
        chunk_tokens=tuple(sorted(set(chunks))),
        verify_tokens=tuple(sorted(set(trees))),
        levels=tuple(sorted(set(levels))),
    )
    # Before anything is read, and for what is not imported yet.
    extras.require_format(kind)
    subject = read_subject(bundle, levels=plan.levels, adapter=adapter, dtype=DTYPES.get(precision))
    if kind == "stablehlo":
        manifest = export_stablehlo(
            subject, output, plan, precision=precision, platforms=platforms or PLATFORMS, progress=_tell
        )
        _say(output, manifest)
        return
    if kind == "iree":
        from export.iree import export_iree

        _say(output, export_iree(subject, output, plan, progress=_tell))
        return
    ranges = None if calibrate is None else _ranges(subject, calibrate)
    if kind == "tflite":
        from export.tflite import export_tflite

        manifest, sharing = export_tflite(
            subject, output, plan, precision=precision, ranges=ranges, progress=_tell
        )
        _say(output, manifest)
    else:
        from export.litertlm import export_litertlm

        sharing = export_litertlm(subject, output, plan, precision=precision, ranges=ranges, progress=_tell)
        click.echo(f"{output}: {subject.name}, {output.stat().st_size / 1e6:.1f} MB")
    click.echo(
        f"weights: {sharing.stored_bytes / 1e6:.1f} MB, which would be {sharing.apart_bytes / 1e6:.1f} MB if "
        "levels shared none"
    )


def _ranges(subject: Subject, text: Path) -> dict[str, quantized.Ranges]:
    try:
        with text.open("rb") as file:
            raw = file.read(_MAX_TEXT_BYTES)
    except OSError as error:
        raise ConfigError(f"{text}: cannot be read ({error.strerror})") from error
    # A character may be cut at the end of what is read.
    tokens = Tokenizer(subject.tokenizer).encode(raw.decode("utf-8", errors="ignore"))
    return quantized.calibrate(quantized.quantized_subject(subject)[0], tokens[:_CALIBRATION_TOKENS])


def _say(output: Path, manifest: Manifest) -> None:
    size_mb = sum(each.size_bytes for each in manifest.files.values()) / 1e6
    click.echo(f"{output}: {len(manifest.signatures)} programs of {manifest.name}, {size_mb:.1f} MB")


def _tell(stage: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r{stage} {done} of {total}", err=True, nl=done == total)
