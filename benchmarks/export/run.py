"""Measures a model live and in every form that it can be exported in, side by side.

All are made of the same float weights. `jaxllm` is the live engine on them, `jaxllm-live-steps` the steps
that programs are made of, jitted: the difference between it and `jaxllm-stablehlo` is what exporting costs.
TFLite models run through our loop on LiteRT (`jaxllm-tflite-...`) and, as a bundle, through LiteRT-LM; the
float one that Google's AI Edge Quantizer has quantized, and llama.cpp, stand beside them where these are
installed. Each runs in a process of its own, in alternation.

Makes rows of what was measured of exported programs.

Measures Google's LiteRT-LM on an exported bundle, in a process of its own.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.export.formats import (
    BLOCK_TOKENS,
    EDGE_QUANTIZER,
    LITERT_LM,
    LIVE,
    LLAMA_CPP,
    STABLEHLO,
    STEPS,
    TFLITE,
    VERIFY_TOKENS,
    Export,
    Plan,
    Subject,
    Tell,
    llama_cpp,
    make_exports,
)
from benchmarks.export.parts import sampling_rows, shadow_rows, stage_rows
from benchmarks.harness.report import Row, compared, median, row
from benchmarks.models import Checkpoint
from benchmarks.peers import Opening
from benchmarks.peers.ours import BLOCKS
from benchmarks.peers.process import (
    Child,
    Result,
    System,
    Text,
    alternate,
    last_words,
    opened,
    perplexity,
    prompt_ids,
    threads_of,
)
from benchmarks.samples import SEPARATOR
from jaxllm.errors import JaxllmError
from jaxllm.serving.ground.bundles import open_model
from jaxllm.serving.ground.options import CPU_CHUNK_TOKENS, cache_lengths
from jaxllm.serving.host.progress import Progress
from jaxllm.text.tokenizer import Tokenizer

_PROMPT_TOKENS = 12


def run_parts(
    subject: Subject, integer: Path, parts: Sequence[str], plan: Plan, progress: Progress, tell: Tell
) -> list[Row]:
    """Measures the parts of `benchmarks.export.PARTS`.

    Args:
      subject: the model. integer: calibrated, for the shadow and the stages alone.
      parts, plan: what and how much.
      progress: called with (stage, done, total).
      tell: called with a line for what is left out.

    Raises:
      JaxllmError: a model cannot be opened.
    """
    rows = run(subject, plan, progress, tell) if "formats" in parts else []
    if "sampling" in parts:
        folder = Checkpoint.find(subject.model).folder(progress)
        with open_model(folder, weights="f32", progress=progress) as bundle:
            path = bundle.path
        rows += sampling_rows(path, plan, progress)
    if "shadow" in parts:
        rows += shadow_rows(integer, subject.text, plan, progress, tell)
    if "stages" in parts:
        rows += stage_rows(integer, subject.text, plan, progress)
    return rows


def run(subject: Subject, plan: Plan, progress: Progress, tell: Tell) -> list[Row]:
    """Measures one model in every format.

    Raises:
      JaxllmError: the model cannot be opened.
    """
    checkpoint = Checkpoint.find(subject.model)
    folder = checkpoint.folder(progress)
    with open_model(folder, weights="f32", progress=progress) as bundle:
        path, tokenizer = bundle.path, Tokenizer(bundle.tokenizer_files())
        context = min(plan.context_tokens, bundle.cfg.window_tokens)
        vocab = bundle.cfg.vocab_size
    fitting = dataclasses.replace(plan, context_tokens=context)
    text = None
    if subject.text is not None:
        text = Text.read(
            subject.text, checkpoint, separator=SEPARATOR, window_tokens=context // 2, limit=plan.text_windows
        )
    prompts = _prompts(text, vocab, plan, tokenizer)
    with tempfile.TemporaryDirectory() as scratch:
        exports = make_exports(path, Path(scratch), context, subject.text, tell)
        with opened(_openings(folder, path, exports, fitting, tell), progress) as children:
            speed_prompts = [prompt_ids(vocab, min(each, context // 2)) for each in plan.prompt_tokens]
            results = alternate(
                [
                    System(system, child, (BLOCKS,) if system == LIVE else tuple(child.settings))
                    for system, child in children.items()
                ],
                speed_prompts,
                plan=plan,
                progress=progress,
            )
            runtime = None
            if LITERT_LM in exports:
                order = {
                    "threads": threads_of(plan.threads),
                    "context_tokens": context,
                    "prefill": min(max(plan.prompt_tokens), context // 2),
                    "decode": plan.decode_tokens,
                    "rounds": plan.rounds,
                    # It takes text: random tokens would come to it as others.
                    "texts": [] if text is None else [tokenizer.decode(each) for each in prompts],
                    "answer_tokens": plan.answer_tokens,
                }
                runtime = measure_litert_lm(exports[LITERT_LM].path, Path(scratch), order)
            rows = opening_rows(children, exports, runtime)
            for prompt in speed_prompts:
                rows += speed_rows(results, children, len(prompt), plan.decode_tokens, runtime)
            rows += agreement_rows(children, prompts, plan.answer_tokens, tokenizer, runtime)
            if text is not None:
                rows += quality_rows(children, text, progress)
    return rows


def _openings(
    folder: Path, bundle: Path, exports: Mapping[str, Export], plan: Plan, tell: Tell
) -> dict[str, Opening]:
    """What every system opens: of a model's float weights as a folder and as a bundle, and its exports."""
    context = plan.context_tokens
    ours = {"context_tokens": context, "chunk_tokens": list(CPU_CHUNK_TOKENS), "buckets_bytes": 0}
    steps = {
        "chunk_tokens": [each for each in CPU_CHUNK_TOKENS if each <= context],
        "verify_tokens": [min(VERIFY_TOKENS, context)],
        "block_tokens": BLOCK_TOKENS,
        "cache_tokens": list(cache_lengths(context)[:-1]),
    }
    return {
        LIVE: plan.opening("jaxllm", folder, "f32", **ours),
        STEPS: plan.opening("live-steps", bundle, "f32", **steps),
        **{name: plan.opening("programs", each.path) for name, each in exports.items() if name != LITERT_LM},
        **llama_cpp(folder, plan, tell),
    }


def _prompts(text: Text | None, vocab: int, plan: Plan, tokenizer: Tokenizer) -> list[list[int]]:
    """Prompts to answer: beginnings of pieces of the text, else random ids."""
    if text is None:
        return [[(7 * i + 13 * j) % vocab for j in range(8 + i)] for i in range(plan.answers)]
    tokens = [token for window, _ in text.windows for token in window]
    step = max(1, len(tokens) // plan.answers)
    pieces = [tokens[at : at + _PROMPT_TOKENS] for at in range(0, step * plan.answers, step)]
    # As every tokenizer reads them: a piece may begin within a word.
    return [list(tokenizer.encode(tokenizer.decode(each))) for each in pieces]


def opening_rows(
    children: Mapping[str, Child], exports: Mapping[str, Export], runtime: Mapping[str, Any] | None
) -> list[Row]:
    """Times to export, load and build, sizes of files, and memory.

    Args:
      children: the systems, open.
      exports: by system.
      runtime: what LiteRT-LM told; None where it did not run.
    """
    rows = []
    for system, export in exports.items():
        rows.append(row("export", "build_ms", export.export_ms, system=system))
        rows.append(row("file", "file_bytes", export.file_bytes, system=system))
    for system, child in children.items():
        times = {metric: child.facts[metric] for metric in ("load_ms", "build_ms") if metric in child.facts}
        rows += [row("open", metric, value, system=system) for metric, value in times.items()]
        rows.append(row("open", "peak_memory_bytes", child.open_peak_bytes, system=system))
        rows.append(row("run", "peak_memory_bytes", child.peak_bytes, system=system))
    if runtime is not None:
        rows.append(row("open", "load_ms", median(runtime["init_ms"]), system=LITERT_LM))
        rows.append(row("run", "peak_memory_bytes", runtime["peak_bytes"], system=LITERT_LM))
    return rows


def speed_rows(
    results: Mapping[tuple[str, int], Result],
    children: Mapping[str, Child],
    prompt: int,
    tokens: int,
    runtime: Mapping[str, Any] | None,
) -> list[Row]:
    """Prefill and decode at one prompt length, each form of ours against the baselines it is measured by."""
    each_rate = {system: results[system, prompt].rates(prompt, tokens) for system in children}
    rows = []
    for case, metric in (
        (f"prompt {prompt}", "prefill_tokens_per_s"),
        (f"decode {tokens} after {prompt}", "decode_tokens_per_s"),
    ):
        rates = {system: each[metric] for system, each in each_rate.items()}
        for ours, others in (
            (STABLEHLO, (STEPS, LIVE)),
            (TFLITE["f32"], (LIVE,)),
            (TFLITE["int8"], (LLAMA_CPP, EDGE_QUANTIZER, TFLITE["f32"])),
            (TFLITE["w8a8"], (TFLITE["int8"],)),
        ):
            beside = {name: rates[name] for name in (ours, *others) if name in rates}
            if ours in beside:
                shown = compared(case, metric, beside, ours=ours)
                rows += [each for each in shown if each.system == ours]
        baselines = [name for name in (LIVE, STEPS, LLAMA_CPP, EDGE_QUANTIZER) if name in rates]
        rows += [row(case, metric, rates[name], system=name) for name in baselines]
        if runtime is not None:
            note = "by its own clock"
            rows.append(row(case, metric, median(runtime[metric]), note, system=LITERT_LM))
    return rows


def agreement_rows(
    children: Mapping[str, Child],
    prompts: Sequence[Sequence[int]],
    answer_tokens: int,
    tokenizer: Tokenizer,
    runtime: Mapping[str, Any] | None,
) -> list[Row]:
    """How many greedy answers are the live engine's, token by token; LiteRT-LM's as text."""

    def answers(child: Child) -> list[list[int]]:
        return [child.answer(each, answer_tokens - 1, child.settings[0])["ids"] for each in prompts]

    case = f"{len(prompts)} answers of {answer_tokens} tokens"
    wanted = answers(children[LIVE])
    rows = []
    for system, child in children.items():
        if system not in (LIVE, LLAMA_CPP):
            same = sum(one == other for one, other in zip(answers(child), wanted, strict=True))
            rows.append(row(case, "agreement", same / len(prompts), system=system))
    if runtime is not None and runtime["texts"]:
        stops = set(tokenizer.eos_ids)
        texts = []
        for each in wanted:
            end = next((at for at, token in enumerate(each) if token in stops), len(each))
            texts.append(tokenizer.decode(each[:end]))
        same = sum(one.strip() == other.strip() for one, other in zip(runtime["texts"], texts, strict=True))
        rows.append(row(case, "agreement", same / len(prompts), system=LITERT_LM))
    return rows


def quality_rows(children: Mapping[str, Child], text: Text, progress: Progress) -> list[Row]:
    """Perplexity of every system on a text, forms of ours against the live engine."""
    case = f"{text.name}, {text.tokens} tokens"
    values = {system: perplexity(child, text, progress) for system, child in children.items()}
    rows = [row(case, "perplexity", value, system=system) for system, value in values.items()]
    return [
        dataclasses.replace(each, baseline=LIVE, ratio=values[LIVE] / each.value)
        if each.system.startswith(f"{LIVE}-")
        else each
        for each in rows
    ]


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
