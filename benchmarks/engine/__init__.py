"""`jaxllm bench engine`: load, build and run times of the engine beside other engines on the same weights."""

import dataclasses
from pathlib import Path

import click

from benchmarks.harness import bench as plans
from jaxllm.formats import WeightFormat

PEERS = ("llama.cpp", "transformers")
PARTS = {
    "speed": "times, rates and memory",
    "quality": "the perplexity of --text, beside that of float weights",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.TimedPlan):
    """Sizes of one measurement; what an option asks for is said there."""

    parts: tuple[str, ...] = plans.parts_of(PARTS)
    weights: tuple[WeightFormat, ...] = plans.sized(
        (), "Weight width for a folder or a shape: one run compares them.", default="its own"
    )
    context_tokens: int = plans.sized(
        0, "Maximum number of tokens of prompt and answer together.", "--context", metavar="TOKENS", low=2,
        default="the model's window, up to 2048",
    )  # fmt: skip
    peers: tuple[str, ...] = plans.sized(
        ("all",), "Another engine that runs the same weights.", "--peer",
        type=click.Choice([*PEERS, "all", "none"]), default="all that are installed",
    )  # fmt: skip
    text: Path | None = plans.sized(
        None, "Measure every system's perplexity on this UTF-8 text too.", type=plans.PATH, metavar="FILE"
    )
    separator: str | None = plans.sized(
        None, "Split the text into documents at this string, scored apart.", metavar="TEXT"
    )
    prompt_tokens: tuple[int, ...] = plans.sized((64, 256, 1024), quick=(64, 256))
    decode_tokens: int = plans.sized(128, quick=32)
    rounds: int = plans.sized(5, quick=3)
    text_windows: int = plans.sized(
        0, "Most windows of the text, each as long as the context.", metavar="N", low=0, quick=8,
        default="8; with --full all",
    )  # fmt: skip
    patience_s: float = plans.sized(120.0, quick=5.0)
    slow_peers: bool = plans.sized(True, quick=False)

    def within(self, context_tokens: int) -> "Plan":
        """The plan for a context that may be too short for it."""
        decode = min(self.decode_tokens, context_tokens // 2)
        prompts = tuple(sorted({min(tokens, context_tokens - decode) for tokens in self.prompt_tokens}))
        sizes = {"context_tokens": context_tokens, "prompt_tokens": prompts, "decode_tokens": decode}
        return dataclasses.replace(self, **sizes)


@plans.benchmark("engine", Plan, real=True)
def engine_command(bench: plans.Run[Plan]) -> plans.Run[Plan]:
    """Measure load, build and run times, speed and memory beside other engines.

    All engines run the same weights at the same width, in turns, each in a process of its own.

    \b
    Example:
      jaxllm bench engine
      jaxllm bench engine --shape 250m --weights int8 --peer llama.cpp --full
      jaxllm bench engine -m model.gguf --weights int8 --only quality --text text.txt
    """
    if bench.plan.separator == "":
        raise click.UsageError("--separator must not be empty")
    if bench.plan.text is None and bench.plan.parts == ("quality",):
        raise click.UsageError("--only quality needs a text: give --text FILE")
    return bench
