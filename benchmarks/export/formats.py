"""Exports a model in every format whose packages are installed, each by a command of its own."""

import dataclasses
import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.peers import edge_quantizer
from benchmarks.peers.process import last_words
from jaxllm.errors import JaxllmError
from serving.options import CPU_CHUNK_TOKENS

Tell = Callable[[str], None]

LIVE, STEPS, STABLEHLO = "jaxllm", "jaxllm-live-steps", "jaxllm-stablehlo"
TFLITE = {precision: f"jaxllm-tflite-{precision}" for precision in ("f32", "int8", "w8a8")}
EDGE_QUANTIZER = "AI-Edge-Quantizer"
LITERT_LM = "LiteRT-LM"
LLAMA_CPP = "llama.cpp"
VERIFY_TOKENS = 64
# Of StableHLO, as `jaxllm export` has it.
BLOCK_TOKENS = 16
_CALIBRATION_BYTES = 1 << 16
# Formats, and the module that writes them.
_NEEDED = (
    (("stablehlo",), "flatbuffers"),
    (("tflite",), "litert_converter"),
    (("litertlm",), "litert_lm_builder"),
)


@dataclasses.dataclass(frozen=True)
class Export:
    """An export that was made: where, how large it is, and how long it took."""

    path: Path
    file_bytes: int
    export_ms: float


def make_exports(
    bundle: Path, scratch: Path, context_tokens: int, text: Path | None, tell: Tell
) -> dict[str, Export]:
    """Exports a bundle in every format whose packages are installed.

    Args:
      bundle: of float weights.
      scratch: a folder for the exports.
      context_tokens: of all programs.
      text: its end calibrates w8a8; None leaves that out.
      tell: called with a line for what cannot be made.

    Returns:
      The exports by system.
    """
    commands = _commands(scratch, context_tokens, text)
    for formats, module in _NEEDED:
        missing = [system for system, options in commands.items() if options[1] in formats]
        if importlib.util.find_spec(module) is None:
            tell(f"without {', '.join(missing)}: {module} is not installed (pip install 'jaxllm[export]')")
            commands = {name: each for name, each in commands.items() if name not in missing}
    made = {}
    for system, options in commands.items():
        try:
            made[system] = exported(bundle, scratch / options[1] / system, options)
        except JaxllmError as error:
            tell(f"without {system}: {error}")
    if TFLITE["f32"] in made and edge_quantizer.missing() is not None:
        tell(f"without {EDGE_QUANTIZER}: {edge_quantizer.PACKAGE} is not installed")
    elif TFLITE["f32"] in made:
        try:
            made[EDGE_QUANTIZER] = _quantized(made[TFLITE["f32"]], scratch / EDGE_QUANTIZER)
        except JaxllmError as error:
            tell(f"without {EDGE_QUANTIZER}: {error}")
    return made


def _commands(scratch: Path, context_tokens: int, text: Path | None) -> dict[str, list[Any]]:
    """Options of `jaxllm export` by system; the second one is the format."""
    chunks = [
        part for each in CPU_CHUNK_TOKENS if each <= context_tokens for part in ("--chunk-tokens", each)
    ]
    sizes = [*chunks, "--context", context_tokens]
    tree = ["--verify-tokens", min(VERIFY_TOKENS, context_tokens)]
    commands: dict[str, list[Any]] = {
        STABLEHLO: ["--format", "stablehlo", "--platform", _platform(), *sizes, *tree],
        TFLITE["f32"]: ["--format", "tflite", *sizes, *tree],
        TFLITE["int8"]: ["--format", "tflite", "--precision", "int8", *sizes, *tree],
        LITERT_LM: ["--format", "litertlm", *sizes],
    }
    if text is not None:
        part = scratch / "calibration.txt"
        part.write_bytes(text.read_bytes()[-_CALIBRATION_BYTES:])
        w8a8 = ["--precision", "w8a8", "--static-verify", "--calibration-text", part]
        commands[TFLITE["w8a8"]] = ["--format", "tflite", *w8a8, *sizes, *tree]
    return commands


def exported(bundle: Path, out: Path, options: Sequence[Any]) -> Export:
    """The export that a command of these options makes, in a process of its own.

    Raises:
      JaxllmError: it failed.
    """
    out.parent.mkdir(exist_ok=True)
    if "litertlm" in options:
        out = out.with_suffix(".litertlm")
    command = [sys.executable, "-m", "serving.cli", "export", bundle, "-o", out, *options]
    began = time.perf_counter()
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise JaxllmError(last_words(done.stderr))
    files = [out] if out.is_file() else list(out.iterdir())
    size = sum(each.stat().st_size for each in files)
    return Export(out, size, 1000 * (time.perf_counter() - began))


def _quantized(floats: Export, out: Path) -> Export:
    """The float TFLite model as AI Edge Quantizer makes it 8-bit."""
    began = time.perf_counter()
    edge_quantizer.quantize_folder(floats.path, out)
    took_ms = 1000 * (time.perf_counter() - began)
    return Export(out, sum(each.stat().st_size for each in out.iterdir()), floats.export_ms + took_ms)


def _platform() -> str:
    return {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
