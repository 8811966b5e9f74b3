"""Kills a training run on the device, by SIGTERM and by kill -9, and compares what resumes with one that was
never stopped.

Measures serving on the device by the service's own commands, in processes of their own.
"""

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.harness.report import Row, row
from benchmarks.train.steps import random_batch, size_of
from jaxllm.errors import JaxllmError
from jaxllm.training.decoders import PretrainRecipe, pretrain_job
from jaxllm.training.loop.parallel import MeshShape, make_mesh
from jaxllm.training.loop.trainer import Preempted, Trainer, train

STEPS, CHECKPOINT_STEPS = 12, 4
_WAIT_S = 240


def train_here(name: str, folder: Path) -> None:
    """Trains in a folder, from its newest checkpoint, and leaves the parameters there."""
    size = size_of(name)
    recipe = PretrainRecipe(
        model=size.cfg, steps=STEPS, batch=size.batch, row_tokens=size.row_tokens, peak_learning_rate=1e-3,
        warmup_steps=2, precision="bfloat16", remat="dots", checkpoint_steps=CHECKPOINT_STEPS, log_steps=1,
    )  # fmt: skip
    trainer = Trainer(pretrain_job(recipe), recipe, make_mesh(MeshShape(data=1), 1))
    held_out = random_batch(dataclasses.replace(size, batch=1), seed=99)

    report = functools.partial(print, flush=True)
    batches, checkpoints = functools.partial(random_batch, size), folder / "checkpoints"
    try:
        state = train(trainer, batches, lambda: [held_out], checkpoints, report)
    except Preempted:
        return
    params = {name: np.asarray(value) for name, value in trainer.whole(state.params).items()}
    np.savez(folder / "params.npz", **params)  # pyright: ignore[reportArgumentType]


def check_resuming(name: str, folder: Path, cpu: bool) -> list[Row]:
    """Compares the parameters of killed and resumed runs with those of a whole one; this process itself
    touches no device, which the runs need whole.

    Args:
      cpu: whether the runs are for CPUs.
    """
    whole = _finished(_started(name, folder / "whole", cpu), folder / "whole")
    rows = []
    for kill in (signal.SIGTERM, signal.SIGKILL):
        own = folder / kill.name
        process = _started(name, own, cpu)
        _wait_for_step(process, CHECKPOINT_STEPS + 1)
        process.send_signal(kill)
        process.communicate(timeout=_WAIT_S)
        found = _finished(_started(name, own, cpu), own)
        case = f"resume {name} after {kill.name}"
        pairs = [(found[each], value) for each, value in whole.items()]
        different = sum(not np.array_equal(*pair) for pair in pairs)
        most = max(float(np.abs(one - other).max()) for one, other in pairs)
        # Sums by atomic operations, as of an embedding's gradient, have no fixed order on GPUs.
        rows.append(row(case, "different_arrays", different))
        rows.append(row(case, "largest_difference", most))
    return rows


def _started(name: str, folder: Path, cpu: bool) -> "subprocess.Popen[str]":
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "benchmarks.train.resuming", name, str(folder)]
    # What one run has compiled and tuned is what the others run.
    own = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled")}
    own |= {"JAX_PLATFORMS": "cpu"} if cpu else {}
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, **own})


def _wait_for_step(process: "subprocess.Popen[str]", step: int) -> None:
    until = time.monotonic() + _WAIT_S
    assert process.stdout is not None
    for line in process.stdout:
        if f"step={step}," in line:
            return
        if time.monotonic() > until:
            break
    process.kill()
    raise JaxllmError(f"the run to be killed did not reach step {step}")


def _finished(process: "subprocess.Popen[str]", folder: Path) -> dict[str, np.ndarray]:
    """The parameters that a run leaves in its folder."""
    process.communicate(timeout=_WAIT_S)
    if process.returncode:
        raise JaxllmError(f"a training run ended with {process.returncode}")
    with np.load(folder / "params.npz") as stored:
        return dict(stored)


def serving_checks(tiny: bool) -> dict[str, Callable[[], list[Row]]]:
    """The checks by name; with `tiny` one bench, of the packaged model."""
    alone = ("--peer", "none", "--quick")
    if tiny:
        return {"serve-packaged": functools.partial(bench, ("engine", *alone))}
    # Prefill and decode of 1.1 billion random weights; levels of the packaged model.
    large = ("engine", "--shape", "1b", "--weights")
    return {
        "serve-bf16": functools.partial(bench, (*large, "bf16", *alone)),
        "serve-int8": functools.partial(bench, (*large, "int8", *alone)),
        "serve-levels": functools.partial(bench, ("elastic", "--only", "costs", "--quick")),
        "serve-integer-prefill": compare_integer_prefill,
    }


def bench(words: Sequence[str]) -> list[Row]:
    """The rows of ours that `jaxllm bench` prints."""
    printed = json.loads(_output_of("bench", *words, "--json"))
    return [
        row(
            f"{each['case']} ({each['system']})", each["metric"], each["value"], each.get("note"),
            unit=each["unit"],
        )
        for each in printed["rows"]
        if each["system"].startswith("jaxllm")
    ]  # fmt: skip


def compare_integer_prefill() -> list[Row]:
    """Answers after integer prefill on two processors: the GPU as the integer one, beside the CPU."""
    prompt = (
        "Once upon a time there was a small dog who lived beside a wide river. One day he met a fox. " * 4
    )
    words = ("generate", "--prefill", "int8", "--processors", "2", "--prompt", prompt, "--max-tokens", "20")
    texts = {device: _output_of(*words, "--integer-device", device) for device in ("cpu", "gpu")}
    same = float(texts["cpu"] == texts["gpu"])
    return [row("integer prefill with --integer-device gpu", "same_answer", same, texts["gpu"].strip())]


def _output_of(*words: str) -> str:
    # Benches start processes of their own: none of them may take the device's whole memory.
    shared = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    process = subprocess.run(
        [sys.executable, "-m", "jaxllm.cli.entry", *words],
        stdout=subprocess.PIPE, text=True, timeout=280, env=shared, check=False,
    )  # fmt: skip
    if process.returncode:
        raise JaxllmError(f"`jaxllm {' '.join(words)[:100]}` ended with {process.returncode}")
    return process.stdout


if __name__ == "__main__":
    train_here(sys.argv[1], Path(sys.argv[2]))
