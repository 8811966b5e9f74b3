"""Kills a training run on the device, by SIGTERM and by kill -9, and compares what resumes with one that was
never stopped."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from jaxllm.errors import JaxllmError
from training.accelerator.rows import Row
from training.accelerator.subjects import random_batch, size_of
from training.loop.parallel import MeshShape, make_mesh
from training.loop.trainer import Preempted, Trainer, train
from training.pretrain.job import pretrain_job
from training.pretrain.recipe import PretrainRecipe

STEPS, CHECKPOINT_STEPS = 12, 4
_WAIT_S = 240


def run(name: str, folder: Path) -> dict[str, np.ndarray]:
    """Trains in a folder, from its newest checkpoint; the parameters on the host."""
    size = size_of(name)
    recipe = PretrainRecipe(
        model=size.cfg, steps=STEPS, batch=size.batch, row_tokens=size.row_tokens, peak_learning_rate=1e-3,
        warmup_steps=2, precision="bfloat16", remat="dots", checkpoint_steps=CHECKPOINT_STEPS, log_steps=1,
    )  # fmt: skip
    trainer = Trainer(pretrain_job(recipe), recipe, make_mesh(MeshShape(data=1), 1))
    held_out = random_batch(dataclasses.replace(size, batch=1), seed=99)

    def report(progress: object) -> None:
        print(progress, flush=True)

    state = train(trainer, lambda step: random_batch(size, step), lambda: [held_out], folder, report)
    return trainer.whole(state.params)


def check_resuming(name: str, folder: Path, cpu: bool) -> list[Row]:
    """Compares the parameters of killed and resumed runs with those of a whole one; this process itself
    touches no device, which the runs need whole.

    Args:
      name: of a size.
      folder: for the runs.
      cpu: whether the runs are for CPUs.
    """
    _finished(_started(name, folder / "whole", cpu))
    whole = _kept(folder / "whole")
    rows = []
    for kill in (signal.SIGTERM, signal.SIGKILL):
        own = folder / kill.name
        process = _started(name, own, cpu)
        _wait_for_step(process, CHECKPOINT_STEPS + 1)
        process.send_signal(kill)
        process.communicate(timeout=_WAIT_S)
        _finished(_started(name, own, cpu))
        found = _kept(own)
        case = f"resume {name} after {kill.name}"
        pairs = [(found[each], value) for each, value in whole.items()]
        different = sum(not np.array_equal(*pair) for pair in pairs)
        most = max(float(np.abs(one - other).max()) for one, other in pairs)
        # Sums by atomic operations, as of an embedding's gradient, have no fixed order on GPUs.
        rows.append(Row(case, "different_arrays", different))
        rows.append(Row(case, "largest_difference", most))
    return rows


def main(name: str, folder: Path) -> None:
    """A process that trains and leaves its parameters in the folder."""
    try:
        params = run(name, folder / "checkpoints")
    except Preempted:
        return
    np.savez(folder / "params.npz", **{each: np.asarray(value) for each, value in params.items()})  # pyright: ignore


def _started(name: str, folder: Path, cpu: bool) -> "subprocess.Popen[str]":
    folder.mkdir(parents=True, exist_ok=True)
    words = ["-m", "training.accelerator", "--train", str(folder), "--size", name, *["--cpu"] * cpu]
    # What one run has compiled and tuned is what the others run.
    own = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled")}
    return subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, text=True, env={**os.environ, **own}
    )


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


def _finished(process: "subprocess.Popen[str]") -> None:
    process.communicate(timeout=_WAIT_S)
    if process.returncode:
        raise JaxllmError(f"a training run ended with {process.returncode}")


def _kept(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "params.npz") as stored:
        return dict(stored)
