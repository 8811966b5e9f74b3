"""The cache of experts: its budget, its order of reading, guesses that are wrong, and files that are."""

import threading
import time

import numpy as np
import pytest

from jaxllm.bundle import Bundle
from jaxllm.errors import BudgetExceeded, BundleError, CheckpointError
from jaxllm.experts.prediction import count_paths, count_tokens
from jaxllm.serving.experts import cache as room
from jaxllm.serving.experts.store import ExpertStore, memory_bytes
from jaxllm.serving.experts.weights import make_predictor
from jaxllm.serving.ground.expert_options import ExpertOptions
from jaxllm.serving.host.direct_io import PAGE
from tests.serving.experts.conftest import E, inside, wait_until


@pytest.fixture(scope="module")
def store(bundle_of):
    return ExpertStore(Bundle.open(bundle_of(8)))


@pytest.fixture
def make(caches, store):
    """A cache with room for so many experts, one thread, and blocks of a page."""
    return lambda experts: caches(store, experts * store.largest_bytes)


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
            assert taken == cache.taken_bytes <= cache.budget_bytes, key
    return order


def experts_inside(cache):
    return {key[:2] for key in inside(cache)}


def test_what_is_there_comes_first_and_who_was_not_visited_for_longest_leaves(make):
    cache, _ = make(4)
    assert visit(cache, 0, [3, 1]) == [3, 1]
    assert visit(cache, 0, [2, 1]) == [1, 2]
    assert (cache.counts.visits, cache.counts.hits, cache.counts.foreseen) == (4, 1, 0)
    cache, _ = make(3)
    for layer, experts in ((0, [0, 1]), (1, [0]), (0, [0]), (2, [5])):
        visit(cache, layer, experts)
    assert experts_inside(cache) == {(1, 0), (0, 0), (2, 5)}
    # A layer may ask for more than there is room.
    cache, reader = make(2)
    assert sorted(visit(cache, 1, range(E))) == list(range(E))
    assert len(set(reader.offsets)) == len(reader.offsets)
    assert len(experts_inside(cache)) <= 2


def test_what_is_foreseen_is_there(make):
    cache, reader = make(4)
    visit(cache, 0, [0], [(1, 2, 0), (2, 3, 0)])
    wait_until(cache, lambda: {(1, 2), (2, 3)} <= experts_inside(cache))
    read = len(reader.offsets)
    assert visit(cache, 1, [2]) == [2]
    assert len(reader.offsets) == read
    assert (cache.counts.guesses, cache.counts.foreseen) == (2, 1)
    # Guesses never evict who is foreseen before.
    cache, _ = make(2)
    visit(cache, 0, [0], [(1, 1, 0), (1, 2, 0), (1, 3, 0)])
    wait_until(cache, lambda: experts_inside(cache) == {(1, 1), (1, 2)})


def test_a_wrong_guess_waits_for_a_right_demand(make, store, monkeypatch):
    """The block that is being read is finished, no more: then comes what is asked for."""
    monkeypatch.setattr(room, "_MOST_BLOCK_BYTES", PAGE)
    cache, reader = make(4)
    first, wrong, right = (store[key].planes[0] for key in ((0, 0), (1, 1), (1, 2)))
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
    assert (1, 1) not in experts_inside(cache)
    visit(cache, 2, [0, 1, 2, 3])
    assert (1, 1, 0) not in cache._slots


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
    assert cache.taken_bytes == 0
    reader.before = lambda offset: None
    monkeypatch.setattr(cache, "_await", awaited)
    assert sorted(visit(cache, 0, [1, 2])) == [1, 2]


def test_a_smaller_budget_evicts_idle_experts(make, store):
    cache, _ = make(4)
    visit(cache, 0, [3, 1])
    visit(cache, 1, [2, 0])
    assert len(experts_inside(cache)) == 4
    cache.resize(2 * store.largest_bytes)
    # The least recently used leave.
    assert experts_inside(cache) == {(1, 2), (1, 0)}
    assert cache.taken_bytes <= cache.budget_bytes == 2 * store.largest_bytes
    assert sorted(visit(cache, 0, [3, 1])) == [1, 3]
    cache.resize(4 * store.largest_bytes)
    visit(cache, 1, [2, 0])
    assert len(experts_inside(cache)) == 4
    # One below one layer's experts is refused.
    with pytest.raises(BudgetExceeded, match="visits at one layer take"):
        cache.resize(store.least_bytes() - 1)
    assert cache.budget_bytes == 4 * store.largest_bytes


# Which experts each predictor foresees, and how far ahead.


EXPERTS, TOKEN = 8, 7
# At each of four layers the token visits other experts.
IDS = np.stack([np.tile([[at, at + 1]], (20, 1)) for at in (0, 2, 4, 6)])
COUNTS, TOKENS = count_paths(IDS, EXPERTS), count_tokens(IDS, np.full(20, TOKEN), EXPERTS)


def foreseen(name, visited, ahead, steps):
    """Whom a predictor thinks worth reading, most probable first."""
    predictor = make_predictor(name, COUNTS, TOKENS)
    predictor.begin(np.array([TOKEN]))
    chances = predictor.probabilities(visited, ahead, steps)
    worth = predictor.worthwhile(visited, chances, steps)
    return [int(each) for each in np.argsort(-chances, kind="stable") if worth[each]]


def test_routers_see_the_next_layers_and_the_token_those_behind_them():
    """So that foreseeing two layers, as is the default, reads for two."""
    assert ExpertOptions().layers_ahead == 2
    ahead = np.zeros((2, EXPERTS), np.float32)
    ahead[0, 5] = ahead[1, 2] = 1.0
    visited = [np.array([[0, 1]])]
    assert foreseen("router", visited, ahead, 1)[0] == 5
    assert foreseen("router", [*visited, np.array([[5, 0]])], ahead, 2) == [2]


def test_what_a_token_visits_weighs_routers():
    """The token visits 2 and 3 at this layer; another one is as the router says."""
    ahead = np.full((1, EXPERTS), 1 / EXPERTS, np.float32)
    visited = [np.array([[0, 1]])]
    assert foreseen("router", visited, ahead, 1)[:2] == [2, 3]
    ahead[0, 6] = 0.99
    assert foreseen("router", visited, ahead, 1)[0] == 2
    predictor = make_predictor("router", COUNTS, TOKENS)
    predictor.begin(np.array([TOKEN + 1]))
    np.testing.assert_array_equal(predictor.probabilities(visited, ahead, 1), ahead[0])


def test_farther_ahead_those_are_read_that_have_half_of_the_probability():
    predictor = make_predictor("router", COUNTS, TOKENS)
    visited, chances = [np.array([[0, 1]])] * 2, np.zeros(EXPERTS, np.float32)
    chances[:4] = 0.3, 0.15, 0.4, 0.15
    assert np.flatnonzero(predictor.worthwhile(visited, chances, 2)).tolist() == [0, 2]
    # A router's best are read whatever their lead; of the first layer the token tells.
    assert len(foreseen("router", [np.array([[0, 1]])], np.full((1, EXPERTS), 1 / EXPERTS), 1)) == EXPERTS
    assert foreseen("router", [], np.zeros((1, EXPERTS)), 1) == [0, 1]


# Nested experts by planes: what is read first, what stays, what is damaged.


@pytest.fixture(scope="module")
def nested(bundle_of):
    return ExpertStore(Bundle.open(bundle_of(8, "int8-nested")))


@pytest.fixture
def make_planes(caches, nested):
    """A cache with room for so many planes, and one thread."""
    size = max(map(memory_bytes, nested[0, 0].planes))
    return lambda planes, policy="lru": caches(nested, planes * size, policy)


def visit_planes(cache, layer, needs, guesses=(), *, together=False):
    """What arrived, in order: experts that are ready, and those that are begun."""
    return [(each.ready, each.begun) for each in cache.visit(layer, needs, guesses, together=together)]


def planes_read(nested, reader):
    """The planes in the order in which their first blocks were read."""
    at = {nested.plane((0, e, p)).offset: (e, p) for e in range(E) for p in range(2)}
    return [at[offset] for offset in reader.offsets if offset in at]


def test_high_planes_are_read_first_and_late_experts_come_together(make_planes, nested):
    assert (nested.forms, nested.planes_of((0, 1), 1)) == (("nested",), [(0, 1, 0)])
    high, low = nested[0, 0].planes
    assert high.offset + high.size_bytes <= low.offset
    cache, reader = make_planes(8)
    assert visit_planes(cache, 0, {3: 2, 1: 2}, together=True) == [([3, 1], [])]
    assert planes_read(nested, reader) == [(3, 0), (1, 0), (3, 1), (1, 1)]
    assert visit_planes(cache, 0, {3: 2, 5: 2, 1: 2, 4: 2}, together=True) == [([3, 1], []), ([5, 4], [])]
    # One after the other where there may be no room for all.
    ready = [ready for ready, _ in visit_planes(cache, 1, {0: 2, 1: 2})]
    assert sorted(expert for each in ready for expert in each) == [0, 1]
    # Guesses are read in the order of planes.
    cache, reader = make_planes(8)
    visit_planes(cache, 1, {0: 2}, [(0, 4, 0), (0, 2, 0), (0, 4, 1)])
    wait_until(cache, lambda: {(0, 4, 0), (0, 2, 0), (0, 4, 1)} <= inside(cache))
    assert planes_read(nested, reader) == [(4, 0), (2, 0), (4, 1)]
    assert visit_planes(cache, 0, {4: 2, 2: 1}) == [([4, 2], [])]
    assert cache.counts.foreseen == 2
    # Bytes are counted by plane.
    cache, _ = make_planes(8)
    visit_planes(cache, 0, {2: 1, 3: 2})
    (first, second), counts = [plane.size_bytes for plane in nested[0, 3].planes], cache.counts
    assert (counts.low_bytes, counts.read_bytes) == (second, 2 * first + second)
    assert (counts.visits, counts.hits, counts.high_alone) == (2, 0, 1)


def test_a_miss_begins_with_the_plane_that_is_there(make_planes, nested):
    cache, reader = make_planes(8)
    visit_planes(cache, 0, {2: 1})
    assert planes_read(nested, reader) == [(2, 0)]
    assert visit_planes(cache, 0, {2: 2}, together=True) == [([], [2]), ([2], [])]
    assert planes_read(nested, reader) == [(2, 0), (2, 1)]
    # Without what is begun it comes whole.
    visit_planes(cache, 0, {4: 1})
    assert visit_planes(cache, 0, {4: 2}) == [([4], [])]


@pytest.mark.parametrize("policy", ["lru", "fifo", "frequency-nearness", "lfu", "lfru"])
def test_a_high_plane_is_evicted_after_its_low_one(make_planes, policy):
    cache, _ = make_planes(4, policy)
    visit_planes(cache, 0, {0: 2, 1: 2})
    visit_planes(cache, 0, {2: 1})
    there = inside(cache)
    assert len(there) == 4
    for layer, expert, plane in there:
        assert plane == 0 or (layer, expert, 0) in there
    visit_planes(cache, 1, {0: 1, 1: 1})
    assert {key for key in inside(cache) if key[2]} == set()
    if policy == "lru":
        # Experts 0 and 1 are as recent, but of 1 the high plane alone was needed last.
        cache, _ = make_planes(4)
        for needs in ({1: 2}, {0: 2}, {1: 1}):
            visit_planes(cache, 0, needs)
        visit_planes(cache, 1, {0: 1})
        assert inside(cache) == {(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)}


def test_more_experts_than_there_is_room_for_do_not_wait_for_each_other(make_planes, nested):
    """Resident high planes of later ones make room for the low planes of earlier ones."""
    cache, _ = make_planes(4)
    visit_planes(cache, 0, dict.fromkeys(range(4), 1))
    assert len(inside(cache)) == 4
    arrived = visit_planes(cache, 0, dict.fromkeys(range(E), 2))
    assert sorted(expert for ready, _ in arrived for expert in ready) == list(range(E))
    assert cache.taken_bytes <= cache.budget_bytes


@pytest.mark.parametrize("plane", [0, 1])
def test_a_damaged_plane_is_read_again_and_named(make_planes, nested, plane):
    cache, reader = make_planes(8)
    offset = nested.plane((0, 1, plane)).offset
    wrong = iter([True])
    reader.spoil = lambda at: at == offset and next(wrong, False)
    assert visit_planes(cache, 0, {1: 2}) == [([1], [])]
    assert planes_read(nested, reader).count((1, plane)) == 2
    cache, reader = make_planes(8)
    reader.spoil = lambda at: at == offset
    name = ("high", "low")[plane]
    with pytest.raises(BundleError, match=rf"the {name} plane of expert 1 of layer 0 is corrupt .* make it"):
        visit_planes(cache, 0, {1: 2})
    # The other plane is sound, and what needs it alone goes on.
    if plane:
        assert visit_planes(cache, 0, {1: 1}) == [([1], [])]
    reader.spoil = lambda at: False
    assert visit_planes(cache, 0, {1: 2}) == [([1], [])]
