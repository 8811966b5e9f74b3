"""Experts that are found by address: to the bit what resident ones give, whole or begun and finished."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.experts.mixture import tiles_of
from jaxllm.kernels import native_products
from jaxllm.kernels.native import WeightTable
from jaxllm.kernels.native_products import BEGIN, FINISH, LEAVE, RUN, StoredExperts, begun_shape
from jaxllm.quant import nested_blocks, quantize, to_blocks
from jaxllm.quant.parts import high_plane
from tests.kernels.refusing import refuse, zeros
from tests.kernels.switching import NATIVE, kernels_of, needs_native

pytestmark = needs_native
I32 = np.int32
# Inputs and neurons that fill neither groups nor panels; a token visits two of three experts.
D, F, E = 200, 72, 3
HOW = {"activation": "silu", "norm_eps": 1e-6}


def experts_of(forms: list[str], seed: int = 0) -> list[Any]:
    """Gate, up and down of each expert."""
    draws = np.random.default_rng(seed)

    def stored(form: str, axis: Any) -> Any:
        weight = draws.standard_normal((F, D)).astype(np.float32)
        if form == "nested":
            return nested_blocks(weight, axis)
        return to_blocks(quantize(weight, bits=int(form), axis=axis))  # pyright: ignore[reportArgumentType]

    return [tuple(stored(form, axis) for axis in (-1, -1, -2)) for form in forms]


def table_of(experts: list[Any]) -> WeightTable:
    rows = [[part for e in experts for w in e for part in (w.data, w.scale, w.low)]]
    # A layer before it, whose experts nobody asks for.
    return WeightTable([[None] * len(rows[0]), *rows])


class Case:
    """Tokens, their tiles, and experts of some forms."""

    def __init__(self, forms: list[str], tokens: int, narrow: bool = False) -> None:
        draws = np.random.default_rng(1)
        self.experts, self.table = experts_of(forms), table_of(experts_of(forms))
        self.x = draws.standard_normal((tokens, D)).astype(np.float32)
        ids = np.argsort(draws.random((tokens, E)), -1)[:, :2].astype(I32)
        if narrow:
            ids[:, 1] += E
        self.tiles = tiles_of(jnp.asarray(ids), 2 * E, rows=1 if tokens == 1 else 4, padded=tokens > 1)
        self.count = len(self.tiles.expert)
        self.norm = draws.standard_normal(D).astype(np.float32)
        self.ids = np.asarray(self.tiles.expert)[: int(self.tiles.count)]

    def nothing(self) -> tuple[np.ndarray, np.ndarray]:
        begun = begun_shape(self.count, F, D) if len(self.x) == 1 else (0,)
        return np.zeros((2 * len(self.x), D), np.float32), np.zeros(begun, I32)

    def stored(self, actions: Any, out: Any = None, begun: Any = None, **how: Any) -> tuple[Any, Any]:
        if out is None:
            out, begun = self.nothing()
        step = jax.jit(partial(self._stored, **(HOW | how)), donate_argnums=(2, 3))
        actions = np.broadcast_to(np.asarray(actions, I32), self.count)
        return step(self.tiles, actions, jnp.array(out), jnp.array(begun), self.table.operand)

    def _stored(self, tiles: Any, actions: Any, out: Any, begun: Any, table: Any, **how: Any) -> Any:
        weights = StoredExperts(table, jnp.int32(1), E, F)
        each = (tiles.token, tiles.expert, tiles.size, tiles.count)
        return native_products.stored_visits(
            jnp.asarray(self.x), each, actions, weights, out, begun, norm_scale=jnp.asarray(self.norm), **how
        )

    def resident(self) -> np.ndarray:
        every = [*self.experts, *(tuple(map(high_plane, each)) for each in self.experts)]
        return np.asarray(jax.jit(partial(self._resident, every=every))(self.tiles))

    def _resident(self, tiles: Any, every: Any) -> jax.Array:
        each = (tiles.token, tiles.expert, tiles.size, tiles.count)
        return native_products.visits(
            jnp.asarray(self.x), each, every, [None] * 3, 2 * len(self.x),
            norm_scale=jnp.asarray(self.norm), **HOW,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("forms", "tokens"),
    [(["nested"] * 3, 1), (["8", "4", "2"], 1), (["8", "4", "2"], 23), (["nested", "4", "nested"], 23)],
    ids=str,
)
def test_they_give_what_resident_ones_give(forms, tokens):
    case = Case(forms, tokens)
    for kernels in NATIVE:
        with kernels_of(kernels):
            np.testing.assert_array_equal(np.asarray(case.stored(RUN)[0]), case.resident(), err_msg=kernels)


@pytest.mark.parametrize("tokens", [1, 23])
def test_a_high_plane_alone_is_the_model_of_four_bits(tokens):
    case = Case(["nested"] * 3, tokens, narrow=True)
    assert case.ids.max() >= E
    np.testing.assert_array_equal(np.asarray(case.stored(RUN)[0]), case.resident())


@pytest.mark.parametrize("kernels", NATIVE)
def test_begun_and_finished_is_run_to_the_bit(kernels):
    case = Case(["nested"] * 3, 1)
    with kernels_of(kernels):
        out, begun = case.stored(BEGIN)
        assert not np.asarray(out).any()
        assert np.asarray(begun).any()
        whole, _ = case.stored(RUN)
        for order in ([FINISH, RUN], [LEAVE, FINISH], [FINISH, LEAVE]):
            out, kept = case.stored(order, out, begun)
            begun = kept
        np.testing.assert_array_equal(np.asarray(out), np.asarray(whole))


def test_beginning_reads_no_low_plane_and_finishing_no_high_planes_of_gate_and_up():
    case = Case(["nested"] * 3, 1)
    whole, _ = case.stored(RUN)
    for each in case.experts:
        for weight in each:
            assert weight.low is not None
    lows = [part.low.copy() for each in case.experts for part in each]
    experts = experts_of(["nested"] * 3)
    for each in experts:
        for weight in each:
            weight.low[...] = 0x5A
    case.table = table_of(experts)
    out, begun = case.stored(BEGIN)
    for weight, low in zip([part for each in experts for part in each], lows, strict=True):
        weight.low[...] = low
    for gate, up, _ in experts:
        gate.data[...] = up.data[...] = 0
    out, _ = case.stored(FINISH, out, begun)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(whole))


# One token that visits experts 0 and 1 of 2.
X, Y = zeros(1, D), zeros(2, D)
TILES = [zeros(2, 1, dtype=I32), np.array([0, 1], I32), np.ones(2, I32), I32(2)]
ONE, NOTHING, NONE = np.ones(2, I32), zeros(0), zeros(0, dtype=I32)
OPTIONS = dict(units=np.int64(F), experts=np.int64(2), activation=np.int64(0), eps=np.float32(0))
KEPT = zeros(*begun_shape(2, F, D), dtype=I32)


def ask(part: str, forms: list[str], at: dict[int, Any] | None = None, **options: Any) -> None:
    """The arguments by their places: x, four of tiles, actions, norm, table, row, outputs, what was begun."""
    table = table_of(experts_of(forms))
    call = [X, *TILES, ONE, NOTHING, table.operand, I32(1), Y, KEPT]
    for place, value in (at or {}).items():
        call[place] = value
    results = [call[9], call[10]]
    refuse(part, "stored_experts", results, call, **(OPTIONS | options))


REFUSED: dict[str, tuple[str, dict[int, Any], dict[str, Any]]] = {
    "narrow activations": ("at least one row", {0: X.astype(np.float16)}, {}),
    "an expert behind the last high plane": ("a tile lies outside", {2: np.array([0, 4], I32)}, {}),
    "an unknown action": ("no such action", {5: 4 * ONE}, {}),
    "more experts than in the table": ("not in the table", {2: ONE * 2}, {"experts": np.int64(4)}),
    "more units": ("shape does not fit", {10: NONE}, {"units": np.int64(F + 16)}),
    "a closed table": ("weight table is closed", {7: np.array([1, 77], np.uint32)}, {}),
    "no table": ("an operand is missing", {7: zeros(0, dtype=np.uint32)}, {}),
    "no room for what is begun": ("only one row of a nested", {5: 2 * ONE, 10: NONE}, {}),
    "a high plane alone that is begun": ("only one row of a nested", {2: 2 * ONE, 5: 2 * ONE}, {}),
}  # fmt: skip


@pytest.mark.parametrize(("part", "at", "options"), REFUSED.values(), ids=REFUSED)
def test_refusals(part, at, options):
    ask(part, ["nested", "nested"], at, **options)


def test_what_has_no_planes_is_not_begun_nor_halved():
    ask("only one row of a nested", ["8", "8"], {5: 2 * ONE})
    ask("has no high plane", ["4", "4"], {2: np.array([2, 3], I32)})
