"""`jaxllm bench prepare`: time and memory of preparing folders and GGUF files; speed, perplexity."""

import dataclasses
from pathlib import Path
from typing import Literal

import click

from benchmarks.harness import bench as plans

PARTS = {
    "memory": "time and peak memory of preparing",
    "speed": "prefill and decode beside a bundle prepared from floats",
    "perplexity": "of GGUF files, beside llama.cpp's on the same file",
}
VOCABULARY_SHAPES = ("0.5b-128k",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.TimedPlan, plans.TextPlan):
    """What is measured, and how long; what an option asks for is said there.

    Attributes:
      vocabulary_data: of whose texts the tokenizer of a shape is learned; None for the packaged stories.
    """

    kinds: tuple[Literal["F16", "Q8_0", "Q4_0", "Q4_1", "Q4_K"], ...] = plans.sized(
        ("F16", "Q8_0", "Q4_0", "Q4_1", "Q4_K"), "Write GGUF files of this type.", "--kind",
        quick=("Q8_0", "Q4_0"),
    )  # fmt: skip
    vocabulary_data: Path | None = plans.sized(
        None, "Learn the vocabulary of a shape of the texts in this folder.", "--data", type=plans.PATH,
        metavar="DIR", default="packaged stories",
    )  # fmt: skip
    parts: tuple[str, ...] = plans.parts_of(PARTS)
    prompt_tokens: tuple[int, ...] = plans.sized((64, 256), quick=(64,))
    decode_tokens: int = plans.sized(64, quick=32)
    rounds: int = plans.sized(7, quick=3)
    context_tokens: int = 512
    text_windows: int = plans.sized(256, quick=8)
    patience_s: float = plans.sized(120.0, quick=5.0)


@plans.benchmark("prepare", Plan, shapes=VOCABULARY_SHAPES)
def prepare_command(bench: plans.Run[Plan]) -> plans.Run[Plan]:
    """Measure preparing a folder and GGUF files of the same weights.

    Time and peak memory of preparing, speed of the bundles beside those prepared from floats, and perplexity
    beside llama.cpp's on the same files.

    \b
    Example:
      jaxllm bench prepare
      jaxllm bench prepare --full --model path/to/folder --only perplexity
      jaxllm bench prepare --full --shape 0.5b-128k --kind Q4_0 --data path/to/texts
    """
    data = bench.plan.vocabulary_data
    if data is not None and bench.shape is None:
        raise click.UsageError("--data goes with --shape")
    if data is not None and not data.is_dir():
        raise click.UsageError(f"--data names a folder of texts; {data} is none")
    if bench.shape is not None:
        bench = bench.without(("perplexity",), "random weights have no meaningful one")
    return bench
