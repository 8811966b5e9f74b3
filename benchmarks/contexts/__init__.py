"""`jaxllm bench contexts`: switching between the contexts of apps in a tight memory budget.

All systems are one manager, one store and the same kernels under other options, so that they differ in
their idea alone. The glossary describes the baselines (LLMS, arXiv 2403.11805, section 4). Ablations are
ours with all chunks at 8 bits (-no-compression); with missing chunks only read (-no-pipeline); with least
recently used chunks evicted first, and written then (-no-lifecycle); with prompts computed when all chunks
have been read (-no-overlap); and with `EngineOptions.attend_quantized_kv`, where others decode chunks into
a cache. The part `resident` has that on as `jaxllm`, and off as `jaxllm-decoded`.

A switch is timed from the call until its first token: chunks of others are evicted, and written if they were
not written ahead, missing chunks are restored into the cache, and the new prompt is computed, with the
context's tokens that are in no whole chunk. The part until the context can be fed the prompt is reported,
too; of ours until all chunks have been read, where the prompt is computed meanwhile. A call to the context
that was called last is no switch. Contexts are computed once, and stored and kept by each system.
"""

import dataclasses
from typing import Literal, NamedTuple

from benchmarks.harness import bench as plans

# That a run may be limited to: name -> what is measured, for the help text.
PARTS = {
    "switching": "time to switch contexts, on every system",
    "ablations": "the same without each of our techniques, and with chunks attended to where they lie",
    "chunk-sizes": "the same with chunks of other lengths",
    "budgets": "most contexts within a limit of switches, by memory",
    "lengths": "the same by the longest context",
    "intervals": "time to switch by the time between calls",
    "resident": "contexts whose chunks are all in memory: attended to where they lie, or decoded first",
    "answering": "speed of answers in a context and without one",
    "traffic": "bytes that switches read and write, and their least time; counted, no model runs",
    "quality": "perplexity, accuracy and recall of compressed contexts",
    "density": "the same for widths by density, and flat and shuffled ones in equal bytes",
}
# Of models without a trained answer, and of counted bytes nothing is timed.
UNTIMED = ("traffic", "quality", "density")


class Setting(NamedTuple):
    """How chunks are stored, for the part `density`."""

    codec: str
    chunk_tokens: int
    outliers: bool = False

    @property
    def name(self) -> str:
        """As rows have it."""
        return f"{self.codec}, chunks of {self.chunk_tokens}{', outliers' if self.outliers else ''}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.ShapePlan, plans.DataPlan):
    """Sizes of one run; what an option asks for is said there.

    Attributes:
      devices: whose storage chunks are on; the first one runs all patterns, others the first pattern.
      fitting: number of contexts of ours that fit into the budget with all of their chunks.
      chunk_tokens: sizes of chunks to compare, besides the paper's.
      budget_shares: budgets to compare, as shares of the one that fits `fitting` contexts.
      context_tokens: most tokens of contexts to compare, as far as the model's window goes.
      interval_s: mean seconds between calls to compare.
      texts, passages: windows that perplexity is measured in, and chunks whose beginning is repeated.
      settings, ratios: how chunks are stored and with what share of the bytes, where densities are compared;
        ratios that a setting's scales leave no room for are left out, and reported.
    """

    contexts: tuple[int, ...] = plans.sized((2, 4, 8, 16), "Number of active contexts.", quick=(4,), low=1)
    patterns: tuple[Literal["random", "markov", "gaussian"], ...] = plans.sized(
        ("random", "markov", "gaussian"), "Order in which contexts are called.", "--pattern",
        quick=("random",),
    )  # fmt: skip
    calls: int = plans.sized(
        30, "Calls of each trace, over 72 hours: 864 are one in five minutes.", quick=10, low=4
    )
    devices: tuple[str, ...] = plans.devices_of(plans.PHONES)
    parts: tuple[str, ...] = plans.parts_of(PARTS)
    fitting: int = plans.sized(8, quick=4)
    chunk_tokens: tuple[int, ...] = plans.sized((8, 32, 64), quick=(32,))
    repeats: int = plans.sized(5, quick=2)
    budget_shares: tuple[float, ...] = plans.sized((0.5, 1.0, 1.5), quick=(0.5, 1.0))
    context_tokens: tuple[int, ...] = plans.sized((256, 512, 1024, 2048, 4096), quick=(512,))
    interval_s: tuple[float, ...] = (0.0, 0.25, 1.0)
    texts: int = plans.sized(96, quick=6)
    passages: int = plans.sized(96, quick=6)
    questions: int = plans.sized(20, quick=1)
    # Outliers of channels do not matter where each has a scale of its own.
    settings: tuple[Setting, ...] = plans.sized(
        (Setting("channel", 16), Setting("channel", 32), Setting("channel", 64), Setting("token", 16, True)),
        quick=(Setting("channel", 32),),
    )
    ratios: tuple[float, ...] = plans.sized((1.0, 0.6, 0.5, 0.375, 0.25), quick=(0.6,))
    density_texts: int = plans.sized(64, quick=6)
    seed: int = 0


@plans.benchmark("contexts", Plan, real=True)
def contexts_command(bench: plans.Run[Plan]) -> plans.Run[Plan]:
    """Measure switching between contexts of apps, and the quality of compressed ones.

    Contexts share a tight memory budget; ours and the baselines of LLMS evict, store and restore them.

    \b
    Example:
      jaxllm bench contexts
      jaxllm bench contexts --shape 110m --only switching --contexts 8 --device emmc
    """
    from jaxllm.kernels import native

    if bench.shape is not None:
        bench = bench.without(("quality", "density"), "random weights have none")
    if not native.kernels().native:
        bench = bench.without(("resident",), "no native kernels run here")
    contexts = tuple(sorted(set(bench.plan.contexts)))
    return bench.changed(contexts=contexts, fitting=min(bench.plan.fitting, contexts[-1]))
