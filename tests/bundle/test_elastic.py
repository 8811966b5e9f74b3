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


def read_50(bundle: Bundle):
    return read_recovery(bundle, 50)


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


ADAPTER = adapter_of(sub_config(TINY, LADDER, 50))
NAME = "layers.0.attn.q"
RIGHT = ADAPTER[f"{NAME}.right"]


def order(**change):
    part = elastic_parts(LADDER, order=ORDER)["elastic"]
    arrays = {**part.arrays, **{name.replace("_", "."): each for name, each in change.items()}}
    arrays = {name: each for name, each in arrays.items() if each is not None}
    return {"elastic": Part(part.facts, arrays)}


def recovery(change):
    return elastic_parts(LADDER, {50: Recovery({**ADAPTER, **change}, 1.0)})


OF_ORDER, OF_ADAPTER = "order of units is malformed", "the adapter of level 50 is malformed"
MALFORMED = {
    "groups of nothing": (order(groups_0=np.zeros_like(ORDER.groups[0])), read_order, OF_ORDER),
    "no neurons": (order(neurons_1=np.zeros_like(ORDER.neurons[1])), read_order, OF_ORDER),
    "an order of fewer layers": (order(groups_1=None), read_order, OF_ORDER),
    "a flat side": (recovery({f"{NAME}.right": RIGHT.reshape(-1)}), read_50, OF_ADAPTER),
    "a side of bytes": (recovery({f"{NAME}.right": RIGHT.astype(np.uint8)}), read_50, OF_ADAPTER),
    "a side of NaN": (recovery({f"{NAME}.right": np.full_like(RIGHT, np.nan)}), read_50, OF_ADAPTER),
    "a stranger": (
        recovery({"layers.9.attn.q.left": RIGHT, "layers.9.attn.q.right": RIGHT}), read_50, OF_ADAPTER
    ),
    "a text as scaling": ({"recovery.50": Part({"scaling": "2"})}, read_50, "scaling"),
    "no scaling": ({"recovery.50": Part({"scaling": None})}, read_50, "scaling"),
    "an endless scaling": ({"recovery.50": Part({"scaling": 10**400})}, read_50, "scaling"),
    "no facts": ({"elastic": Part({})}, read_ladder, "levels are malformed"),
    "no whole model": (
        {"elastic": Part({"ladder": {"levels": [50], "anchors": []}})}, read_ladder, "that end with 100"
    ),
    "an anchor behind the last": (
        {"elastic": Part({"ladder": {"levels": [50, 100], "anchors": [9]}})}, read_ladder, "is an anchor"
    ),
    "a list of levels": ({"elastic": Part({"ladder": [1]})}, read_ladder, "malformed"),
}  # fmt: skip


@pytest.mark.parametrize(("parts", "read", "message"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_parts_are_refused(tmp_path, parts, read, message):
    path = write_tiny_bundle(tmp_path / "bad.jaxllm", parts=parts)
    with pytest.raises(BundleError, match=message):
        read(Bundle.open(path))


def test_the_model_itself_is_the_same(elastic, tmp_path):
    plain = Bundle.open(write_tiny_bundle(tmp_path / "plain.jaxllm"))
    params, same = plain.load(), Bundle.open(elastic).load()
    assert params.keys() == same.keys()
    for name, value in params.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(same[name]))
    assert read_ladder(plain) is None
    with pytest.raises(ConfigError, match="has no levels, only the whole model; make an elastic bundle"):
        require_level(plain, 50)


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
