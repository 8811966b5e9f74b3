"""Chunks in and out of caches: what is stored comes back, what is computed is what a prefill gives."""

import numpy as np
import pytest

from jaxllm.contexts.codecs import ChunkFormat, ChunkShape
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.serving.contexts.chunk_io import ChunkIO
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.runners.runner import prefill_prompt
from tests.kernels.switching import needs_native
from tests.tiny import TINY

C = 16
TOKENS = np.random.default_rng(0).integers(0, 250, 60).tolist()


def prefilled(runner, tokens=TOKENS):
    """A cache, and a copy of its keys and values."""
    _, cache = prefill_prompt(runner, runner.start(len(tokens)), tokens, 0)
    return cache, [np.array(rows) for rows in (*cache.keys, *cache.values)]


def rows_of(cache):
    return [np.asarray(rows) for rows in (*cache.keys, *cache.values)]


def test_chunks_come_back_as_their_codec_has_them(engine_of):
    """Of every width, in other places nothing; the first layer by hand."""
    runner = engine_of("kivi").runner
    chunk_io = ChunkIO(runner)
    cache, rows = prefilled(runner)
    stored = chunk_io.encode(cache, {0: 4, 1: 8, 3: 2})
    assert {chunk: bits for chunk, (bits, _) in stored.items()} == {0: 4, 1: 8, 3: 2}
    shape = ChunkShape(heads=4, tokens=C, width=16)
    for chunk, (bits, blobs) in stored.items():
        assert tuple(blob.size for blob in blobs) == chunk_io.layer_bytes[bits]
        assert sum(blob.size for blob in blobs) == chunk_io.chunk_bytes(bits)
        # What the codec decodes is what it was given, but for its levels.
        keys, values = ChunkFormat.named("kivi", C).codec.decode(blobs[0][None], shape, bits)
        for got, stack in ((keys, 0), (values, 1)):
            wanted = rows[stack][0, 0, :, chunk * C : (chunk + 1) * C]
            assert np.abs(np.asarray(got)[0] - wanted).max() <= 0.6 * np.ptp(wanted) / (2**bits - 1)
    loaded = chunk_io.load(runner.start(60), stored)
    for got, whole in zip(rows_of(loaded), rows, strict=True):
        assert not got[..., 32:48, :].any()
        assert not np.array_equal(got[..., :16, :], whole[..., :16, :])
        np.testing.assert_allclose(got[..., 16:32, :], whole[..., 16:32, :], atol=0.02)


def test_blobs_that_have_not_the_bytes_of_their_width_are_refused(engine_of):
    """Before an address of them is given away, in whichever layer."""
    runner = engine_of("kivi").runner
    chunk_io = ChunkIO(runner)
    cache, _ = prefilled(runner)
    bits, blobs = chunk_io.encode(cache, {1: 4})[1]
    short = [*blobs[:2], blobs[2][:-1]]
    for stored, layer in (((8, blobs), 0), ((2, blobs), 0), ((bits, short), 2)):
        with pytest.raises(CheckpointError, match=f"chunk 1 has .* bytes in layer {layer}"):
            chunk_io.load(runner.start(60), {1: stored})
        at = chunk_io.positions([0], 1)
        there = {1: (stored[0], stored[1][layer])}
        with pytest.raises(CheckpointError, match=f"chunk 1 has .* bytes in layer {layer}"):
            chunk_io.restore_layer(layer, chunk_io.embed(TOKENS, at), at, runner.start(60), there)


@pytest.mark.slow
@needs_native
def test_a_level_stores_the_heads_that_it_uses(engine_of):
    """Although its cache has room for those of the whole model."""
    engine = engine_of("channel", "int8", (50,))
    whole, half = (ChunkIO(engine.runner_at(level)) for level in (100, 50))
    assert half.runner.model.bucket_level == 100
    assert half.chunk_bytes(4) == whole.chunk_bytes(4) // 2
    assert (half.origin.heads, whole.origin.heads) == ((2, 2, 2), (4, 4, 4))
    cache, rows = prefilled(half.runner)
    loaded = half.load(half.runner.start(60), half.encode(cache, {0: 8, 2: 8}))
    for got, wanted in zip(rows_of(loaded), rows, strict=True):
        assert got.shape[-3] == 4
        got, unused = got[..., :2, :, :], got[..., 2:, :, :]
        assert not unused.any()
        for there in (slice(16), slice(32, 48)):
            np.testing.assert_allclose(got[..., there, :], wanted[..., :2, there, :], atol=0.03)
        assert not got[..., 16:32, :].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(kv_codec="zip"), "no codec 'zip'"),
        (dict(kv_codec="raw", kv_chunk_tokens=0), "kv_chunk_tokens must be a whole number in"),
        # One that cannot be computed.
        (dict(kv_codec="raw", kv_chunk_tokens=24), "divides none"),
    ],
)
def test_bad_options_are_told(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineOptions(**options).resolve(TINY)
