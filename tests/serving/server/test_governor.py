"""The governor looks in its interval, resizes in the order of kinds, and tells figures; the division of a
memory budget by hand, and in simulated hours of changing load."""

import contextlib
import logging
import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.serving.contexts.memory import ChunkMemory
from jaxllm.serving.experts.cache import ExpertCounts
from jaxllm.serving.experts.weights import ExpertWeights
from jaxllm.serving.server import memory as memories
from jaxllm.serving.server import opening
from jaxllm.serving.server.memory import Division, Holding, Observed, ServiceMemory, divide
from jaxllm.serving.server.opening import storage_figures


def memory_of(name, limit_bytes, least_bytes=0):
    """A holding whose size is what it may be."""

    def resize(to_bytes):
        assert to_bytes >= least_bytes

    made = Holding(
        name, lambda: made.limit_bytes, resize, most=lambda: limit_bytes, least=lambda: least_bytes
    )
    return made


@pytest.fixture
def world(monkeypatch):
    made = SimpleNamespace(now=0.0, fixed=100, pressure=None, looks=0, patch=monkeypatch)
    monkeypatch.setattr(memories, "memory_pressure", lambda: made.pressure)
    return made


def governor_of(world, *holdings):
    def taken():
        world.looks += 1
        return world.fixed + sum(each.size_bytes for each in holdings)

    world.patch.setattr(memories, "resident_bytes", taken)
    return ServiceMemory(1000, 0, holdings=holdings, clock=lambda: world.now)


def test_it_looks_once_in_an_interval(world):
    governor = governor_of(world, memory_of("contexts", 100))
    for world.now in (0.0, 0.5, 0.9, 1.0, 1.1):
        assert not governor.step()
    assert world.looks == 1 + 2


def test_kinds_shrink_in_their_order_however_they_are_given(world):
    experts, drafts = memory_of("experts", 400, 100), memory_of("drafts", 200)
    contexts = memory_of("contexts", 300, 50)
    governor = governor_of(world, experts, drafts, contexts)
    assert not governor.step()
    world.fixed, world.now = 400, 1.0
    assert governor.step()
    assert (contexts.limit_bytes, drafts.limit_bytes, experts.limit_bytes) == (50, 150, 400)
    assert not governor.step()
    world.fixed, world.now = 700, 2.0
    governor.step()
    assert (contexts.limit_bytes, drafts.limit_bytes, experts.limit_bytes) == (50, 0, 250)
    world.fixed = 100
    for now in range(3, 60):
        world.now = float(now)
        governor.step()
    # The margin of 5 % stays free.
    assert (contexts.limit_bytes, drafts.limit_bytes, experts.limit_bytes) == (250, 200, 400)


def test_a_budget_that_is_too_small_is_told_once(world, caplog):
    governor = governor_of(world, memory_of("contexts", 300, 200))
    world.fixed = 900
    with caplog.at_level(logging.WARNING):
        for now in range(3):
            world.now = float(now)
            governor.step()
    assert governor.short_bytes == 100
    assert [each.message for each in caplog.records] == [
        "the memory budget of 1,000 bytes is 100 bytes too small although all that can shrink has: until it "
        "is enough, answers begin one at a time; give more, or ask for shorter contexts"
    ]


def test_figures_and_kinds(world):
    for names in (("caches",), ("contexts", "contexts")):
        with pytest.raises(ConfigError, match="different ones of prefixes, contexts, drafts"):
            governor_of(world, *(memory_of(name, 1) for name in names))
    governor = governor_of(world, memory_of("contexts", 300, 50))
    world.pressure = 0.02
    governor.step()
    assert governor.figures(0)["pressure"] == 0.02


def holdings_of(contexts=None, speculation=None, streamed=None, lock=None):
    """The holdings of a service with these parts."""
    options = SimpleNamespace(context_tokens=128, kv_chunk_tokens=16)
    engine = SimpleNamespace(
        levels=(100,), runner_at=lambda level: None, options=options, speculation=speculation,
        model=SimpleNamespace(streamed=streamed),
        runner=SimpleNamespace(lock=lock or contextlib.nullcontext()),
    )  # fmt: skip
    return opening.holdings(SimpleNamespace(engine=engine, contexts=contexts))


def test_contexts_give_chunks_back(monkeypatch):
    memory = ChunkMemory(1000)
    for name, pinned in (("mail", False), ("notes", True)):
        memory.claim(name, 4, pinned=pinned)
        for chunk in range(4):
            memory.load(name, chunk, 8, [np.zeros(100, np.uint8)])
        memory.release(name)
    contexts = SimpleNamespace(memory=memory, options=SimpleNamespace(budget_bytes=1000))
    monkeypatch.setattr(opening, "chunk_io_of", lambda runner: None)
    monkeypatch.setattr(opening, "most_bytes", lambda *_: 200)
    (holding,) = holdings_of(contexts=contexts)
    # What is pinned, and room for the longest.
    assert (holding.size_bytes, holding.limit_bytes, holding.least_bytes) == (800, 1000, 600)
    holding.resize(600)
    assert (holding.size_bytes, holding.limit_bytes) == (600, 600)
    assert len(memory.chunks("notes")) == 4
    memory.pin("notes", False)
    assert holding.least_bytes == 200


def test_experts_drafts_and_layers_are_holdings():
    cache = SimpleNamespace(
        taken_bytes=5, budget_bytes=9, resize=lambda limit: setattr(cache, "budget_bytes", limit),
        counts=ExpertCounts(visits=9, hits=6, foreseen=2, read_bytes=300),
    )  # fmt: skip
    streamed = ExpertWeights.__new__(ExpertWeights)
    streamed.cache, streamed.store = cache, SimpleNamespace(least_bytes=lambda: 2)
    streamed.counts = cache.counts
    streamed.budget_bytes = 9
    (holding,) = holdings_of(streamed=streamed)
    assert (holding.size_bytes, holding.limit_bytes, holding.least_bytes, holding.most_bytes) == (5, 9, 2, 9)
    holding.resize(3)
    assert holding.limit_bytes == 3
    assert storage_figures(SimpleNamespace(streamed=streamed)) == {
        "experts": {"visits": 9, "hits": 6, "foreseen": 2, "hit_rate": 6 / 9}, "read_bytes": {"experts": 300}
    }  # fmt: skip
    assert storage_figures(SimpleNamespace(streamed=None)) == {}, "weights in memory are not read"
    # Drafts stop where not all of their memory may be there.
    said, drafter = [], SimpleNamespace(size_bytes=70, most_bytes=100)
    (holding,) = holdings_of(speculation=SimpleNamespace(draft=said.append, drafter=drafter))
    assert (holding.size_bytes, holding.limit_bytes, holding.most_bytes) == (70, 100, 100)
    for limit in (99, 0, 100):
        holding.resize(limit)
    assert (said, holding.limit_bytes) == ([False, False, True], 100)
    # Layers are resized under the model's lock.
    lock, asked = threading.Lock(), []
    weights = SimpleNamespace(
        plan=SimpleNamespace(resident_bytes=50), resident_bytes=50, resizable=True,
        resize=lambda limit: asked.append((limit, lock.locked())),
    )  # fmt: skip
    (holding,) = holdings_of(streamed=weights, lock=lock)
    holding.resize(20)
    assert (asked, holding.limit_bytes, holding.most_bytes) == ([(20, True)], 20, 50)


LIMIT = 1000


@pytest.fixture
def large_steps(monkeypatch):
    monkeypatch.setattr(memories, "_STEP", 0.1)


START = Division(limits={}, allowance_bytes=1000, restless_s=0.0)


def portion(name, size, limit, least=0, most=None):
    most = limit if most is None else most
    return SimpleNamespace(name=name, size_bytes=size, limit_bytes=limit, least_bytes=least, most_bytes=most)


def seen(taken, now=1.0, pressure=0.0):
    return Observed(now_s=now, taken_bytes=taken, pressure=pressure)


@pytest.mark.parametrize(
    ("fixed", "limits", "short"),
    [
        (600, [100, 200, 0, 100], 0), (650, [50, 200, 0, 100], 0), (700, [20, 180, 0, 100], 0),
        (850, [20, 30, 0, 100], 0), (900, [20, 30, 0, 50], 0), (960, [20, 30, 0, 40], 50),
    ],
)  # fmt: skip
def test_who_shrinks_first(fixed, limits, short):
    """What fits stays, and a budget that cannot be kept is told."""
    names, sizes, least = ("prefixes", "contexts", "drafts", "experts"), (100, 200, 0, 100), (20, 30, 0, 40)
    portions = [
        portion(name, size, size, floor) for name, size, floor in zip(names, sizes, least, strict=True)
    ]
    got = divide(portions, START, seen(fixed + 400), LIMIT)
    assert (list(got.limits.values()), got.short_bytes) == (limits, short)
    assert got.restless_s == (0.0 if fixed == 600 else 1.0)


def test_unused_room_is_not_promised_twice():
    # Nothing is taken yet, but both could grow to their limits.
    portions = [portion("contexts", 0, 600), portion("experts", 0, 600)]
    assert divide(portions, START, seen(0), LIMIT).limits == {"contexts": 400, "experts": 600}


def test_limits_grow_by_steps_when_it_is_calm(large_steps):
    portions = [portion("contexts", 10, 10, most=300), portion("experts", 10, 10, most=60)]
    assert divide(portions, START, seen(500, now=9.9), LIMIT).limits == {"contexts": 10, "experts": 10}
    # A step is 100: the last that shrank grows first.
    assert divide(portions, START, seen(500, now=10.0), LIMIT).limits == {"contexts": 60, "experts": 60}
    # Of the 80 that are free, the margin of 50 stays.
    tight = divide(portions, START, seen(920, now=10.0), LIMIT)
    assert tight.limits == {"contexts": 10, "experts": 40}


def test_what_grew_does_not_shrink_at_once_again(large_steps):
    portions = [portion("contexts", 100, 100, most=900)]
    division, now, limit = START, 10.0, 100
    for _ in range(100):
        division = divide(portions, division, seen(600, now=now), LIMIT)
        now, limit = now + 1, division.limits["contexts"]
        portions = [portion("contexts", 100, limit, most=900)]
        # Fixed memory differs by less than the margin from look to look.
        noisy = divide(portions, division, seen(649, now=now), LIMIT)
        assert noisy.limits["contexts"] >= limit
    assert limit == 450


def test_pressure_gives_back_step_by_step_and_takes_again(large_steps):
    division, limit, limits = START, 400, []
    for now in range(60):
        pressure = 0.3 if 5 <= now < 8 else 0.05 if now < 20 else 0.0
        portions = [portion("contexts", limit, limit, least=50, most=400)]
        division = divide(portions, division, seen(400 + limit, now=now, pressure=pressure), LIMIT)
        limit = division.limits["contexts"]
        limits.append(limit)
    # What is taken counts, not what was allowed; a third step may not take the least.
    assert limits[4:9] == [400, 300, 200, 100, 100]
    assert limits[8:29] == [100] * 21
    assert limits[-1] == 400
    assert sorted(limits[30:]) == limits[30:]
    assert division.allowance_bytes == 1000


def test_simulated_load_stays_within_the_budget():
    """Running caches come and go, contexts fill what they may: the process never takes more than its limit
    for longer than a step, the order holds, and limits do not flap."""
    draw = random.Random(1)
    limit_bytes = 10_000
    division = Division(limits={}, allowance_bytes=10_000, restless_s=0.0)
    names, least, most = ("prefixes", "contexts", "experts"), (0, 500, 1500), (1000, 3000, 4000)
    limits, sizes = list(most), [0, 0, 0]
    fixed = 3000.0
    over = changes = 0
    for now in range(20_000):
        # A load that changes slowly, with calls that come and go.
        fixed = min(7900, max(2500, fixed + draw.gauss(0, 40)))
        taken_by_calls = draw.randrange(0, 100)
        sizes = [min(limit, size + draw.randrange(60)) for limit, size in zip(limits, sizes, strict=True)]
        taken = int(fixed) + taken_by_calls + sum(sizes)
        over += taken > limit_bytes
        portions = [
            portion(name, size, limit, floor, top)
            for name, size, limit, floor, top in zip(names, sizes, limits, least, most, strict=True)
        ]
        division = divide(portions, division, seen(taken, now=float(now)), limit_bytes)
        after = [division.limits[name] for name in names]
        changes += after != limits
        room = limit_bytes - (taken - sum(sizes))
        assert sum(after) <= max(room, sum(least))
        assert all(low <= each <= high for low, each, high in zip(least, after, most, strict=True))
        if any(new < old for new, old in zip(after, limits, strict=True)):
            # Nobody shrinks before all earlier ones are at their least.
            first = max(at for at in range(3) if after[at] < limits[at])
            assert all(after[at] == least[at] for at in range(first))
            assert not any(new > old for new, old in zip(after, limits, strict=True))
        limits, sizes = after, [min(size, limit) for size, limit in zip(sizes, after, strict=True)]
    # Over it only until the next look, which is at once.
    assert over < 0.05 * 20_000
    assert changes < 0.3 * 20_000
