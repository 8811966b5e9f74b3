"""The memory of a service: its caches shrink under a small limit and grow back, and figures tell it all."""

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest

from jaxllm import Engine, EngineOptions
from jaxllm.errors import BudgetExceeded, CheckpointError, ConfigError
from jaxllm.serving.engine.request import Session
from jaxllm.serving.host.machine import memory_bytes
from jaxllm.serving.server import memory as memories
from jaxllm.serving.server import opening
from jaxllm.serving.server.calls import Ended
from jaxllm.serving.server.memory import ServiceMemory
from jaxllm.serving.server.opening import engine_bytes, service_memory, storage_figures
from jaxllm.serving.server.scheduler import SchedulerOptions
from jaxllm.serving.weights.memory_plan import fixed_bytes, whole_budget
from tests.serving.server.executors import make_executor
from tests.serving.server.talking import until
from tests.serving.server.test_executor import call, read, together
from tests.tiny import TINY, write_tiny_bundle

LIMIT = 1 << 30


class World:
    """What a governor measures."""

    def __init__(self, patch):
        self.now, self.fixed, self.looks = 0.0, LIMIT // 2, 0
        self.sessions = self.layers = None
        patch.setattr(memories, "resident_bytes", self.taken)
        patch.setattr(memories, "memory_pressure", lambda: None)

    def memory(self, service, limit_bytes=LIMIT, **options):
        return service_memory(service, limit_bytes, clock=lambda: self.now, **options)

    def taken(self):
        self.looks += 1
        prefixes = 0 if self.sessions is None else self.sessions.size_bytes
        return self.fixed + prefixes + (0 if self.layers is None else self.layers.resident_bytes)


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


@pytest.fixture
def service(plain_service):
    return plain_service


def answered(executor, prompt):
    return together(executor, call(prompt, tokens=4))[0]


def test_prefixes_shrink_under_a_small_limit_and_grow_back(service, world):
    memory = world.memory(service)
    world.sessions = sessions = memory.sessions
    executor = make_executor(service, SchedulerOptions(), memory=memory)
    executor.start()
    try:
        prompt = tuple(range(1, 33))
        first, again = (answered(executor, prompt) for _ in range(2))
        assert (first[0].reused_tokens, again[0].reused_tokens) == (0, 31)
        until(lambda: sessions.size_bytes)
        assert sessions.size_bytes <= sessions.limit_bytes == sessions.most_bytes
        # Something else takes all of the memory.
        world.fixed, world.now = LIMIT, 10.0
        until(lambda: sessions.limit_bytes == 0)
        assert sessions.size_bytes == 0
        assert [answered(executor, prompt)[0].reused_tokens for _ in range(2)] == [0, 0]
        # And gives it back.
        world.fixed = LIMIT // 4
        for _ in range(50):
            if sessions.limit_bytes == sessions.most_bytes:
                break
            # What shrank last grows first.
            looks, world.now = world.looks, world.now + 10.0
            executor._notify()
            until(lambda looks=looks: world.looks > looks)
        assert [answered(executor, prompt)[0].reused_tokens for _ in range(2)] == [0, 31]
    finally:
        executor.stop(0)


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
    world.layers, world.fixed = streamed, 0
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


def test_figures_with_and_without_a_limit(service, world):
    free = service_memory(service).figures(7)
    assert free["process_bytes"] > 1 << 20 > free["limit_bytes"] == 0
    assert set(free["holdings"]) == {"weights", "kv", "prefixes", "contexts"}
    assert free["holdings"]["weights"]["size_bytes"] == service.engine.model.bundle.weight_bytes
    assert free["holdings"]["kv"] == {"size_bytes": 7}
    memory = world.memory(service)
    memory.step()
    figures = memory.figures(7)
    assert (figures["process_bytes"], figures["limit_bytes"]) == (LIMIT // 2, LIMIT)
    prefixes = {"size_bytes": 0, "limit_bytes": LIMIT // 4, "least_bytes": 0}
    assert figures["holdings"]["prefixes"] == prefixes
    assert figures["holdings"]["contexts"]["least_bytes"] > 0


def test_the_memory_of_contexts_follows_what_is_asked_for(service, world):
    contexts = service.contexts
    asked = contexts.options.budget_bytes
    memory = world.memory(service)
    holding = next(each for each in memory._holdings if each.name == "contexts")
    assert holding.most_bytes == asked
    service.resize(asked // 2)
    assert holding.most_bytes == holding.limit_bytes == contexts.memory.budget_bytes == asked // 2
    # Something else takes all: the governor goes below what was asked for, and no higher again.
    world.fixed, world.now = LIMIT, 10.0
    memory.step()
    assert holding.limit_bytes == holding.least_bytes < asked // 2
    world.fixed = 0
    for _ in range(50):
        world.now += 20.0
        memory.step()
    assert holding.limit_bytes == asked // 2
    service.resize(asked)


def test_pressure_is_followed_without_a_limit_where_the_system_tells(service, monkeypatch):
    options = {"follow_pressure": True, "clock": lambda: 100.0}
    monkeypatch.setattr(memories, "memory_pressure", lambda: 0.5)
    memory = service_memory(service, **options)
    assert memory._limit_bytes == memory_bytes()
    holding = next(each for each in memory._holdings if each.name == "contexts")
    before = holding.limit_bytes
    memory.step()
    assert holding.limit_bytes < before
    assert not memory.short_bytes
    service.resize(before)
    monkeypatch.setattr(memories, "memory_pressure", lambda: None)
    with pytest.raises(ConfigError, match="leave out follow_pressure"):
        service_memory(service, **options)


def test_running_caches_are_counted(service):
    executor, seen = make_executor(service, SchedulerOptions()), []
    executor.memory.step = lambda: seen.append(executor.cache_bytes)
    executor.start()
    try:
        answered(executor, tuple(range(1, 40)))
    finally:
        executor.stop(0)
    cache = service.engine.runner.empty_cache(64)
    assert set(seen) == {0, Session(cache=cache).size_bytes}
    assert executor.cache_bytes == 0


def test_where_memory_is_short_answers_run_one_at_a_time(service, monkeypatch):
    monkeypatch.setattr(ServiceMemory, "short_bytes", 1)
    executor = make_executor(service, SchedulerOptions())

    async def run():
        loop, running = asyncio.get_running_loop(), []
        tickets = [executor.submit(call((1, 2, 3), tokens=4), loop) for _ in "12"]
        # In place of its thread.
        executor._one_turn()
        while executor._jobs:
            running.append(len(executor.running()))
            executor._one_turn()
        return running, [(await read(each))[-1] for each in tickets]

    running, ended = asyncio.run(run())
    assert set(running) == {0, 1}
    assert all(isinstance(each, Ended) for each in ended)


def test_a_layer_that_cannot_be_read_again_ends_nothing(service, world, caplog):
    memory = world.memory(service)

    def failing(limit_bytes):
        raise CheckpointError("the disk is gone")

    memory.sessions.resize = failing
    world.fixed = LIMIT
    memory.step()
    assert "memory stays as it is: the disk is gone" in caplog.text


def test_the_engines_part_of_the_budget(monkeypatch):
    monkeypatch.setattr(opening, "resident_bytes", lambda: 300)
    assert engine_bytes(0) == 0
    assert engine_bytes(1000) == 700
    with pytest.raises(BudgetExceeded, match="300 before a model is opened"):
        engine_bytes(300)
