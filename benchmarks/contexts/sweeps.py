"""Repeats switching over budgets of memory, lengths of contexts, and intervals between calls (LLMS, figures
10, 11 and 15)."""

from collections.abc import Callable, Mapping

from benchmarks.contexts.bench import Bench
from benchmarks.contexts.cell import Cell
from benchmarks.contexts.replay import Switches
from benchmarks.contexts.rows import LIMITS_MS, most_contexts, switch_rows
from benchmarks.contexts.systems import SYSTEMS, System
from benchmarks.measuring.report import Row
from jaxllm.errors import BudgetExceeded

Tell = Callable[[str], None]


def budget_rows(bench: Bench, budget_bytes: int, tell: Tell) -> list[Row]:
    """How many contexts each system switches between within a limit, by memory: shares of `budget_bytes`."""
    rows = []
    for share in bench.plan.budget_shares:
        memory = int(share * budget_bytes)
        rows += _limit_rows(bench, f"budget: {memory / 1e6:.0f} MB", memory, tell)
    return rows


def length_rows(bench: Bench, budget_bytes: int, tell: Tell) -> list[Row]:
    """The same by the most tokens of a context, in one budget."""
    rows = []
    for tokens in bench.plan.context_tokens:
        if tokens > bench.window_tokens:
            tell(f"length: without {tokens} tokens, for the model's window has {bench.window_tokens}")
            continue
        shorter = bench.of_length(tokens)
        rows += _limit_rows(shorter, f"length: {tokens} tokens", budget_bytes, tell)
    return rows


def interval_rows(bench: Bench, budget_bytes: int, tell: Tell) -> list[Row]:
    """Switches by the mean time between calls, with the most contexts; the calls' times are those of the
    trace, made denser."""
    plan = bench.plan
    rows = []
    for interval_s in plan.interval_s:
        cell = Cell(plan.patterns[0], plan.contexts[-1], plan.devices[0], budget_bytes, interval_s)
        found = {}
        for system in SYSTEMS:
            found[system.name] = each = bench.switches(system, cell)
            tell(f"{interval_s:g} s between calls: {system.name} {each.mean_ms:.1f} ms; {each.note}")
        rows += switch_rows(f"interval: {interval_s:g} s, {cell.name}", found, cell.device)
    return rows


def _limit_rows(bench: Bench, case: str, budget_bytes: int, tell: Tell) -> list[Row]:
    """The most contexts of each system within the limits, as far as contexts fit the memory at all."""
    plan = bench.plan
    found: dict[int, Mapping[str, Switches | None]] = {}
    for contexts in plan.contexts:
        cell = Cell(plan.patterns[0], contexts, plan.devices[0], budget_bytes)
        found[contexts] = {system.name: _fitting(bench, system, cell) for system in SYSTEMS}
        tell(f"{case}, {cell.name}: {_told(found[contexts])}")
    case = f"{case}, {plan.patterns[0]}, {plan.devices[0].name}"
    return [row for limit_ms in LIMITS_MS for row in most_contexts(case, found, limit_ms)]


def _fitting(bench: Bench, system: System, cell: Cell) -> Switches | None:
    """A cell's trace on a system; None where one of its contexts alone takes more than the budget."""
    try:
        return bench.switches(system, cell)
    except BudgetExceeded:
        return None


def _told(found: Mapping[str, Switches | None]) -> str:
    return ", ".join(
        f"{name} no room" if each is None else f"{name} {each.mean_ms:.1f} ms" for name, each in found.items()
    )
