"""Engines that serve contexts, each compiled once for the room."""

import dataclasses
import functools

import pytest

from jaxllm import Engine
from jaxllm.bundle.levels import elastic_parts
from jaxllm.elastic.ladder import Ladder
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.ground.options import EngineOptions
from tests.serving.contexts.talking import READ, reopening
from tests.serving.memory import budget
from tests.tiny import TINY, tiny_params, write_tiny_bundle

# The first and the last layer share buckets, the one between has none like it.
CFG = dataclasses.replace(TINY, layers=3, heads=8, kv_heads=4, attention_windows=(0, 24, 0))
OPTIONS = EngineOptions(
    context_tokens=128, cache_tokens=(64, 128), chunk_tokens=(16, 32), decode_block=4, buckets_bytes=0
)


@pytest.fixture(scope="session")
def engine_of(tmp_path_factory):
    """An engine by codec, format of weights, levels, the share of weights that there is memory for, whether
    it attends to coded chunks, its drafts and other options."""

    @functools.cache
    def bundle(weights, levels):
        parts = elastic_parts(Ladder(levels=(*levels, 100))) if levels else None
        path = tmp_path_factory.mktemp("contexts") / "tiny.jaxllm"
        return write_tiny_bundle(path, weights, cfg=CFG, params=tiny_params(CFG), parts=parts)

    @functools.cache
    def made(codec, weights, levels, share, coded, drafts, more):
        options = dataclasses.replace(
            OPTIONS, kv_codec=codec, levels=levels, attend_quantized_kv=coded, **dict(more)
        )
        if share is not None:
            whole = made(codec, weights, levels, None, coded, drafts, more)
            options = dataclasses.replace(options, memory_bytes=budget(whole, share))
        return Engine.open(bundle(weights, levels), options=options, speculation=drafts)

    def opened(codec, weights="f32", levels=(), share=None, coded=False, drafts=None, **more):
        # Arguments that are left out name no other engine.
        return made(codec, weights, levels, share, coded, drafts, tuple(sorted(more.items())))

    return opened


@pytest.fixture
def kept(engine_of, tmp_path):
    """Contexts in a folder of the test's, by codec; opened again by calling again. `read` has nothing be
    computed that can be read; `engine` has further options of the engine."""

    def opened(codec="raw", weights="f32", levels=(), share=None, coded=False, read=False, **options):
        engine = engine_of(codec, weights, levels, share, coded, **options.pop("engine", {}))
        contexts = Contexts(engine, ContextOptions(folder=tmp_path / "store", **options))
        if read:
            contexts._delays[100] = READ
        return contexts

    with reopening(opened) as again:
        yield again
