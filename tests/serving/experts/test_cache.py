"""The cache of experts: its budget, its order of reading, guesses that are wrong, and files that are."""

import threading
import time

import numpy as np
import pytest

from jaxllm.bundle import Bundle
from jaxllm.errors import BudgetExceeded, BundleError, CheckpointError
from jaxllm.experts.prediction import eviction_policy
from jaxllm.serving.experts import cache as room
from jaxllm.serving.experts.cache import ExpertCache
from jaxllm.serving.experts.store import ExpertStore
from jaxllm.serving.host.direct_io import PAGE, PieceReader
from tests.serving.experts.conftest import SPARSE, E


@pytest.fixture(scope="module")
def store(bundle_of):
    return ExpertStore(Bundle.open(bundle_of(8)))


class Reader(PieceReader):
    """Says what is read, and may wait, fail or lie before it does."""

    def __init__(self, path):
        super().__init__(path)
        self.offsets, self.before = [], lambda offset: None
        self.spoil = lambda offset: False

    def read_into(self, memory, place, offset, size):
        self.before(offset)
        super().read_into(memory, place, offset, size)
        self.offsets.append(offset)
        if self.spoil(offset):
            memory[place] ^= 1


@pytest.fixture
def make(store, monkeypatch):
    """A cache with room for so many experts, one thread, and blocks of a page."""
    monkeypatch.setattr(room, "_THREADS", 1)
    made = []

    def of(experts, policy="lru"):
        reader = Reader(store.bundle.path)
        cache = ExpertCache(
            store,
            reader,
            budget_bytes=experts * store.largest_bytes,
            policy=eviction_policy(policy),
            frequency=np.zeros((SPARSE, E)),
        )
        made.append(cache)
        return cache, reader

    yield of
    for each in made:
        each.close()


def visit(cache, layer, experts, guesses=()):
    """The experts in the order in which they come; each has its own weights while it is there."""
    order = []
    for arrived in cache.visit(layer, dict.fromkeys(experts, 2), guesses):
        for expert in arrived.ready:
            key = layer, expert
            weights = cache.regions.weights(key, 2)
            whole = cache._store.bundle.load()[f"layers.{cache._store.sparse[layer]}.experts.up"]
            matrix = whole.matrices[expert]
            np.testing.assert_array_equal(np.asarray(weights["up"].data), np.asarray(matrix.data))
            order.append(expert)
            taken = sum(len(slot.memory) for slot in cache._slots.values())
            assert taken == cache._taken_bytes <= cache._budget, key
    return order


def inside(cache):
    return {key[:2] for key, slot in cache._slots.items() if slot.ready}


def wait_until(cache, condition):
    with cache._lock:
        assert cache._came.wait_for(condition, timeout=60)


def test_what_is_there_comes_first(make):
    cache, _ = make(4)
    assert visit(cache, 0, [3, 1]) == [3, 1]
    assert visit(cache, 0, [2, 1]) == [1, 2]
    counts = cache.counts
    assert (counts.visits, counts.hits, counts.foreseen) == (4, 1, 0)


def test_who_was_not_visited_for_longest_leaves(make):
    cache, _ = make(3)
    for layer, experts in ((0, [0, 1]), (1, [0]), (0, [0]), (2, [5])):
        visit(cache, layer, experts)
    assert inside(cache) == {(1, 0), (0, 0), (2, 5)}


def test_a_layer_may_ask_for_more_than_there_is_room(make):
    cache, reader = make(2)
    assert sorted(visit(cache, 1, range(E))) == list(range(E))
    assert len(set(reader.offsets)) == len(reader.offsets)
    assert len(inside(cache)) <= 2


def test_what_is_foreseen_is_there(make):
    cache, reader = make(4)
    visit(cache, 0, [0], [(1, 2, 0), (2, 3, 0)])
    wait_until(cache, lambda: {(1, 2), (2, 3)} <= inside(cache))
    read = len(reader.offsets)
    assert visit(cache, 1, [2]) == [2]
    assert len(reader.offsets) == read
    assert (cache.counts.guesses, cache.counts.foreseen) == (2, 1)


def test_a_wrong_guess_waits_for_a_right_demand(make, store, monkeypatch):
    """The block that is being read is finished, no more: then comes what is asked for."""
    monkeypatch.setattr(room, "_MOST_BLOCK_BYTES", PAGE)
    cache, reader = make(4)
    first, wrong, right = (store[key].planes[0].segment for key in ((0, 0), (1, 1), (1, 2)))
    begun, go_on = threading.Event(), threading.Event()

    def before(offset):
        if wrong.offset <= offset < wrong.offset + wrong.size_bytes:
            begun.set()
            assert go_on.wait(60)

    reader.before = before
    visit(cache, 0, [0], [(1, 1, 0)])
    assert begun.wait(60)
    coming = cache.visit(1, {2: 2})
    waiting = threading.Thread(target=lambda: list(coming))
    waiting.start()
    while cache._wanted != [(1, 2, 0)]:
        time.sleep(0.001)
    go_on.set()
    waiting.join(60)
    places = [
        next(name for name, each in (("first", first), ("wrong", wrong), ("right", right))
             if each.offset <= offset < each.offset + each.size_bytes)
        for offset in reader.offsets
    ]  # fmt: skip
    assert places.count("first") == places.count("right") > 2
    assert places.index("right") == places.count("first") + 1
    # Nobody foresees it any more, and its room is free for others.
    assert (1, 1) not in inside(cache)
    visit(cache, 2, [0, 1, 2, 3])
    assert (1, 1, 0) not in cache._slots


def test_guesses_never_evict_who_is_foreseen_before(make):
    cache, _ = make(2)
    visit(cache, 0, [0], [(1, 1, 0), (1, 2, 0), (1, 3, 0)])
    wait_until(cache, lambda: inside(cache) == {(1, 1), (1, 2)})


def test_a_byte_that_was_read_wrongly_is_read_again(make, store):
    cache, reader = make(2)
    wrong = iter([True])
    reader.spoil = lambda offset: offset == store[0, 1].planes[0].segment.offset and next(wrong, False)
    assert visit(cache, 0, [1]) == [1]
    assert reader.offsets.count(store[0, 1].planes[0].segment.offset) == 2


def test_a_corrupt_expert_is_an_error_and_the_next_visit_tries_again(make, store):
    cache, reader = make(2)
    reader.spoil = lambda offset: offset == store[0, 1].planes[0].segment.offset
    with pytest.raises(BundleError, match=r"expert 1 of layer 0 is corrupt .* make it again"):
        visit(cache, 0, [1])
    reader.spoil = lambda offset: False
    assert visit(cache, 0, [1]) == [1]


def test_a_read_that_fails_is_an_error(make, store):
    cache, reader = make(2)

    def before(offset):
        raise CheckpointError("gone")

    reader.before = before
    with pytest.raises(CheckpointError, match="gone"):
        visit(cache, 0, [1])
    # A guess that fails is nobody's error.
    cache.expect([(1, 1, 0)])
    wait_until(cache, lambda: cache.counts.guesses == 1 and not cache._slots)
    reader.before = lambda offset: None
    assert visit(cache, 0, [1]) == [1]


def test_a_second_error_does_not_outlast_its_visit(make, monkeypatch):
    """Two experts cannot be read, and one error is raised: when storage is back, both are there."""
    cache, reader = make(4)

    def before(offset):
        raise CheckpointError("gone")

    def failed(expert):
        slot = cache._slots.get((0, expert, 0))
        return slot is not None and slot.error is not None and not slot.in_flight

    def late(*asked, **how):
        wait_until(cache, lambda: failed(1) and failed(2))
        return awaited(*asked, **how)

    reader.before, awaited = before, cache._await
    monkeypatch.setattr(cache, "_await", late)
    with pytest.raises(CheckpointError, match="gone"):
        visit(cache, 0, [1, 2])
    assert not cache._slots
    assert cache._taken_bytes == 0
    reader.before = lambda offset: None
    monkeypatch.setattr(cache, "_await", awaited)
    assert sorted(visit(cache, 0, [1, 2])) == [1, 2]


def test_a_smaller_budget_evicts_idle_experts(make, store):
    cache, _ = make(4)
    visit(cache, 0, [3, 1])
    visit(cache, 1, [2, 0])
    assert len(inside(cache)) == 4
    cache.resize(2 * store.largest_bytes)
    # The least recently used leave.
    assert inside(cache) == {(1, 2), (1, 0)}
    assert cache.taken_bytes <= cache.budget_bytes == 2 * store.largest_bytes
    assert sorted(visit(cache, 0, [3, 1])) == [1, 3]
    cache.resize(4 * store.largest_bytes)
    visit(cache, 1, [2, 0])
    assert len(inside(cache)) == 4


def test_a_budget_below_one_layers_experts_is_refused(make, store):
    cache, _ = make(4)
    with pytest.raises(BudgetExceeded, match="visits at one layer take"):
        cache.resize(store.least_bytes() - 1)
    assert cache.budget_bytes == 4 * store.largest_bytes
