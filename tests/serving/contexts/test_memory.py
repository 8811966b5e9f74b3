"""Chunks in memory: who leaves first, who never does, and that the budget holds whatever happens."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jaxllm.contexts.codecs import RAW
from jaxllm.contexts.eviction import find_policy
from jaxllm.errors import BudgetExceeded
from jaxllm.serving.contexts.memory import ChunkMemory

SIZE = {RAW: 16, 8: 8, 4: 4, 2: 2}


def blob(bits):
    return [np.zeros(SIZE[bits] // 2, np.uint8)] * 2


def filled(policy, budget=1000):
    """Context a: chunks of 8, 4 and 2 bits; then b: 8 and 2; then a again with a raw one."""
    memory = ChunkMemory(budget, find_policy(policy))
    for context, widths in (("a", (8, 4, 2)), ("b", (8, 2))):
        memory.claim(context, len(widths))
        for chunk, bits in enumerate(widths):
            memory.load(context, chunk, bits, blob(bits), restore_ms=1.0 + chunk)
        memory.release(context)
    assert memory.claim("a", 5) == [3, 4]
    memory.load("a", 3, RAW, blob(RAW), restore_ms=100.0)
    memory.release("a")
    return memory


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        # The widest first; of one width b's, which was used before a.
        ("lctru", ["a3", "b0", "a0", "a1", "b1", "a2"]),
        ("lru", ["b1", "b0", "a3", "a2", "a1", "a0"]),
        ("fifo", ["a0", "a1", "a2", "b0", "b1", "a3"]),
        ("whole-contexts", ["b0", "b1", "a0", "a1", "a2", "a3"]),
        # What is cheap to bring back, for its bytes and its age.
        ("cost-aware", ["b0", "a0", "b1", "a1", "a2", "a3"]),
    ],
)
def test_who_leaves_first(policy, order):
    """And no more than must, except whole contexts."""
    memory = filled(policy, budget=60)
    used = memory.resident_bytes
    assert used == 8 + 4 + 2 + 8 + 2 + 16
    assert memory.reclaim(60 - used) == []
    left = memory.reclaim(60 - used + 1)
    assert [each.context for each in left] == ["b", "b"] if policy == "whole-contexts" else len(left) == 1
    left += memory.reclaim(60)
    assert [f"{each.context}{each.chunk}" for each in left] == order
    assert (memory.resident_bytes, memory.evicted) == (0, len(order))


def test_what_runs_or_is_pinned_stays():
    memory = ChunkMemory(24, find_policy("lru"))
    for context, pinned in (("a", True), ("b", False), ("c", False)):
        memory.claim(context, 1, pinned=pinned)
        memory.load(context, 0, 8, blob(8))
        memory.release(context)
    assert memory.claim("b", 1) == []
    memory.claim("d", 2)
    memory.load("d", 0, 8, blob(8))
    assert memory.chunks("c") == {}
    with pytest.raises(BudgetExceeded, match="24 bytes of memory; 8 more do not fit"):
        memory.load("d", 1, 8, blob(8))
    # A chunk that was to be replaced is still there.
    with pytest.raises(BudgetExceeded):
        memory.load("d", 0, RAW, blob(RAW))
    assert memory.chunks("d")[0].bits == 8
    memory.claim("a", 1, pinned=False)
    memory.release("a")
    memory.load("d", 1, 8, blob(8))
    assert memory.chunks("a") == {}


class Memory(RuleBasedStateMachine):
    """Any sequence of calls keeps the budget, and the bytes are those of the chunks."""

    def __init__(self):
        super().__init__()
        self.memory = ChunkMemory(40, find_policy("lctru"))

    @rule(context=st.sampled_from("abc"), chunk=st.integers(0, 3), bits=st.sampled_from([RAW, 8, 4, 2]))
    def load(self, context, chunk, bits):
        try:
            self.memory.load(context, chunk, bits, blob(bits))
        except BudgetExceeded:
            return
        assert self.memory.chunks(context)[chunk].bits == bits

    @rule(context=st.sampled_from("abc"), pinned=st.booleans())
    def claim(self, context, pinned):
        missing = self.memory.claim(context, 4, pinned=pinned)
        assert set(missing) | set(self.memory.chunks(context)) == {0, 1, 2, 3}

    @rule(context=st.sampled_from("abc"))
    def release(self, context):
        self.memory.release(context)

    @rule(context=st.sampled_from("abc"))
    def forget(self, context):
        self.memory.forget(context)

    @rule(room=st.integers(0, 50))
    def reclaim(self, room):
        try:
            self.memory.reclaim(room)
        except BudgetExceeded:
            return
        assert self.memory.resident_bytes + room <= 40

    @invariant()
    def within_budget(self):
        sizes = [each.size_bytes for name in "abc" for each in self.memory.chunks(name).values()]
        assert sum(sizes) == self.memory.resident_bytes <= 40


TestMemory = Memory.TestCase
TestMemory.settings = settings(max_examples=40, stateful_step_count=30)
