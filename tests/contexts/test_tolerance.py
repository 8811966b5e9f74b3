"""Tests the bits of chunks: by hand, against all possibilities, and at the bounds."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.contexts.codecs import ChunkShape
from jaxllm.contexts.tolerance import (
    KEPT,
    Candidate,
    allocate,
    choose,
    chunk_mass,
    kept_shares,
    sightings,
)
from jaxllm.errors import ConfigError


def test_density_is_the_mean_over_queries_that_see_a_token():
    """Two heads, three tokens: attention written out."""
    heads = np.array(
        [
            [[1.0, 0.0, 0.0], [0.25, 0.75, 0.0], [0.5, 0.25, 0.25]],
            [[1.0, 0.0, 0.0], [0.75, 0.25, 0.0], [0.0, 0.0, 1.0]],
        ]
    )
    mass = np.append(heads.sum((0, 1)), 99.0)  # behind the last token stands anything
    seen = sightings(0, 3, 3, 1, heads=[2], windows=[0])
    np.testing.assert_allclose(chunk_mass(mass, 3, 1) / seen, [3.5 / 6, 1.25 / 4, 1.25 / 2])
    # Where a query sees two positions at most, the first token was seen twice by each head.
    assert sightings(0, 3, 3, 1, heads=[2], windows=[2]).tolist() == [4, 4, 2]
    assert chunk_mass(mass, 1, 2).tolist() == [4.75]


def test_sightings_add_up_over_layers_and_calls():
    once = sightings(0, 11, 2, 4, heads=[3, 5], windows=[0, 3])
    layers = [sightings(0, 11, 2, 4, heads=[n], windows=[w]) for n, w in ((3, 0), (5, 3))]
    np.testing.assert_array_equal(once, sum(layers))
    calls = [sightings(a, b, 2, 4, heads=[3, 5], windows=[0, 3]) for a, b in ((0, 5), (5, 6), (6, 11))]
    np.testing.assert_array_equal(once, sum(calls))
    assert sightings(11, 11, 2, 4, heads=[1], windows=[0]).tolist() == [0, 0]


# Levels alone, and with scales beside them.
QUARTERS, WITH_SCALES = {8: 4, 4: 2, 2: 1}, {8: 10, 4: 6, 2: 4}


def information(density, bits):
    return float(np.sum(density * np.array([KEPT[each] for each in bits])))


@settings(max_examples=60)
@given(
    density=st.lists(st.floats(0, 1), min_size=1, max_size=6),
    share=st.floats(0, 1),
    sizes=st.sampled_from([QUARTERS, WITH_SCALES]),
)
def test_no_other_choice_keeps_more(density, share, sizes):
    density = np.array(density)
    budget = len(density) * sizes[2] + int(share * len(density) * (sizes[8] - sizes[2]))
    bits = allocate(density, budget, sizes=sizes, newest=0)
    possible = [
        each
        for each in itertools.product(sizes, repeat=len(density))
        if sum(sizes[width] for width in each) <= budget
    ]
    assert tuple(bits) in possible
    assert information(density, bits) >= max(information(density, each) for each in possible) - 1e-12


def test_the_newest_count_as_the_densest():
    density = np.array([0.9, 0.8, 0.7, 0.1, 0.0])
    # Twelve quarters: all at 4 bits, and one of the newest at 8.
    assert allocate(density, 12, sizes=QUARTERS, newest=2).tolist() == [4, 4, 4, 8, 4]
    # Six are one chunk at 4 bits beside four at 2.
    assert allocate(density, 6, sizes=QUARTERS, newest=1).tolist() == [2, 2, 2, 2, 4]


def test_what_widths_keep_decides():
    """A model that 4 bits cost as much as 2 gets 8 bits and 2."""
    density = np.arange(1.0, 7.0)
    fitted = allocate(density, 12, sizes=QUARTERS, newest=0, kept={8: 1.0, 4: 0.5, 2: 0.5})
    assert fitted.tolist() == [2, 2, 2, 2, 8, 8]
    assert set(allocate(density, 12, sizes=QUARTERS, newest=0)) == {4}


def test_bad_input_is_refused():
    with pytest.raises(
        ConfigError, match="3 chunks take 12 bytes at 2 bits, scales included, and may take 11"
    ):
        allocate(np.ones(3), 11, sizes=WITH_SCALES)
    with pytest.raises(ConfigError, match="finite"):
        allocate(np.array([1.0, np.nan]), 9, sizes=QUARTERS)


# The choice of codecs, from errors made by hand


SHORT, LONG = Candidate("channel", 16), Candidate("channel", 64)
SHAPES = [ChunkShape(heads=2, tokens=16, width=16)] * 2
EVEN = np.ones((2, 2), np.float32)


def errors(eight: float, four: float, two: float) -> np.ndarray:
    """The same for both layers, keys and values."""
    return np.broadcast_to(np.array([eight, four, two], np.float32)[:, None], (2, 3, 2))


def test_kept_is_what_is_not_lost_where_it_matters():
    """Only the values of the second layer matter."""
    own = np.zeros((2, 3, 2), np.float32)
    own[1, :, 1], own[0] = [0.25, 0.5, 3.0], 0.9
    weights = np.array([[0, 0], [0, 7]], np.float32)
    assert dict(kept_shares(own, weights)) == {8: 0.75, 4: 0.5, 2: 0.0}
    # Nothing matters: all alike. Noise makes no width better than a wider one.
    assert dict(kept_shares(errors(0.5, 0.25, 0.5), 0 * EVEN)) == {8: 0.5, 4: 0.5, 2: 0.5}


def test_equal_bytes_decide():
    """Half of the bytes are 4 bits in longer chunks, and half of the chunks at 2 bits in shorter ones."""
    measured = {SHORT: errors(0.0, 0.01, 0.1), LONG: errors(0.0, 0.02, 0.2)}
    chosen, lost = choose(measured, EVEN, SHAPES, 0.5)
    assert chosen == LONG
    assert lost[SHORT] == pytest.approx((0.01 + 0.1) / 2)
    # 0.45 are 4 bits; of the 0.4 to 8 bits an eighth is left.
    assert lost[LONG] == pytest.approx(7 / 8 * 0.02)
    assert choose(measured, EVEN, SHAPES, 0.6)[0] == SHORT
    assert choose(measured, EVEN, SHAPES, 0.25)[1][SHORT] == float("inf")
    with pytest.raises(ConfigError, match=r"a ratio of 0\.2 is less than all measured codecs take"):
        choose(measured, EVEN, SHAPES, 0.2)
