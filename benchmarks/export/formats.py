"""Exports a model in every format whose packages are installed, each by a command of its own.

Quantizes an exported float TFLite model to 8 bits with Google's AI Edge Quantizer.

Weights of fully connected layers and embeddings become 8-bit by output channel, activations are quantized
while the model runs (`dynamic_wi8_afp32`). Only the model's file is replaced, and the same loop runs it.
"""

import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.harness.plan import sized
from benchmarks.peers import PEERS, Opening
from benchmarks.peers.process import TimedPlan, last_words, threads_of
from jaxllm.errors import JaxllmError
from jaxllm.export.folder_format.manifest import MANIFEST, Manifest, StoredFile
from jaxllm.serving.ground.options import CPU_CHUNK_TOKENS

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(TimedPlan):
    """Sizes of one measurement.

    Attributes:
      answers: greedy answers that are compared with the live engine's.
      answer_tokens: of each.
      context_tokens: most.
      sampled_precisions: of the TFLite programs whose sampling is measured.
    """

    prompt_tokens: tuple[int, ...] = sized((64, 256), quick=(64,))
    decode_tokens: int = sized(64, quick=16)
    rounds: int = sized(5, quick=2)
    answers: int = sized(20, quick=4)
    answer_tokens: int = sized(48, quick=16)
    text_windows: int = sized(12, quick=2)
    context_tokens: int = sized(1024, quick=256)
    sampled_precisions: tuple[str, ...] = sized(("f32", "int8"), quick=("int8",))
    patience_s: float = sized(60.0, quick=2.0)

    def export_options(self, lengths: Sequence[int] = (16, 64, 256)) -> list[str]:
        """The options of an export of these sizes, with one length of caches and chunks of `lengths`."""
        chunks = (
            part for each in lengths if each <= self.context_tokens for part in ("--chunk-tokens", each)
        )
        return [str(each) for each in ("--context", self.context_tokens, "--cache-tokens", 0, *chunks)]

    def opening(self, peer: str, model: Path, format_: str = "", **options: Any) -> Opening:
        """What a system opens, with the threads and the context of all."""
        threads = threads_of(self.threads)
        return Opening(
            peer=peer,
            model=model,
            format=format_,
            threads=threads,
            context_tokens=self.context_tokens,
            options=options,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What is measured.

    Attributes:
      model: a bundle or a Hugging Face folder.
      text: to calibrate w8a8 on, to take prompts from and to score; without it there is no w8a8.
    """

    model: Path
    text: Path | None


def llama_cpp(folder: Path, plan: Plan, tell: Tell) -> dict[str, Opening]:
    """What llama.cpp opens of a folder; nothing where it is not installed, which is told."""
    if missing := PEERS[LLAMA_CPP].missing():
        tell(f"without {LLAMA_CPP}: {missing} is not installed (pip install 'jaxllm[peers]')")
        return {}
    return {LLAMA_CPP: plan.opening(LLAMA_CPP, folder, "Q8_0")}


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
    if TFLITE["f32"] in made and quantizer_missing() is not None:
        tell(f"without {EDGE_QUANTIZER}: {PACKAGE} is not installed")
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
    command = [sys.executable, "-m", "jaxllm.cli.main", "export", bundle, "-o", out, *options]
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
    quantize_folder(floats.path, out)
    took_ms = 1000 * (time.perf_counter() - began)
    return Export(out, sum(each.stat().st_size for each in out.iterdir()), floats.export_ms + took_ms)


def _platform() -> str:
    return {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())


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


def quantizer_missing() -> str | None:
    """Names the package where it is not installed; None where it is."""
    return None if importlib.util.find_spec(_MODULE) else PACKAGE


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
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(floats / model), str(out / model)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
    )
    if done.returncode or not (out / model).is_file():
        raise JaxllmError(f"{PACKAGE} failed: {last_words(done.stderr)}")
    files = {**manifest.files, model: StoredFile.of(out / model)}
    dataclasses.replace(manifest, precision="int8", files=files).write(out)
