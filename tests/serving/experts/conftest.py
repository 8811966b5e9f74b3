"""A mixture of four layers, one of them dense, whose experts are stored separately at widths of their own."""

import contextlib
import dataclasses
import functools

import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.bundle.calibrations import expert_parts
from jaxllm.experts.prediction import POLICIES, count_paths, count_tokens
from jaxllm.serving.experts import cache as cache_module
from jaxllm.serving.experts.cache import ExpertCache
from jaxllm.serving.experts.store import ExpertStore
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.host.direct_io import PieceReader
from jaxllm.serving.opening.weight_source import budget_with_experts
from jaxllm.serving.runners.layerwise import LayerwiseRunner
from tests.tiny import TINY, tiny_params, write_tiny_bundle

E, K = 6, 2
CFG = dataclasses.replace(
    TINY, model_type="qwen3_moe", qk_norm=True, layers=4, attention_windows=(), experts=E,
    experts_per_token=K, expert_ffn_size=256, sparse_layers=(True, False, True, True),
)  # fmt: skip
SPARSE = sum(CFG.sparse_layers)
OPTIONS = EngineOptions(
    context_tokens=128, cache_tokens=(128,), chunk_tokens=(16,), decode_block=4, buckets_bytes=0
)
MIXED = np.random.default_rng(0).choice([2, 4, 8], (SPARSE, E))


def drawn_params(cfg=CFG):
    """Routers far from uniform, so that answers depend on them."""
    return {
        name: np.asarray(value) * np.float32(3.0 if name.endswith("router") else 1.0)
        for name, value in tiny_params(cfg).items()
    }


@pytest.fixture(scope="session")
def bundle_of(tmp_path_factory):
    """A bundle by the width of its experts ("mixed" for some of each), apart or together."""

    @functools.cache
    def written(width, weights, apart):
        path = tmp_path_factory.mktemp("experts") / f"{width}.jaxllm"
        bits = MIXED if width == "mixed" else np.full((SPARSE, E), width)
        ids = np.random.default_rng(1).permuted(np.tile(np.arange(E), (SPARSE, 200, 1)), axis=-1)[..., :K]
        tokens = count_tokens(ids, np.arange(200) % CFG.vocab_size, E)
        parts = expert_parts(count_paths(ids, E), tokens=tokens)
        return write_tiny_bundle(
            path, weights, cfg=CFG, params=drawn_params(), parts=parts,
            expert_bits=bits if apart else None,
        )  # fmt: skip

    return lambda width="mixed", weights="f32", apart=True: written(width, weights, apart)


@pytest.fixture(scope="session")
def resident_of(bundle_of):
    """An engine with all weights in memory."""

    @functools.cache
    def opened(width, weights, apart):
        return Engine.open(bundle_of(width, weights, apart), options=OPTIONS, warm_up=False)

    return lambda width="mixed", weights="f32", apart=True: opened(width, weights, apart)


def budget(engine, experts, **options):
    """Memory for so many experts of the largest width, and all else of an engine with some other options."""
    bundle, options = engine.model.bundle, dataclasses.replace(engine.options, **options)
    return budget_with_experts(bundle, options, experts * ExpertStore(bundle).largest_bytes)


@pytest.fixture
def streamed_of(bundle_of, resident_of):
    """Opens engines with memory for so many experts, and closes them after the test."""
    with contextlib.ExitStack() as closing:

        def opened(width="mixed", weights="f32", room=6, **options):
            options = {"memory_bytes": budget(resident_of(width, weights), room), **options}
            how = dataclasses.replace(OPTIONS, **options)
            engine = Engine.open(bundle_of(width, weights), options=how, warm_up=False)
            closing.callback(engine.close)
            assert isinstance(engine.runner, LayerwiseRunner)
            return engine

        yield opened


def inside(cache):
    """The planes that are in memory."""
    return {key for key, slot in cache._slots.items() if slot.ready}


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
def caches(monkeypatch):
    """Makes caches of one thread and of so many bytes, and what reads for them."""
    monkeypatch.setattr(cache_module, "_THREADS", 1)
    made = []

    def of(store, budget_bytes, policy="lru"):
        reader, frequency = Reader(store.bundle.path), np.zeros((SPARSE, E))
        how = {"policy": POLICIES[policy], "frequency": frequency}
        made.append(ExpertCache(store, reader, budget_bytes=budget_bytes, **how))
        return made[-1], reader

    yield of
    for each in made:
        each.close()


def wait_until(cache, condition):
    with cache._lock:
        assert cache._came.wait_for(condition, timeout=60)
