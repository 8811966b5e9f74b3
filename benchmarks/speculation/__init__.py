"""`jaxllm bench speculative`: a model larger than memory, with and without drafts (LLMCad, section 4).

`systems` opens ours and the baselines, `run` times answers, `answers` tunes systems and has the figures of
answers, `memory` measures a process in a budget, `in_memory` times answers without one, beside llama.cpp's,
and makes a trained target as much larger than its draft as the papers' are.
"""

import dataclasses
from pathlib import Path
from typing import Literal

import click

from benchmarks.harness import bench as plans
from jaxllm.option_types import Share

# That a run may be limited to: name -> what is measured, for the help text.
PARTS = {
    "systems": "time per token of every system",
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
