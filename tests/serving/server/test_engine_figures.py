"""Figures of an engine: what it read from storage, of weights and of experts."""

import dataclasses
from types import SimpleNamespace

from jaxllm import Engine, EngineOptions
from jaxllm.serving.experts.counts import ExpertCounts
from jaxllm.serving.experts.weights import ExpertWeights
from jaxllm.serving.server.holdings import storage_figures
from jaxllm.serving.weights.footprint import fixed_bytes
from jaxllm.serving.weights.prefetch_plan import whole_budget
from tests.tiny import TINY, write_tiny_bundle

CFG = dataclasses.replace(TINY, layers=8, attention_windows=())
OPTIONS = EngineOptions(context_tokens=64, chunk_tokens=(16,), decode_block=4, buckets_bytes=0)


def test_weights_in_memory_are_not_read():
    assert storage_figures(SimpleNamespace(streamed=None)) == {}


def test_streamed_weights_tell_what_was_read(tmp_path):
    path = write_tiny_bundle(tmp_path / "tiny.jaxllm", cfg=CFG)
    fixed = fixed_bytes(CFG, OPTIONS.resolve(CFG, quantized=False))
    budget = whole_budget(fixed + 3 * path.stat().st_size // 4)
    engine = Engine.open(path, options=dataclasses.replace(OPTIONS, memory_bytes=budget))
    try:
        before = storage_figures(engine.model)["read_bytes"]["weights"]
        engine.generate("hello")
        assert storage_figures(engine.model)["read_bytes"]["weights"] > before
    finally:
        engine.close()


def test_experts_tell_their_visits():
    streamed = ExpertWeights.__new__(ExpertWeights)
    streamed.cache = SimpleNamespace(counts=ExpertCounts(visits=9, hits=6, foreseen=2, read_bytes=300))
    assert storage_figures(SimpleNamespace(streamed=streamed)) == {
        "experts": {"visits": 9, "hits": 6, "foreseen": 2},
        "read_bytes": {"experts": 300},
    }
