"""The whole bench: what a token takes in every system, and whether the answers are the target's."""

import dataclasses
from pathlib import Path

import numpy as np

from benchmarks.devices import PHONES, Device, named_devices
from benchmarks.report import Row, compared
from benchmarks.speculative.prompts import TASKS, read_prompts
from benchmarks.speculative.systems import (
    OURS,
    SP_LENGTHS,
    Setting,
    fixed_lines,
    systems,
)
from jaxllm.errors import ConfigError
from jaxllm.sampling import Sampling
from serving.engine import Engine
from serving.generation import Generation, GenerationConfig
from serving.models import open_model
from serving.options import EngineOptions
from serving.progress import Progress

SP = "SP"
ALL = "all tasks"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of one run.

    Attributes:
      prompts: of each task, timed.
      tokens: of each answer, at most.
      tried: prompts of each task that SP's length is chosen on.
      same: prompts whose answers are compared with the target's own; 0 compares none.
      context_tokens: of every context.
      shares: budgets, as shares of the target's weights.
      devices: where weights are read from.
      ablations: whether ours runs without each technique in turn, too.
      seed: of the choice of prompts.
    """

    prompts: int = 10
    tokens: int = 64
    tried: int = 2
    same: int = 200
    context_tokens: int = 512
    shares: tuple[float, ...] = (0.5,)
    devices: tuple[Device, ...] = named_devices(PHONES)
    ablations: bool = True
    seed: int = 0

    @classmethod
    def quick(cls) -> "Plan":
        """Fits in a minute for the packaged models."""
        return cls(prompts=1, tokens=24, tried=1, same=4, devices=named_devices(PHONES[:1]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What is measured.

    Attributes:
      model: the target, a bundle.
      draft: a small model of its tokenizer.
      coarse: the target at 4 bits, for STI.
      data: the folder of the tasks' files.
    """

    model: Path
    draft: Path
    coarse: Path | None
    data: Path


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
                coarse=subject.coarse,
                weights_bytes=int(share * weight_bytes),
                context_tokens=plan.context_tokens,
                storage=device.storage,
            )
            rows += _setting_rows(setting, device, share, subject, plan, first=not rows, progress=progress)
    return rows


def _setting_rows(
    setting: Setting,
    device: Device,
    share: float,
    subject: Subject,
    plan: Plan,
    *,
    first: bool,
    progress: Progress | None,
) -> list[Row]:
    """One storage and budget."""
    engines = {name: opened(setting) for name, opened in systems(setting, ablations=plan.ablations).items()}
    tokenizer = engines[OURS].tokenizer
    most = plan.context_tokens - plan.tokens
    count = plan.prompts + plan.tried
    prompts = read_prompts(subject.data, tokenizer, count=count, most_tokens=most, seed=plan.seed)
    tried = {task: each[: plan.tried] for task, each in prompts.items()}
    timed = {task: each[plan.tried :] for task, each in prompts.items()}
    config = GenerationConfig(max_tokens=plan.tokens)
    lines = {length: fixed_lines(setting, length) for length in SP_LENGTHS}
    attempts = {str(each): engine for each, engine in lines.items()}
    found = _answers(attempts, tried, config, "Trying lengths of lines", progress)
    length = min(lines, key=lambda each: _token_ms(found[str(each)]))
    engines[SP] = lines.pop(length)
    for each in lines.values():
        each.close()
    answers = _answers(engines, timed, config, f"Measuring on {device.name}", progress)
    case = f"{device.name}, {share:.0%} of the model in memory"
    notes = _notes(engines, answers, device, length)
    rows = []
    for task in (*timed, ALL):
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
    rows += _draft_rows(engines, case)
    rows += _hopeless_rows(engines, timed, config, case, progress)
    if first and plan.same:
        rows += _same_rows(engines[OURS], subject, plan, progress)
    for each in engines.values():
        each.close()
    return rows


Answers = dict[str, list[Generation]]


def _answers(
    engines: dict[str, Engine],
    prompts: dict[str, list[list[int]]],
    config: GenerationConfig,
    label: str,
    progress: Progress | None,
) -> dict[str, Answers]:
    """Every system's answers by task, all systems at one prompt before the next."""
    found: dict[str, Answers] = {name: {task: [] for task in prompts} for name in engines}
    done, total = 0, len(engines) * sum(map(len, prompts.values()))
    for number, (task, prompt) in enumerate((task, each) for task, all_ in prompts.items() for each in all_):
        # Nobody always runs behind the same neighbour.
        order = list(engines) if number % 2 else list(engines)[::-1]
        for name in order:
            found[name][task].append(engines[name].generate(prompt, config))
            done += 1
            if progress is not None:
                progress(label, done, total)
    return found


def _token_ms(answers: Answers) -> float:
    """Time per token after the first: of each task all answers together, then the mean over tasks."""
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
        if engine.streamed is not None:
            plan = engine.streamed.plan
            parts.append(f"{len(plan.resident)} pieces stay, {engine.streamed.caching} reads")
        if name == SP:
            parts.append(f"lines of {length}, the best of {SP_LENGTHS} on other prompts")
        if name in ("BLD", "STI"):
            parts.append(f"{_agreement(answers[name], answers['StdPL']):.0%} of tokens as the target's")
        notes[name] = "; ".join(parts)
    return notes


def _agreement(ours: Answers, theirs: Answers) -> float:
    """Share of tokens that are the same at the same place."""
    pairs = [(a.tokens, b.tokens) for task in theirs for a, b in zip(ours[task], theirs[task], strict=True)]
    same = sum(sum(x == y for x, y in zip(a, b, strict=False)) for a, b in pairs)
    return same / max(1, sum(len(b) for _, b in pairs))


def _draft_rows(engines: dict[str, Engine], case: str) -> list[Row]:
    """What drafts came to."""
    rows = []
    for name, engine in engines.items():
        if engine.speculative is None:
            continue
        counts = engine.speculative.counts
        note = (
            f"{counts.rounds} verifications, {counts.plain_tokens} tokens without one; "
            f"{counts.hidden_steps} readings of the draft while the target waited"
        )
        for metric, value, unit in (
            ("acceptance_length", counts.acceptance_length, "tokens"),
            ("useful_share", counts.useful_share, "share"),
        ):
            rows.append(Row(case=case, system=name, metric=metric, value=value, unit=unit, note=note))
    return rows


def _hopeless_rows(
    engines: dict[str, Engine],
    prompts: dict[str, list[list[int]]],
    config: GenerationConfig,
    case: str,
    progress: Progress | None,
) -> list[Row]:
    """Answers that no draft can guess: drawn at a temperature at which any token may come."""
    sampling = Sampling(temperature=5.0, seed=1)
    config = dataclasses.replace(config, sampling=sampling, ignore_eos=True)
    chosen = {name: engines[name] for name in (OURS, "StdPL")}
    hopeless = _answers(chosen, prompts, config, "Measuring without hope", progress)
    times = {name: _token_ms(found) for name, found in hopeless.items()}
    return compared(
        times, ours=OURS, case=f"{case}: hopeless", metric="tpot_ms", unit="ms", lower_is_better=True
    )


def _same_rows(engine: Engine, subject: Subject, plan: Plan, progress: Progress | None) -> list[Row]:
    """Whether answers are to the token those of the target with all of its weights in memory and no draft."""
    whole = Engine.open(subject.model, options=EngineOptions(context_tokens=plan.context_tokens))
    count = -(-plan.same // len(TASKS))
    most = plan.context_tokens - plan.tokens
    prompts = read_prompts(subject.data, whole.tokenizer, count=count, most_tokens=most, seed=plan.seed + 1)
    asked, same = [each for all_ in prompts.values() for each in all_], 0
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
