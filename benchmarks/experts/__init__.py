"""`jaxllm bench experts`: mixtures of experts larger than memory, beside other systems (EdgeMoE, section 4).

`systems` opens ours and the baselines, and has nested experts; `run` times them and each technique, by a text
or by tasks, and judges predictors and eviction policies by the experts that a model visited.
"""

import dataclasses
from pathlib import Path

import click

from benchmarks.harness import bench as plans
from jaxllm.option_types import Size

# That a run may be limited to: name -> what is measured, for the help text.
PARTS = {
    "systems": "time per token and memory of every system",
    "ablations": "time per token without each of our techniques",
    "buffers": "time per token by room for experts",
    "losses": "time per token by the tolerable loss",
    "nested": "time per token of nested experts beside IO-QEXP, and what a loss costs",
    "predictors": "hit rates of predictors and eviction policies",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.TextPlan):
    """Sizes of one run; what an option asks for is said there.

    Attributes:
      text: whose pieces are the prompts of a trained decoder.
      devices: that experts are read from; all but systems are measured on the first alone.
      tokens, repeats, prompt_tokens, context_tokens: of answers without an encoder: tokens of each, answers
        of each system, tokens of each prompt and of every context.
      task_tokens, task_answers, task_context_tokens: the same of answers to sources, which are read whole.
      judged: answers that Rouge-2 judges.
      share: room of ours, as a share of all experts.
      buffers: further rooms, in times the experts of a token at one layer, for the sweep and for the replay
        of eviction policies; `task_buffers` are shares of all experts.
      watched_tokens: by which predictors and policies are judged.
      widened: times as many neurons the experts of a trained mixture get where nested ones are timed.
      shares: rooms of nested experts, as shares of all of them.
      nested_answers: of each system beside nested experts.
      windows: of text, by which the loss of nested experts is judged.
    """

    checkpoint: Path | None = plans.sized(
        None, "The Hugging Face folder that the model was calibrated from; baselines are made of it.",
        metavar="DIR", default="the model's own weights as floats",
    )  # fmt: skip
    others: tuple[Path, ...] = plans.sized(
        (), "The same mixture calibrated to another tolerable loss.", "--other-loss", type=plans.FILE,
        metavar="BUNDLE",
    )  # fmt: skip
    devices: tuple[str, ...] = plans.devices_of(plans.BOARDS, "tx2-ssd")
    tasks: tuple[str, ...] = plans.sized(
        (), "Answer one of an encoder-decoder's own tasks, such as translation_de_to_en.", "--task",
        metavar="NAME",
    )  # fmt: skip
    data: Path | None = plans.sized(None, "The folder of the tasks' files.", metavar="DIR")
    pairs: tuple[Path, Path] | None = plans.sized(
        None, "For an encoder-decoder: two UTF-8 text files to answer, whose lines of the same number are a "
        "source and its target.", type=(plans.PATH, plans.PATH), multiple=False, metavar="SOURCE TARGET",
    )  # fmt: skip
    prefix: str | None = plans.sized(
        None, "With --pairs: the prefix of the task.", metavar="TEXT",
        default="the model's own prefix",
    )  # fmt: skip
    budgets: tuple[int, ...] = plans.sized(
        (), "Also measure the memory of a process under this budget; of switch-base-64 nothing else.",
        "--memory", type=Size(), default="300MB for switch-base-64",
    )  # fmt: skip
    parts: tuple[str, ...] = plans.parts_of(PARTS)
    tokens: int = plans.sized(32, quick=12)
    repeats: int = plans.sized(3, quick=1)
    prompt_tokens: int = 24
    context_tokens: int = 256
    task_tokens: int = 64
    task_answers: int = plans.sized(32, quick=6)
    task_context_tokens: int = 128
    judged: int = plans.sized(200, quick=40)
    share: float = 0.25
    buffers: tuple[int, ...] = plans.sized((2, 5, 10, 20), quick=(2, 10))
    task_buffers: tuple[float, ...] = plans.sized((0.1, 0.5, 0.75), quick=(0.5,))
    watched_tokens: int = plans.sized(400, quick=60)
    widened: int = 64
    shares: tuple[float, ...] = plans.sized((0.25, 0.5), quick=(0.25,))
    nested_answers: int = plans.sized(16, quick=2)
    windows: int = plans.sized(100, quick=10)

    @property
    def is_asked(self) -> bool:
        """Whether an encoder-decoder is asked."""
        return self.pairs is not None or bool(self.tasks)


@plans.benchmark("experts", Plan, "moe", (*plans.MIXTURE_SHAPES, *plans.SWITCH_SHAPES))
def experts_command(bench: plans.Run[Plan]) -> plans.Run[Plan]:
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
    if bench.shape in plans.SWITCH_SHAPES and plan.parts != tuple(PARTS):
        raise click.UsageError("random weights of an encoder-decoder are measured for memory alone")
    if bench.shape in plans.MIXTURE_SHAPES:
        bench = bench.without(("losses",), "random weights are not calibrated")
    if plan.is_asked:
        bench = bench.without(("nested", "predictors"), "decoders alone are measured so")
    return bench
