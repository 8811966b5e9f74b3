"""Reserves a share of a memory budget for the runtime: compiled buckets and the allocator's gaps."""

# Buckets of a model of a billion parameters take some 50 MB when they are read from disk; more when compiled.
_MOST_BYTES, _SHARE = 64 << 20, 5


def runtime_bytes(budget_bytes: int) -> int:
    """The runtime's share of a budget."""
    return min(_MOST_BYTES, budget_bytes // _SHARE)


def whole_budget(needed_bytes: int) -> int:
    """The smallest budget that leaves `needed_bytes` besides the runtime's share."""
    budget = needed_bytes
    while budget - runtime_bytes(budget) < needed_bytes:
        budget += needed_bytes - (budget - runtime_bytes(budget))
    return budget


def least_budget(budget_bytes: int, missing_bytes: int) -> int:
    """The smallest sufficient budget if `budget_bytes` lacks `missing_bytes`; the runtime's share grows with
    it."""
    return whole_budget(budget_bytes - runtime_bytes(budget_bytes) + missing_bytes)
