"""`jaxllm bench elastic`: the cost of levels and of changing them, and answers that are right and in time.

The glossary describes the baselines (ELMS, arXiv 2409.09071, section 5.1). A change of PFS-swap is counted as
the read of its file alone; its models have their own tokenizers and widths, which rows say. Ours also runs
without shortening prompts (-model-only), with the whole model alone (-prompt-only), and by other decisions:

- jaxllm-random: drawn among those in time.
- jaxllm-fixed: of each task's variants in time always the one that is right most often, as known in
  hindsight: what a rule that looks at no question can reach.
- jaxllm-oracle: the bound. A request counts where any variant of ours is right in time, at what the variant
  must take and without a margin; so no decision can exceed it. It counts luck, too: of many variants one may
  be right by chance.

Every system meets an objective of <100,100>, so there are also shares of the other five objectives alone.

Systems are timed in alternation. Each has two shares: `accuracy`, of right answers whether in time or not,
and `right_and_met`, of right answers in time. Intervals, and comparisons with ours, resample questions, not
requests (`report.interval`).
"""

import dataclasses
from pathlib import Path

import click

from benchmarks.harness import bench as plans

# That a run may be limited to: name -> what is measured, for the help text.
PARTS = {
    "costs": "times and memory of levels, and of changing them",
    "accuracy": "right answers of every level",
    "trace": "right answers in time, on every system",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.ShapePlan, plans.DataPlan):
    """Sizes of one run; what an option asks for is said there.

    Attributes:
      rounds: pairs of requests that change to each level and that stay.
      questions: of each task, that the trace draws from.
      layer_subsets: models of the baseline that leaves out layers, besides the whole one; 0 takes all.
      replayed: requests that are really answered, to see which objectives are met.
    """

    plain: tuple[Path, ...] = plans.sized(
        (), "A plain model of another size, trained from scratch, for the baseline PFS.", "--plain-model",
        type=plans.PATH, metavar="MODEL", default="small",
    )  # fmt: skip
    pruned: Path | None = plans.sized(
        None, "An elastic bundle made without anchors, for the baseline LLM-Pruner.", "--pruned-model",
        metavar="BUNDLE", default="the model itself",
    )  # fmt: skip
    compared: tuple[Path, ...] = plans.sized(
        (), "An elastic bundle made otherwise, whose accuracy is compared level by level.",
        "--compare-levels-with", type=plans.PATH, metavar="BUNDLE",
    )  # fmt: skip
    timed_shape: str = plans.sized(
        "", "Take the times of the trace from random weights of this size, with the model's levels and "
        "tokenizer, and only the answers from the model.", "--trace-times-of",
        type=click.Choice(plans.DENSE_SHAPES),
    )  # fmt: skip
    parts: tuple[str, ...] = plans.parts_of(PARTS)
    repeats: int = plans.sized(5, quick=2)
    rounds: int = plans.sized(41, quick=3)
    requests: int = plans.sized(1200, quick=60)
    questions: int = plans.sized(40, quick=3)
    layer_subsets: int = plans.sized(0, quick=4)
    replayed: int = plans.sized(150, quick=60)
    seed: int = 0


@plans.benchmark("elastic", Plan, shapes=plans.DENSE_SHAPES)
def elastic_command(bench: plans.Run[Plan]) -> plans.Run[Plan]:
    """Measure the cost of a model's levels, and right answers in time.

    The model is an elastic bundle with a tiny LM; apps with objectives ask it questions, and the baselines of
    ELMS answer the same ones. Random weights are measured for costs alone.

    \b
    Example:
      jaxllm bench elastic
      jaxllm bench elastic --shape 250m --only costs
    """
    if bench.shape is not None and bench.plan.timed_shape:
        raise click.UsageError("--trace-times-of goes with a --model, whose trace it times")
    if bench.shape is not None:
        bench = bench.without(("accuracy", "trace"), "random weights have no right answers")
    return bench
