"""StableHLO programs write new rows into the caches that they are given, and copy none."""

import dataclasses

import jax
import numpy as np
import pytest

pytest.importorskip("flatbuffers")

from jaxllm.config import WHOLE
from jaxllm.export.folder_format.signature import cache_shapes
from jaxllm.export.signatures import ExportPlan, step_shapes
from jaxllm.export.stablehlo import PLATFORMS, traced
from jaxllm.export.subject import read_subject
from tests.copied_bytes import copied_bytes
from tests.tiny import TINY, tiny_params, write_tiny_bundle

LAYERS, ROOM = 4, 512
PLAN = ExportPlan(
    context_tokens=ROOM, chunk_tokens=(16, 64), cache_tokens=(), verify_tokens=(8,), block_tokens=4
)


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    cfg = dataclasses.replace(TINY, layers=LAYERS, window_tokens=ROOM, attention_windows=())
    path = tmp_path_factory.mktemp("export") / "tiny.jaxllm"
    return read_subject(write_tiny_bundle(path, cfg=cfg, params=tiny_params(cfg)))


def compiled(signature, subject, *, branches):
    """A program of all platforms, as this CPU compiles it."""
    program = traced(signature, subject, PLAN, precision="f32", platforms=PLATFORMS, branches=branches)
    step = jax.jit(program.call, donate_argnums=(1,), keep_unused=True)
    return step.lower(*step_shapes(signature, subject, PLAN, np.dtype(np.float32))).compile()


@pytest.mark.parametrize("name", ["decode", "block_4", "verify_8", "prefill_16", "prefill_64"])
def test_no_cache_is_copied(subject, name, shipped_compilations):
    (signature,) = (each for each in PLAN.resolved(subject.cfg).signatures(WHOLE, str) if each.name == name)
    one = 4 * int(np.prod(next(iter(cache_shapes(subject.cfg, ROOM).values()))))
    # What a block copies are its controls.
    assert copied_bytes(compiled(signature, subject, branches=True)) < one
    if name == "decode":
        assert copied_bytes(compiled(signature, subject, branches=False)) >= 2 * LAYERS * one
