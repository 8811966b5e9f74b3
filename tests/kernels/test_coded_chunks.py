"""Attention over chunks as they are stored, by address and by value, beside a plain one in numpy."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.contexts.codecs import CODECS, RAW, ChunkFormat, ChunkShape
from jaxllm.contexts.coded import CodedChunks
from jaxllm.kernels.native import ChunkTable
from jaxllm.kv.cache import Past, TokenPositions
from jaxllm.nn.layers import AttentionOptions, Heads, cached_attention
from tests.kernels.switching import needs_native

pytestmark = needs_native
K, C, COUNT, CAPACITY = 2, 10, 9, 32


class Case:
    """Chunks of all widths in turn, and a cache of `CAPACITY` rows behind them, of which three are filled."""

    def __init__(self, name: str, dtype: str, width: int, tokens: int, group: int, window: int = 0) -> None:
        draw, self.form = np.random.default_rng(width + tokens), ChunkFormat.named(name, C)
        self.bits = [self.form.widths[n % len(self.form.widths)] for n in range(COUNT)]
        self.shape = ChunkShape(heads=K, tokens=C, width=width, dtype=dtype)
        # Decoded without rounding to halves, as attention reads them.
        wide = dataclasses.replace(self.shape, dtype=dtype if name == "raw" else "float32")
        self.blobs, sides = [], ([], [])
        for bits in self.bits:
            chunk = [jnp.asarray(draw.normal(size=(1, K, C, width)) * 2 + 0.5, jnp.float32) for _ in "kv"]
            blob = self.form.codec.encode(chunk[0], chunk[1], self.shape, bits)
            self.blobs.append(np.asarray(blob)[0].copy())
            for side, rows in zip(sides, self.form.codec.decode(blob, wide, bits), strict=True):
                side.append(np.asarray(rows, np.float32)[0])
        self.length, self.options = COUNT * C + 3, AttentionOptions(scale=width**-0.5, window=window)
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
            heads=[K], tokens=C, width=self.shape.width, half=self.shape.dtype == "float16",
            keys_by_token=codec.keys == "token", values_by_token=codec.values == "token",
            rotated=codec.rotated,
        )  # fmt: skip
        return ChunkTable(
            [(bits, [blob]) for bits, blob in zip(self.bits, self.blobs, strict=True)],
            **given | change,
        )

    def by_value(self) -> CodedChunks:
        """With room for two chunks more."""
        source = np.zeros((1, COUNT + 2, max(self.form.sizes(self.shape).values())), np.uint8)
        for place, blob in enumerate(self.blobs):
            source[0, place, : blob.size] = blob
        bits = np.array([*self.bits, -1, -1], np.int32)
        return CodedChunks(np.int32(COUNT * C), source, self.form, bits, self.no_mass, np.int32(0))

    def by_address(self, table: ChunkTable, tokens: int = COUNT * C) -> CodedChunks:
        return CodedChunks(np.int32(tokens), table.operand, self.form, None, self.no_mass, np.int32(0))

    @property
    def no_mass(self) -> np.ndarray:
        return np.zeros((1, COUNT + 2), np.float32)

    def attend(self, coded: CodedChunks) -> tuple[np.ndarray, np.ndarray]:
        """Outputs, and the mass of all positions, of chunks spread over their tokens."""
        tokens = self.new.k.shape[1]
        positions = jnp.arange(self.length, self.length + tokens, dtype=jnp.int32)
        at = TokenPositions(positions, jnp.int32(tokens), consecutive=True)

        def door(new: Heads, keys: jax.Array, values: jax.Array, coded: CodedChunks) -> Any:
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
        of_chunks = self.mass[: COUNT * C].reshape(COUNT, C).sum(1)
        wanted = np.concatenate([of_chunks, self.mass[COUNT * C :]])
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
    rows = [np.zeros((1, 1, K, COUNT * C + CAPACITY, 64), dtype) for _ in "kv"]
    for number, blob in enumerate(case.blobs):
        halves = blob.view(dtype).reshape(2, K, C, 64)
        for side, own in zip(rows, halves, strict=True):
            side[0, 0, :, number * C : (number + 1) * C] = own
    for side, cache in zip(rows, case.cache, strict=True):
        side[0, 0, :, COUNT * C :] = cache[0, 0]
    table = case.table()
    out, _ = case.attend(case.by_address(table))
    case.cache = rows
    plain, _ = case.attend(case.by_address(table, tokens=0))
    np.testing.assert_array_equal(out, plain)


def test_tokens_that_a_table_has_not_and_closed_tables_are_refused():
    case = Case("kivi", "float32", 64, 1, 1)
    table = case.table()
    for tokens in (COUNT * C + C, COUNT * C - 1, -C):
        with pytest.raises(Exception, match="not so many tokens in whole chunks"):
            case.attend(case.by_address(table, tokens))
    table.close()
    with pytest.raises(Exception, match="no such table of chunks, or it is closed"):
        case.attend(case.by_address(table))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"heads": [K + 1]}, "has not the bytes of its width"),
        ({"heads": [0]}, "a layer of chunks needs a head"),
        ({"heads": []}, "each chunk needs a blob in each layer"),
        ({"heads": [K, K]}, "each chunk needs a blob in each layer"),
        ({"tokens": C + 1}, "has not the bytes of its width"),
        ({"width": 6}, "a multiple of 4"),
        ({"keys_by_token": True}, "has not the bytes of its width"),
    ],
)
def test_a_table_that_does_not_fit_is_not_opened(change, part):
    with pytest.raises(ValueError, match=part):
        Case("kivi", "float32", 64, 1, 1).table(**change)


def test_blobs_that_are_no_chunks_are_not_opened():
    case = Case("kivi", "float32", 64, 1, 1)
    case.bits[3] = 3
    with pytest.raises(ValueError, match="levels of 8, 4 or 2 bits"):
        case.table()
    case.bits[3] = RAW
    with pytest.raises(ValueError, match="has not the bytes of its width"):
        case.table()
    case = Case("raw", "float32", 64, 1, 1)
    memory = np.zeros(case.blobs[0].size + 4, np.uint8)
    case.blobs[0] = memory[1 : 1 + case.blobs[0].size]
    with pytest.raises(ValueError, match="is not aligned"):
        case.table()
    with pytest.raises(ValueError, match="stand beside no transformed ones"):
        case.table(rotated=True)
