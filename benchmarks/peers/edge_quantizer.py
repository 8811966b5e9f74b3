"""Quantizes an exported float TFLite model to 8 bits with Google's AI Edge Quantizer.

Weights of fully connected layers and embeddings become 8-bit by output channel, activations are quantized
while the model runs (`dynamic_wi8_afp32`). Only the model's file is replaced, and the same loop runs it.
"""

import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.process import last_words
from jaxllm.errors import JaxllmError
from jaxllm.program_folder.manifest import MANIFEST, Manifest, StoredFile

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


def missing() -> str | None:
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
