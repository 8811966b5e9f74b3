"""Chunks from bytes to a cache, on every processor's kernels: what the codec itself decodes, in its place."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernels import native_attention
from jaxllm.kernels.used_units import UsedUnits
from jaxllm.kv.chunks import load_chunks, place_chunks
from jaxllm.kv.codecs import CODECS, RAW, WIDTHS, ChunkFormat, ChunkShape
from serving.contexts.blobs import Blobs
from tests.kernels.drawing import answers
from tests.kernels.switching import needs_native

pytestmark = needs_native
C = 16


def extents_of(blobs):
    """Where blobs are, as the kernel takes it; None for those that are not there."""
    return Blobs(np.zeros(0, np.uint8) if blob is None else blob for blob in blobs).extents


def door(name):
    codec = CODECS[name]
    options = dict(
        tokens=C,
        keys_by_token=codec.keys == "token",
        values_by_token=codec.values == "token",
        rotated=codec.rotated,
    )

    def load(*args):
        """Into any number of layers: keys, values, keys, values, ..., extents and bits."""
        *rows, extents, bits = args
        pasts = tuple(zip(rows[::2], rows[1::2], strict=True))
        return [
            each for past in native_attention.load_chunks(pasts, extents, bits, **options) for each in past
        ]

    return load


@pytest.mark.slow
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("width", [4, 16, 20, 64, 96])
def test_the_kernel_decodes_what_the_codec_does(name, dtype, width):
    """Chunks of every width and none, side by side, in two layers of different heads; the last one reaches
    past the cache's end."""
    draw = np.random.default_rng(width)
    bits = np.array([8, -1, 2, RAW, 4, 8, RAW, 2, 4], np.int32)
    capacity = len(bits) * C - 5
    codec, blobs, rows, wanted = CODECS[name], [], [], []
    for heads in (3, 2):
        shape = ChunkShape(heads=heads, tokens=C, width=width, dtype=dtype)
        past = draw.normal(size=(2, 1, heads, capacity, width)).astype(dtype)
        chunks = draw.normal(size=(2, len(bits), heads, C, width)).astype(np.float32) * 3 + 1
        after, own = [jnp.asarray(each) for each in past], [None] * len(bits)
        for each in (RAW, *WIDTHS):
            at = np.flatnonzero(bits == each).astype(np.int32)
            coded = codec.encode(*map(jnp.asarray, chunks[:, at]), shape, each)
            for place, blob in zip(at, np.asarray(coded), strict=True):
                own[place] = blob.copy()
            back = codec.decode(coded, shape, each)
            after = [place_chunks(*pair, at) for pair in zip(after, back, strict=True)]
        blobs += own
        rows += list(past)
        wanted += after
    extents = extents_of(blobs).reshape(2, len(bits), 3)
    for kernels, found in answers(door(name), *rows, extents, bits).items():
        chex.assert_trees_all_equal_shapes_and_dtypes(found, wanted)
        for got, expected in zip(found, wanted, strict=True):
            room = 2e-3 if dtype == "float16" else 1e-5
            np.testing.assert_allclose(
                got.astype(np.float32),
                np.asarray(expected, np.float32),
                atol=room,
                rtol=room,
                err_msg=kernels,
            )
    assert set(WIDTHS) | {RAW, -1} == set(bits.tolist())


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bits", [RAW, *WIDTHS])
def test_blobs_of_some_heads_fill_those_alone(name, bits):
    draw = np.random.default_rng(3)
    form = ChunkFormat(CODECS[name], (bits,), C)
    whole = ChunkShape(heads=3, tokens=C, width=8)
    chunk = [jnp.asarray(draw.normal(size=(1, 3, C, 8)), jnp.float32) for _ in "kv"]
    blobs = np.asarray(form.codec.encode(chunk[0], chunk[1], whole, bits))
    cut = form.first_heads(blobs, whole, bits, 2)
    assert cut.shape == (1, form.codec.blob_bytes(ChunkShape(heads=2, tokens=C, width=8), bits))
    np.testing.assert_array_equal(form.first_heads(blobs, whole, bits, 3), blobs)
    wanted = form.codec.decode(blobs, whole, bits)
    keys, values = draw.normal(size=(2, 1, 3, C, 8)).astype(np.float32)

    def door(keys, values, source, widths, counts):
        used = UsedUnits(counts, 1, 0)
        return load_chunks([(keys, values)], source, widths, form=form, used=[used])[0]

    counts = np.array([[9, 9, 9], [2, 9, 9]], np.int32)
    given = keys, values, extents_of([cut[0]])[None], np.array([bits], np.int32), counts
    for kernels, found in answers(door, *given).items():
        for got, was, expected in zip(found, (keys, values), wanted, strict=True):
            np.testing.assert_allclose(got[:, :2], expected[:, :2], atol=1e-5, err_msg=kernels)
            np.testing.assert_array_equal(got[:, 2], was[:, 2], err_msg=kernels)


@pytest.mark.parametrize("heads", [0, 4, -1])
def test_heads_that_a_cache_has_not_are_refused(heads):
    past = (jnp.zeros((1, 3, C, 8)), jnp.zeros((1, 3, C, 8)))
    form, nowhere = ChunkFormat.named("raw", C), np.zeros((1, 1, 3), np.uint32)

    def door(counts):
        used = UsedUnits(counts, 0, 0)
        return load_chunks([past], jnp.asarray(nowhere), jnp.asarray([-1], jnp.int32), form=form, used=[used])

    with pytest.raises(Exception, match="a count is out of range"):
        jax.block_until_ready(jax.jit(door)(jnp.array([[heads, 1, 1]], jnp.int32)))


@pytest.mark.slow
def test_blobs_by_value_are_what_blobs_by_address_are():
    """The way of processes without native kernels."""
    draw, form = np.random.default_rng(4), ChunkFormat.named("kivi", C)
    shape = ChunkShape(heads=2, tokens=C, width=8)
    bits = np.array([4, -1, 8, 2], np.int32)
    past = tuple(jnp.asarray(draw.normal(size=(1, 2, 4 * C - 3, 8)), jnp.float32) for _ in "kv")
    blobs, source = [], np.zeros((4, form.codec.blob_bytes(shape, 8)), np.uint8)
    for place, width in enumerate(bits.tolist()):
        rows = [jnp.asarray(draw.normal(size=(1, 2, C, 8)), jnp.float32) for _ in "kv"]
        blob = None if width < 0 else np.asarray(form.codec.encode(rows[0], rows[1], shape, width))[0]
        blobs.append(blob)
        if blob is not None:
            source[place, : blob.size] = blob
    (plain,) = load_chunks([past], [jnp.asarray(source)], jnp.asarray(bits), form=form)

    def door(keys, values, source, bits):
        return load_chunks([(keys, values)], source, bits, form=form)[0]

    for found in answers(door, *past, extents_of(blobs)[None], bits).values():
        for got, expected in zip(found, plain, strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("bits", [RAW, *WIDTHS])
@pytest.mark.parametrize("change", [-1, 1, 1 << 20])
def test_a_blob_that_has_not_the_bytes_of_its_width_is_refused(bits, change):
    """Before a byte of it is read, in any layer."""
    past = (jnp.zeros((1, 3, C, 8)), jnp.zeros((1, 3, C, 8)))
    form = ChunkFormat.named("raw" if bits == RAW else "kivi", C)
    size = form.codec.blob_bytes(ChunkShape(heads=3, tokens=C, width=8), bits)
    blobs = [np.zeros(size, np.uint8) for _ in range(2)]
    extents = extents_of(blobs).reshape(2, 1, 3)

    def door(extents):
        return load_chunks([past, past], extents, jnp.asarray([bits], jnp.int32), form=form)

    jax.block_until_ready(jax.jit(door)(jnp.asarray(extents)))
    extents[1, 0, 2] = max(0, size + change)
    with pytest.raises(Exception, match="has not the bytes of its width"):
        jax.block_until_ready(jax.jit(door)(jnp.asarray(extents)))


def test_layers_of_different_caches_are_refused():
    short, long = (jnp.zeros((1, 3, tokens, 8)) for tokens in (C, 2 * C))
    form, nowhere = ChunkFormat.named("raw", C), jnp.zeros((2, 1, 3), jnp.uint32)

    def door(bits):
        return load_chunks([(short, short), (long, long)], nowhere, bits, form=form)

    with pytest.raises(Exception, match=r"load_chunks takes keys as .* with S = 16"):
        jax.block_until_ready(jax.jit(door)(jnp.array([-1], jnp.int32)))
