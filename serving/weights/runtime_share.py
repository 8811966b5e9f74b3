"""Leaves a part of a memory budget for buckets, their code and the allocator's gaps."""

# Of a model of a billion parameters buckets that are read from disk hold some 50 MB; compiled first, more.
_MOST_BYTES, _SHARE = 64 << 20, 5


def runtime_bytes(budget_bytes: int) -> int:
    """What the runtime takes of a budget."""
    return min(_MOST_BYTES, budget_bytes // _SHARE)


def whole_budget(needed_bytes: int) -> int:
    """The smallest budget that has room for so much besides what the runtime takes."""
    budget = needed_bytes
    while budget - runtime_bytes(budget) < needed_bytes:
        budget += needed_bytes - (budget - runtime_bytes(budget))
    return budget


def least_budget(budget_bytes: int, missing_bytes: int) -> int:
    """The smallest budget that does where this one lacks so much: of a larger one the runtime takes more."""
    return whole_budget(budget_bytes - runtime_bytes(budget_bytes) + missing_bytes)
