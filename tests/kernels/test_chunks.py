"""Chunks from bytes to a cache, on every processor's kernels: what the codec itself decodes, in its place."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.contexts.codecs import CODECS, RAW, WIDTHS, ChunkFormat, ChunkShape
from jaxllm.contexts.coded import QuantizedPrefix
from jaxllm.kernels import native_attention
from jaxllm.kernels.native import ChunkTable
from jaxllm.kv.cache import KVCache, Past, TokenPositions
from jaxllm.kv.chunks import load_chunks, place_chunks
from jaxllm.nn.layers import AttentionOptions, Heads, cached_attention
from jaxllm.serving.contexts.memory import Blobs
from tests.kernels.drawing import answers, jit
from tests.kernels.switching import needs_native

pytestmark = needs_native
C = 16
# Compiled once for all tests, as each operation by itself is compiled for each shape.
placing = jit(place_chunks)


@functools.cache
def coders(name):
    """A codec's two directions."""
    static = dict(static_argnames=("shape", "bits"))
    return jit(CODECS[name].encode, **static), jit(CODECS[name].decode, **static)


def extents_of(blobs):
    """Where blobs are, as the kernel takes it; None for those that are not there."""
    return Blobs(np.zeros(0, np.uint8) if blob is None else blob for blob in blobs).extents


def cache_of(*pasts):
    """A cache of stacks of one layer each."""
    keys, values = ([each[None] for each in side] for side in zip(*pasts, strict=True))
    places = tuple((stack, 0) for stack in range(len(pasts)))
    return KVCache(tuple(keys), tuple(values), jnp.zeros((), jnp.int32), places=places)


def pair_of(cache):
    """Keys and values of the first layer."""
    return cache.keys[0][0], cache.values[0][0]


def door(name):
    codec = CODECS[name]
    options = dict(
        tokens=C, keys_by_token=codec.keys == "token", values_by_token=codec.values == "token",
        rotated=codec.rotated,
    )  # fmt: skip

    def load(*args):
        """Into any number of layers: keys, values, keys, values, ..., extents and bits."""
        *rows, extents, bits = args
        stacks = [(keys[None], values[None]) for keys, values in zip(rows[::2], rows[1::2], strict=True)]
        slots = np.zeros(len(stacks), np.int32)
        loaded = native_attention.load_chunks(stacks, range(len(stacks)), slots, extents, bits, **options)
        return [each[0] for past in loaded for each in past]

    return load


@pytest.mark.slow
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(
    ("width", "dtype"),
    [(4, "float32"), (20, "float32"), (20, "float16"), (96, "float16")],
)
def test_the_kernel_decodes_what_the_codec_does(name, dtype, width):
    """Chunks of every width and none, side by side, in two layers of different heads; the last one reaches
    past the cache's end."""
    draw = np.random.default_rng(width)
    bits = np.array([8, -1, 2, RAW, 4, 8, RAW, 2, 4], np.int32)
    capacity = len(bits) * C - 5
    (encode, decode), blobs, rows, wanted = coders(name), [], [], []
    for heads in (3, 2):
        shape = ChunkShape(heads=heads, tokens=C, width=width, dtype=dtype)
        past = draw.normal(size=(2, 1, heads, capacity, width)).astype(dtype)
        chunks = draw.normal(size=(2, len(bits), heads, C, width)).astype(np.float32) * 3 + 1
        after, own = list(past), [None] * len(bits)
        for each in (RAW, *WIDTHS):
            at = np.flatnonzero(bits == each).astype(np.int32)
            coded = encode(*chunks[:, at], shape=shape, bits=each)
            for place, blob in zip(at, np.asarray(coded), strict=True):
                own[place] = blob.copy()
            back = decode(coded, shape=shape, bits=each)
            after = [placing(*pair, at) for pair in zip(after, back, strict=True)]
        blobs += own
        rows += list(past)
        wanted += after
    extents = extents_of(blobs).reshape(2, len(bits), 3)
    for kernels, found in answers(door(name), *rows, extents, bits).items():
        chex.assert_trees_all_equal_shapes_and_dtypes(found, wanted)
        for got, expected in zip(found, wanted, strict=True):
            room = 2e-3 if dtype == "float16" else 1e-5
            got, expected = got.astype(np.float32), np.asarray(expected, np.float32)
            np.testing.assert_allclose(got, expected, atol=room, rtol=room, err_msg=kernels)
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

    def door(keys, values, source, widths, heads):
        return pair_of(load_chunks(cache_of((keys, values)), [0], source, widths, form=form, heads=heads))

    counts = np.array([2], np.int32)
    given = keys, values, extents_of([cut[0]])[None], np.array([bits], np.int32), counts
    for kernels, found in answers(door, *given).items():
        for got, was, expected in zip(found, (keys, values), wanted, strict=True):
            np.testing.assert_allclose(got[:, :2], expected[:, :2], atol=1e-5, err_msg=kernels)
            np.testing.assert_array_equal(got[:, 2], was[:, 2], err_msg=kernels)


@pytest.mark.parametrize("bits", [RAW, *WIDTHS])
def test_a_blob_that_has_not_the_bytes_of_its_width_is_refused(bits):
    """Before a byte of it is read, in any layer."""
    past = (jnp.zeros((1, 3, C, 8)), jnp.zeros((1, 3, C, 8)))
    form = ChunkFormat.named("raw" if bits == RAW else "kivi", C)
    size = form.codec.blob_bytes(ChunkShape(heads=3, tokens=C, width=8), bits)
    blobs = [np.zeros(size, np.uint8) for _ in range(2)]
    extents = extents_of(blobs).reshape(2, 1, 3)

    @jax.jit
    def door(extents):
        cache = cache_of(past, past)
        return load_chunks(cache, [0, 1], extents, jnp.asarray([bits], jnp.int32), form=form)

    jax.block_until_ready(door(jnp.asarray(extents)))
    for change in (-1, 1, 1 << 20):
        extents[1, 0, 2] = max(0, size + change)
        with pytest.raises(Exception, match="has not the bytes of its width"):
            jax.block_until_ready(door(jnp.asarray(extents)))


# Attention over chunks as they are stored, by address and by value, beside a plain one in numpy

K, COUNT, CAPACITY = 2, 9, 32
# Tokens of a chunk that end in the middle of a block of keys.
UNEVEN = 10


class Case:
    """Chunks of all widths in turn, and a cache of `CAPACITY` rows behind them, of which three are filled."""

    def __init__(self, name: str, dtype: str, width: int, tokens: int, group: int, window: int = 0) -> None:
        draw, self.form = np.random.default_rng(width + tokens), ChunkFormat.named(name, UNEVEN)
        self.bits = [self.form.widths[n % len(self.form.widths)] for n in range(COUNT)]
        self.shape = ChunkShape(heads=K, tokens=UNEVEN, width=width, dtype=dtype)
        # Decoded without rounding to halves, as attention reads them.
        wide = dataclasses.replace(self.shape, dtype=dtype if name == "raw" else "float32")
        self.blobs, sides = [], ([], [])
        for bits in self.bits:
            chunk = [
                jnp.asarray(draw.normal(size=(1, K, UNEVEN, width)) * 2 + 0.5, jnp.float32) for _ in "kv"
            ]
            blob = self.form.codec.encode(chunk[0], chunk[1], self.shape, bits)
            self.blobs.append(np.asarray(blob)[0].copy())
            for side, rows in zip(sides, self.form.codec.decode(blob, wide, bits), strict=True):
                side.append(np.asarray(rows, np.float32)[0])
        self.length, self.options = COUNT * UNEVEN + 3, AttentionOptions(scale=width**-0.5, window=window)
        self.cache = [draw.normal(size=(1, 1, K, CAPACITY, width)).astype(dtype) for _ in "kv"]
        q = draw.normal(size=(1, tokens, K, group, width)).astype(np.float32)
        k, v = (draw.normal(size=(1, tokens, K, width)).astype(np.float32) for _ in "kv")
        self.new = Heads(*map(jnp.asarray, (q, k, v)))
        rows = [
            np.concatenate([*side, cache[0, 0].astype(np.float32)], 1)
            for side, cache in zip(sides, self.cache, strict=True)
        ]
        for side, new in zip(rows, (k, v), strict=True):
            side[:, self.length : self.length + tokens] = new[0].astype(dtype).swapaxes(0, 1)
        scores = np.einsum("tkgh,ksh->tkgs", q[0], rows[0]) * self.options.scale
        stands, token = np.arange(scores.shape[-1]), self.length + np.arange(tokens)[:, None]
        hidden = (stands > token) | (stands <= token - window if window else False)
        scores = np.where(hidden[:, None, None], -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        self.wanted = np.einsum("tkgs,ksh->tkgh", weights, rows[1])
        self.mass = weights.sum((0, 1, 2))

    def table(self, **change: Any) -> ChunkTable:
        codec = self.form.codec
        given: dict[str, Any] = dict(
            heads=[K], tokens=UNEVEN, width=self.shape.width, half=self.shape.dtype == "float16",
            keys_by_token=codec.keys == "token", values_by_token=codec.values == "token",
            rotated=codec.rotated,
        )  # fmt: skip
        return ChunkTable(
            [(bits, [blob]) for bits, blob in zip(self.bits, self.blobs, strict=True)],
            **given | change,
        )

    def by_value(self) -> QuantizedPrefix:
        """With room for two chunks more."""
        source = np.zeros((1, COUNT + 2, max(self.form.sizes(self.shape).values())), np.uint8)
        for place, blob in enumerate(self.blobs):
            source[0, place, : blob.size] = blob
        bits = np.array([*self.bits, -1, -1], np.int32)
        return QuantizedPrefix(np.int32(COUNT * UNEVEN), source, self.form, bits, self.no_mass, np.int32(0))

    def by_address(self, table: ChunkTable, tokens: int = COUNT * UNEVEN) -> QuantizedPrefix:
        return QuantizedPrefix(np.int32(tokens), table.operand, self.form, None, self.no_mass, np.int32(0))

    @property
    def no_mass(self) -> np.ndarray:
        return np.zeros((1, COUNT + 2), np.float32)

    def attend(self, coded: QuantizedPrefix) -> tuple[np.ndarray, np.ndarray]:
        """Outputs, and the mass of all positions, of chunks spread over their tokens."""
        tokens = self.new.k.shape[1]
        positions = jnp.arange(self.length, self.length + tokens, dtype=jnp.int32)
        at = TokenPositions(positions, jnp.int32(tokens), consecutive=True)

        def door(new: Heads, keys: jax.Array, values: jax.Array, coded: QuantizedPrefix) -> Any:
            capacity = keys.shape[-2]
            mask, mass = jnp.zeros((tokens, capacity), jnp.bool_), jnp.zeros((1, capacity))
            past = Past(keys, values, jnp.int32(0), coded)
            return cached_attention(new, None, past, mask, at, mass, options=self.options)

        out, past, mass = jax.jit(door)(self.new, *self.cache, coded)
        of_chunks = np.asarray(past.coded.mass)[0]
        assert not of_chunks[COUNT:].any()
        return np.asarray(out)[0], np.concatenate([of_chunks[:COUNT], np.asarray(mass)[0]])

    def judge(self, found: tuple[np.ndarray, np.ndarray], room: float) -> None:
        out, mass = found
        np.testing.assert_allclose(out, self.wanted, atol=room)
        of_chunks = self.mass[: COUNT * UNEVEN].reshape(COUNT, UNEVEN).sum(1)
        wanted = np.concatenate([of_chunks, self.mass[COUNT * UNEVEN :]])
        np.testing.assert_allclose(mass, wanted, atol=room * len(self.new.q[0]))


SHAPES = [
    ("float16", 64, 1, 1, 0), ("float32", 64, 3, 2, 50), ("float16", 20, 1, 3, 0), ("float16", 64, 12, 2, 0),
    ("float32", 128, 1, 8, 70),
]  # fmt: skip
NAMES = ["raw", *CODECS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "width", "tokens", "group", "window"),
    [
        *(("kivi", *each) for each in SHAPES),
        *((name, *SHAPES[at % 5]) for at, name in enumerate(NAMES) if name != "kivi"),
    ],
)
def test_it_attends_to_what_the_codec_decodes(name, dtype, width, tokens, group, window):
    """Where chunks end in the middle of a block of keys, too."""
    case = Case(name, dtype, width, tokens, group, window)
    table = case.table()
    case.judge(case.attend(case.by_address(table)), 2e-5)
    # XLA decodes to the dtype of the cache first.
    case.judge(case.attend(case.by_value()), 5e-3 if dtype == "float16" else 2e-5)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_raw_chunks_give_the_bits_of_a_cache(dtype):
    case = Case("raw", dtype, 64, 1, 2)
    rows = [np.zeros((1, 1, K, COUNT * UNEVEN + CAPACITY, 64), dtype) for _ in "kv"]
    for number, blob in enumerate(case.blobs):
        halves = blob.view(dtype).reshape(2, K, UNEVEN, 64)
        for side, own in zip(rows, halves, strict=True):
            side[0, 0, :, number * UNEVEN : (number + 1) * UNEVEN] = own
    for side, cache in zip(rows, case.cache, strict=True):
        side[0, 0, :, COUNT * UNEVEN :] = cache[0, 0]
    table = case.table()
    out, _ = case.attend(case.by_address(table))
    case.cache = rows
    plain, _ = case.attend(case.by_address(table, tokens=0))
    np.testing.assert_array_equal(out, plain)


def test_tokens_that_a_table_has_not_and_closed_tables_are_refused():
    case = Case("kivi", "float32", 64, 1, 1)
    table = case.table()
    for tokens in (COUNT * UNEVEN + UNEVEN, COUNT * UNEVEN - 1, -UNEVEN):
        with pytest.raises(Exception, match="not so many tokens in whole chunks"):
            case.attend(case.by_address(table, tokens))
    table.close()
    with pytest.raises(Exception, match="no such table of chunks, or it is closed"):
        case.attend(case.by_address(table))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"heads": [K + 1]}, "has not the bytes of its width"),
        ({"heads": [1 << 17]}, "a layer of chunks has too many heads"),
        ({"heads": []}, "each chunk needs a blob in each layer"),
        ({"heads": [K, K]}, "each chunk needs a blob in each layer"),
        ({"tokens": UNEVEN + 1}, "has not the bytes of its width"),
        ({"width": 6}, "a multiple of 4"),
        ({"keys_by_token": True}, "has not the bytes of its width"),
    ],
)
def test_a_table_that_does_not_fit_is_not_opened(change, part):
    with pytest.raises(ValueError, match=part):
        Case("kivi", "float32", 64, 1, 1).table(**change)
