"""Memory is spared: buckets are compiled in another process, those of several rows are loaded when they are
needed, answers stay the same, and a service says what its memory holds, which is little."""

import concurrent.futures
import dataclasses
import re
import sys
import time
from pathlib import Path

import httpx
import pytest

from jaxllm import Engine, EngineOptions, GenerationConfig
from jaxllm.serving.buckets import compiler
from jaxllm.serving.buckets.model import BatchBucket
from jaxllm.serving.engine.step import batchable, decode_together, step
from tests.kernels.switching import needs_native
from tests.serving.server.daemons import Process
from tests.tiny import write_tiny_bundle

pytestmark = pytest.mark.usefixtures("own_compilations")

OPTIONS = EngineOptions(
    context_tokens=64, chunk_tokens=(16,), decode_block=4, batch_rows=(2, 4), spare_memory=True
)
CONFIG = GenerationConfig(max_tokens=12, ignore_eos=True)
# Of a process on Linux besides weights and caches; measured were 137 MB.
MOST_BYTES = 190_000_000


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JAXLLM_BUCKETS_BYTES", raising=False)
    return tmp_path / "cache"


def together(engine, count):
    """The tokens of answers that are decoded together, and the rows of buckets that are then ready."""
    runs = [engine.stream([5 + number, 7, 9], CONFIG) for number in range(count)]
    while running := [run for run in runs if run.stage != "ended"]:
        for run in running:
            if not batchable(run):
                step(run)
        decode_together([run for run in running if batchable(run)])
    table = engine.runner.buckets
    concurrent.futures.wait(table._pending.values())
    ready = [
        rows for rows in (2, 4) if table.is_ready(BatchBucket(rows=rows, block_tokens=4, cache_tokens=64))
    ]
    return [run.tokens for run in runs], ready


@needs_native
def test_buckets_are_compiled_apart_and_loaded_when_needed(tmp_path, cache, compiles):
    path = write_tiny_bundle(tmp_path / "tiny.jaxllm", "int8")
    with compiles() as count:
        engine = Engine.open(path, options=OPTIONS)
        assert len([*cache.rglob("*.graph")]) == 4
        engine.runner.buckets.keep(engine.model.later_buckets())
        stored = {*cache.rglob("*.graph")}
        assert engine.model.facts() == {"loaded_buckets": 0, "compiled_buckets": 4}
        # Two of several rows, and one that asks for masks, are on disk alone.
        assert len(stored) == 7
        expected = [engine.generate([5 + number, 7, 9], CONFIG).tokens for number in range(5)]
        assert together(engine, 1) == (expected[:1], [])
        # At first one by one, then by as many rows as are ready.
        assert together(engine, 2)[0] == expected[:2]
        for number in (2, 5, 5, 3):
            tokens, ready = together(engine, number)
            assert tokens == expected[:number]
        assert ready == [2, 4]
        assert {*cache.rglob("*.graph")} == stored
        again = Engine.open(path, options=OPTIONS)
        assert again.model.facts() == {"loaded_buckets": 4, "compiled_buckets": 0}
    assert count() == 0


@needs_native
@pytest.mark.parametrize("fault", ["settings", "no Python", "killed"])
def test_what_another_process_cannot_compile_is_compiled_here(tmp_path, cache, monkeypatch, caplog, fault):
    if fault == "settings":
        monkeypatch.setattr(
            compiler, "_BOOT", compiler._BOOT.replace("environment_facts()", "environment_facts() | {1: 1}")
        )
    elif fault == "no Python":
        monkeypatch.setattr(sys, "executable", "")
    else:
        monkeypatch.setattr(compiler, "_BOOT", "import os; os.kill(os.getpid(), 9)")
    path = write_tiny_bundle(tmp_path / "tiny.jaxllm", "int8")
    engine = Engine.open(path, options=dataclasses.replace(OPTIONS, batch_rows=(2,)))
    said = {"settings": "set up differently", "no Python": "has no Python", "killed": "0 of 4 were: exit -9"}
    assert said[fault] in caplog.text
    assert engine.generate([5, 7, 9], CONFIG).tokens


@needs_native
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="looks into /proc")
def test_a_service_says_what_its_memory_holds(tmp_path, cache):
    model = write_tiny_bundle(tmp_path / "tiny.jaxllm", "int8")
    with Process(tmp_path, "--model", model, "--http", "127.0.0.1:0") as process:
        url = process.ready()

        def call(number):
            body = {"prompt": f"hello {number}", "max_tokens": 24, "temperature": 0}
            assert httpx.post(url + "/v1/completions", json=body, timeout=60).status_code == 200

        call(0)

        def held():
            """Bytes by name, by part and by kind of page."""
            found = re.findall(r"(?m)^jaxllm_memory_(\S+) (\S+)$", httpx.get(url + "/metrics").text)
            named = {name: float(value) for name, value in found}
            return named, *(
                {name.split('"')[1]: value for name, value in named.items() if name.startswith(kind)}
                for kind in ("part", "pages")
            )

        found, parts, pages = held()
        assert sum(parts.values()) == sum(pages.values()) == found["bytes"]
        assert {"python", "jax", "tokenizer", "weights", "buckets", "libraries", "kv", "rest"} <= {*parts}
        assert abs(parts["rest"]) < 0.25 * found["bytes"]
        until = time.monotonic() + 120
        while found["bytes"] + found["children_bytes"] - parts["weights"] - parts["prefixes"] >= MOST_BYTES:
            # Another process compiles at a first start what only some calls need.
            assert time.monotonic() < until, found
            time.sleep(1)
            found, parts, pages = held()
        stored = {*cache.rglob("*.graph")}
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            [*pool.map(call, range(24))]
        assert {*cache.rglob("*.graph")} == stored != set()
