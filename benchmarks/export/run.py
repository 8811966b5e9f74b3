"""Measures a model live and in every form that it can be exported in, side by side.

All are made of the same float weights. `jaxllm` is the live engine on them, `jaxllm-live-steps` the steps
that programs are made of, jitted: the difference between it and `jaxllm-stablehlo` is what exporting costs.
TFLite models run through our loop on LiteRT (`jaxllm-tflite-...`) and, as a bundle, through LiteRT-LM; the
float one that Google's AI Edge Quantizer has quantized, and llama.cpp, stand beside them where these are
installed. Each runs in a process of its own, in alternation.
"""

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.export import Plan, formats
from benchmarks.harness.bench import Run
from benchmarks.harness.children import in_process
from benchmarks.harness.report import Row, median, row
from benchmarks.int8_prefill.accuracy import missing
from benchmarks.models import Checkpoint, calibrated_model, calibrated_shapes
from benchmarks.peers import Opening, process
from benchmarks.peers.ours import BLOCKS
from benchmarks.samples import SEPARATOR
from jaxllm.errors import ConfigError
from jaxllm.serving.ground.bundles import open_model
from jaxllm.serving.ground.options import CPU_CHUNK_TOKENS, cache_lengths
from jaxllm.text.tokenizer import Tokenizer


def run(bench: Run[Plan]) -> list[Row]:
    """Measures the parts that the plan names.

    Raises:
      JaxllmError: a model cannot be opened.
    """
    if lacking := missing():
        bench = bench.without(("sampling", "shadow", "stages"), f"{lacking} is not installed")
    model = integer = bench.path()
    if {"shadow", "stages"} & {*bench.plan.parts}:
        try:
            integer, _ = (
                calibrated_model(model, bench.progress)
                if bench.shape is None
                else calibrated_shapes(bench.shape, bench.progress)
            )
        except ConfigError as error:
            bench = bench.without(("shadow", "stages"), str(error))
    parts = bench.plan.parts
    rows = _format_rows(model, bench) if "formats" in parts else []
    if "sampling" in parts:
        folder = Checkpoint.find(model).folder(bench.progress)
        with open_model(folder, weights="f32", progress=bench.progress) as bundle:
            path = bundle.path
        rows += formats.sampling_rows(path, bench)
    rows += formats.shadow_rows(integer, bench) if "shadow" in parts else []
    rows += formats.stage_rows(integer, bench) if "stages" in parts else []
    return rows


def _format_rows(model: Path, bench: Run[Plan]) -> list[Row]:
    """One model in every format."""
    checkpoint, plan = Checkpoint.find(model), bench.plan
    folder = checkpoint.folder(bench.progress)
    with open_model(folder, weights="f32", progress=bench.progress) as bundle:
        path, tokenizer = bundle.path, Tokenizer(bundle.tokenizer_files())
        context = min(plan.context_tokens, bundle.cfg.window_tokens)
        vocab = bundle.cfg.vocab_size
    half = context // 2
    lengths = tuple(sorted({min(each, half) for each in plan.prompt_tokens}))
    bench = bench.changed(context_tokens=context, prompt_tokens=lengths)
    plan, text = bench.plan, None
    if plan.text is not None:
        text = process.Text.read(
            plan.text, checkpoint, separator=SEPARATOR, window_tokens=half, limit=plan.text_windows
        )
    prompts = _prompts(text, vocab, plan, tokenizer)
    with tempfile.TemporaryDirectory() as scratch:
        exports = formats.make_exports(path, Path(scratch), context, plan.text, bench.tell)
        with process.opened(_openings(folder, path, exports, bench), bench.progress) as children:
            systems = [
                process.System(name, child, (BLOCKS,) if name == formats.LIVE else tuple(child.settings))
                for name, child in children.items()
            ]
            results = process.alternate(systems, vocab, plan=plan, progress=bench.progress)
            runtime = None
            if formats.LITERT_LM in exports:
                (cache := Path(scratch) / "litert-lm-cache").mkdir()
                # It takes text: random tokens would come to it as others.
                texts = [] if text is None else [tokenizer.decode(each) for each in prompts]
                threads, made = process.threads_of(plan.threads), exports[formats.LITERT_LM].path
                runtime = in_process(formats.run_litert_lm, made, cache, threads, plan, texts)
            rows = opening_rows(children, exports, runtime)
            rows += speed_rows(results, list(children), plan, runtime)
            rows += agreement_rows(children, prompts, plan.answer_tokens, tokenizer, runtime)
            if text is not None:
                case = f"{text.name}, {text.tokens} tokens"
                values = {s: process.perplexity(child, text, bench.progress) for s, child in children.items()}
                for system, value in values.items():
                    against = {"baseline": formats.LIVE, "ratio": values[formats.LIVE] / value}
                    how = against if system.startswith(f"{formats.LIVE}-") else {}
                    rows.append(row(case, "perplexity", value, system=system, **how))
    return rows


def _openings(
    folder: Path, bundle: Path, exports: Mapping[str, formats.Export], bench: Run[Plan]
) -> dict[str, Opening]:
    """What every system opens: of a model's float weights as a folder and as a bundle, and its exports."""
    plan, context = bench.plan, bench.plan.context_tokens
    ours = {"context_tokens": context, "chunk_tokens": list(CPU_CHUNK_TOKENS), "buckets_bytes": 0}
    steps = {
        "chunk_tokens": [each for each in CPU_CHUNK_TOKENS if each <= context],
        "verify_tokens": [min(formats.VERIFY_TOKENS, context)],
        "block_tokens": formats.BLOCK_TOKENS,
        "cache_tokens": list(cache_lengths(context)[:-1]),
    }
    programs = {name: each.path for name, each in exports.items() if name != formats.LITERT_LM}
    return {
        formats.LIVE: process.opening_of(plan, "jaxllm", folder, "f32", **ours),
        formats.STEPS: process.opening_of(plan, "live-steps", bundle, "f32", **steps),
        **{name: process.opening_of(plan, "programs", path) for name, path in programs.items()},
        **formats.llama_cpp(folder, bench),
    }


def _prompts(text: process.Text | None, vocab: int, plan: Plan, tokenizer: Tokenizer) -> list[list[int]]:
    """Prompts to answer: beginnings of pieces of the text, else random ids."""
    if text is None:
        return [[(7 * i + 13 * j) % vocab for j in range(8 + i)] for i in range(plan.answers)]
    tokens = [token for window, _ in text.windows for token in window]
    step = max(1, len(tokens) // plan.answers)
    pieces = [tokens[at : at + 12] for at in range(0, step * plan.answers, step)]
    # As every tokenizer reads them: a piece may begin within a word.
    return [list(tokenizer.encode(tokenizer.decode(each))) for each in pieces]


def opening_rows(
    children: Mapping[str, process.Child],
    exports: Mapping[str, formats.Export],
    runtime: Mapping[str, Any] | None,
) -> list[Row]:
    """Times to export, load and build, sizes of files, and memory.

    Args:
      children: the systems, open.
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
        rows.append(row("open", "load_ms", median(runtime["init_ms"]), system=formats.LITERT_LM))
        rows.append(row("run", "peak_memory_bytes", runtime["peak_bytes"], system=formats.LITERT_LM))
    return rows


# Forms of ours, and the baselines that each is measured by.
_BESIDE = {
    formats.STABLEHLO: (formats.STEPS, formats.LIVE),
    formats.TFLITE["f32"]: (formats.LIVE,),
    formats.TFLITE["int8"]: (formats.LLAMA_CPP, formats.EDGE_QUANTIZER, formats.TFLITE["f32"]),
    formats.TFLITE["w8a8"]: (formats.TFLITE["int8"],),
}


def speed_rows(
    results: process.Results, systems: Sequence[str], plan: Plan, runtime: Mapping[str, Any] | None
) -> list[Row]:
    """Prefill and decode of each form of ours against its baselines, and of the baselines."""
    rows = []
    for ours, others in _BESIDE.items():
        beside = {name: name for name in (ours, *others) if name in systems}
        if ours in beside:
            shown = process.rate_rows(results, beside, plan, ours=ours)
            rows += [each for each in shown if each.system == ours]
    for name in (formats.LIVE, formats.STEPS, formats.LLAMA_CPP, formats.EDGE_QUANTIZER):
        rows += process.rate_rows(results, {name: name}, plan, ours=name) if name in systems else []
    if runtime is not None:
        for prompt, phase in itertools.product(plan.prompt_tokens, ("prefill", "decode")):
            metric, case = f"{phase}_tokens_per_s", process.phase_case(phase, prompt, plan.decode_tokens)
            rows.append(
                row(case, metric, median(runtime[metric]), "by its own clock", system=formats.LITERT_LM)
            )
    return rows


def agreement_rows(
    children: Mapping[str, process.Child],
    prompts: Sequence[Sequence[int]],
    answer_tokens: int,
    tokenizer: Tokenizer,
    runtime: Mapping[str, Any] | None,
) -> list[Row]:
    """How many greedy answers are the live engine's, token by token; LiteRT-LM's as text."""

    def answers(child: process.Child) -> list[list[int]]:
        return [child.answer(each, answer_tokens - 1, child.settings[0])["ids"] for each in prompts]

    case = f"{len(prompts)} answers of {answer_tokens} tokens"
    wanted = answers(children[formats.LIVE])
    rows = []
    for system, child in children.items():
        if system not in (formats.LIVE, formats.LLAMA_CPP):
            same = sum(one == other for one, other in zip(answers(child), wanted, strict=True))
            rows.append(row(case, "agreement", same / len(prompts), system=system))
    if runtime is not None and runtime["texts"]:
        stops = set(tokenizer.eos_ids)
        texts = []
        for each in wanted:
            end = next((at for at, token in enumerate(each) if token in stops), len(each))
            texts.append(tokenizer.decode(each[:end]))
        same = sum(one.strip() == other.strip() for one, other in zip(runtime["texts"], texts, strict=True))
        rows.append(row(case, "agreement", same / len(prompts), system=formats.LITERT_LM))
    return rows
