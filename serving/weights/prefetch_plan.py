"""Plans a memory budget: which pieces are resident, and which are read in each pass."""

import dataclasses
from collections.abc import Sequence

from jaxllm.errors import BudgetExceeded

# Slots for pieces that are not resident: one is computed while the next one is read. With more of them more
# layers would run together, but each uses the memory of a resident piece, which is then read in each pass.
SLOTS = 2

# Buckets of a model of a billion parameters need some 50 MB when loaded from disk; more when compiled.
_RUNTIME_BYTES, _RUNTIME_SHARE = 64 << 20, 5


@dataclasses.dataclass(frozen=True)
class MemoryBudget:
    """The memory limit of a model and everything around it.

    Attributes:
      total_bytes: limit for everything.
      fixed_bytes: bytes of everything but weights: caches, activations, a drafter, the runtime's share.
      fixed_parts: names of the fixed parts, for messages.
    """

    total_bytes: int
    fixed_bytes: int
    fixed_parts: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The division of a memory budget.

    Attributes:
      budget_bytes: the whole budget.
      fixed_bytes: bytes of everything but pieces: caches, activations, a drafter.
      slots: number of slots, shared by the pieces that are read in each pass; 0 if all are resident.
      slot_bytes: bytes of one slot.
      resident: numbers of the resident pieces, ascending.
      resident_bytes: bytes of the resident pieces.
    """

    budget_bytes: int
    fixed_bytes: int
    slots: int
    slot_bytes: int
    resident: tuple[int, ...]
    resident_bytes: int

    @property
    def planned_bytes(self) -> int:
        """Bytes of the budget in use."""
        return self.fixed_bytes + self.slots * self.slot_bytes + self.resident_bytes


def plan_memory(
    sizes: Sequence[int],
    budget: MemoryBudget,
    *,
    slot_bytes: int = 0,
    slots: int = SLOTS,
    order: Sequence[int] | None = None,
) -> MemoryPlan:
    """Makes as many pieces resident as fit, spread evenly among the others, so that reads never pause.

    Args:
      sizes: sizes of all pieces, in bytes, in the order of a pass.
      budget: budget, including the fixed part.
      slot_bytes: bytes of a piece while it is computed, if more than its resident size.
      slots: maximum number of slots for pieces that are not resident; at least two.
      order: order of making pieces resident while they fit; None for all spread evenly.

    Raises:
      BudgetExceeded: two pieces do not fit.
    """
    total, largest = sum(sizes), max(slot_bytes, *sizes)
    budget_bytes, fixed_bytes = budget.total_bytes, budget.fixed_bytes
    room = budget_bytes - fixed_bytes
    if total <= room:
        return MemoryPlan(
            budget_bytes=budget_bytes,
            fixed_bytes=fixed_bytes,
            slots=0,
            slot_bytes=0,
            resident=tuple(range(len(sizes))),
            resident_bytes=total,
        )
    slots = max(SLOTS, min(slots, room // largest))
    room -= slots * largest
    if room < 0:
        least = least_budget(budget_bytes, -room)
        raise BudgetExceeded(
            f"a memory budget of {budget_bytes:,} bytes is too small: this model needs at least {least:,} "
            f"({least - SLOTS * largest:,} for {budget.fixed_parts}, {SLOTS} times {largest:,} for its "
            "largest layers); give more, or ask for a shorter context"
        )
    resident: list[int] = []
    for each in spread_evenly(len(sizes)) if order is None else order:
        if sizes[each] <= room:
            resident.append(each)
            room -= sizes[each]
    return MemoryPlan(
        budget_bytes=budget_bytes,
        fixed_bytes=fixed_bytes,
        slots=slots,
        slot_bytes=largest,
        resident=tuple(sorted(resident)),
        resident_bytes=sum(sizes[each] for each in resident),
    )


def spread_evenly(count: int) -> list[int]:
    """The numbers [0, count) in an order whose every prefix is spread evenly: van der Corput's sequence."""
    bits = max(1, (count - 1).bit_length())
    reversed_bits = (int(f"{each:0{bits}b}"[::-1], 2) for each in range(1 << bits))
    return [each for each in reversed_bits if each < count]


def runtime_bytes(budget_bytes: int) -> int:
    """The runtime's share of a budget."""
    return min(_RUNTIME_BYTES, budget_bytes // _RUNTIME_SHARE)


def whole_budget(needed_bytes: int) -> int:
    """The minimum budget that leaves `needed_bytes` besides the runtime's share."""
    budget = needed_bytes
    while budget - runtime_bytes(budget) < needed_bytes:
        budget += needed_bytes - (budget - runtime_bytes(budget))
    return budget


def least_budget(budget_bytes: int, missing_bytes: int) -> int:
    """The smallest sufficient budget if `budget_bytes` lacks `missing_bytes`; the runtime's share grows with
    it."""
    return whole_budget(budget_bytes - runtime_bytes(budget_bytes) + missing_bytes)
