"""Tests the division of a budget, in exact small cases."""

import pytest

from jaxllm.errors import BudgetExceeded
from jaxllm.serving.weights.prefetch_plan import MemoryBudget, plan_memory


def plan(sizes, budget, fixed=0):
    return plan_memory(sizes, MemoryBudget(budget, fixed, "a context"))


def test_all_stays_where_all_fits():
    found = plan([10] * 4, 45, 5)
    assert (found.slots, found.resident, found.planned_bytes) == (0, (0, 1, 2, 3), 45)


def test_two_pieces_are_read_in_turn_and_the_rest_stays():
    found = plan([10] * 8, 60)
    assert (found.slots, found.slot_bytes) == (2, 10)
    # Evenly between those that are read.
    assert found.resident == (0, 2, 4, 6)
    assert found.planned_bytes == 60


def test_slots_fit_the_largest_and_small_pieces_fill_what_is_left():
    found = plan([4, 20, 4, 20, 4], 49)
    assert (found.slot_bytes, found.resident) == (20, (0, 4))
    assert found.planned_bytes <= 49


def test_below_two_pieces_there_is_no_way():
    assert plan([10] * 8, 25, 5).resident == ()
    with pytest.raises(BudgetExceeded, match=r"24 bytes .*at least 26 \(6 for a context, 2 times 10"):
        plan([10] * 8, 24, 5)
