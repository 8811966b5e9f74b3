"""Tests the choice of codecs from errors made by hand."""

import numpy as np
import pytest

from jaxllm.contexts.codecs import ChunkShape
from jaxllm.contexts.tolerance import Candidate, ContextCalibration, choose, kept_shares
from jaxllm.errors import ConfigError

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


def test_what_was_not_measured_is_not_known():
    known = ContextCalibration(chosen=SHORT, errors={SHORT: errors(0.0, 0.1, 0.2)}, sensitivity=EVEN)
    assert known.kept("kivi", 16) is None
    assert known.kept("channel", 64) is None
    assert (known.kept("channel", 16) or {})[4] == pytest.approx(0.9)
