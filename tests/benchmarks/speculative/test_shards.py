"""Bitwidths of STI's shards by their importance."""

import dataclasses

import numpy as np
import pytest

from benchmarks.speculative import shards
from benchmarks.speculative.shards import narrow_bundles, plan_widths, shard_importance, shards_of
from jaxllm.bundle import Bundle
from jaxllm.errors import ConfigError
from serving.engine import Engine
from serving.options import EngineOptions
from serving.request import GenerationConfig
from tests.tiny import TINY, tiny_params, write_tiny_bundle

CFG = dataclasses.replace(TINY, layers=2, attention_windows=())
TEXTS = [list(range(5, 45)), list(range(60, 80))]


def test_what_is_left_goes_to_the_important_shards():
    sizes, importance = {"a": 100, "b": 100, "c": 50, "d": 50}, {"a": 0.1, "b": 0.4, "c": 0.3, "d": 0.2}
    assert plan_widths(importance, sizes, 4) == dict.fromkeys(sizes, 4)
    # 300 bits are left above 4 each: none is enough for `b`, which is most important; `c` takes 200 of them.
    assert plan_widths(importance, sizes, 5) == {"a": 4, "b": 4, "c": 8, "d": 4}
    # 600 above 4: 400 for `b`, 200 for `c`.
    assert plan_widths(importance, sizes, 6) == {"a": 4, "b": 8, "c": 8, "d": 4}
    # 300 above 2: 200 for `b` at 4, and 100 for `c`.
    assert plan_widths(importance, sizes, 3) == {"a": 2, "b": 4, "c": 4, "d": 2}
    with pytest.raises(ConfigError, match="2 bits at least"):
        plan_widths(importance, sizes, 1.5)


def test_a_shard_is_a_layers_attention_or_its_block():
    found = shards_of(CFG)
    assert list(found) == ["layers.0.attn", "layers.0.ffn", "layers.1.attn", "layers.1.ffn"]
    assert found["layers.1.attn"] == [f"layers.1.attn.{each}" for each in ("q", "k", "v", "o")]
    assert not [name for names in found.values() for name in names if "norm" in name or "bias" in name]


def test_a_shard_that_does_nothing_is_unimportant():
    params = {name: np.asarray(each, np.float32) for name, each in tiny_params(CFG).items()}
    # Nothing that this block computes is added to the residual stream.
    params["layers.1.ffn.down"] = np.zeros_like(params["layers.1.ffn.down"])
    found = shard_importance(CFG, params, TEXTS, 2)
    assert list(found) == list(shards_of(CFG))
    assert found["layers.1.ffn"] == pytest.approx(0, abs=1e-6)
    wider = shard_importance(CFG, params, TEXTS, 8)
    assert all(found[each] > 10 * abs(wider[each]) > 0 for each in found if each != "layers.1.ffn")
    with pytest.raises(ConfigError, match="there are none"):
        shard_importance(CFG, params, [[]], 2)


@pytest.mark.slow
def test_bundles_of_mixed_widths_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "cache_folder", lambda: tmp_path / "cache")
    write_tiny_bundle(tmp_path / "target.jaxllm", "int8", cfg=CFG, params=tiny_params(CFG))
    made = narrow_bundles(tmp_path / "target.jaxllm", (3.0, 4.0, 6.0), TEXTS)
    widths = {}
    for bits, path in made.items():
        with Bundle.open(path) as bundle:
            tensors = bundle.layout.tensors
            widths[bits] = {tensors[name].bits for names in shards_of(CFG).values() for name in names}
            assert tensors["embed.tokens"].bits == 8
    assert widths == {3.0: {2, 4}, 4.0: {4}, 6.0: {4, 8}}
    sizes = [path.stat().st_size for path in made.values()]
    assert sizes == sorted(sizes)
    for path in made.values():
        engine = Engine.open(path, options=EngineOptions(context_tokens=64))
        config = GenerationConfig(max_tokens=4, ignore_eos=True)
        assert len(engine.generate(list(range(9)), config).tokens) == 4
        engine.close()
    # Made once.
    times = [path.stat().st_mtime_ns for path in made.values()]
    assert narrow_bundles(tmp_path / "target.jaxllm", (3.0, 4.0, 6.0), TEXTS) == made
    assert [path.stat().st_mtime_ns for path in made.values()] == times


def test_shards_of_nested_weights_are_those_of_their_8_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "cache_folder", lambda: tmp_path / "cache")
    sizes = {}
    for weights in ("int8", "int8-nested"):
        path = tmp_path / f"{weights}.jaxllm"
        write_tiny_bundle(path, weights, cfg=CFG, params=tiny_params(CFG))
        with Bundle.open(narrow_bundles(path, (4.0,), TEXTS)[4.0]) as narrowed:
            tensors = narrowed.layout.tensors
            assert {tensors[name].bits for names in shards_of(CFG).values() for name in names} == {4}
            sizes[weights] = narrowed.weight_bytes
    assert sizes["int8-nested"] == sizes["int8"]
