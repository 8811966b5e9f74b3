"""`jaxllm export`: a bundle becomes programs."""

from pathlib import Path

import click

from export.signatures import DEFAULT_CHUNKS, ExportPlan
from export.stablehlo import DTYPES, PLATFORMS, export_stablehlo
from export.subject import read_subject

FORMATS = ("stablehlo",)


@click.command("export")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="What to write.")
@click.option("--format", "kind", type=click.Choice(FORMATS), default="stablehlo", show_default=True)
@click.option(
    "--precision",
    type=click.Choice(["f32", "bf16"]),
    default="f32",
    show_default=True,
    help="Of the weights.",
)
@click.option(
    "--platform",
    "platforms",
    multiple=True,
    type=click.Choice(PLATFORMS),
    help="StableHLO: for these devices. Repeatable. [default: all]",
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
    default=DEFAULT_CHUNKS,
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
    platforms: tuple[str, ...],
    context_tokens: int,
    chunks: tuple[int, ...],
    trees: tuple[int, ...],
    levels: tuple[int, ...],
    adapter: Path | None,
) -> None:
    """Write the model in BUNDLE as programs for devices that compile nothing."""
    del kind
    plan = ExportPlan(
        context_tokens=context_tokens,
        chunk_tokens=tuple(sorted(set(chunks))),
        verify_tokens=tuple(sorted(set(trees))),
        levels=tuple(sorted(set(levels))),
    )
    subject = read_subject(
        bundle,
        levels=plan.levels,
        adapter=adapter,
        dtype=DTYPES[precision],
    )
    manifest = export_stablehlo(
        subject, output, plan, precision=precision, platforms=platforms or PLATFORMS, progress=_tell
    )
    size_mb = sum(each.size_bytes for each in manifest.files.values()) / 1e6
    click.echo(f"{output}: {len(manifest.signatures)} programs of {manifest.name}, {size_mb:.1f} MB")


def _tell(stage: str, done: int, total: int) -> None:
    click.echo(f"\r{stage} {done} of {total}", err=True, nl=done == total)
