"""Measures parts of TFLite programs by themselves: sampling inside of programs, and W8A8 with its shadow.

Times stage programs on two processors in each order, beside the simulator's times of the same stages, and
beside whole prefill programs on the threads of both.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.export.formats import TFLITE, Plan, Tell, exported, llama_cpp
from benchmarks.harness.children import in_process
from benchmarks.harness.machine import wait_for_quiet
from benchmarks.harness.report import Row, compared, row
from benchmarks.models import Checkpoint
from benchmarks.peers.ours import DRAWN, GREEDY
from benchmarks.peers.process import Result, System, alternate, opened, prompt_ids
from jaxllm.bundle import Bundle
from jaxllm.export.folder_format.manifest import Manifest
from jaxllm.export.programs.model import open_program
from jaxllm.export.programs.stages import StagePrograms
from jaxllm.int8_prefill.schedule import Order, simulate
from jaxllm.serving.host.progress import Progress
from jaxllm.text.tokenizer import Tokenizer

BLOCK_TOKENS = 16
SHADOW = f"{TFLITE['w8a8']}-shadow"
_SUFFIX = "-blocks"
_CALIBRATION_BYTES = 1 << 16
_CALIBRATION_WORDS = 2048


def sampling_rows(bundle: Path, plan: Plan, progress: Progress) -> list[Row]:
    """Decoding by programs of `BLOCK_TOKENS` tokens with sampling inside, beside the same model by a dispatch
    for each token with NumPy's sampling; greedy, and drawn.

    Args:
      bundle: of float weights.
      plan: of the measurement; prompts have the first length.
      progress: called with (stage, done, total).
    """
    openings, scratch = {}, Path()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for precision in plan.sampled_precisions:
            for suffix, block in (("", 0), (_SUFFIX, BLOCK_TOKENS)):
                name = f"{TFLITE[precision]}{suffix}"
                options = ["--format", "tflite", "--precision", precision, "--block-tokens", block]
                made = exported(bundle, scratch / name, [*options, *plan.export_options()])
                openings[name] = plan.opening("device-programs", made.path)
        with opened(openings, progress) as children:
            systems = [
                System(f"{name} {how}", child, (how,))
                for name, child in children.items()
                for how in (GREEDY, DRAWN)
            ]
            results, prompt = _alternated(systems, bundle, plan, plan.prompt_tokens[:1], progress)
    rows = []
    for precision in plan.sampled_precisions:
        for how in (GREEDY, DRAWN):
            rates = {
                each: 1000 * plan.decode_tokens / results[f"{each} {how}", prompt].decode_ms
                for each in (f"{TFLITE[precision]}{_SUFFIX}", TFLITE[precision])
            }
            rows += compared(
                f"decode {plan.decode_tokens} after {prompt}, {how}",
                "decode_tokens_per_s",
                rates,
                ours=f"{TFLITE[precision]}{_SUFFIX}",
            )
    return rows


def shadow_rows(integer: Path, text: Path | None, plan: Plan, progress: Progress, tell: Tell) -> list[Row]:
    """Prefill by W8A8 programs with the shadow of a calibrated bundle, beside those without, the int8
    programs, and llama.cpp.

    Args:
      integer: a calibrated bundle.
      text: its end gives the steps of outputs; None for words of the model's.
      plan: of the measurement.
      progress: called with (stage, done, total).
      tell: called with a line for what is left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        part = calibration_text(integer, text, scratch)
        static = ["--precision", "w8a8", "--calibration-text", part]
        forms = {
            SHADOW: static,
            TFLITE["w8a8"]: [*static, "--without-shadow"],
            TFLITE["int8"]: ["--precision", "int8"],
        }
        openings = {}
        for name, options in forms.items():
            made = exported(integer, scratch / name, ["--format", "tflite", *options, *plan.export_options()])
            openings[name] = plan.opening("programs", made.path)
        openings |= llama_cpp(Checkpoint.find(integer).folder(progress), plan, tell)
        with opened(openings, progress) as children:
            systems = [System(name, child, tuple(child.settings)) for name, child in children.items()]
            results, _ = _alternated(systems, integer, plan, plan.prompt_tokens, progress)
    rows = []
    for prompt in {length for _, length in results}:
        rates = {name: 1000 * prompt / results[name, prompt].prefill_ms for name in openings}
        case = f"prompt {prompt}"
        rows += compared(case, "prefill_tokens_per_s", rates, ours=SHADOW)
    return rows


def calibration_text(integer: Path, text: Path | None, folder: Path) -> Path:
    """A file with the end of a text, or with words of a bundle's vocabulary."""
    part = folder / "calibration.txt"
    if text is not None:
        part.write_bytes(text.read_bytes()[-_CALIBRATION_BYTES:])
        return part
    with Bundle.open(integer) as bundle:
        words = prompt_ids(bundle.cfg.vocab_size, _CALIBRATION_WORDS)
        part.write_text(Tokenizer(bundle.tokenizer_files()).decode(words), encoding="utf-8")
    return part


def _alternated(
    systems: Sequence[System], bundle: Path, plan: Plan, lengths: Sequence[int], progress: Progress
) -> tuple[dict[tuple[str, int], Result], int]:
    """The results of prompts of these lengths, or half the context, and the longest."""
    with Bundle.open(bundle) as model:
        vocab_size = model.cfg.vocab_size
    fitting = sorted({min(each, plan.context_tokens // 2) for each in lengths})
    results = alternate(
        systems,
        [prompt_ids(vocab_size, each) for each in fitting],
        plan=plan,
        progress=progress,
    )
    return results, fitting[-1]


OURS = "jaxllm-stages"
_ORDERS: dict[str, Order] = {
    OURS: "out-of-order",
    f"{OURS}-in-order": "in-order",
    f"{OURS}-equation-5": "equation-5",
}
# Short ones give the order more to choose from.
_CHUNKS = (64, 128, 256)
_WHOLE = TFLITE["w8a8"]


def stage_rows(integer: Path, text: Path | None, plan: Plan, progress: Progress) -> list[Row]:
    """Makespans of prompts on two processors.

    Args:
      integer: a calibrated bundle.
      text: its end gives the steps of outputs; None for words of the model's.
      plan: of the measurement; there is one more prompt, of half the context.
      progress: called with (stage, done, total).

    Raises:
      JaxllmError: exporting or measuring failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        options = ["--format", "tflite", "--precision", "w8a8", "--stages", *plan.export_options(_CHUNKS)]
        options += ["--calibration-text", calibration_text(integer, text, scratch)]
        progress("Measuring", 0, 2)
        made = exported(integer, scratch / "stages", options)
        progress("Measuring", 1, 2)
        lengths = {min(each, plan.context_tokens // 2) for each in plan.prompt_tokens}
        lengths = sorted({*lengths, plan.context_tokens // 2})
        found = in_process(_measured, made.path, lengths, plan.rounds)
    progress("Measuring", 2, 2)
    return _rows(found)


def _rows(found: dict[int, Any]) -> list[Row]:
    rows = []
    for length, systems in found.items():
        case = f"prompt {length}, two processors"
        notes = {
            name: f"chunks of {each['chunks']}; {each['real_to_simulated'] - 1:+.0%} against simulated "
            f"{each['simulated_ms']:.0f} ms"
            for name, each in systems.items()
            if name in _ORDERS
        }
        spans = {name: each["real_ms"] for name, each in systems.items()}
        rows += compared(case, "makespan_ms", spans, notes, ours=OURS)
        rows += [
            row(case, "real_to_simulated", each["real_to_simulated"], system=name)
            for name, each in systems.items()
            if name in _ORDERS
        ]
    return rows


def _measured(folder: Path, lengths: Sequence[int], rounds: int) -> dict[int, Any]:
    """Milliseconds of prompts of these lengths, by length and system."""
    manifest = Manifest.read(folder)
    stages, runner = StagePrograms(manifest, folder), open_program(folder).runner
    draw, found = np.random.default_rng(0), {}
    vocab_size = stages.cfg.vocab_size
    for tokens in stages.facts.chunk_tokens:
        stages.measure(tokens)
    for length in lengths:
        plan, runs = list(stages.plan(length, 0)), {}
        for number in range(rounds + 1):
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
    return found


def _timed(
    stages: StagePrograms, order: Order, tokens: list[int], lengths: Sequence[int]
) -> dict[str, float]:
    """Milliseconds of a prompt, and the simulator's by times that were measured just before: they change with
    the machine's load, from moment to moment."""
    for length in dict.fromkeys(lengths):
        stages.measure(length, runs=1)
    chunks = [(length, sum(lengths[:place])) for place, length in enumerate(lengths)]
    subgraphs = stages.subgraphs(len(lengths))
    simulated_ms = simulate(
        subgraphs,
        stages.times_of(chunks),
        order,
        overhead_ms=stages.measured.handover_ms,
        shared=stages.times_of(chunks, shared=True),
    ).makespan_ms
    stages.order = order
    wait_for_quiet(0.3)
    _, trace = stages.prefill(tokens, 0, {}, lengths)
    return {
        "real_ms": trace.makespan_ms,
        "simulated_ms": simulated_ms,
        "real_to_simulated": trace.makespan_ms / simulated_ms,
    }
