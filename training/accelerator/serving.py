"""Measures serving on the device by the service's own commands, in processes of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxllm.errors import JaxllmError
from training.accelerator.rows import Row

# Prefill and decode of 1.1 billion random weights; levels of the packaged model.
_BENCHES: Mapping[str, Sequence[str]] = {
    "serve-bf16": ("engine", "--shape", "1b", "--weights", "bf16", "--peer", "none", "--quick"),
    "serve-int8": ("engine", "--shape", "1b", "--weights", "int8", "--peer", "none", "--quick"),
    "serve-levels": ("elastic", "--only", "costs", "--quick"),
}
_TINY: Mapping[str, Sequence[str]] = {"serve-packaged": ("engine", "--peer", "none", "--quick")}
_PROMPT = "Once upon a time there was a small dog who lived beside a wide river. One day he met a fox. " * 4
_LIMIT_S = 280


def checks(tiny: bool) -> dict[str, Callable[[], list[Row]]]:
    """The checks by name; with `tiny` one bench, of the packaged model."""
    found: dict[str, Callable[[], list[Row]]] = {}
    for name, words in (_TINY if tiny else _BENCHES).items():
        found[name] = lambda words=words: bench(words)
    return found if tiny else {**found, "serve-integer-prefill": compare_integer_prefill}


def bench(words: Sequence[str]) -> list[Row]:
    """The rows of ours that `jaxllm bench` prints."""
    printed = json.loads(_output_of("bench", *words, "--json"))
    rows = (row for row in printed["rows"] if row["system"].startswith("jaxllm"))
    return [_row(row) for row in rows]


def compare_integer_prefill() -> list[Row]:
    """Answers after integer prefill on two processors: the GPU as the integer one, beside the CPU."""
    words = ("generate", "--prefill", "int8", "--processors", "2", "--prompt", _PROMPT, "--max-tokens", "20")
    texts = {device: _output_of(*words, "--integer-device", device) for device in ("cpu", "gpu")}
    same = float(texts["cpu"] == texts["gpu"])
    return [Row("integer prefill with --integer-device gpu", "same_answer", same, "", texts["gpu"].strip())]


def _row(row: Mapping[str, Any]) -> Row:
    case = f"{row['case']} ({row['system']})"
    return Row(case, row["metric"], row["value"], row["unit"], row.get("note") or "")


def _output_of(*words: str) -> str:
    # Benches start processes of their own: none of them may take the device's whole memory.
    shared = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    process = subprocess.run(
        [sys.executable, "-m", "serving.entry", *words],
        stdout=subprocess.PIPE, text=True, timeout=_LIMIT_S, env=shared, check=False,
    )  # fmt: skip
    if process.returncode:
        raise JaxllmError(f"`jaxllm {' '.join(words)[:100]}` ended with {process.returncode}")
    return process.stdout
