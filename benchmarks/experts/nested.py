"""Measures nested experts beside IO-QEXP: time per token at equal buffer bytes, and what a loss costs."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.experts.quality import NODES, PROMPT, TREES, predicted
from benchmarks.experts.systems import OURS, NestedSetting, nested_engine
from benchmarks.measuring.intervals import median_ratio_interval
from benchmarks.measuring.report import Row, compared, median
from benchmarks.measuring.storage import Device
from jaxllm.sampling import Sampling
from serving.engine import Engine
from serving.request import GenerationConfig

LOSSES = (0.0, 0.35, 0.5, 1.0)
BASELINE = "IO-QEXP"
# The baseline as published keeps the experts of one token at one layer.
BUFFERS = {"equal": "a buffer of as many bytes", "published": "no buffer, as published"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NestedPlan:
    """Sizes of a run.

    Attributes:
      tokens: of each answer.
      prompts: of which the first warms up.
      windows: of text for the quality; none for random weights.
    """

    tokens: int
    prompts: Sequence[Sequence[int]]
    windows: Sequence[Sequence[int]] = ()


@dataclasses.dataclass
class _Measured:
    """Of one system: ms per token of each answer, and counts of all of them."""

    times: list[float] = dataclasses.field(default_factory=list)
    tokens: int = 0
    read_bytes: int = 0
    visits: int = 0
    hits: int = 0
    calls: int = 0


def nested_rows(setting: NestedSetting, device: Device, plan: NestedPlan) -> list[Row]:
    """Times all systems in turns, over the same prompts.

    Args:
      setting: the bundles and the buffer.
      device: that experts are read from.
      plan: sizes.
    """
    engines = {f"{OURS} {loss}": nested_engine(setting, loss=loss) for loss in LOSSES}
    engines |= {name: nested_engine(setting, baseline=name) for name in BUFFERS}
    found = _in_turns(engines, plan)
    rows = []
    for loss in LOSSES:
        ours = found[f"{OURS} {loss}"]
        for name, buffer in BUFFERS.items():
            theirs = found[name]
            low, high = median_ratio_interval(ours.times, theirs.times)
            interval = f"ratio's 95 % interval [{low:.2f}, {high:.2f}]"
            notes: dict[str, str | None] = {
                OURS: f"{device.note}; {_facts(ours)}; {interval}",
                BASELINE: f"{device.note}; {buffer}; {_facts(theirs)}",
            }
            times = {OURS: median(ours.times), BASELINE: median(theirs.times)}
            shown = "exact" if not loss else f"loss {loss:.0%}"
            case = f"nested, {shown}, {setting.share:.0%} in memory, IO-QEXP with {buffer}: {device.name}"
            rows += compared(
                times, ours=OURS, case=case, metric="tpot_ms", unit="ms", notes=notes, lower_is_better=True
            )
    for each in engines.values():
        each.close()
    return rows


def quality_rows(setting: NestedSetting, plan: NestedPlan) -> list[Row]:
    """Perplexity and agreement with both planes by loss, and the perplexity of experts at 4 bits."""
    if not plan.windows:
        return []
    rows, exact = [], None
    for loss in LOSSES:
        engine = nested_engine(setting, loss=loss, trees=TREES)
        each = predicted(engine, plan.windows)
        engine.close()
        exact = exact or each
        case = f"nested, loss {loss:.0%}: {len(each.likeliest):,} tokens"
        share = float((each.likeliest == exact.likeliest).mean())
        for metric, value, unit in (
            ("perplexity", each.perplexity, "perplexity"),
            ("agreement", share, "share"),
        ):
            rows.append(Row(case=case, system=OURS, metric=metric, value=value, unit=unit))
    engine = nested_engine(setting, baseline="equal", trees=TREES)
    four = predicted(engine, plan.windows)
    engine.close()
    assert exact is not None
    case = f"experts at 4 bits: {len(four.likeliest):,} tokens"
    agreement = float((four.likeliest == exact.likeliest).mean())
    rows.append(
        Row(case=case, system=BASELINE, metric="perplexity", value=four.perplexity, unit="perplexity")
    )
    rows.append(Row(case=case, system=BASELINE, metric="agreement", value=agreement, unit="share"))
    return rows


def text_windows(ids: Sequence[int], count: int) -> list[list[int]]:
    """Windows of a text for `quality_rows`, as many as there are, evenly spread."""
    size = PROMPT + NODES + 1
    starts = np.linspace(0, len(ids) - size, max(1, min(count, len(ids) // size))).astype(int)
    return [list(ids[start : start + size]) for start in starts]


def _in_turns(engines: Mapping[str, Engine], plan: NestedPlan) -> dict[str, _Measured]:
    found = {name: _Measured() for name in engines}
    for number, prompt in enumerate(plan.prompts):
        sampling = Sampling(temperature=1.0, seed=number)
        config = GenerationConfig(max_tokens=plan.tokens, ignore_eos=True, sampling=sampling)
        order = list(engines) if number % 2 else list(engines)[::-1]
        for name in order:
            engine, each = engines[name], found[name]
            before = _counts(engine)
            answer = engine.generate(prompt, config)
            # The first answer warms up: code runs for the first time, and expert buffers are empty.
            if not number:
                continue
            each.times.append(answer.timings.tpot_ms(len(answer.tokens)))
            each.tokens += len(answer.tokens)
            after = _counts(engine)
            for field, first in before.items():
                setattr(each, field, getattr(each, field) + after[field] - first)
    return found


def _counts(engine: Engine) -> dict[str, int]:
    streamed = engine.model.streamed
    assert streamed is not None
    counts = streamed.counts
    visits = engine.runner.layers.visits  # pyright: ignore
    return {
        "read_bytes": counts.read_bytes,
        "visits": counts.visits,  # pyright: ignore
        "hits": counts.hits,  # pyright: ignore
        "calls": getattr(visits, "calls", 0),
    }


def _facts(each: _Measured) -> str:
    tokens = max(1, each.tokens)
    return (
        f"{each.read_bytes / tokens / 1e6:.2f} MB and {each.calls / tokens:.1f} calls a token (prompts among "
        f"them), {each.hits / max(1, each.visits):.0%} of visits in memory"
    )
