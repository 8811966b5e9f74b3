"""Tests which parts of a bundle are exported, and in which numbers."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxllm.bundle import Bundle, lay_experts_apart
from jaxllm.checkpoints.peft import write_adapter
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.export.folder_format.parts import LEFT
from jaxllm.export.subject import read_subject
from jaxllm.models.lora import LoraConfig, merge
from jaxllm.quant import dequantize
from tests.export.models import write_elastic
from tests.models.test_lora import random_adapter
from tests.tiny import TINY, write_tiny_bundle

MIXTURE = dataclasses.replace(
    TINY, model_type="mixtral", attention_windows=(), experts=3, experts_per_token=2, expert_ffn_size=32,
    sparse_layers=(True, True),
)  # fmt: skip


def test_experts_that_lie_apart_go_out_together(tmp_path):
    """A program has all of them in memory, however the bundle stores them."""
    together, apart = write_tiny_bundle(tmp_path / "together", "int8", cfg=MIXTURE), tmp_path / "apart"
    with Bundle.open(together) as bundle:
        lay_experts_apart(apart, bundle, np.full((2, 3), 8))
    wanted, got = read_subject(together).arrays, read_subject(apart).arrays
    assert list(got) == list(wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(got[name], array)


def test_widths_that_only_native_kernels_read(tmp_path):
    path = write_tiny_bundle(tmp_path / "four.jaxllm", "int4")
    with pytest.raises(ConfigError, match=r"int4 weights.*native-only width"):
        read_subject(path)
    with pytest.raises(CheckpointError, match="jaxllm prepare"):
        read_subject(tmp_path)


def test_adapters_are_at_half_precision_where_nothing_is_lost(subject, tmp_path):
    other = read_subject(write_elastic(tmp_path / "tiny.jaxllm", scaling=0.3), levels=(40,))
    sides = [name for name in subject.arrays if name.startswith("level_40.")]
    for name in sides:
        assert subject.arrays[name].dtype == np.float16, name
        # Scaled by three tenths, left sides are halves no more.
        assert other.arrays[name].dtype == (np.float32 if name.endswith(LEFT) else np.float16), name
        ratio = np.float32(0.3) / np.float32(0.5) if name.endswith(LEFT) else 1
        wide = subject.arrays[name].astype(np.float32)
        np.testing.assert_allclose(other.arrays[name], wide * ratio, rtol=1e-6, err_msg=name)
    assert sides


def test_int8_weights_come_as_the_floats_that_they_stand_for(tmp_path):
    path = write_tiny_bundle(tmp_path / "eight.jaxllm", "int8")
    arrays = read_subject(path).arrays
    with Bundle.open(path) as bundle:
        for name, weight in bundle.load().items():
            np.testing.assert_array_equal(arrays[name], dequantize(weight, jax.numpy.float32), err_msg=name)


def test_an_adapter_is_folded_in_and_makes_another_model(tmp_path):
    path = write_tiny_bundle(tmp_path / "tiny.jaxllm")
    lora = LoraConfig(rank=2, alpha=4, targets=("attn.q", "ffn.down"))
    adapter = random_adapter(TINY, lora, 0)
    write_adapter(tmp_path / "adapter", TINY, lora, adapter)
    plain, adapted = read_subject(path), read_subject(path, adapter=tmp_path / "adapter")
    assert plain.model != adapted.model
    params = {name: jax.numpy.asarray(value) for name, value in plain.arrays.items()}
    wanted = merge(params, adapter, lora.scaling)
    for name, array in adapted.arrays.items():
        np.testing.assert_allclose(array, wanted[name], rtol=1e-6, err_msg=name)
    assert (adapted.arrays["layers.0.attn.q"] != plain.arrays["layers.0.attn.q"]).any()
