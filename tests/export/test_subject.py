"""Tests which parts of a bundle are exported."""

import dataclasses

import numpy as np

from jaxllm.bundle import Bundle, lay_experts_apart
from jaxllm.export.subject import read_subject
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
