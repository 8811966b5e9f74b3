"""`jaxllm bench export`: a model live and in every form that it can be exported in, side by side.

All are made of the same float weights. `jaxllm` is the live engine on them, `jaxllm-live-steps` the steps
that programs are made of, jitted: the difference between it and `jaxllm-stablehlo` is what exporting costs.
TFLite models run through our loop on LiteRT (`jaxllm-tflite-...`) and, as a bundle, through LiteRT-LM; the
float one that Google's AI Edge Quantizer has quantized, and llama.cpp, stand beside them where these are
installed. Each in a process of its own, in alternation.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import Checkpoint
from benchmarks.contest import Contender, Result, prompt_ids, race
from benchmarks.peers import PEERS, Opening, edge_quantizer
from benchmarks.peers.jaxllm_engine import BLOCKS
from benchmarks.peers.process import Child, last_words
from benchmarks.quality import Text, perplexity
from benchmarks.report import Row, compared, median
from jaxllm.errors import JaxllmError, one_line
from jaxllm.tokenizer import Tokenizer
from serving.models import open_model
from serving.options import CPU_CHUNK_TOKENS, cache_lengths
from serving.progress import Progress

Tell = Callable[[str], None]

LIVE, STEPS, STABLEHLO = "jaxllm", "jaxllm-live-steps", "jaxllm-stablehlo"
TFLITE = {precision: f"jaxllm-tflite-{precision}" for precision in ("f32", "int8", "w8a8")}
EDGE_QUANTIZER = "AI-Edge-Quantizer"
LITERT_LM = "LiteRT-LM"
LLAMA_CPP = "llama.cpp"
_VERIFY_TOKENS = 64
_PROMPT_TOKENS = 12
_CALIBRATION_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of one measurement.

    Attributes:
      prompt_tokens: lengths of prompts.
      decode_tokens: decoded after each of them.
      rounds: of which medians are taken.
      answers: greedy answers that are compared with the live engine's.
      answer_tokens: of each.
      text_windows: of text to score.
      context_tokens: most; 0 is the model's window.
      patience_s: for repeating what other processes disturbed, in all.
    """

    prompt_tokens: tuple[int, ...] = (64, 256)
    decode_tokens: int = 64
    rounds: int = 5
    answers: int = 20
    answer_tokens: int = 48
    text_windows: int = 12
    context_tokens: int = 1024
    patience_s: float = 60.0

    @classmethod
    def quick(cls) -> "Plan":
        """Fits in a minute on two cores for the packaged model."""
        return cls(
            prompt_tokens=(64,), decode_tokens=16, rounds=2, answers=4, answer_tokens=16, text_windows=2,
            context_tokens=256, patience_s=2.0,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What is measured.

    Attributes:
      model: a bundle or a Hugging Face folder; None for the packaged model.
      text: to calibrate w8a8 on, to take prompts from and to score; without it there is no w8a8.
      threads: that every system may compute with; 0 takes all cores.
    """

    model: Path | None
    text: Path | None
    threads: int = 0


@dataclasses.dataclass(frozen=True)
class Export:
    """An export that was made: where, how large it is, and how long it took."""

    path: Path
    file_bytes: int
    export_ms: float


def run(subject: Subject, plan: Plan, progress: Progress, tell: Tell) -> list[Row]:
    """Measures one model; rows as `report` prints them.

    Raises:
      JaxllmError: the model cannot be opened or exported.
    """
    threads = subject.threads or len(os.sched_getaffinity(0))
    checkpoint = Checkpoint.find(subject.model)
    folder = checkpoint.folder(progress)
    with open_model(folder, weights="f32", progress=progress) as bundle:
        path, tokenizer = bundle.path, Tokenizer(bundle.tokenizer_files())
        context = min(plan.context_tokens, bundle.cfg.window_tokens)
        vocab = bundle.cfg.vocab_size
    text = None
    if subject.text is not None:
        text = Text.read(
            subject.text, checkpoint, separator=None, window_tokens=context // 2, limit=plan.text_windows
        )
    prompts = _prompts(text, vocab, plan, tokenizer)

    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        exports = _exports(path, Path(scratch), context, subject.text, tell)
        children: dict[str, Child] = {}

        def opened(system: str, peer: str, model: Path, format_: str, options: dict[str, Any]) -> None:
            opening = Opening(
                peer=peer, model=model, format=format_, threads=threads, context_tokens=context,
                options=options,
            )  # fmt: skip
            children[system] = stack.enter_context(Child(system, opening, progress))

        engine_options = {
            "context_tokens": context,
            "chunk_tokens": list(CPU_CHUNK_TOKENS),
            "executables_bytes": 0,
        }
        opened(LIVE, "jaxllm", folder, "f32", engine_options)
        step_options = {
            "chunk_tokens": [each for each in CPU_CHUNK_TOKENS if each <= context],
            "verify_tokens": [min(_VERIFY_TOKENS, context)],
            "cache_tokens": list(cache_lengths(context)[:-1]),
        }
        opened(STEPS, "live-steps", path, "f32", step_options)
        for system, export in exports.items():
            if system != LITERT_LM:
                opened(system, "programs", export.path, "", {})
        missing = PEERS[LLAMA_CPP].missing()
        if missing is None:
            opened(LLAMA_CPP, LLAMA_CPP, folder, "Q8_0", {})
        else:
            tell(f"without {LLAMA_CPP}: {missing} is not installed")
        contenders = [
            Contender(system, child, (BLOCKS,) if system == LIVE else tuple(child.settings))
            for system, child in children.items()
        ]
        speed_prompts = [prompt_ids(vocab, min(each, context // 2)) for each in plan.prompt_tokens]
        results = race(
            contenders,
            speed_prompts,
            decode_tokens=plan.decode_tokens,
            rounds=plan.rounds,
            patience_s=plan.patience_s,
            progress=progress,
        )
        runtime = None
        if LITERT_LM in exports:
            # It takes text: random tokens would come to it as others.
            texts = [] if text is None else [tokenizer.decode(each) for each in prompts]
            runtime = _litert_lm(exports[LITERT_LM], Path(scratch), threads, context, plan, texts)
        rows = _opening_rows(children, exports, runtime)
        for prompt in speed_prompts:
            rows += _speed_rows(results, children, len(prompt), plan.decode_tokens, runtime)
        rows += _agreement_rows(children, prompts, plan, tokenizer, runtime)
        if text is not None:
            rows += _quality_rows(children, text, progress)
    return rows


def _exports(bundle: Path, scratch: Path, context: int, text: Path | None, tell: Tell) -> dict[str, Export]:
    """What can be made of a bundle here, by system."""
    chunks = [part for each in CPU_CHUNK_TOKENS if each <= context for part in ("--chunk", each)]
    sizes = [*chunks, "--context", context]
    tree = ["--verify", min(_VERIFY_TOKENS, context)]
    wanted: dict[str, list[Any]] = {
        STABLEHLO: ["--format", "stablehlo", "--platform", _platform(), *sizes, *tree],
        TFLITE["f32"]: ["--format", "tflite", *sizes, *tree],
        TFLITE["int8"]: ["--format", "tflite", "--precision", "int8", *sizes, *tree],
        LITERT_LM: ["--format", "litertlm", *sizes],
    }
    if text is not None:
        part = scratch / "calibration.txt"
        part.write_bytes(text.read_bytes()[-_CALIBRATION_BYTES:])
        wanted[TFLITE["w8a8"]] = [
            "--format", "tflite", "--precision", "w8a8", "--calibrate", part, *sizes, *tree,
        ]  # fmt: skip
    made = {}
    for system, options in wanted.items():
        out = scratch / (f"{system}.litertlm" if system == LITERT_LM else system)
        command = [sys.executable, "-m", "serving.cli", "export", bundle, "-o", out, *options]
        began = time.perf_counter()
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
        if done.returncode:
            reason = one_line(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "it failed")
            if system == STABLEHLO:
                raise JaxllmError(f"the model cannot be exported: {reason}")
            tell(f"without {system}: {reason}")
            continue
        files = [out] if out.is_file() else list(out.iterdir())
        size = sum(each.stat().st_size for each in files)
        made[system] = Export(out, size, 1000 * (time.perf_counter() - began))
    if TFLITE["f32"] in made:
        try:
            made[EDGE_QUANTIZER] = _quantized(made[TFLITE["f32"]], scratch / EDGE_QUANTIZER)
        except JaxllmError as error:
            tell(f"without {EDGE_QUANTIZER}: {error}")
    return made


def _quantized(floats: Export, out: Path) -> Export:
    """The float TFLite model as AI Edge Quantizer makes it 8-bit."""
    if edge_quantizer.missing() is not None:
        raise JaxllmError(f"{edge_quantizer.PACKAGE} is not installed")
    began = time.perf_counter()
    edge_quantizer.quantize_folder(floats.path, out)
    took_ms = 1000 * (time.perf_counter() - began)
    return Export(out, sum(each.stat().st_size for each in out.iterdir()), floats.export_ms + took_ms)


def _platform() -> str:
    import jax

    return {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())


def _prompts(text: Text | None, vocab: int, plan: Plan, tokenizer: Tokenizer) -> list[list[int]]:
    """Prompts to answer: beginnings of pieces of the text, else random ids."""
    if text is None:
        return [[(7 * i + 13 * j) % vocab for j in range(8 + i)] for i in range(plan.answers)]
    tokens = [token for window, _ in text.windows for token in window]
    step = max(1, len(tokens) // plan.answers)
    pieces = [tokens[at : at + _PROMPT_TOKENS] for at in range(0, step * plan.answers, step)]
    # As every tokenizer reads them: a piece may begin within a word.
    return [list(tokenizer.encode(tokenizer.decode(each))) for each in pieces]


def _litert_lm(
    export: Export, scratch: Path, threads: int, context: int, plan: Plan, texts: Sequence[str]
) -> dict[str, Any]:
    cache = scratch / "litert-lm-cache"
    cache.mkdir()
    order = {
        "model": str(export.path),
        "threads": threads,
        "context_tokens": context,
        "prefill": min(max(plan.prompt_tokens), context // 2),
        "decode": plan.decode_tokens,
        "rounds": plan.rounds,
        "texts": list(texts),
        "answer_tokens": plan.answer_tokens,
        "cache": str(cache),
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers.litert_lm_child"],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise JaxllmError(f"LiteRT-LM failed: {last_words(done.stderr)}")
    return json.loads(done.stdout)


def _opening_rows(
    children: Mapping[str, Child], exports: Mapping[str, Export], runtime: Mapping[str, Any] | None
) -> list[Row]:
    rows = []
    for system, export in exports.items():
        rows.append(_row("export", system, "build_ms", export.export_ms, "ms"))
        rows.append(_row("file", system, "file_bytes", export.file_bytes, "bytes"))
    for system, child in children.items():
        times = {metric: child.facts[metric] for metric in ("load_ms", "build_ms") if metric in child.facts}
        rows += [_row("open", system, metric, value, "ms") for metric, value in times.items()]
        rows.append(_row("open", system, "peak_memory_bytes", child.open_peak_bytes, "bytes"))
        rows.append(_row("run", system, "peak_memory_bytes", child.peak_bytes, "bytes"))
    if runtime is not None:
        rows.append(_row("open", LITERT_LM, "load_ms", median(runtime["init_ms"]), "ms"))
        rows.append(_row("run", LITERT_LM, "peak_memory_bytes", runtime["peak_bytes"], "bytes"))
    return rows


def _speed_rows(
    results: Mapping[tuple[str, int], Result],
    children: Mapping[str, Child],
    prompt: int,
    tokens: int,
    runtime: Mapping[str, Any] | None,
) -> list[Row]:
    found = {system: results[system, prompt] for system in children}
    prefill = {system: 1000 * prompt / each.prefill_ms for system, each in found.items()}
    decode = {system: 1000 * tokens / each.decode_ms for system, each in found.items()}
    rows = []
    for case, metric, rates in (
        (f"prompt {prompt}", "prefill_tokens_per_s", prefill),
        (f"decode {tokens} after {prompt}", "decode_tokens_per_s", decode),
    ):
        for ours, others in (
            (STABLEHLO, (STEPS, LIVE)),
            (TFLITE["f32"], (LIVE,)),
            (TFLITE["int8"], (LLAMA_CPP, EDGE_QUANTIZER, TFLITE["f32"])),
            (TFLITE["w8a8"], (TFLITE["int8"],)),
        ):
            beside = {name: rates[name] for name in (ours, *others) if name in rates}
            if ours in beside:
                shown = compared(beside, ours=ours, case=case, metric=metric, unit="tokens/s")
                rows += [each for each in shown if each.system == ours]
        baselines = [name for name in (LIVE, STEPS, LLAMA_CPP, EDGE_QUANTIZER) if name in rates]
        rows += [_row(case, name, metric, rates[name], "tokens/s") for name in baselines]
        if runtime is not None:
            note = "by its own clock"
            rows.append(_row(case, LITERT_LM, metric, median(runtime[metric]), "tokens/s", note=note))
    return rows


def _agreement_rows(
    children: Mapping[str, Child],
    prompts: Sequence[Sequence[int]],
    plan: Plan,
    tokenizer: Tokenizer,
    runtime: Mapping[str, Any] | None,
) -> list[Row]:
    """How many greedy answers are the live engine's, token by token; LiteRT-LM's as text."""

    def answers(child: Child) -> list[list[int]]:
        return [child.answer(each, plan.answer_tokens - 1, child.settings[0])["ids"] for each in prompts]

    case = f"{len(prompts)} answers of {plan.answer_tokens} tokens"
    wanted = answers(children[LIVE])
    rows = []
    for system, child in children.items():
        if system not in (LIVE, LLAMA_CPP):
            same = sum(one == other for one, other in zip(answers(child), wanted, strict=True))
            rows.append(_row(case, system, "agreement", same / len(prompts), "share"))
    if runtime is not None and runtime["texts"]:
        stops = set(tokenizer.eos_ids)
        texts = []
        for each in wanted:
            end = next((at for at, token in enumerate(each) if token in stops), len(each))
            texts.append(tokenizer.decode(each[:end]))
        same = sum(one.strip() == other.strip() for one, other in zip(runtime["texts"], texts, strict=True))
        rows.append(_row(case, LITERT_LM, "agreement", same / len(prompts), "share"))
    return rows


def _quality_rows(children: Mapping[str, Child], text: Text, progress: Progress) -> list[Row]:
    case = f"{text.name}, {text.tokens} tokens"
    values = {system: perplexity(child, text, progress) for system, child in children.items()}
    rows = [_row(case, system, "perplexity", value, "") for system, value in values.items()]
    return [
        dataclasses.replace(each, baseline=LIVE, ratio=values[LIVE] / each.value)
        if each.system.startswith(f"{LIVE}-")
        else each
        for each in rows
    ]


def _row(case: str, system: str, metric: str, value: float, unit: str, *, note: str | None = None) -> Row:
    return Row(case=case, system=system, metric=metric, value=value, unit=unit, note=note)
