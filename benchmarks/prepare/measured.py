"""Prepares a model in a process of its own, and measures time and peak memory.

`python -m benchmarks.prepare.measured MODEL BUNDLE [WEIGHTS]` prints one JSON object. The peak is of resident
memory, mapped pages of files included; what Python, JAX and the imports take before is told apart.
"""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness.memory import peak_resident_bytes, reset_peak_memory
from benchmarks.peers.process import environment_of, last_words
from jaxllm.errors import JaxllmError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preparation:
    """What preparing took.

    Attributes:
      took_s: seconds.
      cpu_s: of them, on processors.
      idle_bytes: resident before.
      peak_bytes: resident at most, with those.
    """

    took_s: float
    cpu_s: float
    idle_bytes: int
    peak_bytes: int


def measure(model: Path, bundle: Path, weights: str | None, threads: int) -> Preparation:
    """Prepares `model` as `bundle` in a process of its own.

    Raises:
      JaxllmError: it failed.
    """
    words = [str(model), str(bundle), *([weights] if weights else [])]
    command = [sys.executable, "-m", "benchmarks.prepare.measured", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment_of(threads))
    if done.returncode:
        raise JaxllmError(f"{model} could not be prepared: {last_words(done.stderr)}")
    return Preparation(**json.loads(done.stdout.splitlines()[-1]))


def _main(model: str, bundle: str, weights: str | None = None) -> None:
    import jax
    import numpy as np

    from jaxllm.prepare import prepare

    # JAX takes memory of its own before there is a model.
    jax.device_put(np.zeros(4)).block_until_ready()
    reset_peak_memory()
    idle = peak_resident_bytes()
    began, began_cpu = time.perf_counter(), time.process_time()
    prepare(model, bundle, weights=weights)  # pyright: ignore[reportArgumentType]: one of the formats
    found = Preparation(
        took_s=time.perf_counter() - began,
        cpu_s=time.process_time() - began_cpu,
        idle_bytes=idle,
        peak_bytes=peak_resident_bytes(),
    )
    print(json.dumps(dataclasses.asdict(found)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
