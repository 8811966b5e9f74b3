"""Nested experts by planes: what is read first, what stays, what is damaged, what the runner does with it."""

import dataclasses

import pytest

from jaxllm import Engine
from jaxllm.bundle import Bundle
from jaxllm.errors import BundleError, ConfigError
from jaxllm.serving.experts.store import ExpertStore
from jaxllm.serving.ground.expert_options import ExpertOptions
from tests.kernels.switching import fall_back, needs_native
from tests.serving.experts.conftest import OPTIONS, SPARSE, E, K, inside, wait_until
from tests.serving.experts.test_runner import CONFIG, answer


@pytest.fixture(scope="module")
def store(bundle_of):
    return ExpertStore(Bundle.open(bundle_of(8, "int8-nested")))


@pytest.fixture
def make(caches, store):
    """A cache with room for so many planes, and one thread."""
    size = max(store.plane((0, 0, plane)).memory_bytes for plane in (0, 1))
    return lambda planes, policy="lru": caches(store, planes * size, policy)


def visit(cache, layer, needs, guesses=(), *, together=False):
    """What arrived, in order: experts that are ready, and those that are begun."""
    return [(each.ready, each.begun) for each in cache.visit(layer, needs, guesses, together=together)]


def planes_read(store, reader):
    """The planes in the order in which their first blocks were read."""
    at = {store.plane((0, e, p)).segment.offset: (e, p) for e in range(E) for p in range(2)}
    return [at[offset] for offset in reader.offsets if offset in at]


def test_high_planes_are_read_first_and_late_experts_come_together(make, store):
    assert (store.forms, store.planes_of((0, 1), 1)) == (("nested",), [(0, 1, 0)])
    high, low = store[0, 0].planes
    assert high.segment.offset + high.segment.size_bytes <= low.segment.offset
    cache, reader = make(8)
    assert visit(cache, 0, {3: 2, 1: 2}, together=True) == [([3, 1], [])]
    assert planes_read(store, reader) == [(3, 0), (1, 0), (3, 1), (1, 1)]
    assert visit(cache, 0, {3: 2, 5: 2, 1: 2, 4: 2}, together=True) == [([3, 1], []), ([5, 4], [])]
    # One after the other where there may be no room for all.
    ready = [ready for ready, _ in visit(cache, 1, {0: 2, 1: 2})]
    assert sorted(expert for each in ready for expert in each) == [0, 1]
    # Guesses are read in the order of planes.
    cache, reader = make(8)
    visit(cache, 1, {0: 2}, [(0, 4, 0), (0, 2, 0), (0, 4, 1)])
    wait_until(cache, lambda: {(0, 4, 0), (0, 2, 0), (0, 4, 1)} <= inside(cache))
    assert planes_read(store, reader) == [(4, 0), (2, 0), (4, 1)]
    assert visit(cache, 0, {4: 2, 2: 1}) == [([4, 2], [])]
    assert cache.counts.foreseen == 2
    # Bytes are counted by plane.
    cache, _ = make(8)
    visit(cache, 0, {2: 1, 3: 2})
    (first, second), counts = [plane.segment.size_bytes for plane in store[0, 3].planes], cache.counts
    assert (counts.low_bytes, counts.read_bytes) == (second, 2 * first + second)
    assert (counts.visits, counts.hits, counts.high_alone) == (2, 0, 1)


def test_a_miss_begins_with_the_plane_that_is_there(make, store):
    cache, reader = make(8)
    visit(cache, 0, {2: 1})
    assert planes_read(store, reader) == [(2, 0)]
    assert visit(cache, 0, {2: 2}, together=True) == [([], [2]), ([2], [])]
    assert planes_read(store, reader) == [(2, 0), (2, 1)]
    # Without what is begun it comes whole.
    visit(cache, 0, {4: 1})
    assert visit(cache, 0, {4: 2}) == [([4], [])]


@pytest.mark.parametrize("policy", ["lru", "fifo", "frequency-nearness", "lfu", "lfru"])
def test_a_high_plane_is_evicted_after_its_low_one(make, policy):
    cache, _ = make(4, policy)
    visit(cache, 0, {0: 2, 1: 2})
    visit(cache, 0, {2: 1})
    there = inside(cache)
    assert len(there) == 4
    for layer, expert, plane in there:
        assert plane == 0 or (layer, expert, 0) in there
    visit(cache, 1, {0: 1, 1: 1})
    assert {key for key in inside(cache) if key[2]} == set()
    if policy == "lru":
        # Experts 0 and 1 are as recent, but of 1 the high plane alone was needed last.
        cache, _ = make(4)
        for needs in ({1: 2}, {0: 2}, {1: 1}):
            visit(cache, 0, needs)
        visit(cache, 1, {0: 1})
        assert inside(cache) == {(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)}


def test_more_experts_than_there_is_room_for_do_not_wait_for_each_other(make, store):
    """Resident high planes of later ones make room for the low planes of earlier ones."""
    cache, _ = make(4)
    visit(cache, 0, dict.fromkeys(range(4), 1))
    assert len(inside(cache)) == 4
    arrived = visit(cache, 0, dict.fromkeys(range(E), 2))
    assert sorted(expert for ready, _ in arrived for expert in ready) == list(range(E))
    assert cache.taken_bytes <= cache.budget_bytes


@pytest.mark.parametrize("plane", [0, 1])
def test_a_damaged_plane_is_read_again_and_named(make, store, plane):
    cache, reader = make(8)
    offset = store.plane((0, 1, plane)).segment.offset
    wrong = iter([True])
    reader.spoil = lambda at: at == offset and next(wrong, False)
    assert visit(cache, 0, {1: 2}) == [([1], [])]
    assert planes_read(store, reader).count((1, plane)) == 2
    cache, reader = make(8)
    reader.spoil = lambda at: at == offset
    name = ("high", "low")[plane]
    with pytest.raises(BundleError, match=rf"the {name} plane of expert 1 of layer 0 is corrupt .* make it"):
        visit(cache, 0, {1: 2})
    # The other plane is sound, and what needs it alone goes on.
    if plane:
        assert visit(cache, 0, {1: 1}) == [([1], [])]
    reader.spoil = lambda at: False
    assert visit(cache, 0, {1: 2}) == [([1], [])]


# -- engines ---------------------------------------------------------------------------------------------


NESTED = 8, "int8-nested"


@needs_native
def test_a_layer_is_one_call_and_one_more_for_late_experts(resident_of, streamed_of):
    """A token visits K experts of each sparse layer: a call each before, one for all that are there now."""
    expected, passes = answer(resident_of(*NESTED)), CONFIG.max_tokens
    for experts in (SPARSE * E - 1, 2 * K):
        engine = streamed_of(*NESTED, experts, experts=ExpertOptions(predictor="none"))
        assert answer(engine) == expected
        layers, counts = engine.runner, engine.model.streamed.counts
        layers.visits.calls = counts.visits = counts.hits = 0
        assert answer(engine) == expected
        late, calls = counts.visits - counts.hits, layers.visits.calls
        # The prompt is one chunk, and so one pass; there more experts may be late than come at once.
        assert counts.visits >= passes * SPARSE * K
        assert calls <= 2 * (passes - 1) * SPARSE + E * SPARSE
        if experts > 2 * K:
            assert passes * SPARSE <= calls <= passes * SPARSE + late
        else:
            assert late > passes


@pytest.mark.parametrize("loss", [0.4, 1.0])
def test_a_loss_does_not_depend_on_what_lies_in_memory(streamed_of, loss, compiles, monkeypatch):
    answers = []
    for experts, predictor in ((2 * K, "none"), (6, "router"), (SPARSE * E - 1, "tokens")):
        how = ExpertOptions(loss=loss, predictor=predictor)
        engine = streamed_of(*NESTED, experts, experts=how)
        answers.append(answer(engine))
        facts = engine.model.streamed.facts()
        # A loss of all is the model of high planes.
        assert (facts["low_plane_bytes"] == 0) == (loss == 1.0)
        assert facts["expert_loss"] == loss
        assert 0 < facts["high_plane_share"] <= 1.0
        with compiles() as count:
            assert answer(engine) == answers[-1]
        assert count() == 0
    assert answers[0] == answers[1] == answers[2]
    assert len(set(answers[0])) > 1
    if loss == 1.0:
        # Without native kernels, too, which compute tile by tile.
        fall_back(monkeypatch)
        engine = streamed_of(*NESTED, experts=ExpertOptions(loss=loss))
        assert len(set(answer(engine))) > 1
        assert engine.model.streamed.counts.low_bytes == 0


def test_a_loss_without_nested_experts_is_refused(bundle_of, streamed_of):
    message = r"has no nested experts .* --weights int8-nested --expert-bits 8"
    with pytest.raises(ConfigError, match=message):
        streamed_of(experts=ExpertOptions(loss=0.1))
    # Where all are in memory, too: what is asked for cannot be done by any memory.
    options = dataclasses.replace(OPTIONS, experts=ExpertOptions(loss=0.1))
    with pytest.raises(ConfigError, match=message):
        Engine.open(bundle_of(8, "int8"), options=options, warm_up=False)
    with pytest.raises(ConfigError, match="loss must be a number at least 0 and at most 1"):
        ExpertOptions(loss=1.5)


@needs_native
def test_an_answer_after_a_damaged_one_is_whole(resident_of, streamed_of):
    """What was begun when the other plane could not be read is begun again."""
    engine = streamed_of(*NESTED, 2 * K, experts=ExpertOptions(predictor="none"))
    expected = answer(resident_of(*NESTED))
    cache, store = engine.model.streamed.cache, engine.model.streamed.store
    read, low = cache._reader.read_into, {store.plane((1, e, 1)).segment.offset for e in range(E)}
    left = [12]

    def spoiled(memory, place, offset, size):
        read(memory, place, offset, size)
        if offset in low:
            left[0] -= 1
            if left[0] < 0:
                memory[place] ^= 1

    cache._reader.read_into = spoiled
    with pytest.raises(BundleError, match="the low plane of expert"):
        answer(engine)
    cache._reader.read_into = read
    assert answer(engine) == expected
