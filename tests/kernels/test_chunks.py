"""Chunks from bytes to a cache, on every processor's kernels: what the codec itself decodes, in its place."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernels import native
from jaxllm.kv.chunks import place_chunks
from jaxllm.kv.codecs import CODECS, RAW, WIDTHS, ChunkShape
from tests.kernels.drawing import answers
from tests.kernels.switching import needs_native

pytestmark = needs_native
C = 16


def addresses_of(blobs):
    """Where blobs are, as the kernel takes it; None for those that are not there."""
    places = np.array([0 if blob is None else blob.ctypes.data for blob in blobs], np.uint64)
    return places.view(np.uint32).reshape(-1, 2)


def door(name):
    codec = CODECS[name]
    options = dict(
        tokens=C,
        keys_by_token=codec.keys == "token",
        values_by_token=codec.values == "token",
        rotated=codec.rotated,
    )
    return functools.partial(native.load_chunks, **options)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("width", [4, 16, 20, 64, 96])
def test_the_kernel_decodes_what_the_codec_does(name, dtype, width):
    """Chunks of every width and none, side by side; the last one reaches past the cache's end."""
    draw = np.random.default_rng(width)
    shape = ChunkShape(heads=3, tokens=C, width=width, dtype=dtype)
    bits = np.array([8, -1, 2, RAW, 4, 8, RAW, 2], np.int32)
    capacity = len(bits) * C - 5
    chunks = [draw.normal(size=(2, 1, 3, C, width)).astype(np.float32) * 3 + 1 for _ in bits]
    keys, values = draw.normal(size=(2, 1, 3, capacity, width)).astype(dtype)
    codec = CODECS[name]
    blobs, wanted = [], (jnp.asarray(keys), jnp.asarray(values))
    for place, (each, each_bits) in enumerate(zip(chunks, bits, strict=True)):
        if each_bits < 0:
            blobs.append(None)
            continue
        coded = codec.encode(*(jnp.asarray(part) for part in each), shape, int(each_bits))
        blobs.append(np.asarray(coded[0]).copy())
        back = codec.decode(coded, shape, int(each_bits))
        at = np.array([place], np.int32)
        wanted = tuple(place_chunks(rows, part, at) for rows, part in zip(wanted, back, strict=True))
    for kernels, found in answers(door(name), keys, values, addresses_of(blobs), bits).items():
        for got, expected in zip(found, wanted, strict=True):
            assert got.dtype == expected.dtype
            room = 2e-3 if dtype == "float16" else 1e-5
            np.testing.assert_allclose(
                got.astype(np.float32),
                np.asarray(expected, np.float32),
                atol=room,
                rtol=room,
                err_msg=kernels,
            )
    assert set(WIDTHS) | {RAW, -1} == set(bits.tolist())
