"""Measures a model live and in every form that it can be exported in, side by side.

All are made of the same float weights, each by a command of its own. `jaxllm` is the live engine on them and
`jaxllm-int8` on 8 bits, `jaxllm-live-steps` the steps that programs are made of, jitted: the difference
between it and `jaxllm-stablehlo` is what exporting costs. TFLite models run through our loop on LiteRT
(`jaxllm-tflite-...`) and, at 8 bits as a bundle, through LiteRT-LM; the float one that Google's AI Edge
Quantizer has quantized, and llama.cpp at 8 bits, stand beside them where these are installed. With `--weights
int4` all have 4 bits in place of 8. Each runs in a process of its own, in alternation; LiteRT-LM, which only
its own benchmark times, after them.

Parts of TFLite programs are measured by themselves: sampling inside of programs, W8A8 with its shadow, and
stage programs on two processors in each order, beside the simulator's times of the same stages, and beside
whole prefill programs on the threads of both.

Google's quantizer makes an exported float TFLite model one of 8 bits: weights of fully connected layers and
embeddings become 8-bit by output channel, activations are quantized while the model runs
(`dynamic_wi8_afp32`). Only the model's file is replaced, and the same loop runs it.
"""

import dataclasses
import importlib.util
import itertools
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.export import Plan
from benchmarks.harness.bench import Run, Tell
from benchmarks.harness.children import Export, exported, in_process, run_python
from benchmarks.harness.machine import peak_resident_bytes, wait_for_quiet
from benchmarks.harness.report import Row, compared, row
from benchmarks.int8_prefill.accuracy import missing
from benchmarks.models import Checkpoint, calibrated_model, calibrated_shapes
from benchmarks.peers import PEERS, Opening, process
from benchmarks.peers.llama import FORMATS
from benchmarks.peers.ours import BLOCKS, DRAWN, GREEDY
from benchmarks.peers.peer import missing_packages
from benchmarks.samples import SEPARATOR
from jaxllm.bundle import Bundle
from jaxllm.bundle.levels import read_ladder
from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.export.folder_format.manifest import MANIFEST, Manifest, StoredFile
from jaxllm.export.programs.model import open_program
from jaxllm.export.programs.stages import StagePrograms
from jaxllm.int8_prefill.schedule import Order, simulate
from jaxllm.serving.ground.bundles import open_model
from jaxllm.serving.ground.options import CPU_CHUNK_TOKENS, cache_lengths
from jaxllm.text.tokenizer import Tokenizer

LIVE, STEPS, STABLEHLO = "jaxllm", "jaxllm-live-steps", "jaxllm-stablehlo"
LIVE_AT = {width: f"{LIVE}-{width}" for width in ("int8", "int4")}
TFLITE = {precision: f"jaxllm-tflite-{precision}" for precision in ("f32", "int8", "int4", "w8a8")}
EDGE_QUANTIZER = "AI-Edge-Quantizer"
LITERT_LM = "LiteRT-LM"
LLAMA_CPP = "llama.cpp"
_LIVE = LIVE, *LIVE_AT.values()
VERIFY_TOKENS = 64
# Of StableHLO, as `jaxllm export` has it.
BLOCK_TOKENS = 16
CALIBRATION_BYTES = 1 << 16
# Formats, and the module that writes them.
_NEEDED = {"stablehlo": "flatbuffers", "tflite": "litert_converter", "litertlm": "litert_lm_builder"}


def run(bench: Run[Plan]) -> list[Row]:
    """Measures the parts that the plan names."""
    if lacking := missing():
        bench = bench.without(("sampling", "memory", "shadow", "stages"), f"{lacking} is not installed")
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
        rows += sampling_rows(path, bench)
    rows += memory_rows(model, bench) if "memory" in parts else []
    rows += shadow_rows(integer, bench) if "shadow" in parts else []
    rows += stage_rows(integer, bench) if "stages" in parts else []
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
        exports = make_exports(path, Path(scratch), plan, bench.tell)
        with process.opened(_openings(folder, path, exports, bench), bench.progress) as children:
            systems = [
                process.System(name, child, (BLOCKS,) if name in _LIVE else tuple(child.settings))
                for name, child in children.items()
            ]
            results = process.alternate(systems, vocab, plan=plan, progress=bench.progress)
            runtime = None
            if LITERT_LM in exports:
                (cache := Path(scratch) / "litert-lm-cache").mkdir()
                # It takes text: random tokens would come to it as others.
                texts = [] if text is None else [tokenizer.decode(each) for each in prompts]
                threads, made = process.threads_of(plan.threads), exports[LITERT_LM].path
                runtime = in_process(run_litert_lm, made, cache, threads, plan, texts)
            rows = opening_rows(children, exports, runtime)
            rows += speed_rows(results, list(children), plan, runtime)
            rows += agreement_rows(children, prompts, plan.answer_tokens, tokenizer, runtime)
            if text is not None:
                case = f"{text.name}, {text.tokens} tokens"
                values = {s: process.perplexity(child, text, bench.progress) for s, child in children.items()}
                for system, value in values.items():
                    against = {"baseline": LIVE, "ratio": values[LIVE] / value}
                    how = against if system.startswith(f"{LIVE}-") else {}
                    rows.append(row(case, "perplexity", value, system=system, **how))
    return rows


def _openings(
    folder: Path, bundle: Path, exports: Mapping[str, Export], bench: Run[Plan]
) -> dict[str, Opening]:
    """What every system opens: of a model's float weights as a folder and as a bundle, and its exports."""
    plan, context = bench.plan, bench.plan.context_tokens
    ours = {"context_tokens": context, "chunk_tokens": list(CPU_CHUNK_TOKENS), "buckets_bytes": 0}
    steps = {
        "chunk_tokens": [each for each in CPU_CHUNK_TOKENS if each <= context],
        "verify_tokens": [min(VERIFY_TOKENS, context)],
        "block_tokens": BLOCK_TOKENS,
        "cache_tokens": list(cache_lengths(context)[:-1]),
    }
    programs = {name: each.path for name, each in exports.items() if name != LITERT_LM}
    return {
        LIVE: process.opening_of(plan, "jaxllm", folder, "f32", **ours),
        LIVE_AT[plan.weights]: process.opening_of(plan, "jaxllm", folder, plan.weights, **ours),
        STEPS: process.opening_of(plan, "live-steps", bundle, "f32", **steps),
        **{name: process.opening_of(plan, "programs", path) for name, path in programs.items()},
        **llama_cpp(folder, bench),
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
    exports: Mapping[str, Export],
    runtime: Mapping[str, Any] | None,
) -> list[Row]:
    """Times to export, load and build, sizes of files, and memory.

    Args:
      runtime: what LiteRT-LM reported; None where it did not run.
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
        rows.append(row("open", "load_ms", statistics.median(runtime["init_ms"]), system=LITERT_LM))
        rows.append(row("run", "peak_memory_bytes", runtime["peak_bytes"], system=LITERT_LM))
    return rows


# Forms of ours, and the baselines that each is measured by.
_BESIDE = {
    STABLEHLO: (STEPS, LIVE),
    TFLITE["f32"]: (LIVE,),
    TFLITE["int8"]: (LIVE_AT["int8"], LLAMA_CPP, EDGE_QUANTIZER, TFLITE["f32"]),
    TFLITE["int4"]: (LIVE_AT["int4"], LLAMA_CPP, TFLITE["f32"]),
    TFLITE["w8a8"]: (TFLITE["int8"],),
}


def speed_rows(
    results: process.Results, systems: Sequence[str], plan: Plan, runtime: Mapping[str, Any] | None
) -> list[Row]:
    """Prefill and decode of each form of ours against its baselines, and of the baselines."""
    rows = []
    for ours, others in _BESIDE.items():
        beside = [name for name in (ours, *others) if name in systems]
        if ours in beside:
            shown = process.rate_rows(results, beside, plan, ours=ours)
            rows += [each for each in shown if each.system == ours]
    for name in (*_LIVE, STEPS, LLAMA_CPP, EDGE_QUANTIZER):
        rows += process.rate_rows(results, [name], plan, ours=name) if name in systems else []
    if runtime is not None:
        for prompt, phase in itertools.product(plan.prompt_tokens, ("prefill", "decode")):
            metric, case = f"{phase}_tokens_per_s", process.phase_case(phase, prompt, plan.decode_tokens)
            rows.append(
                row(case, metric, statistics.median(runtime[metric]), "by its own clock", system=LITERT_LM)
            )
    return rows


def agreement_rows(
    children: Mapping[str, process.Child],
    prompts: Sequence[Sequence[int]],
    answer_tokens: int,
    tokenizer: Tokenizer,
    runtime: Mapping[str, Any] | None,
) -> list[Row]:
    """How many greedy answers are the live engine's, token by token; LiteRT-LM's as text, where there are
    such those of the programs of as many bits."""

    def answers(child: process.Child) -> list[list[int]]:
        return [child.answer(each, answer_tokens - 1, child.settings[0])["ids"] for each in prompts]

    case = f"{len(prompts)} answers of {answer_tokens} tokens"
    found = {system: answers(child) for system, child in children.items() if system != LLAMA_CPP}
    wanted, rows = found[LIVE], list[Row]()
    for system, ids in found.items():
        if system != LIVE:
            same = sum(one == other for one, other in zip(ids, wanted, strict=True))
            rows.append(row(case, "agreement", same / len(prompts), system=system))
    if runtime is not None and runtime["texts"]:
        stops, like = set(tokenizer.eos_ids), (TFLITE[each] for each in LIVE_AT if TFLITE[each] in found)
        alike = found.get(next(like, ""), wanted)
        ended = [itertools.takewhile(lambda each: each not in stops, ids) for ids in alike]
        texts = [tokenizer.decode([*ids]) for ids in ended]
        same = sum(one.strip() == other.strip() for one, other in zip(runtime["texts"], texts, strict=True))
        rows.append(row(case, "agreement", same / len(prompts), system=LITERT_LM))
    return rows


def chunk_options(lengths: Sequence[int], context_tokens: int) -> list[object]:
    """Options of an export with chunks of these lengths, as far as the context goes."""
    return [part for each in lengths if each <= context_tokens for part in ("--chunk-tokens", each)]


def llama_cpp(folder: Path, bench: Run[Plan]) -> dict[str, Opening]:
    """What llama.cpp opens of a folder; nothing where it is not installed, which is reported."""
    if missing := missing_packages(*PEERS[LLAMA_CPP].packages):
        bench.tell(f"without {LLAMA_CPP}: {missing} is not installed (pip install 'jaxllm[peers]')")
        return {}
    return {LLAMA_CPP: process.opening_of(bench.plan, LLAMA_CPP, folder, FORMATS[bench.plan.weights])}


def make_exports(bundle: Path, scratch: Path, plan: Plan, tell: Tell) -> dict[str, Export]:
    """Exports a bundle in every format whose packages are installed: the exports by system."""
    made, commands = {}, _commands(scratch, plan)
    for form, module in _NEEDED.items():
        if importlib.util.find_spec(module) is None:
            missing = [system for system, options in commands.items() if options[1] == form]
            tell(f"without {', '.join(missing)}: {module} is not installed (pip install 'jaxllm[export]')")
            commands = {name: each for name, each in commands.items() if name not in missing}
    for system, options in commands.items():
        try:
            made[system] = exported(bundle, scratch / str(options[1]) / system, *options)
        except JaxllmError as error:
            tell(f"without {system}: {error}")
    if plan.weights == "int8" and (floats := made.get(TFLITE["f32"])) is not None:
        try:
            made[EDGE_QUANTIZER] = quantize_folder(floats, scratch / EDGE_QUANTIZER)
        except JaxllmError as error:
            tell(f"without {EDGE_QUANTIZER}: {error}")
    return made


def _commands(scratch: Path, plan: Plan) -> dict[str, list[Any]]:
    """Options of `jaxllm export` by system; the second is the format. A text's end calibrates w8a8."""
    context_tokens, text, width = plan.context_tokens, plan.text, plan.weights
    sizes = [*chunk_options(CPU_CHUNK_TOKENS, context_tokens), "--context", context_tokens]
    platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    tree = ["--verify-tokens", min(VERIFY_TOKENS, context_tokens)]
    commands: dict[str, list[Any]] = {
        STABLEHLO: ["--format", "stablehlo", "--platform", platform, *sizes, *tree],
        TFLITE["f32"]: ["--format", "tflite", *sizes, *tree],
        TFLITE[width]: ["--format", "tflite", "--precision", width, *sizes, *tree],
        LITERT_LM: ["--format", "litertlm", "--precision", width, *sizes],
    }
    if text is not None and width == "int8":
        part = scratch / "calibration.txt"
        part.write_bytes(text.read_bytes()[-CALIBRATION_BYTES:])
        w8a8 = ["--precision", "w8a8", "--static-verify", "--calibration-text", part]
        commands[TFLITE["w8a8"]] = ["--format", "tflite", *w8a8, *sizes, *tree]
    return commands


def run_litert_lm(
    bundle: Path, cache: Path, threads: int, plan: Plan, texts: Sequence[str] = ()
) -> dict[str, Any]:
    """Runs Google's LiteRT-LM on a bundle, by its own clock; then answers texts greedily. In a process of its
    own: its runtime takes text and does not give its tokens, so that it cannot be a `Session`.

    Returns:
      `init_ms`, `prefill_tokens_per_s` and `decode_tokens_per_s` of each round, `texts`, and `peak_bytes`.
    """
    import litert_lm

    litert_lm.set_min_log_severity(litert_lm.LogSeverity.ERROR)
    how: dict[str, Any] = {"max_num_tokens": plan.context_tokens, "cache_dir": str(cache)}
    backend = litert_lm.Backend.CPU(thread_count=threads)
    sizes = {"prefill_tokens": max(plan.prompt_tokens), "decode_tokens": plan.decode_tokens}
    rounds = [litert_lm.Benchmark(str(bundle), backend, **sizes, **how).run() for _ in range(plan.rounds)]
    engine = litert_lm.Engine(str(bundle), backend=backend, **how)

    def answer(text: str) -> str:
        session = engine.create_session(
            sampler_config=litert_lm.SamplerConfig(top_k=1, temperature=0.0, seed=1),
            apply_prompt_template=False,
            max_output_tokens=plan.answer_tokens,
        )
        session.run_prefill([text])
        return session.run_decode().texts[0]

    return {
        "init_ms": [1000 * each.init_time_in_second for each in rounds],
        "prefill_tokens_per_s": [each.last_prefill_tokens_per_second for each in rounds],
        "decode_tokens_per_s": [each.last_decode_tokens_per_second for each in rounds],
        "texts": list(map(answer, texts)),
        "peak_bytes": peak_resident_bytes(),
    }


PACKAGE = "ai-edge-quantizer"
# In a process of its own: it brings its own LiteRT, and logs a lot. It identifies tensors by their names,
# which several signatures of a model share.
_SCRIPT = """
import pathlib, sys
from ai_edge_quantizer import quantizer, recipe
from ai_edge_quantizer.utils import tfl_flatbuffer_utils
floats, out = map(pathlib.Path, sys.argv[1:])
model = tfl_flatbuffer_utils.read_model(floats)
for number, subgraph in enumerate(model.subgraphs):
    for place, tensor in enumerate(subgraph.tensors):
        tensor.name = f"{number}/{place}".encode()
renamed = out.with_suffix(".floats")
tfl_flatbuffer_utils.write_model(model, renamed)
result = quantizer.Quantizer(str(renamed), recipe.dynamic_wi8_afp32()).quantize(enable_progress_report=False)
result.export_model(str(out), overwrite=True)
renamed.unlink()
"""


def quantize_folder(floats: Export, out: Path) -> Export:
    """Writes a copy of a folder of TFLite programs with its model quantized.

    Args:
      floats: made by `jaxllm export --format tflite`.
    """
    manifest, began = Manifest.read(floats.path), time.perf_counter()
    (model,) = {each.file for each in manifest.signatures}
    shutil.copytree(floats.path, out, ignore=shutil.ignore_patterns(model, MANIFEST))
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    run_python(PACKAGE, "-c", _SCRIPT, floats.path / model, out / model, env=quiet)
    files = {**manifest.files, model: StoredFile.of(out / model)}
    dataclasses.replace(manifest, precision="int8", files=files).write(out)
    return Export.of(out, began, floats.export_ms)


def memory_rows(model: Path, bench: Run[Plan]) -> list[Row]:
    """Memory of the loop of a device at 8 bits above its weights and longest caches, generating and as a
    service, each in a process of its own without JAX: at its peak, and at the end its share (PSS)."""
    system, rows = TFLITE["int8"], []
    with open_model(model) as bundle:
        ladder, context = read_ladder(bundle), min(bench.plan.context_tokens, bundle.cfg.window_tokens)
    # The level nearest to half of the model.
    levels = [] if ladder is None else ["--level", min(ladder.levels, key=lambda each: abs(each - 50))]
    with tempfile.TemporaryDirectory() as folder:
        options = ("--format", "tflite", "--precision", "int8", "--context", context, *levels)
        made = exported(model, Path(folder) / system, *options)
        for calls in (0, bench.plan.memory_calls):
            command = ("-m", "jaxllm.cli.device", made.path, "facts", "--json", "--calls", calls)
            # A first start packs weights and measures a profile.
            facts = [json.loads(run_python("the device's loop", *command)) for _ in range(2)][-1]
            case = f"a service of {calls} calls" if calls else "generate"
            for metric, what in (("peak_memory_bytes", "peak"), ("proportional_bytes", "share")):
                above = facts[metric] - facts["weights_bytes"] - facts["cache_bytes"]
                note = f"{what} above weights and caches"
                rows.append(row(case, metric, above, note, system=system))
    return rows


SHADOW = f"{TFLITE['w8a8']}-shadow"
_SUFFIX = "-blocks"


def _options(bench: Run[Plan], *own: object, chunks: Sequence[int] = (16, 64, 256)) -> list[object]:
    """Options of a TFLite export of the plan's sizes, with one length of caches."""
    context = bench.plan.context_tokens
    sizes = ["--context", context, "--cache-tokens", 0, *chunk_options(chunks, context)]
    return ["--format", "tflite", *own, *sizes]


def sampling_rows(bundle: Path, bench: Run[Plan]) -> list[Row]:
    """Decoding by programs of `BLOCK_TOKENS` tokens with sampling inside, beside the same model by a dispatch
    for each token with NumPy's sampling; greedy, and drawn. The bundle has float weights; prompts have the
    first length."""
    plan, openings = bench.plan, {}
    with tempfile.TemporaryDirectory() as folder:
        for precision, (suffix, block) in itertools.product(
            plan.sampled_precisions, {"": 0, _SUFFIX: BLOCK_TOKENS}.items()
        ):
            name = f"{TFLITE[precision]}{suffix}"
            options = _options(bench, "--precision", precision, "--block-tokens", block)
            made = exported(bundle, Path(folder) / name, *options)
            openings[name] = process.opening_of(plan, "device-programs", made.path)
        with process.opened(openings, bench.progress) as children:
            systems = [
                process.System(f"{name} {how}", child, (how,))
                for name, child in children.items()
                for how in (GREEDY, DRAWN)
            ]
            results = _alternated(systems, bundle, bench, plan.prompt_tokens[:1])
    rows, (prompt, *_) = [], {length for _, length in results}
    for precision, how in itertools.product(plan.sampled_precisions, (GREEDY, DRAWN)):
        ours = f"{TFLITE[precision]}{_SUFFIX}"
        rates = {
            each: results[f"{each} {how}", prompt].rate("decode", plan.decode_tokens)
            for each in (ours, TFLITE[precision])
        }
        case = f"{process.phase_case('decode', prompt, plan.decode_tokens)}, {how}"
        rows += compared(case, "decode_tokens_per_s", rates, ours=ours)
    return rows


def shadow_rows(integer: Path, bench: Run[Plan]) -> list[Row]:
    """Prefill by W8A8 programs with the shadow of a calibrated bundle, beside those without, the int8
    programs, and llama.cpp."""
    plan, openings = bench.plan, {}
    with tempfile.TemporaryDirectory() as folder:
        static = ["--precision", "w8a8", *_calibration(integer, plan.text, Path(folder))]
        forms = {
            SHADOW: static,
            TFLITE["w8a8"]: [*static, "--without-shadow"],
            TFLITE["int8"]: ["--precision", "int8"],
        }
        for name, options in forms.items():
            made = exported(integer, Path(folder) / name, *_options(bench, *options))
            openings[name] = process.opening_of(plan, "programs", made.path)
        openings |= llama_cpp(Checkpoint.find(integer).folder(bench.progress), bench)
        with process.opened(openings, bench.progress) as children:
            systems = [process.System(name, child, tuple(child.settings)) for name, child in children.items()]
            results = _alternated(systems, integer, bench, plan.prompt_tokens)
    rows = process.rate_rows(results, openings, plan, ours=SHADOW)
    return [each for each in rows if each.metric == "prefill_tokens_per_s"]


def _calibration(integer: Path, text: Path | None, folder: Path) -> list[object]:
    """The option that gives the steps of outputs: the end of a text, or words of a bundle's vocabulary."""
    part = folder / "calibration.txt"
    if text is not None:
        part.write_bytes(text.read_bytes()[-CALIBRATION_BYTES:])
    else:
        with Bundle.open(integer) as bundle:
            words = process.prompt_ids(bundle.cfg.vocab_size, 2048)
            part.write_text(Tokenizer(bundle.tokenizer_files()).decode(words), encoding="utf-8")
    return ["--calibration-text", part]


def _alternated(
    systems: Sequence[process.System], bundle: Path, bench: Run[Plan], lengths: Sequence[int]
) -> process.Results:
    """The results of prompts of these lengths, or half the context."""
    with Bundle.open(bundle) as model:
        vocab_size = model.cfg.vocab_size
    fitting = tuple(sorted({min(each, bench.plan.context_tokens // 2) for each in lengths}))
    plan = bench.changed(prompt_tokens=fitting).plan
    return process.alternate(systems, vocab_size, plan=plan, progress=bench.progress)


STAGES = "jaxllm-stages"
_ORDERS: dict[str, Order] = {
    STAGES: "out-of-order",
    f"{STAGES}-in-order": "in-order",
    f"{STAGES}-equation-5": "equation-5",
}


def stage_rows(integer: Path, bench: Run[Plan]) -> list[Row]:
    """Makespans of a calibrated bundle's prompts on two processors, one more of half the context."""
    plan = bench.plan
    with tempfile.TemporaryDirectory() as folder:
        own = ["--precision", "w8a8", "--stages", *_calibration(integer, plan.text, Path(folder))]
        bench.progress("Measuring", 0, 2)
        # Short chunks give the order more to choose from.
        options = _options(bench, *own, chunks=(64, 128, 256))
        made = exported(integer, Path(folder) / "stages", *options)
        bench.progress("Measuring", 1, 2)
        half = plan.context_tokens // 2
        lengths = sorted({*(min(each, half) for each in plan.prompt_tokens), half})
        found = in_process(_measured, made.path, lengths, plan.rounds)
    bench.progress("Measuring", 2, 2)
    return makespan_rows(found)


def makespan_rows(found: dict[int, Any]) -> list[Row]:
    """Rows of prompts by length, of what was measured of each system."""
    rows = []
    for length, systems in found.items():
        case = f"prompt {length}, two processors"
        ordered = {name: each for name, each in systems.items() if name in _ORDERS}
        notes = {
            name: f"chunks of {each['chunks']}; {each['real_to_simulated'] - 1:+.0%} against simulated "
            f"{each['simulated_ms']:.0f} ms"
            for name, each in ordered.items()
        }
        spans = {name: each["real_ms"] for name, each in systems.items()}
        rows += compared(case, "makespan_ms", spans, notes, ours=STAGES)
        for name, each in ordered.items():
            rows.append(row(case, "real_to_simulated", each["real_to_simulated"], system=name))
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
            for name in list(_ORDERS) if number % 2 else list(_ORDERS)[::-1]:
                runs.setdefault(name, []).append(_timed(stages, _ORDERS[name], tokens, plan))
            cache = runner.start(length + 1)
            wait_for_quiet(0.3)
            began = time.perf_counter()
            runner.prefill(cache, [*tokens, 0], 0, runner.prefill_chunks(length + 1)[0])
            runs.setdefault(TFLITE["w8a8"], []).append({"real_ms": 1000 * (time.perf_counter() - began)})
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
