"""The memory of a service: figures, holdings that are resized in their order, the division of a budget by
hand and in simulated hours of changing load, and which session a prompt goes on with."""

import asyncio
import dataclasses
import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from jaxllm import Engine, EngineOptions
from jaxllm.errors import BudgetExceeded, CheckpointError, ConfigError
from jaxllm.serving.engine.request import Session
from jaxllm.serving.experts.cache import ExpertCounts
from jaxllm.serving.experts.weights import ExpertWeights
from jaxllm.serving.host.machine import memory_bytes
from jaxllm.serving.server import memory as memories
from jaxllm.serving.server import opening
from jaxllm.serving.server.calls import Ended
from jaxllm.serving.server.memory import Division, Holding, PrefixSessions, ServiceMemory, divide
from jaxllm.serving.server.opening import engine_bytes, service_memory, storage_figures
from jaxllm.serving.server.scheduler import SchedulerOptions
from jaxllm.serving.weights.memory_plan import fixed_bytes, whole_budget
from tests.serving.server.services import call, make_executor, read
from tests.tiny import TINY, write_tiny_bundle

LIMIT = 1000


class World:
    """What a governor measures: something else besides the holdings."""

    def __init__(self, patch):
        self.now, self.fixed, self.looks, self.pressure, self.holdings = 0.0, 100, 0, None, ()
        patch.setattr(memories, "resident_bytes", self.taken)
        patch.setattr(memories, "memory_pressure", lambda: self.pressure)

    def taken(self):
        self.looks += 1
        return self.fixed + sum(each.size_bytes for each in self.holdings)

    def memory(self, service, limit_bytes=LIMIT << 20):
        return service_memory(service, limit_bytes, clock=lambda: self.now)

    def governor(self, *holdings):
        self.holdings = holdings
        return ServiceMemory(LIMIT, 0, holdings=holdings, clock=lambda: self.now)


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def test_layers_of_a_streamed_model_are_let_go_last_and_come_back_first(tmp_path, world):
    cfg = dataclasses.replace(TINY, layers=8, attention_windows=())
    options = EngineOptions(context_tokens=64, chunk_tokens=(16,), decode_block=4, buckets_bytes=0)
    path = write_tiny_bundle(tmp_path / "tiny.jaxllm", cfg=cfg)
    fixed = fixed_bytes(cfg, options.resolve(cfg, quantized=False))
    budget = whole_budget(fixed + 3 * path.stat().st_size // 4)
    engine = Engine.open(path, options=dataclasses.replace(options, memory_bytes=budget))
    streamed, expected = engine.model.streamed, engine.generate("hello").tokens
    most = streamed.resident_bytes
    memory = world.memory(SimpleNamespace(engine=engine, contexts=None), 4 * most)
    assert set(memory.figures(0)["holdings"]) == {"weights", "kv", "prefixes", "layers"}
    world.holdings, world.fixed = memory._holdings, 0
    sizes, limits = [], []
    # What else takes memory, at each look: room for prefixes, for half of the layers, for none, for all.
    before = storage_figures(engine.model)["read_bytes"]["weights"]
    for fixed, looks in ((0, 1), (3.5 * most, 1), (4 * most, 1), (0, 40)):
        world.fixed = int(fixed)
        for _ in range(looks):
            world.now += 20.0
            memory.step()
        sizes.append(streamed.resident_bytes)
        limits.append(memory.sessions.limit_bytes)
        assert engine.generate("hello").tokens == expected
    assert (sizes[0], sizes[2], sizes[3]) == (most, 0, most)
    assert 0 < sizes[1] <= most // 2
    assert limits == [most, 0, 0, most]
    # What was read of storage meanwhile is told.
    assert storage_figures(engine.model)["read_bytes"]["weights"] > before
    engine.close()


def test_figures_and_the_memory_of_contexts_follows_what_is_asked_for(plain_service, world):
    free = service_memory(plain_service).figures(7)
    weights = {"size_bytes": plain_service.engine.model.bundle.weight_bytes}
    assert set(free["holdings"]) == {"weights", "kv", "prefixes", "contexts"}
    assert (free["holdings"]["weights"], free["holdings"]["kv"]) == (weights, {"size_bytes": 7})
    contexts, memory = plain_service.contexts, world.memory(plain_service)
    memory.step()
    figures = memory.figures(7)
    assert (figures["process_bytes"], figures["limit_bytes"]) == (100, LIMIT << 20)
    prefixes = {"size_bytes": 0, "limit_bytes": LIMIT << 18, "least_bytes": 0}
    assert figures["holdings"]["prefixes"] == prefixes
    assert figures["holdings"]["contexts"]["least_bytes"] > 0
    asked = contexts.options.budget_bytes
    holding = next(each for each in memory._holdings if each.name == "contexts")
    assert holding.most_bytes == asked
    plain_service.resize(asked // 2)
    assert holding.most_bytes == holding.limit_bytes == contexts.memory.budget_bytes == asked // 2
    # Something else takes all: the governor goes below what was asked for, and no higher again.
    world.fixed, world.now = LIMIT << 20, 10.0
    memory.step()
    assert holding.limit_bytes == holding.least_bytes < asked // 2
    world.fixed = 0
    for _ in range(50):
        world.now += 20.0
        memory.step()
    assert holding.limit_bytes == asked // 2
    plain_service.resize(asked)


def test_pressure_is_followed_without_a_limit_where_the_system_tells(plain_service, monkeypatch):
    options = {"follow_pressure": True, "clock": lambda: 100.0}
    monkeypatch.setattr(memories, "memory_pressure", lambda: 0.5)
    memory = service_memory(plain_service, **options)
    assert memory._limit_bytes == memory_bytes()
    holding = next(each for each in memory._holdings if each.name == "contexts")
    before = holding.limit_bytes
    memory.step()
    assert holding.limit_bytes < before
    assert not memory.short_bytes
    plain_service.resize(before)
    monkeypatch.setattr(memories, "memory_pressure", lambda: None)
    with pytest.raises(ConfigError, match="leave out follow_pressure"):
        service_memory(plain_service, **options)


def test_where_memory_is_short_answers_run_one_at_a_time_and_their_caches_are_counted(
    plain_service, monkeypatch
):
    monkeypatch.setattr(ServiceMemory, "short_bytes", 1)
    executor = make_executor(plain_service, SchedulerOptions())

    async def run():
        loop, seen = asyncio.get_running_loop(), set()
        tickets = [executor.submit(call((1, 2, 3), tokens=4), loop) for _ in "12"]
        # In place of its thread.
        executor._one_turn()
        while executor._jobs:
            seen.add((len(executor.running()), executor.cache_bytes))
            executor._one_turn()
        return seen, [(await read(each))[-1] for each in tickets]

    seen, ended = asyncio.run(run())
    cache = plain_service.engine.runner.empty_cache(64)
    assert seen == {(0, 0), (1, Session(cache=cache).size_bytes)}
    assert all(isinstance(each, Ended) for each in ended)


def test_a_layer_that_cannot_be_read_again_ends_nothing(plain_service, world, caplog):
    memory = world.memory(plain_service)

    def failing(limit_bytes):
        raise CheckpointError("the disk is gone")

    memory.sessions.resize = failing
    world.fixed = LIMIT << 20
    memory.step()
    assert "memory stays as it is: the disk is gone" in caplog.text


def test_the_engines_part_of_the_budget(monkeypatch):
    monkeypatch.setattr(opening, "resident_bytes", lambda: 300)
    assert engine_bytes(0) == 0
    assert engine_bytes(1000) == 700
    with pytest.raises(BudgetExceeded, match="300 before a model is opened"):
        engine_bytes(300)


def memory_of(name, limit_bytes, least_bytes=0):
    """A holding whose size is what it may be."""

    def resize(to_bytes):
        assert to_bytes >= least_bytes

    made = Holding(
        name, lambda: made.limit_bytes, resize, most=lambda: limit_bytes, least=lambda: least_bytes
    )
    return made


def test_kinds_shrink_in_their_order_however_they_are_given(world):
    experts, drafts = memory_of("experts", 400, 100), memory_of("drafts", 200)
    contexts = memory_of("contexts", 300, 50)
    governor = world.governor(experts, drafts, contexts)
    assert not governor.step()
    world.fixed, world.now = 400, 1.0
    assert governor.step()
    assert (contexts.limit_bytes, drafts.limit_bytes, experts.limit_bytes) == (50, 150, 400)
    assert not governor.step()
    world.fixed, world.now = 700, 2.0
    governor.step()
    assert (contexts.limit_bytes, drafts.limit_bytes, experts.limit_bytes) == (50, 0, 250)
    world.fixed = 100
    for world.now in range(3, 60):
        governor.step()
    # The margin of 5 % stays free.
    assert (contexts.limit_bytes, drafts.limit_bytes, experts.limit_bytes) == (250, 200, 400)


def test_it_looks_once_in_an_interval_and_says_once_that_a_budget_is_too_small(world, caplog):
    for names in (("caches",), ("contexts", "contexts")):
        with pytest.raises(ConfigError, match="different ones of prefixes, contexts, drafts"):
            world.governor(*(memory_of(name, 1) for name in names))
    world.fixed = 900
    governor, before, world.pressure = world.governor(memory_of("contexts", 300, 200)), world.looks, 0.02
    for world.now in (0.0, 0.5, 0.9, 1.0, 1.1):
        governor.step()
    assert (world.looks - before, governor.figures(0)["pressure"], governor.short_bytes) == (2, 0.02, 100)
    (record,) = (each for each in caplog.records if each.levelname == "WARNING")
    assert "1,000 bytes is 100 bytes too small" in record.message


def holding_of(speculation=None, streamed=None):
    """The holding of a service with this part, and a lock of its model."""
    lock = threading.Lock()
    model, runner = SimpleNamespace(streamed=streamed), SimpleNamespace(lock=lock)
    engine = SimpleNamespace(speculation=speculation, model=model, runner=runner)
    (holding,) = opening.holdings(SimpleNamespace(engine=engine, contexts=None))
    return holding, lock


def test_experts_drafts_and_layers_are_holdings():
    cache = SimpleNamespace(
        taken_bytes=5, budget_bytes=9, resize=lambda limit: setattr(cache, "budget_bytes", limit),
        counts=ExpertCounts(visits=9, hits=6, foreseen=2, read_bytes=300),
    )  # fmt: skip
    streamed = ExpertWeights.__new__(ExpertWeights)
    streamed.cache, streamed.store = cache, SimpleNamespace(least_bytes=lambda: 2)
    streamed.counts, streamed.budget_bytes = cache.counts, 9
    holding, _ = holding_of(streamed=streamed)
    assert (holding.size_bytes, holding.limit_bytes, holding.least_bytes, holding.most_bytes) == (5, 9, 2, 9)
    holding.resize(3)
    assert holding.limit_bytes == 3
    assert storage_figures(SimpleNamespace(streamed=streamed)) == {
        "experts": {"visits": 9, "hits": 6, "foreseen": 2, "hit_rate": 6 / 9}, "read_bytes": {"experts": 300}
    }  # fmt: skip
    assert storage_figures(SimpleNamespace(streamed=None)) == {}, "weights in memory are not read"
    # Drafts stop where not all of their memory may be there.
    said, drafter = [], SimpleNamespace(size_bytes=70, most_bytes=100)
    holding, _ = holding_of(SimpleNamespace(draft=said.append, drafter=drafter))
    assert (holding.size_bytes, holding.limit_bytes, holding.most_bytes) == (70, 100, 100)
    for limit in (99, 0, 100):
        holding.resize(limit)
    assert (said, holding.limit_bytes) == ([False, False, True], 100)
    # Layers are resized under the model's lock.
    asked, plan = [], SimpleNamespace(resident_bytes=50)
    weights = SimpleNamespace(plan=plan, resident_bytes=50, resizable=True)
    holding, lock = holding_of(streamed=weights)
    weights.resize = lambda limit: asked.append((limit, lock.locked()))
    holding.resize(20)
    assert (asked, holding.limit_bytes, holding.most_bytes) == ([(20, True)], 20, 50)


START = Division(limits={}, allowance_bytes=1000, restless_s=0.0)


def divided(portions, before, taken, now=1.0, pressure=0.0, limit=LIMIT):
    return divide(portions, before, limit, now_s=now, taken_bytes=taken, pressure=pressure)


def portion(name, size, limit, least=0, most=None):
    most = limit if most is None else most
    return SimpleNamespace(name=name, size_bytes=size, limit_bytes=limit, least_bytes=least, most_bytes=most)


def test_pressure_gives_back_step_by_step_and_takes_again(monkeypatch):
    monkeypatch.setattr(memories, "_STEP", 0.1)
    division, limit, limits = START, 400, []
    for now in range(60):
        pressure = 0.3 if 5 <= now < 8 else 0.05 if now < 20 else 0.0
        portions = [portion("contexts", limit, limit, least=50, most=400)]
        division = divided(portions, division, 400 + limit, now=now, pressure=pressure)
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
        division = divided(portions, division, taken, now=float(now), limit=limit_bytes)
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


SIZE = 100
SYSTEM = tuple(range(40))


class Runner:
    """Copies arrays of bytes."""

    lock, ready = threading.RLock(), True

    def __init__(self, level=100):
        self.weights_version, self.forked = (level, 0), []

    def can_fork(self, cache):
        return self.ready

    def fork(self, cache, tokens):
        self.forked.append(tokens)
        return cache.copy()


@pytest.fixture
def runner():
    return Runner()


def chat(*tokens, size=SIZE):
    cache = np.zeros(size, np.uint8)
    return Session(list(tokens), cache, (100, 0))  # pyright: ignore[reportArgumentType]


def prompt(first, count=30):
    return (*SYSTEM, *range(first, first + count))


def test_a_conversation_that_goes_on_takes_its_session(runner):
    sessions, own = PrefixSessions(10 * SIZE), chat(*prompt(100))
    sessions.keep("mail", "", own)
    assert sessions.take("mail", "", (*prompt(100), 7), runner) is own
    assert (len(sessions), sessions.size_bytes, runner.forked) == (0, 0, [])
    # Also where its last tokens came back as others.
    sessions.keep("mail", "", own)
    assert sessions.take("mail", "", (*prompt(100, 20), 7, 8), runner) is own
    # Another conversation gets a copy of what both have.
    sessions.keep("mail", "", own)
    copied = sessions.take("mail", "", prompt(200), runner)
    assert (copied.tokens, copied.weights_version) == ([*SYSTEM], (100, 0))
    assert copied.cache is not own.cache
    assert (len(sessions), runner.forked) == (1, [len(SYSTEM)])
    assert sessions.take("mail", "", (*prompt(100), 7), runner) is own


def test_the_longest_prefix_is_taken_and_of_equal_ones_the_keys(runner):
    sessions = PrefixSessions(10 * SIZE)
    for key, first in (("a", 100), ("b", 200), ("c", 300)):
        sessions.keep("mail", key, chat(*prompt(first)))
    long = sessions.take("mail", "a", (*prompt(200, 5), 7), runner)
    assert long.tokens == [*prompt(200, 5)]
    # Nothing is copied before its bucket is there.
    runner.ready = False
    assert sessions.take("mail", "a", prompt(400), runner).cache is None
    runner.ready = True
    # All three have the instruction; what was copied from last stays the longest.
    assert sessions.take("mail", "a", prompt(400), runner).tokens == [*SYSTEM]
    sessions.resize(SIZE)
    assert sessions.take("mail", "", (*prompt(100), 7), runner).tokens == [*prompt(100)]


def test_no_session_is_of_use_to_another_app_or_level(runner):
    sessions = PrefixSessions(10 * SIZE)
    sessions.keep("mail", "", chat(*prompt(100)))
    for mine in (prompt(100), prompt(200)):
        assert sessions.take("spy", "", mine, runner).cache is None
        assert sessions.take("mail", "", mine, Runner(50)).cache is None
    assert runner.forked == []
    # Too little in common is computed.
    assert sessions.take("mail", "", (*SYSTEM[:15], 7), runner).cache is None
    assert sessions.take("mail", "", (*SYSTEM[:16], 7), runner).tokens == [*SYSTEM[:16]]
    # What another session of the app has all of is not kept twice.
    sessions.keep("spy", "", chat(*prompt(100)))
    sessions.keep("mail", "", chat(*prompt(100, 31)))
    assert len(sessions) == 2


def test_what_would_be_found_is_told_by_weights(runner):
    sessions = PrefixSessions(10 * SIZE)
    for tokens, level in ((prompt(100), 100), (prompt(200), 100), (prompt(100, 8), 50)):
        each = chat(*tokens)
        each.weights_version = (level, 0)
        sessions.keep("mail", "", each)
    asked = (*prompt(100), 7)
    found = sessions.reusable("mail", asked)
    assert found == {(100, 0): len(prompt(100)), (50, 0): len(SYSTEM) + 8}
    assert (sessions.reusable("news", asked), sessions.reusable("mail", tuple(range(500, 540)))) == ({}, {})
    for level in (100, 50):
        taken = sessions.take("mail", "", asked, Runner(level))
        assert len(taken.tokens) == found[level, 0]


def test_an_app_gives_up_its_own_prefixes_before_others(runner):
    sessions = PrefixSessions(450, lambda app: 250 if app == "small" else 0)
    sessions.keep("mail", "", chat(*range(20)))
    for first in (100, 200, 300):
        sessions.keep("small", "", chat(*range(first, first + 20)))
    assert (len(sessions), sessions.size_bytes) == (3, 300)
    assert sessions.take("small", "", tuple(range(100, 120)), runner).cache is None
    sessions.keep("small", "", chat(*range(400, 420), size=251))
    assert len(sessions) == 3
    for first in (500, 600):
        sessions.keep("mail", "", chat(*range(first, first + 20)))
    # Beyond the limit of all, the least recently used goes, whoever's it is.
    assert sessions.take("mail", "", tuple(range(20)), runner).cache is None
    assert sessions.size_bytes == 400
    sessions.resize(0)
    assert (len(sessions), sessions.size_bytes) == (0, 0)
