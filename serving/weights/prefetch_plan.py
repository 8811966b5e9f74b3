"""Plans a memory budget: which pieces stay, and which are read each time."""

import dataclasses
from collections.abc import Sequence

from jaxllm.errors import BudgetExceeded
from serving.weights.runtime_share import least_budget

# Pieces in memory beside those that stay: one is computed while the next one is read.
SLOTS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """A memory budget as it is spent.

    Attributes:
      budget_bytes: all of it.
      fixed_bytes: what there must be besides pieces: caches, activations, a draft.
      slots: pieces that are read anew each time share these; 0 where all stay.
      slot_bytes: of one of them.
      resident: numbers of the pieces that stay, ascending.
      resident_bytes: of those.
    """

    budget_bytes: int
    fixed_bytes: int
    slots: int
    slot_bytes: int
    resident: tuple[int, ...]
    resident_bytes: int

    @property
    def planned_bytes(self) -> int:
        """What is taken of the budget."""
        return self.fixed_bytes + self.slots * self.slot_bytes + self.resident_bytes


def plan_memory(
    sizes: Sequence[int],
    *,
    budget_bytes: int,
    fixed_bytes: int,
    what: str,
    slot_bytes: int = 0,
) -> MemoryPlan:
    """Keeps as many pieces in memory as fit, evenly among those that are read, so that reading never pauses.

    Args:
      sizes: of all pieces, in bytes, in the order of a pass.
      budget_bytes: for everything.
      fixed_bytes: of it, for everything but pieces; what the runtime takes of such a budget among it.
      what: says what the fixed part is, for the message.
      slot_bytes: that a piece takes while it is computed, where that is more than what it takes to stay.

    Raises:
      BudgetExceeded: not even two pieces fit.
    """
    total, largest = sum(sizes), max(slot_bytes, *sizes)
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
    room -= SLOTS * largest
    if room < 0:
        least = least_budget(budget_bytes, -room)
        raise BudgetExceeded(
            f"a memory budget of {budget_bytes:,} bytes is too small: this model needs at least {least:,} "
            f"({least - SLOTS * largest:,} for {what}, {SLOTS} times {largest:,} for its largest layers); "
            "give more, or ask for a shorter context"
        )
    resident: list[int] = []
    for each in _spread(len(sizes)):
        if sizes[each] <= room:
            resident.append(each)
            room -= sizes[each]
    return MemoryPlan(
        budget_bytes=budget_bytes,
        fixed_bytes=fixed_bytes,
        slots=SLOTS,
        slot_bytes=largest,
        resident=tuple(sorted(resident)),
        resident_bytes=sum(sizes[each] for each in resident),
    )


def _spread(count: int) -> list[int]:
    """All of [0, count) in an order of which every beginning lies evenly in it: van der Corput's sequence."""
    bits = max(1, (count - 1).bit_length())
    reversed_bits = (int(f"{each:0{bits}b}"[::-1], 2) for each in range(1 << bits))
    return [each for each in reversed_bits if each < count]
