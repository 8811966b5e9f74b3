"""Handles that nobody gave are refused before a kernel runs, and a weight table holds what it reads."""

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
from jaxllm.kernels.native_call import value
from tests.kernels.drawing import floats, weight_of
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
from tests.kernels.test_by_address import entries

pytestmark = needs_native
CLOSED = "an operand is missing, or its weight table is closed"


def test_an_array_of_another_shape_is_refused():
    table = WeightTable([[zeros(2, 3)]])
    for result in (zeros(3, 2), zeros(6), zeros(1, 2, 3), zeros(2, 3, dtype=np.int32), zeros(2, 2)):
        refuse("has another shape", "copy", result, [], [0], table=(table.operand, np.int32(0)))
    for columns in ([], [0, 0], [NOTHING, 0]):
        refuse(CLOSED, "copy", zeros(2, 3), [], columns, table=(table.operand, np.int32(0)))


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


@settings(max_examples=25)
@given(columns=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=12))
def test_columns_that_nobody_gave_are_refused(columns):
    # All that is below zero is no column.
    assume([max(each, -1) for each in columns] != [-1, -1, -1, 0, 1, -1, -1])
    opened = Open()
    call = opened(row=np.int32(1))
    given = dict(opened.options, columns=np.array(columns, np.int64))
    refuse("", *call, **given, **formats(), **UNITS)
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
    assert not native._library().close_table(again.handle)
    # Not the first table of a slot, which another test's engine may have.
    for nothing in (0, 0xFFFFFFFF << 32, 4096 | 1 << 32, 2**64 - 1):
        assert not native._library().close_table(nothing)


def test_counts_of_a_table_are_checked():
    """As those of an operand."""
    for counts, part in (
        (np.array([2, 1, 1], np.int32), "a count is"),
        (np.array([0, 1, 1], np.int32), "a count is"),
        (np.ones(3, np.float32), "a count is"),
    ):
        table = WeightTable([[DATA, SCALE, counts]])
        operands = [NOTHING, 2, STEPS, 0, 1, NOTHING, NOTHING, NOTHING]
        options = UNITS | {"units_at": np.int64(0)}
        given = dict(table=(table.operand, np.int32(0)), **formats(), **options)
        refuse(part, "to_units", [Y], [X, LIVE], operands, **given)
        table.close()


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


def test_a_table_closes_when_its_operand_is_collected():
    array = np.ones(8, np.float32)
    alive, table = weakref.ref(array), WeightTable([[array]])
    operand = table.operand
    del array, table
    assert alive() is not None
    del operand
    assert alive() is None


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
    "uint32": (np.zeros(3, np.uint32), *UNREADABLE),
    "int16": (np.zeros(3, np.int16), *UNREADABLE),
    "another order of bytes": (np.zeros(3, ">f4"), *UNREADABLE),
    "records": (np.zeros(3, [("a", "f4"), ("b", "i4")]), *UNREADABLE),
    "a number": (np.array(1, np.float32), *UNREADABLE),
    "six dimensions": (np.zeros((1,) * 6, np.float32), *UNREADABLE),
    "not aligned": (FLAT.view(np.uint8)[1:-3].view(np.float32), ValueError, "not aligned"),
    "every second": (FLAT[::2], *GAPS),
    "columns first": (np.zeros((3, 4), np.float32).T, *GAPS),
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
    for rows in ([[array], [array, array]], [[array, None], [array]]):
        with pytest.raises(ValueError, match="as many columns"):
            WeightTable(rows)
    for wrong in (5, [5], [[5]], ["a"]):
        with pytest.raises(TypeError):
            native._library().open_table(wrong)  # pyright: ignore[reportArgumentType]
