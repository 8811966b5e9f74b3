"""Times stage programs on two processors in each order, beside the simulator's times of the same stages, and
beside whole prefill programs on the threads of both."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.export.formats import TFLITE, exported
from benchmarks.export.tflite_parts import Sizes, calibration_text
from benchmarks.measuring.quiet import wait_for_quiet
from benchmarks.measuring.report import Row, compared
from benchmarks.peers.process import last_words
from jaxllm.errors import JaxllmError
from jaxllm.int8_prefill.schedule import Order
from jaxllm.int8_prefill.simulator import lower_bound_ms, simulate
from jaxllm.program_folder.manifest import Manifest
from serving.engine import Engine
from serving.host.progress import Progress
from serving.programs.stages import StagePrograms

OURS = "jaxllm-stages"
_ORDERS: dict[str, Order] = {
    OURS: "out-of-order",
    f"{OURS}-in-order": "in-order",
    f"{OURS}-equation-5": "equation-5",
}
# Short ones give the order more to choose from.
_CHUNKS = (64, 128, 256)
_WHOLE = TFLITE["w8a8"]


def stage_rows(integer: Path, text: Path | None, sizes: Sizes, progress: Progress) -> list[Row]:
    """Makespans of prompts on two processors.

    Args:
      integer: a calibrated bundle.
      text: its end gives the steps of outputs; None for words of the model's.
      sizes: of the measurement; there is one more prompt, of half the context.
      progress: called with (stage, done, total).

    Raises:
      JaxllmError: exporting or measuring failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        options = ["--format", "tflite", "--precision", "w8a8", "--stages", *sizes.export_options(_CHUNKS)]
        options += ["--calibration-text", calibration_text(integer, text, scratch)]
        progress("Measuring", 0, 2)
        made = exported(integer, scratch / "stages", options)
        progress("Measuring", 1, 2)
        lengths = {min(each, sizes.context_tokens // 2) for each in sizes.prompt_tokens}
        asked = {
            "folder": str(made.path),
            "lengths": sorted({*lengths, sizes.context_tokens // 2}),
            "rounds": sizes.rounds,
        }
        command = [sys.executable, "-m", "benchmarks.export.stages", json.dumps(asked)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise JaxllmError(f"measuring stages failed: {last_words(done.stderr)}")
    progress("Measuring", 2, 2)
    return _rows(json.loads(done.stdout.splitlines()[-1]))


def _rows(found: dict[str, Any]) -> list[Row]:
    rows = []
    for length, systems in found.items():
        case = f"prompt {length}, two processors"
        notes: dict[str, str | None] = {
            name: f"chunks of {each['chunks']}; {each['real_to_simulated'] - 1:+.0%} against simulated "
            f"{each['simulated_ms']:.0f} ms"
            for name, each in systems.items()
            if name in _ORDERS
        }
        spans = {name: each["real_ms"] for name, each in systems.items()}
        rows += compared(
            spans, ours=OURS, case=case, metric="makespan_ms", unit="ms", notes=notes, lower_is_better=True
        )
        rows += [
            Row(case=case, system=name, metric="real_to_simulated", value=each["real_to_simulated"], unit="")
            for name, each in systems.items()
            if name in _ORDERS
        ]
    return rows


def main(told: str) -> None:
    """Measures a folder in this process, and prints one JSON object."""
    asked = json.loads(told)
    folder = Path(asked["folder"])
    manifest = Manifest.read(folder)
    stages, runner = StagePrograms(manifest, folder), Engine.open_program(folder).runner
    draw, found = np.random.default_rng(0), {}
    vocab_size = stages.cfg.vocab_size
    for tokens in stages.facts.chunk_tokens:
        stages.measure(tokens)
    for length in asked["lengths"]:
        plan, runs = list(stages.plan(length, 0)), {}
        for number in range(asked["rounds"] + 1):
            tokens = draw.integers(0, vocab_size, length).tolist()
            systems = list(_ORDERS) if number % 2 else list(_ORDERS)[::-1]
            for name in systems:
                runs.setdefault(name, []).append(_timed(stages, _ORDERS[name], tokens, plan))
            cache = runner.start(length + 1)
            wait_for_quiet(0.3)
            began = time.perf_counter()
            runner.prefill(cache, [*tokens, 0], 0, runner.prefill_chunks(length + 1)[0])
            runs.setdefault(_WHOLE, []).append({"real_ms": 1000 * (time.perf_counter() - began)})
        # The first run of each is not counted.
        found[length] = {
            name: {key: statistics.median(run[key] for run in each[1:]) for key in each[0]}
            for name, each in runs.items()
        }
        for name in _ORDERS:
            found[length][name]["chunks"] = " + ".join(map(str, plan))
    stages.close()
    print(json.dumps(found))


def _timed(stages: StagePrograms, order: Order, tokens: list[int], plan: Sequence[int]) -> dict[str, float]:
    """Milliseconds of a prompt, and the simulator's by times that were measured just before: they change with
    the machine's load, from moment to moment."""
    for length in dict.fromkeys(plan):
        stages.measure(length, runs=1)
    chunks = [(length, sum(plan[:place])) for place, length in enumerate(plan)]
    subgraphs = stages.subgraphs(len(plan))
    simulated_ms = simulate(
        subgraphs,
        stages.times_of(chunks),
        order,
        overhead_ms=stages.measured.handover_ms,
        shared=stages.times_of(chunks, shared=True),
    ).makespan_ms
    stages.order = order
    wait_for_quiet(0.3)
    _, trace = stages.prefill(tokens, 0, {}, plan)
    took = {subgraphs[run.index]: run.end_ms - run.start_ms for run in trace.runs}
    return {
        "real_ms": trace.makespan_ms,
        "simulated_ms": simulated_ms,
        "real_to_simulated": trace.makespan_ms / simulated_ms,
        "real_to_own_bound": trace.makespan_ms / lower_bound_ms(subgraphs, took.__getitem__),
    }


if __name__ == "__main__":
    main(sys.argv[1])
