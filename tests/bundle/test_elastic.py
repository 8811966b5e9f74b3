import jax
import numpy as np
import pytest

from jaxllm.bundle import Bundle, Part
from jaxllm.bundle.levels import (
    Recovery,
    elastic_parts,
    read_ladder,
    read_order,
    read_recovery,
    release_recovery,
    require_level,
)
from jaxllm.config import ModelConfig
from jaxllm.elastic.ladder import Ladder, sub_config
from jaxllm.errors import BundleError, ConfigError
from jaxllm.models.lora import LoraConfig, init_adapter
from tests.elastic.models import random_order
from tests.tiny import TINY, write_tiny_bundle

LADDER = Ladder(levels=(50, 100), anchors=(1,))
ORDER = random_order(TINY)


def adapter_of(cfg: ModelConfig):
    return jax.device_get(init_adapter(cfg, LoraConfig(rank=2), jax.random.key(0)))


@pytest.fixture(scope="module")
def elastic(tmp_path_factory):
    adapter = adapter_of(sub_config(TINY, LADDER, 50))
    parts = elastic_parts(LADDER, {50: Recovery(adapter, 2.0)}, order=ORDER, facts={"made": "here"})
    return write_tiny_bundle(tmp_path_factory.mktemp("elastic") / "tiny.jaxllm", parts=parts)


def test_levels_and_their_adapters_survive_the_file(elastic):
    with Bundle.open(elastic) as bundle:
        assert read_ladder(bundle) == LADDER
        assert require_level(bundle, 50) == sub_config(TINY, LADDER, 50)
        recovery = read_recovery(bundle, 50)
        assert recovery is not None
        assert recovery.scaling == 2.0
        expected = adapter_of(require_level(bundle, 50))
        assert recovery.adapter.keys() == expected.keys()
        for name, value in expected.items():
            assert recovery.adapter[name].dtype == np.float16
            np.testing.assert_array_equal(recovery.adapter[name], value.astype(np.float16))
        assert read_recovery(bundle, 100) is None
        order = read_order(bundle)
        assert order is not None
        for mine, theirs in ((order.groups, ORDER.groups), (order.neurons, ORDER.neurons)):
            for one, other in zip(mine, theirs, strict=True):
                np.testing.assert_array_equal(one, other)
        bundle.verify()


def test_memory_of_an_adapter_is_given_back_and_what_is_read_again_is_the_same(elastic):
    with Bundle.open(elastic) as bundle:
        recovery = read_recovery(bundle, 50)
        assert recovery is not None
        before = {name: value.copy() for name, value in recovery.adapter.items()}
        release_recovery(bundle, 50)
        for name, value in before.items():
            np.testing.assert_array_equal(recovery.adapter[name], value)
        release_recovery(bundle, 100)
    release_recovery(bundle, 50)


def test_an_adapter_that_half_precision_cannot_hold_stays_as_it_is(tmp_path):
    adapter = adapter_of(sub_config(TINY, LADDER, 50))
    large = {name: value + np.float32(1e5) for name, value in adapter.items()}
    path = write_tiny_bundle(
        tmp_path / "large.jaxllm", parts=elastic_parts(LADDER, {50: Recovery(large, 1.0)})
    )
    recovery = read_recovery(Bundle.open(path), 50)
    assert recovery is not None
    for name, value in large.items():
        np.testing.assert_array_equal(recovery.adapter[name], value)


@pytest.mark.parametrize("change", ["groups.0", "neurons.1", None])
def test_an_order_of_another_model_is_refused(tmp_path, change):
    parts = elastic_parts(LADDER, order=ORDER)
    arrays = dict(parts["elastic"].arrays)
    if change is None:
        del arrays["groups.1"]
    else:
        arrays[change] = np.zeros_like(arrays[change])
    path = write_tiny_bundle(tmp_path / "bad.jaxllm", parts={"elastic": Part(parts["elastic"].facts, arrays)})
    with pytest.raises(BundleError, match="order of units is malformed"):
        read_order(Bundle.open(path))


@pytest.mark.parametrize("kind", ["flat", "deep", "bytes", "nan", "stranger"])
def test_malformed_adapters_are_refused(tmp_path, kind):
    adapter = dict(adapter_of(sub_config(TINY, LADDER, 50)))
    name = "layers.0.attn.q"
    right = adapter[f"{name}.right"]
    changes = {
        "flat": {f"{name}.right": right.reshape(-1)},
        "deep": {f"{name}.right": right[None]},
        "bytes": {f"{name}.right": right.astype(np.uint8)},
        "nan": {f"{name}.right": np.full_like(right, np.nan)},
        "stranger": {"layers.9.attn.q.left": right, "layers.9.attn.q.right": right},
    }
    parts = elastic_parts(LADDER, {50: Recovery({**adapter, **changes[kind]}, 1.0)})
    path = write_tiny_bundle(tmp_path / "bad.jaxllm", parts=parts)
    with pytest.raises(BundleError, match="the adapter of level 50 is malformed"):
        read_recovery(Bundle.open(path), 50)


def test_the_model_itself_is_the_same(elastic, tmp_path):
    plain = Bundle.open(write_tiny_bundle(tmp_path / "plain.jaxllm"))
    params, same = plain.load(), Bundle.open(elastic).load()
    assert params.keys() == same.keys()
    for name, value in params.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(same[name]))
    assert read_ladder(plain) is None
    with pytest.raises(ConfigError, match="has no levels, only the whole model; make an elastic bundle"):
        require_level(plain, 50)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({}, "levels are malformed"),
        ({"ladder": {"levels": [50], "anchors": []}}, "that end with 100"),
        ({"ladder": {"levels": [50, 100], "anchors": [9]}}, "layer 9 is an anchor"),
        ({"ladder": [1]}, "malformed"),
    ],
)
def test_malformed_levels_are_refused(tmp_path, facts, message):
    path = write_tiny_bundle(tmp_path / "bad.jaxllm", parts={"elastic": Part(facts)})
    with pytest.raises(BundleError, match=message):
        read_ladder(Bundle.open(path))


@pytest.mark.parametrize("scaling", ["2", None, float("nan"), 10**400, True])
def test_a_malformed_scaling_is_refused(tmp_path, scaling):
    path = write_tiny_bundle(tmp_path / "bad.jaxllm", parts={"recovery.50": Part({"scaling": scaling})})
    with pytest.raises(BundleError, match="scaling"):
        read_recovery(Bundle.open(path), 50)


def test_arrays_of_a_part_are_plain_numbers(tmp_path):
    with pytest.raises(ConfigError, match="x of part more must be one of float32"):
        write_tiny_bundle(tmp_path / "bad.jaxllm", parts={"more": Part({}, {"x": np.zeros(3, np.int64)})})
    assert not (tmp_path / "bad.jaxllm").exists()


def test_a_damaged_part_is_noticed(elastic, tmp_path):
    with Bundle.open(elastic) as bundle:
        segment = bundle.layout.segments["part.recovery.50"]
    raw = bytearray(elastic.read_bytes())
    raw[segment.offset + segment.size_bytes // 2] ^= 1
    path = tmp_path / "damaged.jaxllm"
    path.write_bytes(raw)
    with Bundle.open(path) as bundle:
        bundle.load()
        with pytest.raises(BundleError, match=r"segment 'part\.recovery\.50' is corrupt"):
            read_recovery(bundle, 50)
