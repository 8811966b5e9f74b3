"""Runs all parts and makes their rows: simulation, speed on one and two processors, accuracy, pruning."""

import dataclasses
from pathlib import Path
from typing import Any

from benchmarks.harness.report import OURS, Row, compared, row
from benchmarks.int8_prefill import PARTS
from benchmarks.int8_prefill.accuracy import AccuracyPlan, accuracy_rows, pruning_rows
from benchmarks.int8_prefill.models import (
    CHUNK_TOKENS,
    MODEL,
    calibrated_model,
    calibrated_shapes,
    headline_phone,
    shadowed_layers,
    stated_phone,
)
from benchmarks.int8_prefill.speed import SpeedPlan, bundles_of, measured
from jaxllm.int8_prefill.schedule import (
    ORDERS,
    Order,
    SpeedProfile,
    Timeline,
    lower_bound_ms,
    prompt_subgraphs,
    simulate,
)
from jaxllm.serving.host.progress import Progress

_RATE = "prefill_tokens_per_s"
# Where the chunk length is chosen together with the order, and of which lengths.
_CHOSEN = f"{OURS}-chosen-chunks"
CHOSEN_CHUNKS = (256, 128, 64)
_RANDOM = "random weights with outliers put in"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes.

    Attributes:
      speed: of what is timed.
      accuracy: of what is judged.
      simulated_tokens: prompts that the phone of `models.py` is simulated on.
      parts: of `PARTS`, those to run.
    """

    speed: SpeedPlan = dataclasses.field(default_factory=SpeedPlan)
    accuracy: AccuracyPlan = dataclasses.field(default_factory=AccuracyPlan)
    simulated_tokens: tuple[int, ...] = (256, 512, 1024)
    parts: tuple[str, ...] = tuple(PARTS)

    @classmethod
    def quick(cls, *, tasks: bool = False) -> "Plan":
        """Fits in a minute for small shapes and models, once their files are made; `tasks` judges accuracy by
        a task's questions, too."""
        return cls(
            speed=SpeedPlan(lengths=(256,), repeats=2, chunk_tokens=(64,)),
            accuracy=AccuracyPlan.quick(tasks=tasks),
        )


def run(
    model: Path | None, shape: str | None, data: Path | None, plan: Plan, progress: Progress
) -> list[Row]:
    """Measures the parts that the plan names.

    Args:
      model: a bundle or a folder; None for a shape.
      shape: a name of `benchmarks.models.SHAPES`, for speed alone.
      data: the folder of texts and tasks; None takes packaged samples.
      plan: how much.
      progress: called with (stage, done, total).
    """
    rows = simulated_rows(plan) if "simulation" in plan.parts else []
    if {"one-processor", "two-processors"} & {*plan.parts}:
        rows += _speed_rows(model, shape, plan, progress)
    if model is not None and "accuracy" in plan.parts:
        rows += accuracy_rows(model, data, plan.accuracy, progress)
    if model is not None and "pruning" in plan.parts:
        rows += pruning_rows(model, data, plan.accuracy, progress)
    return rows


def _speed_rows(model: Path | None, shape: str | None, plan: Plan, progress: Progress) -> list[Row]:
    """Rates, buckets and schedules of a calibrated model, or of random weights."""
    if shape is not None:
        name, note, bundles = shape, _RANDOM, calibrated_shapes(shape, progress)
    else:
        assert model is not None
        name, note, bundles = model.stem, "", calibrated_model(model, progress)
    paths, rows = bundles_of(*bundles), []
    parts = [each for each in ("one-processor", "two-processors") if each in plan.parts]
    for done, part in enumerate(parts):
        progress("Measuring", done, len(parts))
        found = measured(paths, plan.speed, processors=1 if part == "one-processor" else 2)
        if part == "one-processor":
            rows += _one_processor_rows(name, found, plan, note)
        else:
            rows += _two_processor_rows(name, found, plan)
    progress("Measuring", len(parts), len(parts))
    return rows


def simulated_rows(plan: Plan) -> list[Row]:
    """Makespans of a prompt's subgraphs in each order on simulated phones (see `models.py`)."""
    return [
        row
        for phone in (stated_phone(), headline_phone())
        for tokens in plan.simulated_tokens
        for row in _phone_rows(phone, tokens)
    ]


def _phone_rows(phone: SpeedProfile, tokens: int) -> list[Row]:
    def simulated(chunk: int, order: Order) -> tuple[Timeline, float]:
        """What happens, and a lower bound on its makespan."""
        times = phone.times(MODEL, chunk)
        subgraphs = prompt_subgraphs(-(-tokens // chunk), shadowed_layers())
        return simulate(subgraphs, times, order), lower_bound_ms(subgraphs, times)

    found = {_of_order(order): simulated(CHUNK_TOKENS, order) for order in reversed(ORDERS)}
    # As the runner does: the chunk length of the least makespan, of equals the longest.
    by_chunk = {chunk: simulated(chunk, "out-of-order") for chunk in CHOSEN_CHUNKS}
    chunk = min(by_chunk, key=lambda each: by_chunk[each][0].makespan_ms)
    found[_CHOSEN] = by_chunk[chunk]
    spans = {name: each.makespan_ms for name, (each, _) in found.items()}
    notes: dict[str, str | None] = {
        name: f"{span / found[name][1]:.3f} times the lower bound; {1000 * tokens / span:.0f} tokens/s; "
        f"bubbles {found[name][0].idle_share:.0%}"
        for name, span in spans.items()
    }
    notes[OURS] = f"{notes[OURS]}; {1 - spans[OURS] / spans[f'{OURS}-in-order']:.0%} less than in order"
    notes[_CHOSEN] = f"{notes[_CHOSEN]}; chunks of {chunk} tokens"
    return compared(f"simulated {phone.name}, Qwen1.5-1.8B, {tokens} tokens", "makespan_ms", spans, notes)


def _of_order(order: str) -> str:
    return OURS if order == "out-of-order" else f"{OURS}-{order}"


def _one_processor_rows(shape: str, found: dict[str, Any], plan: Plan, note: str) -> list[Row]:
    """Rates of prompts on all cores together, sizes of float rows, and times to build the engines."""
    rows = []
    ms = found["ms"]
    for length in plan.speed.lengths:
        rates = {name: 1000 * length / each[length] for name, each in ms.items()}
        spent = ms[OURS][length] / ms["naive-int8"][length] - 1
        notes: dict[str, str | None] = dict.fromkeys(rates, note)
        notes[OURS] = "; ".join(filter(None, [note, f"shadow takes {spent:.1%} of naive-int8's time"]))
        case = f"{shape}, prompt of {length} tokens, one processor"
        rows += compared(case, _RATE, rates, notes)
    share = found["row_bytes"] / found["weight_bytes"]
    return [
        *rows,
        row(
            f"{shape}, float rows in the file",
            "row_bytes",
            float(found["row_bytes"]),
            f"{share:.2%} of the weights' bytes",
        ),
        *(
            row(
                f"{shape}, all buckets of an engine",
                "build_ms",
                spent,
                f"{found['buckets'][name]} buckets",
                system=name,
            )
            for name, spent in found["build_ms"].items()
        ),
    ]


def _bucket_rows(shape: str, found: dict[str, Any]) -> list[Row]:
    shared, apart = found["sharing"]["shared"], found["sharing"]["apart"]
    rows = []
    for metric, key in (("buckets", "buckets"), ("bucket_bytes", "bytes"), ("build_ms", "build_ms")):
        rows += compared(
            f"{shape}, subgraphs of the longest prompt",
            metric,
            {OURS: float(shared[key]), "bucket-per-chunk-and-layer": float(apart[key])},
            {"bucket-per-chunk-and-layer": "counted by those that are shared"},
        )
    return rows


def _two_processor_rows(shape: str, found: dict[str, Any], plan: Plan) -> list[Row]:
    """Makespans of prompts on an integer and a float processor, and buckets of their subgraphs."""
    rows = _bucket_rows(shape, found)
    for length in plan.speed.lengths:
        known = {name: each[length] for name, each in found["spans"].items()}
        spans = {name: each["real_ms"] for name, each in known.items()}
        notes: dict[str, str | None] = {
            name: f"{each['real_to_simulated'] - 1:+.0%} against simulated {each['simulated_ms']:.0f} ms; "
            f"{each['real_ms'] / each['bound_ms'] - 1:+.0%} against the bound of {each['bound_ms']:.0f} ms, "
            f"{each['real_to_own_bound'] - 1:+.0%} against that of the times in the run itself"
            for name, each in known.items()
        }
        spent = spans[OURS] / spans[f"{OURS}-no-shadow"] - 1
        notes[OURS] = f"{notes[OURS]}; shadow takes {spent:.1%} of the time without"
        rows += compared(f"{shape}, prompt of {length} tokens, two processors", "makespan_ms", spans, notes)
    for order, spent in found["decision_us"].items():
        name = _of_order(order)
        rows.append(row(f"{shape}, a decision", "decision_us", spent, system=name))
    return rows
