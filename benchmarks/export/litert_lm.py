"""Measures Google's LiteRT-LM on an exported bundle, in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.process import last_words
from jaxllm.errors import JaxllmError


def measure_litert_lm(bundle: Path, scratch: Path, order: Mapping[str, Any]) -> dict[str, Any]:
    """What `benchmarks.peers.litert_lm_child` finds.

    Args:
      bundle: in the format of LiteRT-LM.
      scratch: a folder for its cache.
      order: the child's order, but for the model and the cache.

    Raises:
      JaxllmError: it failed.
    """
    cache = scratch / "litert-lm-cache"
    cache.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers.litert_lm_child"],
        input=json.dumps({**order, "model": str(bundle), "cache": str(cache)}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise JaxllmError(f"LiteRT-LM failed: {last_words(done.stderr)}")
    return json.loads(done.stdout)
