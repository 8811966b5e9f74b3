"""Makes rows of answers: times with paired intervals, likeness to the target's answers, use of drafts."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from benchmarks.measuring.report import Row, compared
from benchmarks.measuring.storage import Device
from benchmarks.speculative.answers import (
    Answers,
    Spent,
    agreement,
    mean_interval,
    ratio_interval,
    rouge_l,
    spent,
    token_ms,
)
from benchmarks.speculative.systems import BLD, OURS, PUBLISHED, STDPL, STI
from serving.engine import Engine

ALL = "all tasks"
# Their answers are not the target's.
_INEXACT = (BLD, STI)


def time_rows(case: str, answers: Mapping[str, Answers], notes: Mapping[str, str]) -> list[Row]:
    """Times per token by task and over all tasks: ours beside the others, and LLMCad as published beside it
    without each technique."""
    without = {name for name in answers if name.startswith(f"{PUBLISHED}-")}
    rows = []
    for task in (*next(iter(answers.values())), ALL):
        found = {name: spent(each if task == ALL else {task: each[task]}) for name, each in answers.items()}
        if not all(sum(map(sum, (tokens for _, tokens in each))) for each in found.values()):
            # Answers of one token, such as labels, have no time per token after it.
            continue
        label = f"{case}: {task}"
        noted = notes if task == ALL else {}
        rows += spent_rows(OURS, {name: found[name] for name in found if name not in without}, label, noted)
        if without:
            rows += spent_rows(PUBLISHED, {name: found[name] for name in (PUBLISHED, *without)}, label, noted)
    return rows


def quality_rows(case: str, answers: Mapping[str, Answers]) -> list[Row]:
    """Rouge-L of answers, the target's own being the right ones, of ours and of the systems whose answers
    differ; none where no such system was measured."""
    judged = [name for name in _INEXACT if name in answers]
    if not judged:
        return []
    scores = {name: rouge_l(answers[name], answers[STDPL]) for name in (OURS, *judged)}
    notes = {}
    for name, each in scores.items():
        low, high = mean_interval(each)
        same = agreement(answers[name], answers[STDPL])
        notes[name] = f"95 % in [{low:.2f}, {high:.2f}] of {len(each)} prompts; {same:.0%} of tokens the same"
    means = {name: float(np.mean(each)) for name, each in scores.items()}
    return compared(means, ours=OURS, case=f"{case}: {ALL}", metric="rouge_l", unit="share", notes=notes)


def draft_rows(engines: Mapping[str, Engine], device: Device, case: str) -> list[Row]:
    """Acceptance of drafts, the share of them that was used, and what a pass's time goes to.

    Args:
      engines: by system.
      device: that weights were read from.
      case: of the rows.
    """
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
        if counts.verifications:
            rows += _pass_rows(engine, device, case, name)
    return rows


def _pass_rows(engine: Engine, device: Device, case: str, name: str) -> list[Row]:
    """Time per verification: of drafting before it, and of itself, with what is read meanwhile."""
    assert engine.speculation is not None
    counts = engine.speculation.counts
    draft_ms, verify_ms, hidden_ms = (
        1000 * each / counts.verifications for each in (counts.draft_s, counts.verify_s, counts.hidden_s)
    )
    parts = [f"{hidden_ms:.1f} ms of it drafting on"]
    if (streamed := engine.model.streamed) is not None and "pass_bytes" in (facts := streamed.facts()):
        read = f"{facts['pass_bytes'] / 1e6:.1f} MB read"
        if speed := device.storage.bytes_per_s:
            read += f", in {1000 * facts['pass_bytes'] / speed:.1f} ms at least"
        parts.append(read)
    return [
        Row(case=case, system=name, metric="draft_ms", value=draft_ms, unit="ms"),
        Row(case=case, system=name, metric="verify_ms", value=verify_ms, unit="ms", note="; ".join(parts)),
    ]


def notes_of(engines: Mapping[str, Engine], device: Device, how: Mapping[str, str]) -> dict[str, str]:
    """How each system ran.

    Args:
      engines: by system.
      device: that weights were read from.
      how: what a system was tuned to, by system.
    """
    notes = {}
    for name, engine in engines.items():
        parts = [device.note] if device.note else []
        if engine.model.streamed is not None:
            facts = engine.model.streamed.facts()
            parts.append(f"{facts['resident_layers']} pieces are resident, {facts['caching']} reads")
        if name in how:
            parts.append(how[name])
        notes[name] = "; ".join(parts)
    return notes


def spent_rows(ours: str, times: Mapping[str, Spent], case: str, notes: Mapping[str, str]) -> list[Row]:
    """Rows of one case; with notes, the interval of each ratio in it, where tasks have several prompts.

    Args:
      ours: the system that the others stand beside.
      times: of every system.
      case: of the rows.
      notes: how each system ran.
    """
    rows = compared(
        {name: token_ms(each) for name, each in times.items()},
        ours=ours,
        case=case,
        metric="tpot_ms",
        unit="ms",
        notes=notes,
        lower_is_better=True,
    )
    counts = [len(answers) for answers, _ in times[ours]]
    if not notes or max(counts) < 2:
        return rows

    def with_interval(row: Row) -> Row:
        if row.baseline is None:
            return row
        low, high = ratio_interval(times[ours], times[row.baseline])
        said = f"paired 95 % in [{low:.2f}x, {high:.2f}x] of {sum(counts)} prompts"
        return dataclasses.replace(row, note="; ".join(filter(None, (said, row.note))))

    return list(map(with_interval, rows))
