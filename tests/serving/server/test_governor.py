"""The governor: it looks in its interval, resizes in the order of kinds, and tells figures."""

import contextlib
import dataclasses
import logging
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.serving.contexts.memory import ChunkMemory
from jaxllm.serving.experts.counts import ExpertCounts
from jaxllm.serving.experts.weights import ExpertWeights
from jaxllm.serving.host.process_memory import process_memory, resident_bytes
from jaxllm.serving.server.holdings import (
    ContextChunks,
    Drafts,
    ExpertBuffer,
    ResidentLayers,
    storage_figures,
)
from jaxllm.serving.server.memory import Governor, GovernorOptions


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

    return Governor(
        holdings, GovernorOptions(limit_bytes=1000, **options),
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
    figures = governor.figures({"weights": 70})
    assert figures == {
        "process_bytes": 400, "limit_bytes": 1000,
        "holdings": {
            "weights": {"size_bytes": 70},
            "contexts": {"size_bytes": 300, "limit_bytes": 300, "least_bytes": 50},
        },
    }  # fmt: skip
    world.pressure, world.now = 0.02, 1.0
    governor.step()
    assert governor.figures()["pressure"] == 0.02


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
    holding = ContextChunks(memory=memory, floor_bytes=200, asked_bytes=lambda: 1000)
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
    streamed.cache = cache
    holding = ExpertBuffer(
        SimpleNamespace(cache=cache, store=SimpleNamespace(least_bytes=lambda: 2), budget_bytes=9)
    )
    assert (holding.size_bytes, holding.limit_bytes, holding.least_bytes, holding.most_bytes) == (5, 9, 2, 9)
    holding.resize(3)
    assert holding.limit_bytes == 3
    assert storage_figures(SimpleNamespace(streamed=streamed)) == {
        "experts": {"visits": 9, "hits": 6, "foreseen": 2}, "read_bytes": {"experts": 300}
    }  # fmt: skip
    assert storage_figures(SimpleNamespace(streamed=None)) == {}, "weights in memory are not read"
    # Drafts stop where not all of their memory may be there.
    said, memory = [], SimpleNamespace(size_bytes=70, most_bytes=100)
    holding = Drafts(SimpleNamespace(draft=said.append), memory, contextlib.nullcontext())
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
    holding = ResidentLayers(weights, lock)
    holding.resize(20)
    assert (asked, holding.limit_bytes, holding.most_bytes) == ([(20, True)], 20, 50)
