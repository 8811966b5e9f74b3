"""Makes rows of what was measured of exported programs."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.export.formats import (
    EDGE_QUANTIZER,
    LITERT_LM,
    LIVE,
    LLAMA_CPP,
    STABLEHLO,
    STEPS,
    TFLITE,
    Export,
)
from benchmarks.measuring.report import Row, compared, median
from benchmarks.peers.alternation import Result
from benchmarks.peers.perplexity import Text, perplexity
from benchmarks.peers.process import Child
from jaxllm.text.tokenizer import Tokenizer
from serving.host.progress import Progress


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


def speed_rows(
    results: Mapping[tuple[str, int], Result],
    children: Mapping[str, Child],
    prompt: int,
    tokens: int,
    runtime: Mapping[str, Any] | None,
) -> list[Row]:
    """Prefill and decode at one prompt length, each form of ours against the baselines it is measured by."""
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


def quality_rows(children: Mapping[str, Child], text: Text, progress: Progress) -> list[Row]:
    """Perplexity of every system on a text, forms of ours against the live engine."""
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
