"""Exports a model in every format whose packages are installed, each by a command of its own.

Quantizes an exported float TFLite model to 8 bits with Google's AI Edge Quantizer: weights of fully connected
layers and embeddings become 8-bit by output channel, activations are quantized while the model runs
(`dynamic_wi8_afp32`). Only the model's file is replaced, and the same loop runs it.
"""

import dataclasses
import importlib.util
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.export import Plan
from benchmarks.harness.bench import Run, Tell
from benchmarks.harness.children import run_python
from benchmarks.models import Export, exported
from benchmarks.peers import PEERS, Opening
from benchmarks.peers.process import opening_of
from jaxllm.errors import JaxllmError
from jaxllm.export.folder_format.manifest import MANIFEST, Manifest, StoredFile
from jaxllm.serving.ground.options import CPU_CHUNK_TOKENS

LIVE, STEPS, STABLEHLO = "jaxllm", "jaxllm-live-steps", "jaxllm-stablehlo"
TFLITE = {precision: f"jaxllm-tflite-{precision}" for precision in ("f32", "int8", "w8a8")}
EDGE_QUANTIZER = "AI-Edge-Quantizer"
LITERT_LM = "LiteRT-LM"
LLAMA_CPP = "llama.cpp"
VERIFY_TOKENS = 64
# Of StableHLO, as `jaxllm export` has it.
BLOCK_TOKENS = 16
CALIBRATION_BYTES = 1 << 16
# Formats, and the module that writes them.
_NEEDED = {"stablehlo": "flatbuffers", "tflite": "litert_converter", "litertlm": "litert_lm_builder"}


def chunk_options(lengths: Sequence[int], context_tokens: int) -> list[object]:
    """Options of an export with chunks of these lengths, as far as the context goes."""
    return [part for each in lengths if each <= context_tokens for part in ("--chunk-tokens", each)]


def llama_cpp(folder: Path, bench: Run[Plan]) -> dict[str, Opening]:
    """What llama.cpp opens of a folder; nothing where it is not installed, which is told."""
    if missing := PEERS[LLAMA_CPP].missing():
        bench.tell(f"without {LLAMA_CPP}: {missing} is not installed (pip install 'jaxllm[peers]')")
        return {}
    return {LLAMA_CPP: opening_of(bench.plan, LLAMA_CPP, folder, "Q8_0")}


def make_exports(
    bundle: Path, scratch: Path, context_tokens: int, text: Path | None, tell: Tell
) -> dict[str, Export]:
    """Exports a bundle in every format whose packages are installed.

    Args:
      scratch: a folder for the exports.
      context_tokens: of all programs.
      text: its end calibrates w8a8; None leaves that out.

    Returns:
      The exports by system.
    """
    made, commands = {}, _commands(scratch, context_tokens, text)
    for form, module in _NEEDED.items():
        if importlib.util.find_spec(module) is None:
            missing = [system for system, options in commands.items() if options[1] == form]
            tell(f"without {', '.join(missing)}: {module} is not installed (pip install 'jaxllm[export]')")
            commands = {name: each for name, each in commands.items() if name not in missing}
    for system, options in commands.items():
        try:
            made[system] = exported(bundle, scratch / str(options[1]) / system, *options)
        except JaxllmError as error:
            tell(f"without {system}: {error}")
    if TFLITE["f32"] in made and importlib.util.find_spec(_MODULE) is None:
        tell(f"without {EDGE_QUANTIZER}: {PACKAGE} is not installed")
    elif TFLITE["f32"] in made:
        floats, out, began = made[TFLITE["f32"]], scratch / EDGE_QUANTIZER, time.perf_counter()
        try:
            quantize_folder(floats.path, out)
            took_ms = floats.export_ms + 1000 * (time.perf_counter() - began)
            made[EDGE_QUANTIZER] = Export(out, sum(each.stat().st_size for each in out.iterdir()), took_ms)
        except JaxllmError as error:
            tell(f"without {EDGE_QUANTIZER}: {error}")
    return made


def _commands(scratch: Path, context_tokens: int, text: Path | None) -> dict[str, list[Any]]:
    """Options of `jaxllm export` by system; the second one is the format."""
    sizes = [*chunk_options(CPU_CHUNK_TOKENS, context_tokens), "--context", context_tokens]
    platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    tree = ["--verify-tokens", min(VERIFY_TOKENS, context_tokens)]
    commands: dict[str, list[Any]] = {
        STABLEHLO: ["--format", "stablehlo", "--platform", platform, *sizes, *tree],
        TFLITE["f32"]: ["--format", "tflite", *sizes, *tree],
        TFLITE["int8"]: ["--format", "tflite", "--precision", "int8", *sizes, *tree],
        LITERT_LM: ["--format", "litertlm", *sizes],
    }
    if text is not None:
        part = scratch / "calibration.txt"
        part.write_bytes(text.read_bytes()[-CALIBRATION_BYTES:])
        w8a8 = ["--precision", "w8a8", "--static-verify", "--calibration-text", part]
        commands[TFLITE["w8a8"]] = ["--format", "tflite", *w8a8, *sizes, *tree]
    return commands


PACKAGE = "ai-edge-quantizer"
_MODULE = "ai_edge_quantizer"
# In a process of its own: it brings its own LiteRT, and logs a lot. It identifies tensors by their names,
# which several signatures of a model share.
_SCRIPT = """
import pathlib, sys
from ai_edge_quantizer import quantizer, recipe
from ai_edge_quantizer.utils import tfl_flatbuffer_utils
floats, out = map(pathlib.Path, sys.argv[1:])
model = tfl_flatbuffer_utils.read_model(floats)
for number, subgraph in enumerate(model.subgraphs):
    for place, tensor in enumerate(subgraph.tensors):
        tensor.name = f"{number}/{place}".encode()
renamed = out.with_suffix(".floats")
tfl_flatbuffer_utils.write_model(model, renamed)
result = quantizer.Quantizer(str(renamed), recipe.dynamic_wi8_afp32()).quantize(enable_progress_report=False)
result.export_model(str(out), overwrite=True)
renamed.unlink()
"""


def quantize_folder(floats: Path, out: Path) -> None:
    """Writes a copy of a folder of TFLite programs with its model quantized.

    Args:
      floats: made by `jaxllm export --format tflite`.
      out: a folder that is not there yet.

    Raises:
      JaxllmError: the package could not do it.
    """
    manifest = Manifest.read(floats)
    (model,) = {each.file for each in manifest.signatures}
    shutil.copytree(floats, out, ignore=shutil.ignore_patterns(model, MANIFEST))
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    run_python(PACKAGE, "-c", _SCRIPT, floats / model, out / model, env=quiet)
    if not (out / model).is_file():
        raise JaxllmError(f"{PACKAGE} failed: it wrote no model")
    files = {**manifest.files, model: StoredFile.of(out / model)}
    dataclasses.replace(manifest, precision="int8", files=files).write(out)
