"""Measures Switch Transformers, EdgeMoE's own models, on a task of pairs: sources that are answered greedily.

The systems are those of `systems`, all with the same bytes for experts: those that load on demand keep the
experts that were used last. Each expert of an encoder is loaded at most once for a source, in all of them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.experts.systems import (
    SYSTEMS,
    Measured,
    Setting,
    ablations,
    config_of,
    make_bundles,
    measured,
    memory_rows,
    opened,
    resident,
)
from benchmarks.harness.machine import REAL, Device
from benchmarks.harness.plan import silent, unheard
from benchmarks.harness.report import OURS, Row, compared, median, row
from benchmarks.samples import SOURCE_TASKS, chosen_tasks, read_lines, source_examples
from jaxllm.bundle import Bundle
from jaxllm.bundle.calibrations import expert_facts
from jaxllm.errors import BudgetExceeded, ConfigError
from jaxllm.models.parameters import sparse_layers
from jaxllm.sampling import Sampling
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.opening.engine import Engine
from jaxllm.tasks.example import paired_lines
from jaxllm.tasks.rouge import require_rouge, rouge
from jaxllm.text.tokenizer import Tokenizer

# Parts of `benchmarks.experts.PARTS` that take a model alone that answers without an encoder.
LEFT_OUT = ("nested", "predictors")
WHY = "decoders alone are measured so"


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
    def of_data(cls, name: str, data: Path | None, tokenizer: Tokenizer) -> "TaskPairs":
        """The held-out examples of one of a model's tasks.

        Raises:
          ConfigError: the model does not have it, or a file is missing.
        """
        chosen_tasks(tokenizer, [name])
        task, examples = SOURCE_TASKS[name], source_examples(name, data)
        return cls(
            pairs=[(each.user, each.answer) for each in examples],
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seq2SeqPlan:
    """Sizes of one run.

    Attributes:
      devices: that experts are read from; all but systems are measured on the first alone.
      task: what is answered.
      answers: timed, of each system; one more warms up.
      judged: answers that Rouge-2 judges.
      tokens: the most of an answer.
      context_tokens: of every context, and of every source.
      share: room of ours, as a share of all experts of both sides.
      buffers: further rooms, as shares.
      parts: to run.
      tell: given a line for each system that does not fit into the memory, whose rows are left out.
    """

    devices: tuple[Device, ...] = (REAL,)
    task: TaskPairs
    answers: int = 32
    judged: int = 200
    tokens: int = 64
    context_tokens: int = 128
    share: float = 0.25
    buffers: tuple[float, ...] = (0.1, 0.5, 0.75)
    parts: tuple[str, ...]
    tell: Callable[[str], None] = unheard

    def quicker(self) -> "Seq2SeqPlan":
        """The same in about a minute for a small model, once its bundles are made."""
        return dataclasses.replace(self, answers=6, judged=40, buffers=(0.5,))


def run_seq2seq(
    folder: Path, mixed: Sequence[Path], cache: Path, plan: Seq2SeqPlan, progress: Progress = silent
) -> list[Row]:
    """Measures all parts.

    Args:
      folder: the model's Hugging Face folder.
      mixed: bundles that `jaxllm calibrate experts` made of it; the first is ours, the others are of other
        losses.
      cache: a folder for the baselines' bundles.
      plan: sizes.
      progress: called with (stage, done, total).

    Raises:
      ConfigError: a bundle's experts are not stored apart, or bundles are of several models.
      CheckpointError: a model cannot be opened.
    """
    cfg = config_of(mixed)
    experts = cfg.experts * len(sparse_layers(cfg))
    if "losses" in plan.parts:
        require_rouge()
    fast = Setting(
        bundles=make_bundles(folder, mixed[0], cache, progress),
        buffer_experts=max(1, int(plan.share * experts)),
        context_tokens=plan.context_tokens,
        storage=REAL.storage,
        equal=True,
    )
    rows: list[Row] = []
    for number, device in enumerate(plan.devices):
        setting = dataclasses.replace(fast, storage=device.storage)
        if "systems" in plan.parts:
            rows += _system_rows(setting, device, plan)
        if number == 0:
            if "ablations" in plan.parts:
                with Bundle.open(mixed[0]) as bundle:
                    names = (OURS, *ablations(bundle))
                rows += _time_rows(_measured(names, setting, plan), f"ablation: {device.name}", device)
            for share in plan.buffers if "buffers" in plan.parts else ():
                room = dataclasses.replace(setting, buffer_experts=max(1, int(share * experts)))
                case = f"buffer of {room.buffer_experts} experts: {device.name}"
                rows += _time_rows(_measured((OURS, f"{OURS}-lru"), room, plan), case, device)
            if "losses" in plan.parts:
                rows += _loss_rows(setting, device, plan, mixed)
        progress("Measuring", number + 1, len(plan.devices))
    if plan.task.called:
        rows = [dataclasses.replace(row, case=f"{plan.task.called}: {row.case}") for row in rows]
    return rows


def _measured(names: Sequence[str], setting: Setting, plan: Seq2SeqPlan) -> dict[str, Measured]:
    """Times all systems in turns, over the same sources; of those that do not fit into the memory, tells."""
    engines: dict[str, Engine] = {}
    for name in names:
        try:
            engines[name] = opened(name, setting)
        except BudgetExceeded as error:
            if name == OURS:
                raise
            plan.tell(f"without {name}: {error}")
    sources = [source for source, _ in _tokens(engines[OURS], plan.task)[: plan.answers + 1]]
    found = measured(engines, sources, lambda _: _config(plan))
    for engine in engines.values():
        engine.close()
    return found


def _tokens(engine: Engine, task: TaskPairs) -> list[tuple[list[int], str]]:
    """The token ids of each source, and its target; of a model's own task those that are too long are left
    out.

    Raises:
      ConfigError: a source is too long.
    """
    lead = engine.tokenizer.files.source_prefix if task.prefix is None else f"{task.prefix.strip()} "
    found = [(list(engine.tokenizer.encode(lead + source)), target) for source, target in task.pairs]
    most = engine.options.context_tokens
    if task.called:
        found = [(source, target) for source, target in found if len(source) <= most]
    longest = max((len(source) for source, _ in found), default=0)
    if longest > most:
        raise ConfigError(
            f"a source has {longest} tokens, and this bench reads at most {most}; give shorter ones"
        )
    return found


def _config(plan: Seq2SeqPlan) -> GenerationConfig:
    return GenerationConfig(max_tokens=plan.tokens, sampling=Sampling(temperature=0))


def _system_rows(setting: Setting, device: Device, plan: Seq2SeqPlan) -> list[Row]:
    """Times of every system; of those that load experts hit rates and loads by layer; and memory."""
    found = _measured(SYSTEMS, setting, plan)
    rows = _time_rows(found, device.name, device)
    with Bundle.open(setting.bundles.mixed) as bundle:
        layers = sparse_layers(bundle.cfg)
    for index, prefix in enumerate(layers):
        side, _, layer = prefix.rstrip(".").rpartition("layers.")
        case = f"{'encoder' if side else 'decoder'} layer {int(layer) + 1}: {device.name}"
        for metric in ("hit_rate", "loads_per_prompt"):
            values = {
                name: _by_layer(each, index, metric) for name, each in found.items() if each.counts["visits"]
            }
            rows += compared(case, metric, values)
    return rows + memory_rows(list(found), setting, f"memory: {device.name}")


def _by_layer(each: Measured, index: int, metric: str) -> float:
    if metric == "hit_rate":
        return each.counts["hits", index] / max(1, each.counts["visits", index])
    return each.counts["loads", index] / max(1, each.prompts)


def _time_rows(found: Mapping[str, Measured], case: str, device: Device) -> list[Row]:
    """Medians per token and per source."""
    notes: dict[str, str | None] = {name: _note(each, device) for name, each in found.items()}
    rows = []
    for metric in ("tpot_ms", "encode_ms"):
        of = {name: each.token_ms if metric == "tpot_ms" else each.encode_ms for name, each in found.items()}
        times = {name: median(values) for name, values in of.items() if values}
        if OURS in times:
            rows += compared(case, metric, times, notes)
    return rows


def _note(each: Measured, device: Device) -> str:
    parts = [device.note] if device.note else []
    parts.append(f"{each.prompts} answers")
    if each.counts["visits"]:
        loads = sum(count for key, count in each.counts.items() if "loads" in key) / each.prompts
        parts.append(f"{each.hit_rate:.0%} of visits in memory, {loads:.1f} loads each")
    return "; ".join(parts)


def _loss_rows(setting: Setting, device: Device, plan: Seq2SeqPlan, mixed: Sequence[Path]) -> list[Row]:
    """Rouge-2 of every system, or its share of right labels, beside the tolerable loss, and time per token by
    that loss."""
    judged = {name: _quality(resident(name, setting), plan) for name in SYSTEMS if name != "IO-EXP"}
    # What it reads on demand has the checkpoint's own widths.
    judged["IO-EXP"] = judged["IO-FREE"]
    whole = judged["IO-FREE"]
    rows = []
    count, quality = min(plan.judged, len(plan.task.pairs)), "accuracy" if plan.task.labels else "rouge2"
    for path in mixed:
        with Bundle.open(path) as bundle:
            facts = expert_facts(bundle)
        if "most_loss" not in facts:
            continue
        tolerable = facts["most_loss"]
        own = dataclasses.replace(setting, bundles=dataclasses.replace(setting.bundles, mixed=path))
        values = {**judged, OURS: _quality(resident(OURS, own), plan)}
        case = f"tolerable loss {tolerable:.0%}"
        by = f"calibrated by {facts.get('measure', 'perplexity')}"
        notes: dict[str, str | None] = {
            name: f"{count} answers; {_share_lost(value, whole, tolerable)}" for name, value in values.items()
        }
        notes[OURS] = f"{notes[OURS]}; {by}"
        rows += compared(case, quality, values, notes)
        widths = f"{facts['lowered']} of {facts['experts']} at {facts['lower']} bits, others {facts['upper']}"
        for metric, key in (("loss", "loss"), ("held_out_loss", "held_out_loss")):
            name = f"{facts.get('measure', 'perplexity')}_{metric}"
            rows.append(row(case, name, facts[key], widths))
        rows += _time_rows(_measured((OURS,), own, plan), case, device)
    return rows


def _share_lost(value: float, whole: float, tolerable: float) -> str:
    """How much of what the float model reaches is lost, and whether that is tolerable."""
    if not whole:
        return "the float model has none to lose"
    lost = 1 - value / whole
    return f"lost {lost:.1%}, {'within' if lost <= tolerable else 'more than'} {tolerable:.0%}"


def _quality(engine: Engine, plan: Seq2SeqPlan) -> float:
    """Mean Rouge-2 of an engine's answers, or the share of right labels; the engine is closed."""
    scores = []
    for source, target in _tokens(engine, plan.task)[-plan.judged :]:
        said = str(engine.generate(source, _config(plan)).text)
        right = float(said.strip() == target)
        scores.append(right if plan.task.labels else rouge([target], said)["rouge2"])
    engine.close()
    return sum(scores) / len(scores)
