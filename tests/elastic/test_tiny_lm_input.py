"""The tiny LM's rows: every token once, behind the marks of an SLO."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.elastic.compression import input_rows, marked, pooled, read_scores
from jaxllm.elastic.slo import Slo, marks
from jaxllm.errors import ConfigError


def test_rows_by_hand():
    tokens, mask = input_rows(np.arange(1, 8), 6)
    np.testing.assert_array_equal(tokens, [[0, 0, 1, 2, 3, 4], [0, 0, 5, 6, 7, 0]])
    np.testing.assert_array_equal(mask, [[True] * 6, [True] * 5 + [False]])
    told = marked(tokens, Slo(ttft=0.2, tpot=1), tuple(range(100, 100 + len(marks()))))
    np.testing.assert_array_equal(told[:, :2], [[100, 117]] * 2)
    np.testing.assert_array_equal(told[:, 2:], tokens[:, 2:])
    assert not tokens[:, :2].any()
    with pytest.raises(ConfigError, match="no room"):
        input_rows(np.arange(3), 2)


@given(st.integers(0, 40), st.integers(3, 12))
def test_scores_come_back_in_order(count, width):
    tokens, mask = input_rows(np.arange(count), width)
    np.testing.assert_array_equal(read_scores(tokens, mask), np.arange(count))
    assert len(tokens) == max(1, -(-count // (width - 2)))
    sizes = mask.sum(1)
    assert sizes.max() - sizes.min() <= 1


def test_rows_decide_together():
    np.testing.assert_array_equal(pooled(np.array([[1.0, 4.0], [3.0, -2.0]])), [2, 1])
    assert pooled(np.zeros((5, 2, 3))).shape == (5, 3)
