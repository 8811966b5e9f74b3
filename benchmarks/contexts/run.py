"""Runs the timed parts: switching on every system, ablations, chunk sizes, sweeps, answering in contexts."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.contexts.bench import Bench, Plan
from benchmarks.contexts.cell import Cell
from benchmarks.contexts.replay import Switches
from benchmarks.contexts.resident import resident_rows
from benchmarks.contexts.rows import LIMITS_MS, most_contexts, switch_rows
from benchmarks.contexts.speed import speed_rows
from benchmarks.contexts.sweeps import budget_rows, interval_rows, length_rows
from benchmarks.contexts.systems import ABLATIONS, OURS, SYSTEMS
from benchmarks.measuring.report import Row
from jaxllm.bundle import WeightFormat
from jaxllm.kernels import native
from serving.contexts.chunk_io import ChunkIO
from serving.contexts.growth import least_ratio
from serving.host.progress import Progress


def run(
    model: Path,
    weights: WeightFormat | None,
    plan: Plan,
    progress: Progress | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Measures all that is timed.

    Args:
      model: a bundle or a Hugging Face folder.
      weights: width of a folder's weights.
      plan: how much.
      progress: of engines that open and contexts that are filled.
      tell: given a line for every system of a case as it has run.
    """
    bench = Bench(model, weights, plan, progress)
    budget, rows = bench.budget_bytes(), []
    if "switching" in plan.parts:
        rows += _switching_rows(bench, budget, tell)
    # Where all of ours fits into the budget, and with twice as many contexts.
    chosen = [each for each in plan.contexts if each in (plan.fitting, 2 * plan.fitting)]
    for device, contexts in itertools.product(plan.devices, chosen):
        cell = Cell(plan.patterns[0], contexts, device, budget)
        if "ablations" in plan.parts:
            rows += _variant_rows("ablation", cell, _ablated(bench, cell), tell)
        if "chunk-sizes" in plan.parts and device is plan.devices[0]:
            rows += _variant_rows("chunk size", cell, _chunked(bench, cell), tell)
    if "budgets" in plan.parts:
        rows += budget_rows(bench, budget, tell)
    if "lengths" in plan.parts:
        rows += length_rows(bench, budget, tell)
    if "intervals" in plan.parts:
        rows += interval_rows(bench, budget, tell)
    if "resident" in plan.parts:
        codec = SYSTEMS[0].codec
        coded, decoded = bench.engine(codec, coded=True), bench.engine(codec)
        rows += resident_rows(coded, decoded, bench.engine(""), plan.repeats, plan.seed)
    if "answering" in plan.parts:
        rows += speed_rows(bench.engine(SYSTEMS[0].codec), bench.engine(""), plan.repeats, plan.seed)
    return rows


def cells(plan: Plan, budget_bytes: int) -> Iterator[Cell]:
    """All patterns on the first device, the first pattern on others."""
    for device in plan.devices:
        for pattern in plan.patterns if device is plan.devices[0] else plan.patterns[:1]:
            for contexts in plan.contexts:
                yield Cell(pattern, contexts, device, budget_bytes)


def _switching_rows(bench: Bench, budget: int, tell: Callable[[str], None]) -> list[Row]:
    """Switches on every system, and how many contexts each serves within the limits."""
    rows = []
    found: dict[Cell, dict[str, Switches]] = {}
    for cell in cells(bench.plan, budget):
        found[cell] = {}
        for system in SYSTEMS:
            found[cell][system.name] = each = bench.switches(system, cell)
            tell(
                f"{cell.name}: {system.name} {each.mean_ms:.1f} ms, {each.mean_ttft_ms:.1f} ms to the first "
                f"token and {each.mean_finish_ms:.1f} ms to keep; {each.note}"
            )
        rows += switch_rows(cell.name, found[cell], cell.device)
    for device, pattern in dict.fromkeys((cell.device, cell.pattern) for cell in found):
        of = {
            cell.contexts: each
            for cell, each in found.items()
            if (cell.device, cell.pattern) == (device, pattern)
        }
        case = f"{pattern}, {budget / 1e6:.0f} MB, {device.name}"
        for limit_ms in LIMITS_MS:
            rows += most_contexts(case, of, limit_ms)
    return rows


def _ablated(bench: Bench, cell: Cell) -> dict[str, Switches]:
    """Ours with and without each of its techniques. It runs again itself, for machines change their pace."""
    systems = [each for each in ABLATIONS if native.kernels().native or not each.attend_coded]
    return {system.name: bench.switches(system, cell) for system in (SYSTEMS[0], *systems)}


def _chunked(bench: Bench, cell: Cell) -> dict[str, Switches]:
    """Ours in chunks of other sizes. Short ones take more for scales: where that is more than our ratio, they
    have the least that they can have, and say so in their name."""
    ours = SYSTEMS[0]
    found = {OURS: bench.switches(ours, cell)}
    for size in bench.plan.chunk_tokens:
        least = least_ratio(ChunkIO(bench.engine(ours.codec, size).runner))
        system, name = dataclasses.replace(ours, ratio=max(ours.ratio, least)), f"{OURS}-chunks-of-{size}"
        if system.ratio > ours.ratio:
            name += f"-ratio-{least:g}"
        found[name] = bench.switches(system, cell, size)
    return found


def _variant_rows(
    what: str, cell: Cell, found: dict[str, Switches], tell: Callable[[str], None]
) -> list[Row]:
    for name, each in found.items():
        times = f"{each.mean_ms:.1f} ms, {each.mean_ttft_ms:.1f} ms to the first token"
        tell(f"{cell.name}: {name} {times}; {each.note}")
    return switch_rows(f"{what}: {cell.name}", found, cell.device)
