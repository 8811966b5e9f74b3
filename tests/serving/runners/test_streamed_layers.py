"""Layers in a row run in one dispatch, to the bits that each gives alone."""

import dataclasses
import time

import jax
import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.bundle.levels import elastic_parts
from jaxllm.elastic.ladder import Ladder
from jaxllm.serving.buckets.layer import LayerBucket, LayersBucket
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.runners import layerwise
from jaxllm.serving.weights import streamed
from jaxllm.speculation.tree import line_tree
from tests import tiny
from tests.kernels.switching import fall_back, needs_native
from tests.serving.memory import budget

CFG = dataclasses.replace(tiny.TINY, layers=9, heads=8, kv_heads=4, ffn_size=192, attention_windows=())
OPTIONS = EngineOptions(
    context_tokens=64,
    cache_tokens=(64,),
    chunk_tokens=(16,),
    levels=(40,),
    kv_codec="channel",
    buckets_bytes=0,
)
ROOM = 8


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    parts = elastic_parts(Ladder(levels=(40, 100)))
    path = tmp_path_factory.mktemp("streamed") / "tiny.jaxllm"
    return tiny.write_tiny_bundle(path, "int8", cfg=CFG, parts=parts)


def opened(path, share, slots=2, **more):
    """An engine with some of its layers in memory, and as many slots for the others."""
    options = dataclasses.replace(OPTIONS, **more)
    whole = Engine.open(path, options=options, warm_up=False)
    options = dataclasses.replace(options, memory_bytes=budget(whole, share))
    whole.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamed, "SLOTS", slots)
        engine = Engine.open(path, options=options, warm_up=False)
    assert engine.model.streamed.plan.slots == slots
    return engine


def groups_of(engine, most, monkeypatch):
    """Lets at most so many layers run together, those that storage has read by a moment later; returns a list
    to which the numbers of layers of dispatches are added."""
    stream, found = engine.model.streamed._stream, []
    pieces, arguments = stream.pieces, layerwise.StreamedRunner._arguments

    def unhurried(*asked):
        until = time.monotonic() + (2 if stream._ahead else 0)
        wanted = min(len(stream._free) + len(stream._ahead), len(stream._coming))
        while time.monotonic() < until and sum(each.ready for each in list(stream._ahead)) < wanted:
            time.sleep(0.001)
        return pieces(*asked)

    def counted(self, layers):
        found.append(len(layers))
        return arguments(self, layers)

    monkeypatch.setattr(stream, "pieces", unhurried)
    monkeypatch.setattr(layerwise.StreamedRunner, "_arguments", counted)
    for runner in {engine.runner, *map(engine.runner_at, engine.levels)}:
        allowed = [min(most, each) for each in runner._most]
        monkeypatch.setattr(runner, "_most", allowed)
    return found


def computed(runner):
    """Bits of a prompt of two chunks and of a token tree behind it: logits, keys and values, and mass."""
    cache = runner.start(64)
    logits, cache = runner.prefill(cache, [3 + each for each in range(20)], 0, runner.prefill_chunks(20)[0])
    found = [logits, cache.mass]
    tree_logits, cache = runner.tree_logits(line_tree([7, 9, 4, 11, 5, 8, 6, 10][:ROOM]), cache)
    found += [tree_logits, cache.mass, *(rows[..., :28, :] for rows in (*cache.keys, *cache.values))]
    return jax.tree.map(np.asarray, found)


def ready(runner):
    runner.fill(runner.buckets_for(20, 8, trees=[ROOM]))


def same(found, expected):
    return all(np.array_equal(*each) for each in zip(found, expected, strict=True))


@needs_native
@pytest.mark.usefixtures("shipped_compilations")
def test_a_layers_bits_are_the_same_in_groups_of_any_size(path, monkeypatch):
    engine, expected = opened(path, 0.98, slots=8), {}
    for level in (100, 40):
        ready(engine.runner_at(level))
    built = dict(engine.runner.buckets.bucket_ms)
    # Layers of a tree; nine are no multiple of two or of four.
    groups = {1: [1] * 9, 2: [2, 2, 2, 2, 1], 3: [3, 3, 3], 4: [4, 4, 1]}
    for most, of_tree in groups.items():
        with monkeypatch.context() as patch:
            sizes = groups_of(engine, most, patch)
            for level in (100, 40, 100):
                found = computed(engine.runner_at(level))
                assert same(found, expected.setdefault(level, found))
        # Chunks whose mass is counted run through one layer before the next.
        assert sizes == 3 * [*[1] * CFG.layers, *of_tree]
    assert engine.runner.buckets.bucket_ms == built
    # One for all layers and all groups, per shape of tokens.
    of_trees = [each.tree for each in built if isinstance(each, LayersBucket)]
    assert sorted(of_trees) == [False, False, True]
    engine.close()


@pytest.mark.parametrize("native_kernels", [pytest.param(True, marks=needs_native), False])
def test_a_prompt_without_mass_runs_in_groups_too(path, native_kernels, monkeypatch):
    """Where nothing is read by address layers run one by one."""
    if not native_kernels:
        fall_back(monkeypatch)
    engine = opened(path, 0.98, slots=6, kv_codec="", levels=())
    ready(engine.runner)
    sizes, found = groups_of(engine, 2, monkeypatch), computed(engine.runner)
    assert found[1] is None
    assert sum(sizes) == 2 * CFG.layers
    assert (max(sizes) == 2) == native_kernels
    layers = [each for each in engine.runner.buckets.bucket_ms if isinstance(each, LayerBucket)]
    assert {type(each) for each in layers} == {LayersBucket if native_kernels else LayerBucket}
    assert any(each.tree for each in layers)
    monkeypatch.setattr(engine.runner, "_most", [1] * CFG.layers)
    assert same(computed(engine.runner), found)
    engine.close()
