"""`jaxllm bench speculative`: a model larger than memory, with and without drafts (LLMCad, section 4).

`systems` opens ours and the baselines, `run` times answers, in a budget of memory and without one, `answers`
tunes systems and has the figures of answers.
"""

import dataclasses
import os
from pathlib import Path
from typing import Literal

import click

from benchmarks.harness import bench as plans
from jaxllm.option_types import Share

# That a run may be limited to: name -> what is measured, for the help text.
PARTS = {
    "systems": "time per token of every system",
    "drafters": "of them only ours, ours by lookup, and StdPL without drafts",
    "ablations": "time per token without each technique",
    "unguessable": "time per token of answers that no draft can guess",
    "same-answers": "share of answers that equal the target's own",
    "in-memory": "with --full or named: time per token with all weights in memory, drafted by their high "
    "planes or a small model, beside llama.cpp with drafts and without",
}

# Sets of options of the token tree: name -> what is measured of it, for the help text.
PRESETS = {
    "ours": "ours without each technique",
    "published": "LLMCad as its paper has it, and without each technique",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.DataPlan):
    """Sizes of one run; what an option asks for is said there.

    Attributes:
      tokens: of each answer, at most.
      tried: prompts of each task that systems are tuned on; 0 does not tune.
      compared_answers: that are compared with the target's own.
      judged: whether answers that differ from the target's are judged; without, BLD and STI are left out.
    """

    draft: str = plans.sized(
        "draft", "A small model of the same tokenizer, which drafts; nested for the high planes of an "
        "int8-nested model.", metavar="MODEL",
    )  # fmt: skip
    enlarge: int = plans.sized(
        0, "Make the model N times as deep and wide by units that cancel: the same answers of a model that "
        "is much larger than its draft.", type=click.IntRange(min=2), metavar="N",
    )  # fmt: skip
    file: Path | None = plans.sized(
        None, "Ask the prompts of Spec-Bench's FILE instead of the tasks'; `spec-bench` finds it as "
        "prompts/spec_bench.jsonl in the folder of --data or $JAXLLM_DATA. For an encoder-decoder a FILE "
        "with a source on each line, or source and answer with a tab between, instead of its own tasks' in "
        "--data.",
        "--prompts", metavar="FILE",
    )  # fmt: skip
    prompts: int = plans.sized(
        10, "Time N prompts of each task; intervals are over all of them.", "--count", quick=1, low=1,
        metavar="N",
    )  # fmt: skip
    devices: tuple[str, ...] = plans.devices_of(plans.PHONES)
    shares: tuple[float, ...] = plans.sized(
        (0.5,), "Memory for weights, as a share of the model's.", "--budget", type=Share(above_zero=True),
        default="50%; for a shape 25%, 50% and 75%",
    )  # fmt: skip
    parts: tuple[str, ...] = plans.parts_of(PARTS)
    presets: tuple[Literal["ours", "published"], ...] = plans.sized(
        ("ours", "published"), "Run this set of options alone beside ours ("
        + "; ".join(f"{name}: {what}" for name, what in PRESETS.items()) + ").", "--preset", default="all",
    )  # fmt: skip
    tokens: int = plans.sized(64, quick=24)
    tried: int = plans.sized(2, quick=0)
    compared_answers: int = plans.sized(200, quick=4)
    context_tokens: int = 512
    judged: bool = True
    seed: int = 0


@plans.benchmark("speculative", Plan, shapes=(*plans.DENSE_SHAPES, *plans.SEQ2SEQ_SHAPES))
def speculative_command(bench: plans.Run[Plan]) -> plans.Run[Plan]:
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
    plan = bench.plan
    if bench.shape is not None:
        if plan.enlarge:
            raise click.UsageError("--enlarge is for a trained model; a --shape has its size")
        if plan.parts != tuple(PARTS):
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
        return bench.changed(shares=shares)
    if bench.is_quick and plan.parts == tuple(PARTS):
        plan = dataclasses.replace(plan, parts=tuple(part for part in plan.parts if part != "in-memory"))
    return bench.changed(parts=plan.parts, file=_prompts_file(plan))


def _prompts_file(plan: Plan) -> Path | None:
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
