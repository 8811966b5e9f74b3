"""`jaxllm bench prefill`: the speed and the loss of integer prefill (mllm-NPU, arXiv 2407.05858).

`run` orders a prompt's subgraphs on a simulated phone, and times prompts on one and on two
processors, `accuracy` compares our static steps with other `activation_quantizers`, and with fewer shadows
and other steps in layers without one.
"""

import dataclasses

from benchmarks.harness import bench as plans

# That a run may be limited to: name -> what is measured, for the help text.
PARTS = {
    "simulation": "orders of subgraphs on a simulated phone",
    "one-processor": "speed of prompts on all cores together",
    "two-processors": "the same on an integer and a float processor",
    "accuracy": "loss beside other quantizers of activations",
    "pruning": "loss by how many layers have a shadow, and by what the others do",
}
QUANTIZERS = (
    "float", "jaxllm", "jaxllm-per-tensor", "naive-int8", "SmoothQuant", "SmoothQuant-all", "LLM.int8()",
    "K-Quant", "Hadamard",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.DataPlan):
    """Sizes; what an option asks for is said there.

    Attributes:
      lengths: of prompts that are timed, ascending.
      repeats: of each of them on each system, which take turns.
      chunk_tokens: of buckets.
      rows: of text, to score; a quarter as many, at least 2,048 tokens, calibrate, and as many are held out.
      factor: of the outliers that are put in.
      outliers: whether the model is measured as it is (False), with outliers put in (True), or both.
      quantizers: of `QUANTIZERS`, to compare; `float` and ours are among them.
    """

    parts: tuple[str, ...] = plans.parts_of(PARTS)
    lengths: tuple[int, ...] = plans.sized((64, 256, 1024), quick=(256,))
    repeats: int = plans.sized(5, quick=2)
    chunk_tokens: tuple[int, ...] = plans.sized((64, 256), quick=(64,))
    simulated_tokens: tuple[int, ...] = (256, 512, 1024)
    rows: int = plans.sized(64, quick=8)
    row_tokens: int = 256
    tasks: tuple[str, ...] = plans.sized(("sentiment", "news", "emotion"), quick=("sentiment",))
    questions: int = plans.sized(60, quick=10)
    factor: int = 64
    outliers: tuple[bool, ...] = (False, True)
    quantizers: tuple[str, ...] = plans.sized(
        QUANTIZERS, quick=tuple(each for each in QUANTIZERS if each != "jaxllm-per-tensor")
    )


@plans.benchmark("prefill", Plan, "draft", plans.DENSE_SHAPES)
def prefill_command(bench: plans.Run[Plan]) -> plans.Run[Plan]:
    """Measure the speed and the loss of integer prefill.

    Runs prompts on one processor and on two, and compares the loss of a trained model with that of other
    quantizers of activations. The order of subgraphs is simulated on a phone, too.

    \b
    Example:
      jaxllm bench prefill
      jaxllm bench prefill --shape 110m --only two-processors
    """
    if bench.shape is not None:
        bench = bench.without(("accuracy", "pruning"), "random weights have none")
    if bench.is_quick and bench.plan.data is None:
        bench = bench.changed(tasks=())
    return bench
