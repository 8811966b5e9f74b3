"""Exports a model itself, for other engines, as `jaxllm export` is asked to."""

from pathlib import Path

import click

# Formats of models for other engines, and the precisions that each takes; the others are of programs.
PLAIN = {"hf": ("f32", "bf16", "f16"), "gguf": ("f32", "bf16", "f16", "int8")}


def export_plain(
    path: Path, output: Path, kind: str, precision: str, levels: tuple[int, ...], adapter: Path | None
) -> None:
    """Exports as hf or gguf."""
    context = click.get_current_context()
    for name in ("context_tokens", "chunk_tokens", "cache_tokens", "verify_tokens", "block_tokens"):
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            raise click.UsageError(f"--{name.split('_')[0]} options shape programs; --format {kind} has none")
    if len(levels) > 1:
        raise click.UsageError(f"--format {kind} writes one model; give one --level")
    from export import extras
    from export.gguf_file import write_plain_gguf
    from export.plain_model import read_plain, write_plain_folder
    from jaxllm.bundle import Bundle
    from jaxllm.config import WHOLE
    from jaxllm.models.parameters import parameter_count

    extras.require_format(kind)
    write = write_plain_folder if kind == "hf" else write_plain_gguf
    with Bundle.open(path) as bundle:
        model = read_plain(bundle, level=levels[0] if levels else WHOLE, adapter=adapter)
        written = parameter_count(write(output, model, precision))
    files = output.iterdir() if output.is_dir() else [output]
    size_mb = sum(each.stat().st_size for each in files) / 1e6
    zeros = 1 - parameter_count(model.cfg) / written
    padded = f", {zeros:.0%} of it zeros, as all layers have one size there" if zeros else ""
    click.echo(f"{output}: {model.name}, {written / 1e6:.1f} M parameters, {size_mb:.1f} MB{padded}")
