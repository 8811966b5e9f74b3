"""The rows of `jaxllm bench prefill`: speed of random weights, and accuracy of trained models."""

import dataclasses
from pathlib import Path
from typing import Any

from benchmarks.prefill.accuracy import AccuracyPlan, accuracy_rows
from benchmarks.prefill.phone import CHUNK_TOKENS, MODEL, shadowed_layers, stated_phone
from benchmarks.prefill.shape import calibrated_shapes
from benchmarks.prefill.speed import OURS, SpeedPlan, bundles_of, measured
from benchmarks.report import Row, compared
from jaxllm.prefill.schedule import ORDERS, prompt_subgraphs
from jaxllm.prefill.simulator import lower_bound_ms, simulate
from serving.progress import Progress

_RATE = "prefill_tokens_per_s"
_RANDOM = "random weights with outliers put in"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes.

    Attributes:
      speed: of what is timed.
      accuracy: of what is judged.
      processors: how many prompts are read on, one after the other: 1 with all cores, 2 apart.
      simulated_tokens: prompts that the phone of `phone.py` is simulated on.
    """

    speed: SpeedPlan = dataclasses.field(default_factory=SpeedPlan)
    accuracy: AccuracyPlan = dataclasses.field(default_factory=AccuracyPlan)
    processors: tuple[int, ...] = (1, 2)
    simulated_tokens: tuple[int, ...] = (256, 512, 1024)

    @classmethod
    def quick(cls) -> "Plan":
        """Fits in a minute for small shapes and models, once their files are made."""
        return cls(
            speed=SpeedPlan(lengths=(64, 256), repeats=2, chunk_tokens=(64,)), accuracy=AccuracyPlan.quick()
        )


def speed_rows(shape: str, plan: Plan, progress: Progress) -> list[Row]:
    """Rates, graphs and schedules of a shape of random weights.

    Args:
      shape: of `benchmarks.shapes.SHAPES`.
      plan: how much.
      progress: called with (stage, done, total).
    """
    paths = bundles_of(*calibrated_shapes(shape, progress))
    rows = []
    for done, processors in enumerate(plan.processors):
        progress("Measuring", done, len(plan.processors))
        found = measured(paths, plan.speed, processors=processors)
        rows += _all_core_rows(shape, found, plan) if processors == 1 else _two_rows(shape, found, plan)
    progress("Measuring", len(plan.processors), len(plan.processors))
    return rows


def simulated_rows(plan: Plan) -> list[Row]:
    """What orders of subgraphs take on a simulated phone (see `phone.py`)."""
    rows = []
    phone = stated_phone()
    times = phone.times(MODEL, CHUNK_TOKENS)
    for tokens in plan.simulated_tokens:
        subgraphs = prompt_subgraphs(-(-tokens // CHUNK_TOKENS), shadowed_layers())
        bound = lower_bound_ms(subgraphs, times)
        found = {_of_order(order): simulate(subgraphs, times, order) for order in reversed(ORDERS)}
        spans = {name: each.makespan_ms for name, each in found.items()}
        notes: dict[str, str | None] = {
            name: f"{span / bound:.3f} times the lower bound; {1000 * tokens / span:.0f} tokens/s; bubbles "
            f"{found[name].idle_share:.0%}"
            for name, span in spans.items()
        }
        notes[OURS] = f"{notes[OURS]}; {1 - spans[OURS] / spans[f'{OURS}-in-order']:.0%} less than in order"
        rows += compared(
            spans,
            ours=OURS,
            case=f"simulated {phone.name}, Qwen1.5-1.8B, {tokens} tokens",
            metric="makespan_ms",
            unit="ms",
            notes=notes,
            lower_is_better=True,
        )
    return rows


def run(
    shape: str | None, folders: list[Path], data: Path | None, plan: Plan, progress: Progress
) -> list[Row]:
    """Everything that was asked for: the simulation always, speed of a shape, accuracy of folders."""
    rows = simulated_rows(plan)
    if shape is not None:
        rows += speed_rows(shape, plan, progress)
    if folders and data is not None:
        rows += accuracy_rows(folders, data, plan.accuracy, progress)
    return rows


def _of_order(order: str) -> str:
    return OURS if order == "out-of-order" else f"{OURS}-{order}"


def _all_core_rows(shape: str, found: dict[str, Any], plan: Plan) -> list[Row]:
    """What prompts take on all cores together, and what the engines take besides."""
    rows = []
    ms = found["ms"]
    for length in plan.speed.lengths:
        rates = {name: 1000 * length / each[str(length)] for name, each in ms.items()}
        spent = ms[OURS][str(length)] / ms["naive-int8"][str(length)] - 1
        notes: dict[str, str | None] = dict.fromkeys(rates, _RANDOM)
        notes[OURS] = f"{_RANDOM}; shadow takes {spent:.1%} of naive-int8's time"
        case = f"{shape}, prompt of {length} tokens, all cores"
        rows += compared(rates, ours=OURS, case=case, metric=_RATE, unit="tokens/s", notes=notes)
    share = found["row_bytes"] / found["weight_bytes"]
    return [
        *rows,
        Row(
            case=f"{shape}, float rows in the file",
            system=OURS,
            metric="row_bytes",
            value=float(found["row_bytes"]),
            unit="bytes",
            note=f"{share:.2%} of the weights' bytes",
        ),
        *(
            Row(
                case=f"{shape}, all graphs of an engine",
                system=name,
                metric="build_ms",
                value=spent,
                unit="ms",
                note=f"{found['graphs'][name]} graphs",
            )
            for name, spent in found["build_ms"].items()
        ),
    ]


def _graph_rows(shape: str, found: dict[str, Any]) -> list[Row]:
    shared, apart = found["sharing"]["shared"], found["sharing"]["apart"]
    rows = []
    for metric, unit, key in (
        ("graphs", "", "graphs"),
        ("graph_bytes", "bytes", "bytes"),
        ("build_ms", "ms", "build_ms"),
    ):
        rows += compared(
            {OURS: float(shared[key]), "chunk-and-layer-graphs": float(apart[key])},
            ours=OURS,
            case=f"{shape}, subgraphs of the longest prompt",
            metric=metric,
            unit=unit,
            notes={"chunk-and-layer-graphs": "counted from those that are shared"},
            lower_is_better=True,
        )
    return rows


def _two_rows(shape: str, found: dict[str, Any], plan: Plan) -> list[Row]:
    """What prompts take on an integer and a float processor, and the subgraphs that they are cut into."""
    rows = _graph_rows(shape, found)
    for length in plan.speed.lengths:
        known = {name: each[str(length)] for name, each in found["spans"].items()}
        spans = {name: each["real_ms"] for name, each in known.items()}
        notes: dict[str, str | None] = {
            name: f"{each['real_to_simulated'] - 1:+.0%} against simulated {each['simulated_ms']:.0f} ms; "
            f"{each['real_ms'] / each['bound_ms'] - 1:+.0%} against the bound of {each['bound_ms']:.0f} ms, "
            f"{each['real_to_own_bound'] - 1:+.0%} against that of the times in the run itself"
            for name, each in known.items()
        }
        spent = spans[OURS] / spans[f"{OURS}-no-shadow"] - 1
        notes[OURS] = f"{notes[OURS]}; shadow takes {spent:.1%} of the time without"
        rows += compared(
            spans,
            ours=OURS,
            case=f"{shape}, prompt of {length} tokens, two processors",
            metric="makespan_ms",
            unit="ms",
            notes=notes,
            lower_is_better=True,
        )
    for order, spent in found["decision_us"].items():
        name = _of_order(order)
        rows.append(
            Row(case=f"{shape}, a decision", system=name, metric="decision_us", value=spent, unit="us")
        )
    return rows
