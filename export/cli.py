"""`jaxllm export`: a bundle becomes programs."""

from pathlib import Path
from typing import Any

import click

from export import extras, quantized, signatures
from export.stablehlo import DTYPES, PLATFORMS, export_stablehlo
from export.subject import Subject, read_subject
from jaxllm.programs.manifest import Manifest
from jaxllm.tokenizer import Tokenizer
from serving.console import context_option, progress_bars, read_text
from serving.options import CPU_CHUNK_TOKENS
from serving.progress import Progress

FORMATS = ("stablehlo", "tflite", "litertlm", "iree")
PRECISIONS = ("f32", "bf16", "int8", "w8a8")
# Enough for the largest magnitudes of a text to have been seen.
_CALIBRATION_TOKENS = 4096
# What surely holds as many.
_CALIBRATION_CHARACTERS = 1 << 20


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
    "--without-shadow",
    is_flag=True,
    help="w8a8 of a bundle that was calibrated for integer prefill: leave its shadow for outliers out.",
)
@click.option(
    "--platform",
    "platforms",
    multiple=True,
    type=click.Choice(PLATFORMS),
    help="stablehlo: for these devices. Repeatable. [default: all]",
)
@context_option
@click.option(
    "--chunk",
    "chunks",
    multiple=True,
    type=click.IntRange(min=2),
    default=CPU_CHUNK_TOKENS,
    show_default=True,
    help="A length of prefill chunks. Repeatable.",
)
@click.option(
    "--cache",
    "caches",
    multiple=True,
    type=click.IntRange(min=0),
    metavar="TOKENS",
    help="A length of caches besides the whole context, which programs over them need not read; 0 for none. "
    "Repeatable. [default: stablehlo, tflite: as the engine has them, 512 and four times more each time]",
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
    without_shadow: bool,
    platforms: tuple[str, ...],
    context_tokens: int,
    chunks: tuple[int, ...],
    caches: tuple[int, ...],
    trees: tuple[int, ...],
    levels: tuple[int, ...],
    adapter: Path | None,
) -> None:
    """Write the model in BUNDLE as programs that run without our model code."""
    if kind != "stablehlo" and platforms:
        raise click.UsageError("--platform goes with --format stablehlo")
    if (precision == "w8a8") != (calibrate is not None):
        raise click.UsageError("--precision w8a8 and --calibrate FILE go together")
    if without_shadow and precision != "w8a8":
        raise click.UsageError("--without-shadow goes with --precision w8a8")
    allowed = {"stablehlo": tuple(DTYPES), "iree": ("f32",)}.get(kind, ("f32", "int8", "w8a8"))
    if precision not in allowed:
        raise click.UsageError(f"--format {kind} takes --precision {', '.join(allowed)}, not {precision}")
    plan = signatures.ExportPlan(
        context_tokens=context_tokens,
        chunk_tokens=tuple(sorted(set(chunks))),
        verify_tokens=tuple(sorted(set(trees))),
        cache_tokens=tuple(sorted(set(caches) - {0})) if caches else None,
        levels=tuple(sorted(set(levels))),
        without_shadow=without_shadow,
    )
    # Before anything is read, and for what is not imported yet.
    extras.require_format(kind)
    subject = read_subject(bundle, levels=plan.levels, adapter=adapter, dtype=DTYPES.get(precision))
    # Before a text is read with it.
    without = quantized.left_out(subject, precision, without_shadow=without_shadow)  # pyright: ignore
    with progress_bars() as progress:
        if kind == "stablehlo":
            manifest = export_stablehlo(
                subject,
                output,
                plan,
                precision=precision,
                platforms=platforms or PLATFORMS,
                progress=progress,
            )
            said = [_facts(output, manifest)]
        elif kind == "iree":
            from export.iree import export_iree

            said = [_facts(output, export_iree(subject, output, plan, progress=progress))]
        else:
            said = _export_tflite(subject, output, plan, kind, precision, calibrate, progress)
    for line in [*said, *(f"without {each}" for each in without)]:
        click.echo(line)


def _export_tflite(
    subject: Subject,
    output: Path,
    plan: signatures.ExportPlan,
    kind: str,
    precision: Any,
    calibrate: Path | None,
    progress: Progress,
) -> list[str]:
    """Exports as tflite or litertlm; what there is to say of it."""
    from export.tflite import export_tflite, require_holdable

    # Before a text is read with it.
    require_holdable(subject.cfg)
    ranges = None if calibrate is None else _ranges(subject, calibrate)
    if kind == "tflite":
        manifest, sharing = export_tflite(
            subject, output, plan, precision=precision, ranges=ranges, progress=progress
        )
        said = [_facts(output, manifest)]
    else:
        from export.litertlm import export_litertlm

        sharing = export_litertlm(
            subject, output, plan, precision=precision, ranges=ranges, progress=progress
        )
        said = [f"{output}: {subject.name}, {output.stat().st_size / 1e6:.1f} MB"]
    if len(subject.levels) > 1:
        said.append(
            f"weights: {sharing.stored_bytes / 1e6:.1f} MB, which would be "
            f"{sharing.apart_bytes / 1e6:.1f} MB if levels shared none"
        )
    return said


def _ranges(subject: Subject, text: Path) -> dict[str, quantized.Ranges]:
    tokens = Tokenizer(subject.tokenizer).encode(read_text(text)[:_CALIBRATION_CHARACTERS])
    return quantized.calibrate(quantized.quantized_subject(subject)[0], tokens[:_CALIBRATION_TOKENS])


def _facts(output: Path, manifest: Manifest) -> str:
    size_mb = sum(each.size_bytes for each in manifest.files.values()) / 1e6
    return f"{output}: {len(manifest.signatures)} programs of {manifest.name}, {size_mb:.1f} MB"
