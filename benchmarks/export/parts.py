"""Measures parts of TFLite programs by themselves: sampling inside of programs, and W8A8 with its shadow.

Times stage programs on two processors in each order, beside the simulator's times of the same stages, and
beside whole prefill programs on the threads of both.
"""

import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.export.formats import LLAMA_CPP, TFLITE, Tell, exported
from benchmarks.harness.machine import wait_for_quiet
from benchmarks.harness.report import Row, compared
from benchmarks.models import Checkpoint
from benchmarks.peers import PEERS, Opening
from benchmarks.peers.ours import DRAWN, GREEDY
from benchmarks.peers.process import Child, Result, System, alternate, last_words, prompt_ids
from jaxllm.bundle import Bundle
from jaxllm.errors import JaxllmError
from jaxllm.export.folder_format.manifest import Manifest
from jaxllm.export.programs.model import open_program
from jaxllm.export.programs.stages import StagePrograms
from jaxllm.int8_prefill.schedule import Order, lower_bound_ms, simulate
from jaxllm.serving.host.progress import Progress
from jaxllm.text.tokenizer import Tokenizer

BLOCK_TOKENS = 16
SHADOW = f"{TFLITE['w8a8']}-shadow"
_SUFFIX = "-blocks"
_CALIBRATION_BYTES = 1 << 16
_CALIBRATION_WORDS = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of one measurement.

    Attributes:
      prompt_tokens: lengths of prompts.
      decode_tokens: decoded after each of them.
      rounds: of which medians are taken.
      context_tokens: most.
      patience_s: for repeating what other processes disturbed, in all.
      threads: that every system may compute with.
    """

    prompt_tokens: tuple[int, ...]
    decode_tokens: int
    rounds: int
    context_tokens: int
    patience_s: float
    threads: int

    def export_options(self, lengths: Sequence[int] = (16, 64, 256)) -> list[str]:
        """The options of an export of these sizes, with one length of caches and chunks of `lengths`."""
        chunks = (
            part for each in lengths if each <= self.context_tokens for part in ("--chunk-tokens", each)
        )
        return [str(each) for each in ("--context", self.context_tokens, "--cache-tokens", 0, *chunks)]


def sampling_rows(bundle: Path, precisions: Sequence[str], sizes: Sizes, progress: Progress) -> list[Row]:
    """Decoding by programs of `BLOCK_TOKENS` tokens with sampling inside, beside the same model by a dispatch
    for each token with NumPy's sampling; greedy, and drawn.

    Args:
      bundle: of float weights.
      precisions: of `TFLITE`.
      sizes: of the measurement; prompts have the first length.
      progress: called with (stage, done, total).
    """
    openings, scratch = {}, Path()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for precision in precisions:
            for suffix, block in (("", 0), (_SUFFIX, BLOCK_TOKENS)):
                name = f"{TFLITE[precision]}{suffix}"
                options = ["--format", "tflite", "--precision", precision, "--block-tokens", block]
                made = exported(bundle, scratch / name, [*options, *sizes.export_options()])
                openings[name] = _opening("device-programs", made.path, "", sizes)
        with _opened(openings, progress) as children:
            systems = [
                System(f"{name} {how}", child, (how,))
                for name, child in children.items()
                for how in (GREEDY, DRAWN)
            ]
            results, prompt = _alternated(systems, bundle, sizes, sizes.prompt_tokens[:1], progress)
    rows = []
    for precision in precisions:
        for how in (GREEDY, DRAWN):
            rates = {
                each: 1000 * sizes.decode_tokens / results[f"{each} {how}", prompt].decode_ms
                for each in (f"{TFLITE[precision]}{_SUFFIX}", TFLITE[precision])
            }
            rows += compared(
                rates,
                ours=f"{TFLITE[precision]}{_SUFFIX}",
                case=f"decode {sizes.decode_tokens} after {prompt}, {how}",
                metric="decode_tokens_per_s",
                unit="tokens/s",
            )
    return rows


def shadow_rows(integer: Path, text: Path | None, sizes: Sizes, progress: Progress, tell: Tell) -> list[Row]:
    """Prefill by W8A8 programs with the shadow of a calibrated bundle, beside those without, the int8
    programs, and llama.cpp.

    Args:
      integer: a calibrated bundle.
      text: its end gives the steps of outputs; None for words of the model's.
      sizes: of the measurement.
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
            made = exported(
                integer, scratch / name, ["--format", "tflite", *options, *sizes.export_options()]
            )
            openings[name] = _opening("programs", made.path, "", sizes)
        missing = PEERS[LLAMA_CPP].missing()
        if missing is None:
            floats = Checkpoint.find(integer).folder(progress)
            openings[LLAMA_CPP] = _opening(LLAMA_CPP, floats, "Q8_0", sizes)
        else:
            tell(f"without {LLAMA_CPP}: {missing} is not installed (pip install 'jaxllm[peers]')")
        with _opened(openings, progress) as children:
            systems = [System(name, child, tuple(child.settings)) for name, child in children.items()]
            results, _ = _alternated(systems, integer, sizes, sizes.prompt_tokens, progress)
    rows = []
    for prompt in {length for _, length in results}:
        rates = {name: 1000 * prompt / results[name, prompt].prefill_ms for name in openings}
        case = f"prompt {prompt}"
        rows += compared(rates, ours=SHADOW, case=case, metric="prefill_tokens_per_s", unit="tokens/s")
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
    systems: Sequence[System], bundle: Path, sizes: Sizes, lengths: Sequence[int], progress: Progress
) -> tuple[dict[tuple[str, int], Result], int]:
    """The results of prompts of these lengths, or half the context, and the longest."""
    with Bundle.open(bundle) as opened:
        vocab_size = opened.cfg.vocab_size
    fitting = sorted({min(each, sizes.context_tokens // 2) for each in lengths})
    results = alternate(
        systems,
        [prompt_ids(vocab_size, each) for each in fitting],
        decode_tokens=sizes.decode_tokens,
        rounds=sizes.rounds,
        patience_s=sizes.patience_s,
        progress=progress,
    )
    return results, fitting[-1]


def _opening(peer: str, model: Path, format_: str, sizes: Sizes) -> Opening:
    return Opening(
        peer=peer, model=model, format=format_, threads=sizes.threads, context_tokens=sizes.context_tokens
    )


@contextlib.contextmanager
def _opened(openings: Mapping[str, Opening], progress: Progress) -> Iterator[dict[str, Any]]:
    """Every system in a process of its own, by name."""
    with contextlib.ExitStack() as stack:
        yield {
            system: stack.enter_context(Child(system, opening, progress))
            for system, opening in openings.items()
        }


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
        command = [sys.executable, "-m", "benchmarks.export.parts", json.dumps(asked)]
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
    stages, runner = StagePrograms(manifest, folder), open_program(folder).runner
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
