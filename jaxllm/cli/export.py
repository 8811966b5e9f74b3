"""`jaxllm export`: writes a bundle as exported programs, or as a plain model for other engines."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxllm.cli.console import progress_bars, read_text
from jaxllm.cli.shared_options import context_option, model_argument, named_folders_option, path_option
from jaxllm.export.contents import CONTENTS, PLAIN, require_contents, require_family, require_format
from jaxllm.option_types import Level

if TYPE_CHECKING:
    from jaxllm.export.folder_format.manifest import Manifest
    from jaxllm.export.signatures import ExportPlan
    from jaxllm.export.subject import Subject
    from jaxllm.serving.host.progress import Progress

PRECISIONS = ("f32", "bf16", "f16", "int8", "int4", "w8a8")
PLATFORMS = ("cpu", "cuda", "tpu")
CACHES = ("f32", "f16", "int8")
CODECS = ("channel", "token", "kivi", "rotated")
CHUNK_TOKENS = (16, 64, 256)
RUN_FILE = "recipe.json"
# Enough tokens to see the largest magnitudes of a text.
_CALIBRATION_TOKENS = 4096
# Enough characters for that many tokens.
_CALIBRATION_CHARACTERS = 1 << 20


@click.command("export")
@model_argument("bundle")
@path_option("-o", "--output", metavar="PATH", help="The folder, LiteRT-LM file or GGUF file to write.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="For tflite, device and litertlm at f32, int8 and int4, print programs, files, bytes and memory of "
    "the export, and write nothing. Reads no weights: of a Hugging Face folder only config.json.",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice([*CONTENTS, *PLAIN]),
    default="stablehlo",
    show_default=True,
    help="StableHLO for JAX, a TFLite model for LiteRT, the same with a runner for systems without JAX "
    "(device), or one LiteRT-LM file; or the plain model: a Hugging Face folder for transformers, or a GGUF "
    "file for llama.cpp.",
)
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    default="f32",
    show_default=True,
    help="Width of weights and activations: stablehlo supports f32 and bf16; tflite, device and litertlm "
    "f32, int8 (weights only), int4 (in blocks of 32; embeddings int8) and w8a8 (both); hf f32, bf16 and "
    "f16; gguf these and int8 (Q8_0).",
)
@path_option(
    "--calibration-text",
    help="For w8a8, a UTF-8 text to calibrate activation scales on; calibrated bundles have the inputs'.",
)
@click.option(
    "--without-shadow",
    is_flag=True,
    help="For w8a8 of a bundle that was calibrated for integer prefill, leave out its activation scales and "
    "the float path of its outlier channels.",
)
@click.option(
    "--static-verify",
    is_flag=True,
    help="For w8a8, make verify programs multiply as prefill programs do, so that the scores of a text show "
    "the loss of prefill.",
)
@click.option(
    "--platform",
    "platforms",
    multiple=True,
    type=click.Choice(PLATFORMS),
    help="For stablehlo, export for this platform. Repeatable.  [default: all]",
)
@context_option
@click.option(
    "--chunk-tokens",
    multiple=True,
    type=click.IntRange(min=2),
    default=CHUNK_TOKENS,
    show_default=True,
    metavar="TOKENS",
    help="Make a prefill program for chunks of this length. Repeatable.",
)
@click.option(
    "--cache-tokens",
    multiple=True,
    type=click.IntRange(min=0),
    metavar="TOKENS",
    help="Also make programs for this cache length, which attend over less than the whole context; 0 for the "
    "whole context only. Repeatable.  [default: 512 and four times more each time; for litertlm none]",
)
@click.option(
    "--verify-tokens",
    multiple=True,
    type=click.IntRange(min=2),
    metavar="TOKENS",
    help="Make a program that verifies token trees of this size in one step. Repeatable.  [default: none]",
)
@click.option(
    "--block-tokens",
    type=click.IntRange(min=0, max=64),
    metavar="TOKENS",
    help="Make a program that decodes up to this many tokens per dispatch, including sampling; 0 for none.  "
    "[default: 16 for stablehlo; else none]",
)
@click.option(
    "--attention-mask",
    "masked",
    is_flag=True,
    help="For litertlm, make prefill and decode programs with the attention mask as an input, filled by the "
    "runtime.",
)
@click.option(
    "--npu",
    is_flag=True,
    help="For litertlm, divide the model into an embedder, an auxiliary model and the layers, as LiteRT's "
    "compiler for NPUs requires; needs exactly one --chunk-tokens.",
)
@click.option(
    "--stages",
    is_flag=True,
    help="For w8a8 as tflite or device, also make separate programs of the stages of prefill, for two "
    "processors to run out of order.",
)
@click.option(
    "--codec",
    type=click.Choice(CODECS),
    help="For stablehlo, tflite and device, make programs that encode chunks of contexts at 8, 4 and 2 bits "
    "with this codec, and programs that load them.  [default: none]",
)
@click.option(
    "--cache",
    type=click.Choice(CACHES),
    default="f32",
    show_default=True,
    help="For tflite, device and litertlm, the width of keys and values in caches: f32, f16 for half the "
    "memory, or int8 with a scale for each row of a head, for about a third.",
)
@click.option(
    "--level",
    "levels",
    multiple=True,
    type=Level(),
    help="Export this level of an elastic bundle. Repeatable, except for hf, gguf and litertlm, whose file "
    "has one level.  [default: the whole model only]",
)
@path_option(
    "--adapter", metavar="DIR", help="A low-rank adapter in PEFT's layout, to merge into the weights."
)
@named_folders_option(
    "--adapter-input",
    "inputs",
    help="Store this low-rank adapter with the programs, as an input: calls name an adapter, or none. "
    "Repeatable.  [default: none]",
)
@click.option(
    "--adapter-rank",
    "input_rank",
    type=click.IntRange(min=0),
    default=0,
    metavar="RANK",
    help="Maximum rank of adapters as inputs of programs.  [default: that of --adapter-input]",
)
@click.option(
    "--release",
    type=click.IntRange(0, 1 << 50),
    default=0,
    metavar="NUMBER",
    help="For device, the number of this release: an update has a higher one than what it replaces.",
)
@path_option(
    "--sign", metavar="KEY", help="For device, sign the folder with the ed25519 key of a publisher (PEM)."
)
def export_command(
    bundle: Path,
    output: Path | None,
    dry_run: bool,
    kind: str,
    precision: str,
    calibration_text: Path | None,
    platforms: tuple[str, ...],
    adapter: Path | None,
    sign: Path | None,
    **shapes: Any,
) -> None:
    """Export a model as programs that run without our model code, or as a model for other engines.

    Reads BUNDLE, a file or the name of a packaged model, a Hugging Face folder or a GGUF file, which is
    prepared first, and writes a folder of programs with their weights, manifest and tokenizer (`jaxllm
    generate --program` runs stablehlo and tflite), or one LiteRT-LM file. Each program is tested before it is
    stored. As hf or gguf, a level of an elastic bundle is a plain model, narrowed to the level's units. For
    the folder of a training run, the best checkpoint so far is written as hf.

    \b
    Example:
      jaxllm export model.jaxllm --output programs
      jaxllm export model.jaxllm --output model.litertlm --format litertlm --precision int8
      jaxllm export model.jaxllm --output device --format device --level 50
      jaxllm export model.jaxllm --output half.gguf --format gguf --precision f16 --level 50
      jaxllm export runs/mine --output runs/mine/hf --format hf
      jaxllm export model.jaxllm --format device --precision int4 --dry-run
    """
    if dry_run and (kind not in ("tflite", "device", "litertlm") or precision == "w8a8"):
        raise click.UsageError(
            "--dry-run goes with --format tflite, device and litertlm at f32, int8 and int4"
        )
    if output is None and not dry_run:
        raise click.UsageError("give --output PATH, or --dry-run")
    output = output or Path()
    if kind != "stablehlo" and platforms:
        raise click.UsageError("--platform goes with --format stablehlo")
    if (precision == "w8a8") != (calibration_text is not None):
        raise click.UsageError("--precision w8a8 and --calibration-text FILE go together")
    if shapes["without_shadow"] and precision != "w8a8":
        raise click.UsageError("--without-shadow goes with --precision w8a8")
    if kind != "device" and (sign is not None or shapes["release"]):
        raise click.UsageError("--release and --sign go with --format device")
    allowed = PLAIN[kind] if kind in PLAIN else CONTENTS[kind].precisions
    if precision not in allowed:
        raise click.UsageError(f"--format {kind} takes --precision {', '.join(allowed)}, not {precision}")
    if (bundle / RUN_FILE).is_file():
        _export_run(bundle, output, kind, precision)
        return
    if kind in PLAIN:
        if shapes["inputs"] or shapes["input_rank"]:
            raise click.UsageError(f"--adapter-input goes with programs; --format {kind} takes --adapter")
        _export_plain(bundle, output, kind, precision, shapes["levels"], adapter)
        return
    # Imported here, so that --help and usage errors do not wait.
    from jaxllm.checkpoints.gguf_file import is_checkpoint
    from jaxllm.export import quantized
    from jaxllm.export.folder_format.publisher import read_private_key, sign_folder
    from jaxllm.export.signatures import ExportPlan
    from jaxllm.export.stablehlo import DTYPES, export_stablehlo
    from jaxllm.export.subject import AdapterOptions, read_subject
    from jaxllm.serving.ground.bundles import open_model
    from jaxllm.serving.host.allocator import give_back_large_blocks

    for name in ("chunk_tokens", "verify_tokens", "levels", "cache_tokens"):
        shapes[name] = tuple(sorted(set(shapes[name])))
    # 0 means no cache length besides the whole context; no option means the default lengths.
    caches = tuple(filter(None, shapes.pop("cache_tokens"))) if shapes["cache_tokens"] else None
    if shapes["block_tokens"] is None:
        shapes["block_tokens"] = CONTENTS[kind].block_tokens
    named, rank = shapes.pop("inputs"), shapes.pop("input_rank")
    inputs = AdapterOptions(given=named, rank=rank) if named or rank else None
    plan = ExportPlan(**{**shapes, "cache_tokens": caches, "codec": shapes["codec"] or ""})
    require_contents(kind, plan, levels=len(plan.levels), adapters=inputs is not None)
    if dry_run:
        from jaxllm.export.forecast import forecast, subject_of_config

        if bundle.is_dir():
            subject = subject_of_config(bundle, plan.levels)
        else:
            subject = read_subject(bundle, levels=plan.levels, adapter=adapter, inputs=inputs)
        click.echo("\n".join(forecast(subject, plan, kind=kind, precision=precision)))  # pyright: ignore
        return
    # Fail before anything is read, also for extras that are not imported yet.
    require_format(kind)
    publisher = None if sign is None else read_private_key(sign)
    if is_checkpoint(bundle):
        # Programs hold floats, or quantize them once.
        with open_model(bundle, weights="f32") as opened:
            bundle = opened.path
    subject = read_subject(
        bundle, levels=plan.levels, adapter=adapter, dtype=DTYPES.get(precision), inputs=inputs
    )
    require_family(kind, precision, subject.cfg, levels=len(subject.levels) > 1)
    # Check this before a text is read.
    without = quantized.left_out(subject, precision, without_shadow=plan.without_shadow)  # pyright: ignore
    # Layers are read one after the other.
    give_back_large_blocks()
    with progress_bars() as progress:
        if kind == "stablehlo":
            manifest = export_stablehlo(
                subject,
                output,
                plan,
                precision=precision,  # pyright: ignore[reportArgumentType]: one of the choices
                platforms=platforms or PLATFORMS,
                progress=progress,
            )
            said = [_facts(output, manifest)]
        else:
            said = _export_tflite(subject, output, plan, kind, precision, calibration_text, progress)
    if publisher is not None:
        sign_folder(output, publisher)
    for line in [*said, *(f"without {each}" for each in without)]:
        click.echo(line)


def _export_plain(
    path: Path, output: Path, kind: str, precision: str, levels: tuple[int, ...], adapter: Path | None
) -> None:
    """Exports as hf or gguf."""
    context = click.get_current_context()
    for name in ("context_tokens", "chunk_tokens", "cache_tokens", "verify_tokens", "block_tokens"):
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            raise click.UsageError(f"--{name.split('_')[0]} options shape programs; --format {kind} has none")
    if len(levels) > 1:
        raise click.UsageError(f"--format {kind} writes one model; give one --level")
    from jaxllm.config import FULL_LEVEL
    from jaxllm.export.gguf_file import write_plain_gguf
    from jaxllm.export.plain_model import read_plain, write_plain_folder
    from jaxllm.models.parameters import parameter_count
    from jaxllm.serving.ground.bundles import open_model

    require_format(kind)
    write = write_plain_folder if kind == "hf" else write_plain_gguf
    with open_model(path) as bundle:
        model = read_plain(bundle, level=levels[0] if levels else FULL_LEVEL, adapter=adapter)
        written = parameter_count(write(output, model, precision))
    files = output.iterdir() if output.is_dir() else [output]
    size_mb = sum(each.stat().st_size for each in files) / 1e6
    zeros = 1 - parameter_count(model.cfg) / written
    padded = f", {zeros:.0%} of it zeros, as all layers have one size there" if zeros else ""
    click.echo(f"{output}: {model.name}, {written / 1e6:.1f} M parameters, {size_mb:.1f} MB{padded}")


def _export_run(run_dir: Path, output: Path, kind: str, precision: str) -> None:
    """Exports the best checkpoint so far of a training run, which may still be running."""
    if (kind, precision) != ("hf", "f32"):
        raise click.UsageError(
            f"{run_dir} is a training run: export its best checkpoint by --format hf --precision f32, and "
            "that folder to other formats"
        )
    from jaxllm.cli.training_options import set_devices
    from jaxllm.training.decoders import export_best
    from jaxllm.training.loop.run_files import read_identity
    from jaxllm.training.seq2seq.run import export_best_seq2seq

    set_devices(None)
    # Runs of encoder-decoders have pairs.
    export = export_best_seq2seq if "pairs" in read_identity(run_dir) else export_best
    click.echo(export(run_dir, output))


def _export_tflite(
    subject: "Subject",
    output: Path,
    plan: "ExportPlan",
    kind: str,
    precision: Any,
    calibration_text: Path | None,
    progress: "Progress",
) -> list[str]:
    """Exports as tflite, device or litertlm; returns messages for the user."""
    from jaxllm.export import quantized
    from jaxllm.export.tflite import export_tflite
    from jaxllm.models.features import require_feature
    from jaxllm.text.tokenizer import Tokenizer

    # Check this before a text is read.
    require_feature(subject.cfg, "tflite")
    ranges = None
    if calibration_text is not None:
        text = read_text(calibration_text)[:_CALIBRATION_CHARACTERS]
        tokens = Tokenizer(subject.tokenizer).encode(text)[:_CALIBRATION_TOKENS]
        of = subject.without_calibration() if plan.without_shadow else subject
        ranges = quantized.calibrate(quantized.quantized_subject(of)[0], tokens)
    if kind in ("tflite", "device"):
        from jaxllm.export.folder import write_loop

        manifest, sharing = export_tflite(
            subject,
            output,
            plan,
            precision=precision,
            ranges=ranges,
            progress=progress,
            beside=write_loop if kind == "device" else None,
        )
        said = [_facts(output, manifest)]
        if kind == "device":
            said.append(f"run it with: python {output}")
    else:
        from jaxllm.export.litertlm import export_litertlm

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


def _facts(output: Path, manifest: "Manifest") -> str:
    size_mb = sum(each.size_bytes for each in manifest.files.values()) / 1e6
    return f"{output}: {len(manifest.signatures)} programs of {manifest.name}, {size_mb:.1f} MB"
