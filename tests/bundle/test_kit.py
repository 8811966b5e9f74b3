import dataclasses

import jax
import numpy as np
import pytest

from jaxllm.bundle import Bundle
from jaxllm.bundle.kit import find_kit, read_kit, write_kit
from jaxllm.bundle.levels import Recovery, elastic_parts, read_ladder, read_order, read_recovery
from jaxllm.elastic.ladder import Ladder, sub_config
from jaxllm.elastic.units import reorder
from jaxllm.errors import CheckpointError
from jaxllm.models.lora import LoraConfig, init_adapter
from jaxllm.models.parameters import param_specs
from jaxllm.prepare import prepare
from jaxllm.quant import dequantize
from jaxllm.training.elastic.importance import random_order
from tests.tiny import TINY, tiny_params, write_tiny_folder

LADDER = Ladder(levels=(50, 100), anchors=(0,))


@pytest.fixture
def kit(tmp_path):
    order, draw = random_order(TINY, 3), np.random.default_rng(0)
    like = init_adapter(sub_config(TINY, LADDER, 50), LoraConfig(rank=2), jax.random.key(0))
    adapter = {name: draw.normal(size=value.shape).astype(np.float32) for name, value in like.items()}
    parts = elastic_parts(LADDER, {50: Recovery(adapter, 2.0)}, order=order, facts={"recovery": "lora"})
    write_kit(tmp_path / "tiny.kit", TINY, tiny_params().items(), parts)
    return tmp_path / "tiny.kit", order, adapter


def test_a_kit_makes_a_checkpoint_elastic_as_its_training_did(kit, tmp_path):
    path, order, adapter = kit
    model = write_tiny_folder(tmp_path / "model")
    prepare(model, tmp_path / "out.jaxllm", weights="f32", parts=read_kit(find_kit(path)))
    with Bundle.open(tmp_path / "out.jaxllm") as bundle:
        bundle.verify()
        assert read_ladder(bundle) == LADDER
        for one, other in zip(read_order(bundle).neurons, order.neurons, strict=True):
            np.testing.assert_array_equal(one, other)
        stored = bundle.load()
        for name, value in reorder(TINY, tiny_params().items(), order):
            np.testing.assert_array_equal(dequantize(stored[name], np.float32), value, err_msg=name)
        found = read_recovery(bundle, 50)
        assert found.scaling == 2.0
        assert found.adapter.keys() == adapter.keys()
        for name, value in adapter.items():
            np.testing.assert_allclose(found.adapter[name], value, rtol=0, atol=np.abs(value).max() / 200)


def test_other_widths_fit_and_other_weights_do_not(kit, tmp_path):
    path, out = kit[0], tmp_path / "out.jaxllm"
    draw = np.random.default_rng(1)
    near = {
        name: value + 0.1 * value.std() * draw.normal(size=value.shape).astype(np.float32)
        for name, value in tiny_params().items()
    }
    prepare(write_tiny_folder(tmp_path / "near", params=near), out, parts=read_kit(path))
    out.unlink()
    for what, params, message in (
        ("seed", tiny_params(seed=1), "other weights of this shape"),
        ("sign", {name: -value for name, value in tiny_params().items()}, "differs by 200%"),
    ):
        folder = write_tiny_folder(tmp_path / what, params=params)
        with pytest.raises(CheckpointError, match=message):
            prepare(folder, out, parts=read_kit(path))
    wrong = dataclasses.replace(read_kit(path), cfg=dataclasses.replace(TINY, ffn_size=2 * TINY.ffn_size))
    with pytest.raises(CheckpointError, match="its ffn_size is"):
        prepare(write_tiny_folder(tmp_path / "model"), out, parts=wrong)
    assert not out.exists()


def test_what_is_no_kit_is_refused(kit, tmp_path, monkeypatch):
    path = kit[0]
    raw = path.read_bytes()
    for made in (
        b"",
        raw[:100],
        raw[: len(raw) // 2],
        raw.replace(b"jaxllm kit 1", b"jaxllm kit 9"),
        b"\0" * 64,
    ):
        bad = tmp_path / "bad.kit"
        bad.write_bytes(made)
        with pytest.raises(CheckpointError, match=r"bad\.kit is no kit"):
            read_kit(bad)
    with pytest.raises(CheckpointError, match="there is no kit nowhere; give a file, or a packaged"):
        find_kit("nowhere")
    # A folder of that name is no file.
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_kit("smollm2").is_file()
    order = dataclasses.replace(read_kit(path), parts={})
    with pytest.raises(CheckpointError, match="its order of units is malformed"):
        list(order.ordered(TINY, tiny_params().items()))
    assert param_specs(TINY).keys() == read_kit(path).sample.keys()
