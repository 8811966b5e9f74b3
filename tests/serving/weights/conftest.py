"""A model of five layers, in every format of weights, with all of it in memory and with half of it."""

import dataclasses
import functools

import pytest

from jaxllm import Engine
from jaxllm.bundle.levels import elastic_parts
from jaxllm.elastic.ladder import Ladder
from jaxllm.serving.ground.options import EngineOptions
from tests.tiny import TINY, write_tiny_bundle

# Two kinds of layers, so that graphs are shared by some and not by all.
CFG = dataclasses.replace(
    TINY, layers=5, heads=8, kv_heads=4, ffn_size=192, attention_windows=(0, 24, 0, 24, 0)
)
OPTIONS = EngineOptions(
    context_tokens=128, cache_tokens=(64, 128), chunk_tokens=(16, 32), decode_block=4, buckets_bytes=0
)


@pytest.fixture(scope="session")
def bundle_of(tmp_path_factory):
    """A bundle by its weights' format, with levels 40 and 100."""

    @functools.cache
    def written(weights="int8", cfg=CFG):
        path = tmp_path_factory.mktemp("streaming") / f"{weights}.jaxllm"
        parts = elastic_parts(Ladder(levels=(40, 100)))
        return write_tiny_bundle(path, weights, cfg=cfg, parts=parts)

    return written


@pytest.fixture(scope="session")
def resident_of(bundle_of):
    """An engine with all weights in memory, by their format."""

    @functools.cache
    def opened(weights="int8", cfg=CFG):
        return Engine.open(bundle_of(weights, cfg), options=OPTIONS, warm_up=False)

    return opened
