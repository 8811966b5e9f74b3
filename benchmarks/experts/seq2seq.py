"""Has the tasks that Switch Transformers, EdgeMoE's own models, are measured on: sources that are answered
greedily, and what answers are worth.

The systems are those of `systems`, all with the same bytes for experts: those that load on demand keep the
experts that were used last. Each expert of an encoder is loaded at most once for a source, in all of them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.experts import Plan
from benchmarks.experts.systems import SYSTEMS, Measured, Setting, resident
from benchmarks.harness.report import OURS, Row, compared, row
from benchmarks.samples import SOURCE_TASKS, chosen_tasks, read_lines, source_examples
from jaxllm.errors import ConfigError
from jaxllm.sampling import Sampling
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.bundles import open_model, open_tokenizer
from jaxllm.serving.opening.engine import Engine
from jaxllm.tasks.example import paired_lines
from jaxllm.tasks.rouge import rouge
from jaxllm.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskPairs:
    """A task.

    Attributes:
      pairs: of sources and targets.
      prefix: in front of each source; None for the model's own.
      called: in rows; empty for the only one.
      labels: whether targets are labels: an answer is then right or wrong, instead of judged by Rouge-2.
    """

    pairs: Sequence[tuple[str, str]]
    prefix: str | None = None
    called: str = ""
    labels: bool = False

    @classmethod
    def chosen(cls, model: Path, plan: Plan) -> "list[TaskPairs]":
        """What is answered: the pairs of two files, or tasks of the model."""
        if plan.pairs is not None:
            return [cls.read(*plan.pairs, plan.prefix)]
        with open_model(model) as bundle:
            tokenizer = open_tokenizer(bundle.tokenizer_files())
        return [cls.of_data(name, plan.data, tokenizer) for name in plan.tasks]

    @classmethod
    def of_data(cls, name: str, data: Path | None, tokenizer: Tokenizer) -> "TaskPairs":
        """The held-out examples of one of a model's tasks.

        Raises:
          ConfigError: the model does not have it, or a file is missing.
        """
        chosen_tasks(tokenizer, [name])
        task = SOURCE_TASKS[name]
        return cls(
            pairs=[(each.user, each.answer) for each in source_examples(name, data)],
            prefix=tokenizer.files.tasks[name],
            called=task.called,
            labels=task.labels,
        )

    @classmethod
    def read(cls, source: Path, target: Path, prefix: str | None = None) -> "TaskPairs":
        """The pairs of two text files, whose lines of the same number are one; none has an empty side.

        Raises:
          ConfigError: a file cannot be read, or they have not as many lines, or no pair.
        """
        found = paired_lines(source, target, read_lines)
        if not found:
            raise ConfigError(f"{source} and {target} have no pair; give texts, one per line")
        return cls(pairs=found, prefix=prefix)

    def tokens(self, engine: Engine) -> list[tuple[list[int], str]]:
        """The token ids of each source, and its target; of a model's own task those that are too long are
        left out.

        Raises:
          ConfigError: a source is too long.
        """
        lead = engine.tokenizer.files.source_prefix if self.prefix is None else f"{self.prefix.strip()} "
        found = [(list(engine.tokenizer.encode(lead + source)), target) for source, target in self.pairs]
        most = engine.options.context_tokens
        if self.called:
            found = [(source, target) for source, target in found if len(source) <= most]
        longest = max((len(source) for source, _ in found), default=0)
        if longest > most:
            raise ConfigError(
                f"a source has {longest} tokens, and this bench reads at most {most}; give shorter ones"
            )
        return found

    def quality(self, engine: Engine, plan: Plan) -> float:
        """Mean Rouge-2 of an engine's answers, or the share of right labels; the engine is closed."""
        scores = []
        for source, target in self.tokens(engine)[-plan.judged :]:
            said = str(engine.generate(source, greedy(plan)).text)
            right = float(said.strip() == target)
            scores.append(right if self.labels else rouge([target], said)["rouge2"])
        engine.close()
        return sum(scores) / len(scores)


def greedy(plan: Plan) -> GenerationConfig:
    """How sources are answered."""
    return GenerationConfig(max_tokens=plan.task_tokens, sampling=Sampling(temperature=0))


def layer_rows(found: Mapping[str, Measured], prefixes: Sequence[str], device: str) -> list[Row]:
    """Hit rates and loads by layer, of the systems that load experts."""
    rows, loading = [], {name: each for name, each in found.items() if each.counts["visits"]}
    for index, prefix in enumerate(prefixes):
        side, _, layer = prefix.rstrip(".").rpartition("layers.")
        case = f"{'encoder' if side else 'decoder'} layer {int(layer) + 1}: {device}"
        for metric in ("hit_rate", "loads_per_prompt"):
            values = {name: by_layer(each, index, metric) for name, each in loading.items()}
            rows += compared(case, metric, values)
    return rows


def by_layer(each: Measured, index: int, metric: str) -> float:
    """A metric of one layer with experts."""
    if metric == "hit_rate":
        return each.counts["hits", index] / max(1, each.counts["visits", index])
    return each.counts["loads", index] / max(1, each.prompts)


def judged_systems(task: TaskPairs, setting: Setting, plan: Plan) -> dict[str, float]:
    """What the answers of every system are worth (see `TaskPairs.quality`)."""
    found = {name: task.quality(resident(name, setting), plan) for name in SYSTEMS if name != "IO-EXP"}
    # What it reads on demand has the checkpoint's own widths.
    return {**found, "IO-EXP": found["IO-FREE"]}


def quality_rows(
    task: TaskPairs, values: Mapping[str, float], facts: Mapping[str, Any], case: str, plan: Plan
) -> list[Row]:
    """Rouge-2 of every system, or its share of right labels, beside the tolerable loss of a calibration."""
    count, metric = min(plan.judged, len(task.pairs)), "accuracy" if task.labels else "rouge2"
    tolerable, measure = facts["most_loss"], facts.get("measure", "perplexity")
    notes: dict[str, str | None] = {
        name: f"{count} answers; {share_lost(value, values['IO-FREE'], tolerable)}"
        for name, value in values.items()
    }
    notes[OURS] = f"{notes[OURS]}; calibrated by {measure}"
    note = widths_note(facts)
    losses = [row(case, f"{measure}_{name}", facts[name], note) for name in ("loss", "held_out_loss")]
    return [*compared(case, metric, values, notes), *losses]


def widths_note(facts: Mapping[str, Any]) -> str:
    """How many experts a calibration has lowered."""
    return f"{facts['lowered']} of {facts['experts']} at {facts['lower']} bits, others {facts['upper']}"


def share_lost(value: float, whole: float, tolerable: float) -> str:
    """How much of what the float model reaches is lost, and whether that is tolerable."""
    if not whole:
        return "the float model has none to lose"
    lost = 1 - value / whole
    return f"lost {lost:.1%}, {'within' if lost <= tolerable else 'more than'} {tolerable:.0%}"
