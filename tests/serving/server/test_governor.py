"""The governor looks in its interval, resizes in the order of kinds, and tells figures; the division of a
memory budget by hand, and in simulated hours of changing load."""

import contextlib
import dataclasses
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
from jaxllm.serving.host.machine import process_memory, resident_bytes
from jaxllm.serving.server.memory import Division, MemoryOptions, Observed, ServiceMemory, divide
from jaxllm.serving.server.opening import of_contexts, of_drafts, of_experts, of_layers, storage_figures


@dataclasses.dataclass
class Memory:
    """A holding whose size is what it may be."""

    name: str
    limit_bytes: int
    least_bytes: int = 0

    def __post_init__(self):
        self.most_bytes = self.limit_bytes

    @property
    def size_bytes(self):
        return self.limit_bytes

    def resize(self, limit_bytes):
        assert limit_bytes >= self.least_bytes
        self.limit_bytes = limit_bytes


@pytest.fixture
def world():
    return SimpleNamespace(now=0.0, fixed=100, pressure=None, looks=0)


def governor_of(world, *holdings, **options):
    def taken():
        world.looks += 1
        return world.fixed + sum(each.size_bytes for each in holdings)

    return ServiceMemory(
        MemoryOptions(limit_bytes=1000, prefix_bytes=0, **options), holdings=holdings,
        taken_bytes=taken, pressure=lambda: world.pressure, clock=lambda: world.now,
    )  # fmt: skip


def test_it_looks_once_in_an_interval(world):
    governor = governor_of(world, Memory("contexts", 100), interval_s=2.0)
    for world.now in (0.0, 0.5, 1.9, 2.0, 2.1):
        assert not governor.step()
    assert world.looks == 1 + 2


def test_kinds_shrink_in_their_order_however_they_are_given(world):
    experts, drafts = Memory("experts", 400, 100), Memory("drafts", 200)
    contexts = Memory("contexts", 300, 50)
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
    governor = governor_of(world, Memory("contexts", 300, 200))
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
            governor_of(world, *(Memory(name, 1) for name in names))
    governor = governor_of(world, Memory("contexts", 300, 50))
    governor.step()
    figures = governor.figures(70)
    assert figures == {
        "process_bytes": 400, "limit_bytes": 1000,
        "holdings": {
            "weights": {"size_bytes": 0}, "kv": {"size_bytes": 70},
            "prefixes": {"size_bytes": 0, "limit_bytes": 0, "least_bytes": 0},
            "contexts": {"size_bytes": 300, "limit_bytes": 300, "least_bytes": 50},
        },
    }  # fmt: skip
    world.pressure, world.now = 0.02, 1.0
    governor.step()
    assert governor.figures(0)["pressure"] == 0.02


def test_the_process_is_measured():
    # The system counts pages of statm in batches, so that the two differ a little.
    assert abs(resident_bytes() - process_memory().resident) < 32 << 20


def test_contexts_give_chunks_back():
    memory = ChunkMemory(1000)
    for name, pinned in (("mail", False), ("notes", True)):
        memory.claim(name, 4, pinned=pinned)
        for chunk in range(4):
            memory.load(name, chunk, 8, [np.zeros(100, np.uint8)])
        memory.release(name)
    holding = of_contexts(memory, 200, lambda: 1000)
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
    streamed.counts = cache.counts
    holding = of_experts(
        SimpleNamespace(cache=cache, store=SimpleNamespace(least_bytes=lambda: 2), budget_bytes=9)
    )
    assert (holding.size_bytes, holding.limit_bytes, holding.least_bytes, holding.most_bytes) == (5, 9, 2, 9)
    holding.resize(3)
    assert holding.limit_bytes == 3
    assert storage_figures(SimpleNamespace(streamed=streamed)) == {
        "experts": {"visits": 9, "hits": 6, "foreseen": 2, "hit_rate": 6 / 9}, "read_bytes": {"experts": 300}
    }  # fmt: skip
    assert storage_figures(SimpleNamespace(streamed=None)) == {}, "weights in memory are not read"
    # Drafts stop where not all of their memory may be there.
    said, memory = [], SimpleNamespace(size_bytes=70, most_bytes=100)
    holding = of_drafts(said.append, memory, contextlib.nullcontext())
    assert (holding.size_bytes, holding.limit_bytes, holding.most_bytes) == (70, 100, 100)
    for limit in (99, 0, 100):
        holding.resize(limit)
    assert (said, holding.limit_bytes) == ([False, False, True], 100)
    # Layers are resized under the model's lock.
    lock, asked = threading.Lock(), []
    weights = SimpleNamespace(
        plan=SimpleNamespace(resident_bytes=50), resident_bytes=50,
        resize=lambda limit: asked.append((limit, lock.locked())),
    )  # fmt: skip
    holding = of_layers(weights, lock)
    holding.resize(20)
    assert (asked, holding.limit_bytes, holding.most_bytes) == ([(20, True)], 20, 50)


OPTIONS = MemoryOptions(limit_bytes=1000, step=0.1, margin=0.05, calm_s=10.0)
START = Division(limits={}, allowance_bytes=1000, restless_s=0.0)


def portion(name, size, limit, least=0, most=None):
    return SimpleNamespace(
        name=name, size_bytes=size, limit_bytes=limit, least_bytes=least,
        most_bytes=limit if most is None else most,
    )  # fmt: skip


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
    got = divide(portions, START, seen(fixed + 400), OPTIONS)
    assert (list(got.limits.values()), got.short_bytes) == (limits, short)
    assert got.restless_s == (0.0 if fixed == 600 else 1.0)


def test_unused_room_is_not_promised_twice():
    # Nothing is taken yet, but both could grow to their limits.
    portions = [portion("contexts", 0, 600), portion("experts", 0, 600)]
    assert divide(portions, START, seen(0), OPTIONS).limits == {"contexts": 400, "experts": 600}


def test_limits_grow_by_steps_when_it_is_calm():
    portions = [portion("contexts", 10, 10, most=300), portion("experts", 10, 10, most=60)]
    assert divide(portions, START, seen(500, now=9.9), OPTIONS).limits == {"contexts": 10, "experts": 10}
    # A step is 100: the last that shrank grows first.
    assert divide(portions, START, seen(500, now=10.0), OPTIONS).limits == {"contexts": 60, "experts": 60}
    # Of the 80 that are free, the margin of 50 stays.
    tight = divide(portions, START, seen(920, now=10.0), OPTIONS)
    assert tight.limits == {"contexts": 10, "experts": 40}


def test_what_grew_does_not_shrink_at_once_again():
    portions = [portion("contexts", 100, 100, most=900)]
    division, now, limit = START, 10.0, 100
    for _ in range(100):
        division = divide(portions, division, seen(600, now=now), OPTIONS)
        now, limit = now + 1, division.limits["contexts"]
        portions = [portion("contexts", 100, limit, most=900)]
        # Fixed memory differs by less than the margin from look to look.
        noisy = divide(portions, division, seen(649, now=now), OPTIONS)
        assert noisy.limits["contexts"] >= limit
    assert limit == 450


def test_pressure_gives_back_step_by_step_and_takes_again():
    division, limit, limits = START, 400, []
    for now in range(60):
        pressure = 0.3 if 5 <= now < 8 else 0.05 if now < 20 else 0.0
        portions = [portion("contexts", limit, limit, least=50, most=400)]
        division = divide(portions, division, seen(400 + limit, now=now, pressure=pressure), OPTIONS)
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
    options = MemoryOptions(limit_bytes=10_000)
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
        over += taken > options.limit_bytes
        portions = [
            portion(name, size, limit, floor, top)
            for name, size, limit, floor, top in zip(names, sizes, limits, least, most, strict=True)
        ]
        division = divide(portions, division, seen(taken, now=float(now)), options)
        after = [division.limits[name] for name in names]
        changes += after != limits
        room = options.limit_bytes - (taken - sum(sizes))
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


def test_options_are_checked():
    for wrong, message in (
        ({"limit_bytes": -1}, "limit_bytes must be"), ({"step": 0.0}, "step must be"),
        ({"margin": 1.5}, "margin must be"), ({"calm_s": -1}, "calm_s must be"),
        ({"pressure_low": 0.2}, "pressure_low must be below"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            MemoryOptions(**{"limit_bytes": 10, **wrong})
