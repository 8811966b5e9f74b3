"""The buckets of batches: made where options ask for them, kept on disk, found whatever others there are."""

import dataclasses

import pytest

from jaxllm import Engine
from jaxllm.serving.buckets.batch import BatchBucket
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.engine.step import batchable, decode_together, step
from jaxllm.serving.ground.options import EngineOptions
from tests.kernels.switching import needs_native
from tests.tiny import write_tiny_bundle

pytestmark = [needs_native, pytest.mark.usefixtures("own_compilations")]
OPTIONS = EngineOptions(
    context_tokens=32, chunk_tokens=(16,), decode_block=4, batch_rows=(2,), buckets_bytes=1 << 30
)
PAIR = BatchBucket(rows=2, block_tokens=4, cache_tokens=32)


def decoded(engine):
    config = GenerationConfig(max_tokens=4, ignore_eos=True)
    runs = [engine.stream([at, 3], config) for at in (5, 9)]
    while not all(map(batchable, runs)):
        step(*(run for run in runs if not batchable(run)))
    decode_together(runs, most_tokens=3)
    return [run.tokens for run in runs], [engine.generate([at, 3], config).tokens for at in (5, 9)]


def test_a_bucket_is_kept_and_found_whatever_batches_are_asked_for(tmp_path, monkeypatch, compiles):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    path = write_tiny_bundle(tmp_path / "tiny.jaxllm", "int8")
    first = Engine.open(path, options=OPTIONS)
    buckets = first.model.runners.buckets
    assert PAIR in buckets.bucket_ms
    assert PAIR not in buckets.loaded
    expected, alone = decoded(first)
    assert expected == alone
    with compiles() as count:
        again = Engine.open(path, options=OPTIONS)
    assert (count(), PAIR in again.model.runners.buckets.loaded) == (0, True)
    assert decoded(again)[0] == expected
    without = Engine.open(path, options=dataclasses.replace(OPTIONS, batch_rows=()))
    assert without.model.facts()["compiled_buckets"] == 0
    assert PAIR not in without.model.runners.buckets
