"""`jaxllm bench export`: exported programs beside the live engine that they were exported from."""

import dataclasses
from typing import Literal

import click

from benchmarks.harness import bench as plans

# That a run may be limited to: name -> what is measured, for the help text.
PARTS = {
    "formats": "every format beside the live engine",
    "sampling": "TFLite programs that draw several tokens per dispatch beside a dispatch for each token",
    "memory": "memory of a device's loop, generating and as a service",
    "shadow": "prefill of W8A8 with shadow beside other 8-bit programs and llama.cpp",
    "stages": "stages of W8A8 prefill on two processors, in each order, beside the simulator",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.TimedPlan, plans.TextPlan):
    """Sizes of one measurement; what an option asks for is said there.

    Attributes:
      text: calibrates w8a8, gives prompts and is scored; of a shape None, without w8a8.
      answers: greedy answers that are compared with the live engine's.
      sampled_precisions: of the TFLite programs whose sampling is measured.
      memory_calls: calls of the service whose memory is measured.
    """

    parts: tuple[str, ...] = plans.parts_of(PARTS)
    prompt_tokens: tuple[int, ...] = plans.sized((64, 256), quick=(64,))
    decode_tokens: int = plans.sized(64, quick=16)
    rounds: int = plans.sized(5, quick=2)
    answers: int = plans.sized(20, quick=4)
    answer_tokens: int = plans.sized(48, quick=16)
    text_windows: int = plans.sized(12, quick=2)
    context_tokens: int = plans.sized(1024, quick=256)
    weights: Literal["int8", "int4"] = plans.sized(
        "int8", "Width of quantized weights in every format; of llama.cpp Q8_0 and Q4_1."
    )
    sampled_precisions: tuple[str, ...] = plans.sized(("f32", "int8"), quick=("int8",))
    memory_calls: int = plans.sized(100, quick=10)
    patience_s: float = plans.sized(60.0, quick=2.0)


@plans.benchmark("export", Plan)
def export_command(bench: plans.Run[Plan]) -> plans.Run[Plan]:
    """Measure exported programs beside the live engine.

    Exports a model as StableHLO, TFLite and LiteRT-LM, and compares load times, sizes, speed, memory and
    answers.

    \b
    Example:
      jaxllm bench export
      jaxllm bench export --shape 110m --threads 1
      jaxllm bench export --only sampling
      jaxllm bench export --only formats --weights int4
    """
    from benchmarks.samples import stories_file

    if bench.shape is None:
        bench = bench.changed(text=bench.plan.text or stories_file(None))
    elif bench.plan.text is not None:
        raise click.UsageError("--shape does not go with --text")
    return bench
