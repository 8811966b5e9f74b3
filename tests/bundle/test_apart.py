"""Experts of a bundle are laid apart: the same model at their own widths, narrower ones beside what stays."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxllm.bundle import Bundle, expert_widths, lay_experts_apart
from jaxllm.bundle.calibrations import expert_facts, expert_parts
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.experts.prediction import PathCounts
from jaxllm.prepare import prepare
from tests.tiny import TINY, write_tiny_bundle

# Neurons that fill panels of 16, and that do not.
CFGS = [
    dataclasses.replace(
        TINY, model_type="qwen3_moe", qk_norm=True, attention_windows=(), experts=3, experts_per_token=2,
        expert_ffn_size=neurons, sparse_layers=(False, True),
    )
    for neurons in (32, 24)
]  # fmt: skip
WIDTHS = {"int8": 8, "int8-nested": 8, "int4": 4, "f32": 32, "bf16": 16}


def bytes_of(bundle, name):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(bundle.stored(name))]


@pytest.mark.parametrize(
    ("weights", "cfg"), [*((weights, CFGS[at % 2]) for at, weights in enumerate(WIDTHS)), ("int8", CFGS[1])]
)
def test_of_their_own_width_experts_are_what_they_are(tmp_path, weights, cfg):
    """The same bytes as of a bundle that was made apart, whether they were together before or not."""
    bits = np.full((1, 3), WIDTHS[weights])
    together = write_tiny_bundle(tmp_path / "together.jaxllm", weights, cfg=cfg)
    wanted = write_tiny_bundle(tmp_path / "wanted.jaxllm", weights, cfg=cfg, expert_bits=bits)
    for source in (together, wanted):
        with Bundle.open(source) as bundle:
            np.testing.assert_array_equal(expert_widths(bundle), bits)
            lay_experts_apart(tmp_path / "apart.jaxllm", bundle, bits)
        with Bundle.open(tmp_path / "apart.jaxllm") as got, Bundle.open(wanted) as expected:
            assert got.layout.experts_apart
            assert list(got.layout.tensors) == list(expected.layout.tensors)
            for name in expected.layout.tensors:
                assert bytes_of(got, name) == bytes_of(expected, name)


def test_narrower_experts_beside_those_that_stay(tmp_path):
    cfg = CFGS[0]
    together = write_tiny_bundle(tmp_path / "together.jaxllm", "int8", cfg=cfg)
    parts = expert_parts(PathCounts.none(layers=1, experts=3), {"loss": 0.5})
    prepare(together, tmp_path / "apart.jaxllm", expert_bits=np.array([[8, 4, 2]]), parts=parts)
    uniform = write_tiny_bundle(tmp_path / "u.jaxllm", "int8", cfg=cfg, expert_bits=np.full((1, 3), 8))
    with Bundle.open(tmp_path / "apart.jaxllm") as got, Bundle.open(uniform) as whole:
        np.testing.assert_array_equal(expert_widths(got), [[8, 4, 2]])
        same = [name for name in whole.layout.tensors if bytes_of(got, name) == bytes_of(whole, name)]
        changed = set(whole.layout.tensors) - set(same)
        assert {name.split(".")[3] for name in changed} == {"1", "2"}
        assert expert_facts(got) == {"loss": 0.5}
        got.verify()


def test_what_cannot_be_laid_apart_says_why(tmp_path):
    cfg, out = CFGS[0], tmp_path / "out.jaxllm"
    mixture = write_tiny_bundle(tmp_path / "mixture.jaxllm", "int4", cfg=cfg)
    dense = write_tiny_bundle(tmp_path / "dense.jaxllm")
    with pytest.raises(ConfigError, match="has experts of 4 bits: wider ones would be larger, not better"):
        prepare(mixture, out, expert_bits=8)
    with pytest.raises(ConfigError, match="is no mixture of experts"):
        prepare(dense, out, expert_bits=8)
    with pytest.raises(CheckpointError, match="name --expert-bits"):
        prepare(mixture, out)
    with pytest.raises(CheckpointError, match="int4 weights, which stay as they are"):
        prepare(mixture, out, weights="int8", expert_bits=4)
    assert not out.exists()
