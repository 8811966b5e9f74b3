"""Scores a text by the TFLite programs that `jaxllm export --precision w8a8` makes of a calibrated bundle, in
the arithmetic of their prefill."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.peers.process import last_words
from jaxllm.bundle import write_bundle
from jaxllm.bundle.prefill import prefill_parts
from jaxllm.config import ModelConfig
from jaxllm.errors import JaxllmError
from jaxllm.int8_prefill.calibration import PrefillCalibration
from jaxllm.text.tokenizer import Tokenizer, TokenizerFiles
from serving.engine import Engine

EXPORTED = "jaxllm-tflite-w8a8"
# Of their formats and of what runs them.
_PACKAGES = ("litert_converter", "ai_edge_litert")


def missing() -> str | None:
    """A package that is not installed; None if all are."""
    return next((each for each in _PACKAGES if importlib.util.find_spec(each) is None), None)


def exported_scores(
    cfg: ModelConfig,
    floats: dict[str, np.ndarray],
    tokenizer: TokenizerFiles,
    calibration: PrefillCalibration,
    known: Sequence[np.ndarray],
    folder: Path,
) -> Callable[[np.ndarray], np.ndarray]:
    """What scores the tokens of a row `[T]` after its first, log-probabilities `[T - 1]`.

    Args:
      cfg: the model.
      floats: its parameters.
      tokenizer: its tokenizer.
      calibration: of integer prefill.
      known: rows of the calibration text, of one length, which rows to score have, too.
      folder: for the bundle, the text and the programs.

    Raises:
      JaxllmError: exporting failed.
    """
    bundle, text, programs = folder / "model.jaxllm", folder / "text.txt", folder / "programs"
    write_bundle(
        bundle,
        cfg=cfg,
        params=floats.items(),
        weights="int8",
        tokenizer=tokenizer,
        name="calibrated",
        parts=prefill_parts(calibration),
    )
    text.write_text(Tokenizer(tokenizer).decode(np.concatenate(known).tolist()), encoding="utf-8")
    length = str(len(known[0]))
    options = [
        "--format",
        "tflite",
        "--precision",
        "w8a8",
        "--calibration-text",
        str(text),
        "--static-verify",
    ]
    sizes = ["--context", length, "--verify-tokens", length, "--chunk-tokens", length, "--cache-tokens", "0"]
    command = [sys.executable, "-m", "serving.cli", "export", str(bundle), "-o", str(programs)]
    done = subprocess.run([*command, *options, *sizes], capture_output=True, text=True, check=False)
    if done.returncode:
        raise JaxllmError(f"the w8a8 export failed: {last_words(done.stderr)}")
    runner = Engine.open_program(programs).runner
    return lambda row: runner.score(row[:-1].tolist(), row[1:].tolist())
