"""Times every system's answers, and compares ours with the target's own."""

import dataclasses
from pathlib import Path

import numpy as np

from benchmarks.measuring.report import Row, compared
from benchmarks.measuring.storage import PHONES, Device, named_devices
from benchmarks.models.checkpoint import Checkpoint
from benchmarks.speculative import PARTS
from benchmarks.speculative.prompts import TASKS, read_prompts
from benchmarks.speculative.systems import (
    OURS,
    SP_LENGTHS,
    STDPL,
    STI,
    Setting,
    fixed_lines,
    plain,
    systems,
)
from jaxllm.errors import ConfigError
from jaxllm.sampling import Sampling
from serving.answer import Answer
from serving.bundles import open_model
from serving.engine import Engine
from serving.host.progress import Progress
from serving.options import EngineOptions
from serving.request import GenerationConfig

SP = "SP"
ALL = "all tasks"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of one run.

    Attributes:
      prompts: of each task, timed.
      tokens: of each answer, at most.
      tried: prompts of each task that SP's length is chosen on.
      compared_answers: that are compared with the target's own.
      context_tokens: of every context.
      shares: budgets, as shares of the target's weights.
      devices: that weights are read from.
      parts: of `PARTS`, those to run.
      seed: of the choice of prompts.
    """

    prompts: int = 10
    tokens: int = 64
    tried: int = 2
    compared_answers: int = 200
    context_tokens: int = 512
    shares: tuple[float, ...] = (0.5,)
    devices: tuple[Device, ...] = named_devices(PHONES)
    parts: tuple[str, ...] = tuple(PARTS)
    seed: int = 0

    @classmethod
    def quick(cls) -> "Plan":
        """Fits in a minute for the packaged models."""
        return cls(prompts=1, tokens=24, tried=1, compared_answers=4, devices=named_devices(PHONES[:1]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What is measured.

    Attributes:
      model: the target, a bundle.
      draft: a small model of its tokenizer.
      narrow: the target at 4 bits, for STI; None where no baselines are measured.
      narrow_again: whether the 4 bits were made of weights that had been quantized before.
      data: the folder of the tasks' files; None takes packaged samples.
    """

    model: Path
    draft: Path
    narrow: Path | None
    data: Path | None
    narrow_again: bool = False


def four_bit_bundle(model: Path, progress: Progress | None = None) -> Path:
    """The bundle of a model's weights at 4 bits, made unless it is there."""
    folder = Checkpoint.find(model).folder(progress or (lambda *_: None))
    with open_model(folder, weights="int4", progress=progress) as bundle:
        return bundle.path


def run(subject: Subject, plan: Plan, progress: Progress | None = None) -> list[Row]:
    """Measures everything.

    Raises:
      ConfigError: a file of the tasks is missing.
      CheckpointError: a model cannot be opened.
    """
    rows: list[Row] = []
    with open_model(subject.model) as bundle:
        weight_bytes = bundle.weight_bytes
    for device in plan.devices:
        for share in plan.shares:
            setting = Setting(
                model=subject.model,
                draft=subject.draft,
                narrow=subject.narrow,
                weights_bytes=int(share * weight_bytes),
                context_tokens=plan.context_tokens,
                storage=device.storage,
            )
            case = f"{device.name}, {share:.0%} of the model in memory"
            found = _Systems(setting, device, subject, plan, progress)
            rows += found.rows(case)
            # What answers say depends neither on storage nor on memory.
            if device is plan.devices[0] and share == plan.shares[0] and "same-answers" in plan.parts:
                rows += _same_rows(found.engines[OURS], subject, plan, progress)
            found.close()
    return rows


class _Systems:
    """The systems on one storage in one budget, and what they answer.

    Attributes:
      engines: by system.
    """

    def __init__(
        self, setting: Setting, device: Device, subject: Subject, plan: Plan, progress: Progress | None
    ) -> None:
        self._setting, self._device, self._plan, self._progress = setting, device, plan, progress
        openers = systems(baselines="systems" in plan.parts, ablations="ablations" in plan.parts)
        self.engines = {name: opened(setting) for name, opened in openers.items()}
        tokenizer = self.engines[OURS].tokenizer
        most, count = plan.context_tokens - plan.tokens, plan.prompts + plan.tried
        prompts = read_prompts(subject.data, tokenizer, count=count, most_tokens=most, seed=plan.seed)
        self._tried = {task: each[: plan.tried] for task, each in prompts.items()}
        self._timed = {task: each[plan.tried :] for task, each in prompts.items()}
        self._config = GenerationConfig(max_tokens=plan.tokens)
        self._narrow_again = subject.narrow_again

    def rows(self, case: str) -> list[Row]:
        """Times per token of every system, what drafts came to, and answers that nobody can guess."""
        rows, timed = [], {*self._plan.parts} & {"systems", "ablations"}
        if timed:
            length = self._open_sp() if "systems" in timed else 0
            label = f"Measuring on {self._device.name}"
            answers = _answers(self.engines, self._timed, self._config, label, self._progress)
            notes = _notes(self.engines, answers, self._device, length)
            if STI in notes and self._narrow_again:
                notes[STI] += "; weights quantized twice"
            rows += _time_rows(case, answers, notes)
            rows += _draft_rows(self.engines, case)
        if "unguessable" in self._plan.parts:
            rows += self._unguessable_rows(case)
        return rows

    def close(self) -> None:
        """Closes all engines."""
        for each in self.engines.values():
            each.close()

    def _open_sp(self) -> int:
        """Opens SP with the length of its lines that is fastest on prompts that are not counted."""
        lines = {length: fixed_lines(self._setting, length) for length in SP_LENGTHS}
        attempts = {str(each): engine for each, engine in lines.items()}
        found = _answers(attempts, self._tried, self._config, "Trying lengths of lines", self._progress)
        length = min(lines, key=lambda each: _token_ms(found[str(each)]))
        self.engines[SP] = lines.pop(length)
        for each in lines.values():
            each.close()
        return length

    def _unguessable_rows(self, case: str) -> list[Row]:
        """Answers that no draft can guess: drawn at a temperature at which any token may come."""
        config = dataclasses.replace(
            self._config, sampling=Sampling(temperature=5.0, seed=1), ignore_eos=True
        )
        chosen = {OURS: self.engines[OURS], STDPL: self.engines.get(STDPL) or plain(self._setting)}
        answers = _answers(chosen, self._timed, config, "Measuring unguessable answers", self._progress)
        if STDPL not in self.engines:
            chosen[STDPL].close()
        times = {name: _token_ms(found) for name, found in answers.items()}
        case = f"{case}: unguessable"
        return compared(times, ours=OURS, case=case, metric="tpot_ms", unit="ms", lower_is_better=True)


def _time_rows(case: str, answers: "dict[str, Answers]", notes: dict[str, str]) -> list[Row]:
    """Times per token by task and over all tasks."""
    rows = []
    tasks = next(iter(answers.values()))
    for task in (*tasks, ALL):
        times = {
            name: _token_ms({task: found[task]} if task != ALL else found) for name, found in answers.items()
        }
        rows += compared(
            times,
            ours=OURS,
            case=f"{case}: {task}",
            metric="tpot_ms",
            unit="ms",
            notes=notes if task == ALL else None,
            lower_is_better=True,
        )
    return rows


Answers = dict[str, list[Answer]]


def _answers(
    engines: dict[str, Engine],
    prompts: dict[str, list[list[int]]],
    config: GenerationConfig,
    label: str,
    progress: Progress | None,
) -> dict[str, Answers]:
    """Answers of every system by task, all systems at one prompt before the next one."""
    found: dict[str, Answers] = {name: {task: [] for task in prompts} for name in engines}
    done, total = 0, len(engines) * sum(map(len, prompts.values()))
    for number, (task, prompt) in enumerate((task, each) for task, all_ in prompts.items() for each in all_):
        # No system always runs behind the same one.
        order = list(engines) if number % 2 else list(engines)[::-1]
        for name in order:
            found[name][task].append(engines[name].generate(prompt, config))
            done += 1
            if progress is not None:
                progress(label, done, total)
    return found


def _token_ms(answers: Answers) -> float:
    """Time per token after the first: over all answers of a task, then the mean over tasks."""
    means = []
    for each in answers.values():
        tokens = sum(len(one.tokens) - 1 for one in each)
        spent = sum(one.timings.total_ms - one.timings.ttft_ms for one in each)
        if tokens:
            means.append(spent / tokens)
    if not means:
        raise ConfigError("no answer had more than one token; give more prompts, or let answers be longer")
    return float(np.mean(means))


def _notes(
    engines: dict[str, Engine], answers: dict[str, Answers], device: Device, length: int
) -> dict[str, str]:
    notes = {}
    for name, engine in engines.items():
        parts = [device.note] if device.note else []
        if engine.model.streamed is not None:
            facts = engine.model.streamed.facts()
            parts.append(f"{facts['resident_layers']} pieces are resident, {facts['caching']} reads")
        if name == SP:
            parts.append(f"lines of {length}, the best of {SP_LENGTHS} on other prompts")
        if name in ("BLD", STI):
            parts.append(f"{_agreement(answers[name], answers[STDPL]):.0%} of tokens as the target's")
        notes[name] = "; ".join(parts)
    return notes


def _agreement(ours: Answers, theirs: Answers) -> float:
    """Share of tokens that are the same at the same place."""
    pairs = [(a.tokens, b.tokens) for task in theirs for a, b in zip(ours[task], theirs[task], strict=True)]
    same = sum(sum(x == y for x, y in zip(a, b, strict=False)) for a, b in pairs)
    return same / max(1, sum(len(b) for _, b in pairs))


def _draft_rows(engines: dict[str, Engine], case: str) -> list[Row]:
    """Acceptance of drafts, and the share of them that was used."""
    rows = []
    for name, engine in engines.items():
        if engine.speculation is None:
            continue
        counts = engine.speculation.counts
        note = (
            f"{counts.verifications} verifications, {counts.plain_tokens} tokens without one; "
            f"{counts.hidden_steps} steps of the draft while the target waited"
        )
        for metric, value, unit in (
            ("acceptance_length", counts.acceptance_length, "tokens"),
            ("useful_share", counts.useful_share, "share"),
        ):
            rows.append(Row(case=case, system=name, metric=metric, value=value, unit=unit, note=note))
    return rows


def _same_rows(engine: Engine, subject: Subject, plan: Plan, progress: Progress | None) -> list[Row]:
    """The share of our answers that equal, token for token, those of the target in memory without a draft."""
    whole = Engine.open(subject.model, options=EngineOptions(context_tokens=plan.context_tokens))
    count = -(-plan.compared_answers // len(TASKS))
    most = plan.context_tokens - plan.tokens
    prompts = read_prompts(subject.data, whole.tokenizer, count=count, most_tokens=most, seed=plan.seed + 1)
    asked, same = [each for all_ in prompts.values() for each in all_][: plan.compared_answers], 0
    for place, prompt in enumerate(asked):
        # Every other answer is drawn, not greedy.
        sampling = Sampling() if place % 2 else Sampling(temperature=0.8, top_p=0.95, seed=place)
        config = GenerationConfig(max_tokens=plan.tokens, sampling=sampling)
        same += engine.generate(prompt, config).tokens == whole.generate(prompt, config).tokens
        if progress is not None:
            progress("Comparing answers", place + 1, len(asked))
    note = f"{same} of {len(asked)} answers, half of them greedy and half drawn"
    return [
        Row(
            case="same answers",
            system=OURS,
            metric="agreement",
            value=same / len(asked),
            unit="share",
            note=note,
        )
    ]
