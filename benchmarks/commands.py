"""Has the commands of the benches: each checks what was asked for, and measures in its room. Importing it
imports no JAX.
"""

import dataclasses
import os
from pathlib import Path

import click

from benchmarks import (
    contexts,
    elastic,
    engine,
    experts,
    export,
    int8_prefill,
    prepare,
    service,
    speculation,
)
from benchmarks.harness import bench as plans


@plans.benchmark("engine", engine.Plan)
def engine_command(bench: plans.Run[engine.Plan]) -> plans.Result:
    """Measure load, build and run times, speed and memory beside other engines.

    All engines run the same weights at the same width, in turns, each in a process of its own.

    \b
    Example:
      jaxllm bench engine
      jaxllm bench engine --shape 250m --weights int8 --peer llama.cpp --full
    """
    from benchmarks.engine import run

    if bench.plan.separator == "":
        raise click.UsageError("--separator must not be empty")
    return run.run(bench), None


@plans.benchmark("elastic", elastic.Plan, shapes=plans.DENSE_SHAPES)
def elastic_command(bench: plans.Run[elastic.Plan]) -> plans.Result:
    """Measure the cost of a model's levels, and right answers in time.

    The model is an elastic bundle with a tiny LM; apps with objectives ask it questions, and the baselines of
    ELMS answer the same ones. Random weights are measured for costs alone.

    \b
    Example:
      jaxllm bench elastic
      jaxllm bench elastic --shape 250m --only costs
    """
    from benchmarks.elastic import run

    if bench.shape is not None and bench.plan.timed_shape:
        raise click.UsageError("--trace-times-of goes with a --model, whose trace it times")
    if bench.shape is not None:
        bench = bench.without(("accuracy", "trace"), "random weights have no right answers")
    return run.run(bench), run.draw


@plans.benchmark("speculative", speculation.Plan, shapes=(*plans.DENSE_SHAPES, *plans.SEQ2SEQ_SHAPES))
def speculative_command(bench: plans.Run[speculation.Plan]) -> plans.Result:
    """Measure a model larger than memory, with drafts and without.

    Times tokens of ours and of LLMCad's baselines, which are tuned on other prompts with --full. The model
    and its draft are decoders, or both encoder-decoders. Of random weights, measures the memory and the reads
    of a process alone.

    \b
    Example:
      jaxllm bench speculative
      jaxllm bench speculative --enlarge 4 --budget 25% --device eufs
      jaxllm bench speculative --full --prompts spec-bench --preset published
      jaxllm bench speculative --model translate --draft translate-draft --prompts val.de
      jaxllm bench speculative --model nested.jaxllm --draft nested --only same-answers
      jaxllm bench speculative --enlarge 8 --only in-memory
    """
    from benchmarks.speculation import run

    plan = bench.plan
    if bench.shape is not None:
        if plan.enlarge:
            raise click.UsageError("--enlarge is for a trained model; a --shape has its size")
        if plan.parts != tuple(speculation.PARTS):
            raise click.UsageError(
                "--only is for a --model; of a --shape the memory of a process is measured"
            )
        asked = {"file": "--prompts", "prompts": "--count", "presets": "--preset"}
        unused = [flag for name, flag in asked.items() if name in bench.given]
        if unused:
            raise click.UsageError(
                f"{' and '.join(unused)}: for a --model; a --shape is not asked for answers"
            )
        shares = plan.shares if "shares" in bench.given else (0.25, 0.5, 0.75)
        return run.shape_rows(bench.changed(shares=shares)), None
    if bench.is_quick and plan.parts == tuple(speculation.PARTS):
        plan = dataclasses.replace(plan, parts=tuple(part for part in plan.parts if part != "in-memory"))
    return run.run(bench.changed(parts=plan.parts, file=_prompts_file(plan))), None


def _prompts_file(plan: speculation.Plan) -> Path | None:
    """The file that --prompts names, checked before anything is measured."""
    file = plan.file
    if file is not None and str(file) == "spec-bench":
        folder = plan.data or os.environ.get("JAXLLM_DATA")
        if not folder:
            raise click.UsageError(
                "--prompts spec-bench needs the folder it lies in: --data, or $JAXLLM_DATA"
            )
        file = Path(folder) / "prompts" / "spec_bench.jsonl"
    if file is not None and not file.is_file():
        raise click.UsageError(f"--prompts {file}: there is no such file; give Spec-Bench's question.jsonl")
    return file


@plans.benchmark("contexts", contexts.Plan)
def contexts_command(bench: plans.Run[contexts.Plan]) -> plans.Result:
    """Measure switching between contexts of apps, and the quality of compressed ones.

    Contexts share a tight memory budget; ours and the baselines of LLMS evict, store and restore them.

    \b
    Example:
      jaxllm bench contexts
      jaxllm bench contexts --shape 110m --only switching --contexts 8 --device emmc
    """
    from benchmarks.contexts import run
    from jaxllm.kernels import native

    if bench.shape is not None:
        bench = bench.without(("quality", "density"), "random weights have none")
    if not native.kernels().native:
        bench = bench.without(("resident",), "no native kernels run here")
    contexts = tuple(sorted(set(bench.plan.contexts)))
    return run.run(bench.changed(contexts=contexts, fitting=min(bench.plan.fitting, contexts[-1]))), run.draw


@plans.benchmark("experts", experts.Plan, "moe", (*plans.MIXTURE_SHAPES, *plans.SWITCH_SHAPES))
def experts_command(bench: plans.Run[experts.Plan]) -> plans.Result:
    """Measure a mixture of experts larger than memory.

    Times tokens of ours and of EdgeMoE's baselines, and judges predictors and eviction policies. Of Switch
    Transformers measures the answers to the sources of tasks, too, and the experts of both sides.

    \b
    Example:
      jaxllm bench experts
      jaxllm bench experts --shape moe-1b --only systems --device sd
      jaxllm bench experts -m switch.jaxllm --data DIR --task translation_de_to_en --task emotion
      jaxllm bench experts -m switch.jaxllm --checkpoint runs/switch/hf --pairs val.de val.en
    """
    from benchmarks.experts import run

    plan = bench.plan
    chosen = plan.checkpoint, plan.others, plan.text, plan.tasks, plan.data, plan.pairs, plan.prefix
    if bench.shape is not None and any(chosen):
        raise click.UsageError(
            "--shape goes with none of --checkpoint, --other-loss, --text, --task and --pairs"
        )
    if plan.pairs is None and plan.prefix is not None:
        raise click.UsageError("--prefix goes with --pairs")
    if (plan.pairs is not None) + bool(plan.tasks) + (plan.text is not None) > 1:
        raise click.UsageError("--pairs, --task and --text exclude each other")
    if plan.data is not None and not plan.tasks:
        raise click.UsageError("--data goes with --task")
    if bench.shape in plans.SWITCH_SHAPES and plan.parts != tuple(experts.PARTS):
        raise click.UsageError("random weights of an encoder-decoder are measured for memory alone")
    if bench.shape in plans.MIXTURE_SHAPES:
        bench = bench.without(("losses",), "random weights are not calibrated")
    if plan.is_asked:
        bench = bench.without(("nested", "predictors"), "decoders alone are measured so")
    return run.run(bench), run.draw


@plans.benchmark("prefill", int8_prefill.Plan, "draft", plans.DENSE_SHAPES)
def prefill_command(bench: plans.Run[int8_prefill.Plan]) -> plans.Result:
    """Measure the speed and the loss of integer prefill.

    Runs prompts on one processor and on two, and compares the loss of a trained model with that of other
    quantizers of activations. The order of subgraphs is simulated on a phone, too.

    \b
    Example:
      jaxllm bench prefill
      jaxllm bench prefill --shape 110m --only two-processors
    """
    from benchmarks.int8_prefill import run

    if bench.shape is not None:
        bench = bench.without(("accuracy", "pruning"), "random weights have none")
    if bench.is_quick and bench.plan.data is None:
        bench = bench.changed(tasks=())
    return run.run(bench), None


@plans.benchmark("prepare", prepare.Plan, shapes=prepare.VOCABULARY_SHAPES)
def prepare_command(bench: plans.Run[prepare.Plan]) -> plans.Result:
    """Measure preparing a folder and GGUF files of the same weights.

    Time and peak memory of preparing, speed of the bundles beside those prepared from floats, and perplexity
    beside llama.cpp's on the same files.

    \b
    Example:
      jaxllm bench prepare
      jaxllm bench prepare --full --model path/to/folder --only perplexity
      jaxllm bench prepare --full --shape 0.5b-128k --kind Q4_0 --data path/to/texts
    """
    from benchmarks.prepare import run

    data = bench.plan.vocabulary_data
    if data is not None and bench.shape is None:
        raise click.UsageError("--data goes with --shape")
    if data is not None and not data.is_dir():
        raise click.UsageError(f"--data names a folder of texts; {data} is none")
    if bench.shape is not None:
        bench = bench.without(("perplexity",), "random weights have no meaningful one")
    return run.run(bench), None


@plans.benchmark("service", service.Plan, shapes=plans.DENSE_SHAPES)
def service_command(bench: plans.Run[service.Plan]) -> plans.Result:
    """Measure the service under load: answers in time, times, tokens per second and memory.

    Six apps call at their own times, each with an objective, and clients call as soon as they are answered.
    Every system is a server process with the same weights and threads, and gets the same requests.

    \b
    Example:
      jaxllm bench service
      jaxllm bench service --shape 250m --weights int8 --full --plot figures
    """
    from benchmarks.service import run
    from benchmarks.service.outcomes import drawing

    if bench.plan.seconds:
        bench = bench.changed(load_s=bench.plan.seconds, clients_s=bench.plan.seconds)
    loads, clients = dict.fromkeys(bench.plan.loads), dict.fromkeys(bench.plan.clients)
    bench = bench.changed(loads=tuple(loads), clients=tuple(clients))
    return run.run(bench), drawing(bench.kept)


@plans.benchmark("export", export.Plan)
def export_command(bench: plans.Run[export.Plan]) -> plans.Result:
    """Measure exported programs beside the live engine.

    Exports a model as StableHLO, TFLite and LiteRT-LM, and compares load times, sizes, speed, memory and
    answers.

    \b
    Example:
      jaxllm bench export
      jaxllm bench export --shape 110m --threads 1
      jaxllm bench export --only sampling
    """
    from benchmarks.export import run
    from benchmarks.samples import stories_file

    if bench.shape is None:
        bench = bench.changed(text=bench.plan.text or stories_file(None))
    elif bench.plan.text is not None:
        raise click.UsageError("--shape does not go with --text")
    return run.run(bench), None
