"""Kernels that read their weights by address give what they give of operands, to the last bit; handles that
nobody gave are refused before a kernel runs; and a weight table holds what it reads."""

import gc
import mmap
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxllm.kernels import native, native_products
from jaxllm.kernels.native import TableArray, WeightTable
from jaxllm.kernels.native_call import UsedUnits, value
from jaxllm.quant import Adapted
from tests.kernels.drawing import WIDTHS, answers, floats, weight_of
from tests.kernels.refusing import (
    COUNTS,
    DATA,
    LIVE,
    NOTHING,
    SCALE,
    STEPS,
    UNITS,
    X,
    Y,
    ask,
    formats,
    refuse,
    zeros,
)
from tests.kernels.switching import needs_native

pytestmark = needs_native
EPS = 1e-5


def entries(weights: Any, handle: Any, row: Any) -> Any:
    """The weights with their arrays by address, in the order of their leaves."""
    leaves, structure = jax.tree.flatten(weights)
    return structure.unflatten(
        TableArray(handle, row, column, np.shape(leaf), leaf.dtype) for column, leaf in enumerate(leaves)
    )


def table_of(weights: Any) -> WeightTable:
    """A table whose second row are the weights, between rows of other numbers."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(weights)]
    others = [np.roll(leaf, 1) for leaf in leaves]
    return WeightTable([others, leaves, others])


def same_by_address(door: Any, x: Any, weights: Any) -> None:
    """What a function of activations and weights gives is the same_by_address by address, on all kernels."""
    table = table_of(weights)

    def addressed(x, handle, row):
        return door(x, entries(weights, handle, row))

    expected = answers(door, x, weights)
    found = answers(addressed, x, table.operand, np.int32(1))
    others = answers(addressed, x, table.operand, np.int32(2))
    for kernels, got in found.items():
        jax.tree.map(np.testing.assert_array_equal, got, expected[kernels])
        differ = jax.tree.map(lambda a, b: not np.array_equal(a, b), others[kernels], got)
        assert any(jax.tree.leaves(differ)), "another row gives the same_by_address"
    table.close()


def adapted(draw, weight):
    left = floats(draw, 3, *weight.shape[:-1])
    return Adapted(weight, left, floats(draw, 3, weight.shape[-1]))


@pytest.mark.parametrize(
    ("rows", "width"), [((1, 19)[at % 2], each) for at, each in enumerate(WIDTHS)], ids=str
)
def test_products(rows, width):
    """With norms, adapters of which two ranks are used, and counts of units."""
    draw = np.random.default_rng(rows)
    weights = {
        "q": adapted(draw, weight_of(draw, (4, 12, 300), width, -1)),
        "k": weight_of(draw, (4, 6, 300), width, -1),
        "o": adapted(draw, weight_of(draw, (4, 41, 50), width, -2)),
        "gate": weight_of(draw, (90, 300), width, -1),
        "up": adapted(draw, weight_of(draw, (90, 300), width, -1)),
        "down": adapted(draw, weight_of(draw, (90, 300), width, -2)),
        "scale": floats(draw, 300),
        "counts": np.array([3, 57, 2], np.int32),
    }

    def door(x, weights):
        groups, neurons = (UsedUnits(weights["counts"], column) for column in range(2))
        norm = dict(norm_scale=weights["scale"], norm_eps=EPS)
        q, k = native_products.to_units(x, [weights["q"], weights["k"]], used=groups, **norm)
        return (
            q[:, : 3 * 12],
            k[:, : 3 * 6],
            native_products.from_units(x[:, :164], weights["o"], residual=x[:, :50], used=groups),
            native_products.feed_forward(
                x, weights["gate"], weights["up"], weights["down"], activation="silu", residual=True,
                used=neurons, **norm,
            ),
            native_products.add_normed(x, 2 * x, weights["scale"], EPS),
        )  # fmt: skip

    same_by_address(door, floats(draw, rows, 300), weights)


DTYPES = ["bool", "int8", "uint8", "int32", "uint16", "float16", "bfloat16", "float32"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_array_comes_out_as_it_is(dtype):
    arrays, kind = [], jnp.dtype(dtype)
    for shape in ((7,), (2, 3), (1, 2, 3, 2, 2), (0, 4)):
        raw = np.random.default_rng(0).integers(0, 256, (*shape, kind.itemsize), dtype=np.uint8)
        arrays.append(np.ascontiguousarray((raw.view(kind) if dtype != "bool" else raw > 100)[..., 0]))
    table = WeightTable([[None, *arrays]])

    @jax.jit
    def door(handle):
        places = [
            TableArray(handle, jnp.int32(0), 1 + at, each.shape, kind) for at, each in enumerate(arrays)
        ]
        return [value(each) for each in places]

    for got, array in zip(map(np.asarray, door(table.operand)), arrays, strict=True):
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got.view(np.uint8), array.view(np.uint8))
    table.close()


CLOSED = "an operand is missing, or its weight table is closed"


# Handles


class Open:
    """A table with the weight of `refusing.py` in its second row, and one of other shapes in its first."""

    def __init__(self) -> None:
        self.table = WeightTable([[DATA[:1], SCALE, None], [DATA, SCALE, None], [DATA, SCALE[:31], None]])
        self.handle = int(self.table.operand[0]) | int(self.table.operand[1]) << 32

    def __call__(
        self, handle: Any = None, row: Any = 1, columns: tuple[int, ...] = (0, 1)
    ) -> tuple[Any, ...]:
        operands = [NOTHING, COUNTS, STEPS, *columns, NOTHING, NOTHING, NOTHING]
        self.options = dict(table=(halves(self.handle if handle is None else handle), row))
        return "to_units", [Y], [X, LIVE], operands

    def ask(self, *args: Any, **more: Any) -> Any:
        call = self(*args, **more)
        return ask(*call, **self.options, **formats(), **UNITS)

    def refuse(self, part: str, *args: Any, **more: Any) -> None:
        call = self(*args, **more)
        refuse(part, *call, **self.options, **formats(), **UNITS)


def halves(handle: Any) -> Any:
    if isinstance(handle, np.ndarray):
        return handle
    return np.array([handle & 0xFFFFFFFF, handle >> 32], np.uint32)


@pytest.fixture
def opened():
    found = Open()
    yield found
    found.table.close()


def test_only_the_row_and_the_columns_that_fit_are_read(opened):
    assert opened.ask(row=np.int32(1))[0].shape == (4, 20)
    opened.refuse("a weight's shape does not fit", row=np.int32(0))
    opened.refuse("a weight's shape does not fit", row=np.int32(2))
    opened.refuse("a weight's shape does not fit", row=np.int32(1), columns=(1, 0))
    for row in (-1, 3, 1 << 30, -(1 << 31)):
        opened.refuse(CLOSED, row=np.int32(row))
    # No array where one must be.
    for columns in ((0, 2), (2, 1)):
        opened.refuse("a weight's shape does not fit", row=np.int32(1), columns=columns)
    # No column, and a handle without any.
    for columns in ((0, 3), (3, 1), (0, 1 << 62)):
        opened.refuse(CLOSED, row=np.int32(1), columns=columns)
    for row in (zeros(2, dtype=np.int32), zeros(0, dtype=np.int32), np.float32(1), np.int8(1)):
        opened.refuse(CLOSED, row=row)
    good = opened.table.operand
    for handle in (good[:1], np.append(good, good), good.view(np.int32), good.astype(np.float32), good[:0]):
        opened.refuse(CLOSED, handle=handle, row=np.int32(1))
    # An entry too many, or a buffer too many.
    for change in ({"columns": np.array([-1, -1, -1, 0, 1, -1, -1], np.int64)}, {"columns": np.full(9, -1)}):
        call = opened(row=np.int32(1))
        refuse(CLOSED, *call, **opened.options, **formats(), **UNITS, **change)


@settings(max_examples=50)
@given(
    # The lowest free slot is taken first: that many tables of other tests are never open.
    slot=st.one_of(st.integers(1024, 4095), st.integers(1024, 2**32 - 1)),
    generation=st.one_of(st.integers(0, 3), st.integers(0, 2**32 - 1)), row=st.integers(-(2**31), 2**31 - 1),
    near=st.sampled_from(["slot", "generation", "row", "none"]),
)  # fmt: skip
def test_handles_that_nobody_gave_are_refused(slot, generation, row, near):
    """Any 64 bits and any row, also where two of the three are right."""
    opened = Open()
    if near in ("generation", "row"):
        slot = opened.handle & 0xFFFFFFFF
    if near in ("slot", "row"):
        generation = opened.handle >> 32
    if near in ("slot", "generation"):
        row = 1
    handle = slot | generation << 32
    assume(handle != opened.handle or not 0 <= row < 3)
    try:
        opened.refuse("", handle=handle, row=np.int32(row))
    finally:
        opened.table.close()


def test_a_closed_table_is_refused_for_good():
    """Also when another one has its place."""
    opened = Open()
    opened.ask(row=np.int32(1))
    opened.table.close()
    opened.refuse(CLOSED, row=np.int32(1))
    again = Open()
    assert again.handle != opened.handle
    again.ask(row=np.int32(1))
    opened.refuse(CLOSED, row=np.int32(1))
    opened.table.close()
    again.ask(row=np.int32(1))
    again.table.close()
    assert not native.native_library().close_table(again.handle)
    # Not the first table of a slot, which another test's engine may have.
    for nothing in (0, 0xFFFFFFFF << 32, 4096 | 1 << 32, 2**64 - 1):
        assert not native.native_library().close_table(nothing)


# Memory


def test_a_table_holds_its_arrays():
    memory = mmap.mmap(-1, 4096)
    array = np.frombuffer(memory, np.float32)
    alive = weakref.ref(array)
    table = WeightTable([[array], [zeros(3)]])
    del array
    assert alive() is not None
    with pytest.raises(BufferError):
        memory.close()
    table.close()
    assert alive() is None
    memory.close()
    table.close()


def test_a_table_stays_open_for_steps_that_have_begun():
    """A CPU device holds the handle's memory, and with it the table, until they have ended."""
    array = np.arange(8, dtype=np.float32)
    alive, table = weakref.ref(array), WeightTable([[array]])
    handle = jax.device_put(table.operand, jax.devices("cpu")[0], may_alias=True)
    assert handle.unsafe_buffer_pointer() == table.operand.ctypes.data

    @jax.jit
    def slow(handle, x):
        x = jax.lax.fori_loop(0, 200, lambda _, x: jnp.tanh(x @ x), x)
        # The array is read at the end.
        row = jnp.int32(0) + (x[0, 0] > 2).astype(jnp.int32)
        return value(TableArray(handle, row, 0, (8,), jnp.dtype("float32")))

    jax.block_until_ready(slow(handle, np.zeros((300, 300), np.float32)))
    found = slow(handle, np.zeros((300, 300), np.float32))
    del handle, table, array
    np.testing.assert_array_equal(found, np.arange(8))
    gc.collect()
    assert alive() is None


def test_closing_waits_for_kernels_that_run():
    """What is done with the memory afterwards reaches no answer."""
    draw = np.random.default_rng(0)
    weight, x = weight_of(draw, (512, 512), (8, 0), -1), floats(draw, 300, 512)
    clean = [np.asarray(leaf) for leaf in jax.tree.leaves(weight)]

    @jax.jit
    def door(x, handle):
        return native_products.to_units(x, [entries(weight, handle, jnp.int32(0))])[0]

    expected, rounds = None, 0
    for pause in np.linspace(0, 0.02, 15):
        leaves = [leaf.copy() for leaf in clean]
        table, found, begun = WeightTable([leaves]), [], threading.Event()
        operand = table.operand.copy()
        first = np.asarray(door(x, operand))
        expected = first if expected is None else expected

        def work(found=found, begun=begun, operand=operand):
            begun.set()
            while True:
                try:
                    found.append(np.asarray(door(x, operand)))
                except (jax.errors.JaxRuntimeError, ValueError) as error:
                    found.append(str(error))
                    return

        worker = threading.Thread(target=work)
        worker.start()
        begun.wait()
        threading.Event().wait(pause)
        table.close()
        for leaf in leaves:
            leaf.fill(77)
        worker.join()
        assert CLOSED in found.pop()
        rounds += len(found)
        for got in (first, *found):
            np.testing.assert_array_equal(got, expected)
    assert rounds > 5


def test_as_many_tables_as_there_are():
    """And no more; each has a handle of its own, and every place is used again."""
    array, tables = zeros(3), []

    def fill():
        while len(tables) < 5000:
            tables.append(WeightTable([[array]]))

    with pytest.raises(ValueError, match="fewer tables must be open"):
        fill()
    assert 4000 < len(tables) <= 4096
    handles = {tuple(each.operand.tolist()) for each in tables}
    assert len(handles) == len(tables)
    for number, each in enumerate(tables):
        if number % 2:
            each.close()
    more = [WeightTable([[array]]) for _ in range(len(tables) // 2)]
    assert not handles & {tuple(each.operand.tolist()) for each in more}
    for each in (*tables, *more):
        each.close()


FLAT = np.zeros(65, np.float32)
UNREADABLE, GAPS = (ValueError, "a type or a number"), ((BufferError, ValueError), "contiguous")
BAD = {
    "float64": (np.zeros(3), *UNREADABLE),
    "records": (np.zeros(3, [("a", "f4"), ("b", "i4")]), *UNREADABLE),
    "six dimensions": (np.zeros((1,) * 6, np.float32), *UNREADABLE),
    "not aligned": (FLAT.view(np.uint8)[1:-3].view(np.float32), ValueError, "not aligned"),
    "every second": (FLAT[::2], *GAPS),
    "backwards": (FLAT[::-1], *GAPS),
}


@pytest.mark.parametrize(("array", "error", "message"), BAD.values(), ids=BAD)
def test_arrays_that_kernels_cannot_read_are_refused(array, error, message):
    """And nothing of the others stays held."""
    good = np.zeros(4, np.float32)
    alive = weakref.ref(good)
    with pytest.raises(error, match=message):
        WeightTable([[good, None], [good, array]])
    del good
    assert alive() is None


def test_tables_without_rows_or_of_ragged_rows_are_refused():
    array = zeros(3)
    for rows in ([], [[]], [[], []]):
        with pytest.raises(ValueError, match="needs a row and a column"):
            WeightTable(rows)
    with pytest.raises(ValueError, match="as many columns"):
        WeightTable([[array], [array, array]])
    with pytest.raises(TypeError):
        native.native_library().open_table([[5]])  # pyright: ignore[reportArgumentType]
