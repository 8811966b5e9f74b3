"""Without native kernels a quantized model's equal layers are stacked when it is loaded; levels are views."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.bundle import Bundle
from jaxllm.bundle.levels import elastic_parts
from jaxllm.elastic.ladder import Ladder
from jaxllm.models.layer_stack import STACK, StackedLayers
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.options import EngineOptions
from tests.kernels.switching import fall_back
from tests.tiny import TINY, tiny_params, write_tiny_bundle

CFG = dataclasses.replace(TINY, layers=4, heads=8, kv_heads=4, attention_windows=())
OPTIONS = EngineOptions(
    context_tokens=64, cache_tokens=(64,), chunk_tokens=(16,), levels=(50,), buckets_bytes=0
)


def bundle_of(folder, weights):
    parts = elastic_parts(Ladder(levels=(50, 100), anchors=(1,)), {})
    path = folder / f"{weights}.jaxllm"
    return write_tiny_bundle(path, cfg=CFG, params=tiny_params(CFG), parts=parts, weights=weights)


def answers(path, level):
    engine = Engine.open(path, options=OPTIONS, level=level)
    try:
        found = engine.generate([1, 50, 7, 99, 23], GenerationConfig(max_tokens=8, ignore_eos=True))
        return engine.model.runner(level).model, found.tokens
    finally:
        engine.close()


@pytest.mark.parametrize("weights", ["f32", "bf16", "int8", "int4"])
def test_stacks_hold_what_the_bundle_does(tmp_path, weights, monkeypatch):
    fall_back(monkeypatch)
    with Bundle.open(bundle_of(tmp_path, weights)) as bundle:
        flat, stacked = bundle.load(), bundle.load(stacked=True)
        assert list(flat) == list(stacked)
        for one, other in zip(jax.tree.leaves(flat), jax.tree.leaves(stacked), strict=True):
            np.testing.assert_array_equal(one, np.asarray(other))


@pytest.mark.parametrize(("weights", "level"), [("int8", 50), ("int8", 100), ("f32", 100), ("bf16", 100)])
def test_an_engine_answers_from_stacks(tmp_path, weights, level, monkeypatch):
    """Floats stay in the mapped file."""
    fall_back(monkeypatch)
    path = bundle_of(tmp_path, weights)
    model, tokens = answers(path, level)
    if weights != "int8":
        assert STACK not in model.params
        return
    assert isinstance(model.params[STACK], StackedLayers)
    monkeypatch.setattr("jaxllm.serving.opening.loading.stacks_layers", lambda *_: False)
    flat, expected = answers(path, level)
    assert STACK not in flat.params
    assert tokens == expected
