"""The experts of tokens: counts by hand, stored and read again."""

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.experts.prediction import TokenExperts, count_tokens

# Three visits of token 7 and one of token 3, at two layers of four experts, two a token.
TOKENS = np.array([7, 3, 7, 7])
IDS = np.array([[[0, 1], [2, 3], [1, 2], [0, 1]], [[3, 2], [0, 1], [3, 2], [3, 0]]])


def test_counts_by_hand():
    found = count_tokens(IDS, TOKENS, 4)
    assert found.tokens.tolist() == [3, 7]
    assert found.experts.tolist() == [[[2, 3], [1, 0]], [[0, 1], [3, 2]]]


def test_chances_are_the_mean_over_known_tokens():
    found = count_tokens(IDS, TOKENS, 4)
    np.testing.assert_allclose(found.chances(0, np.array([7]), 4), [0.5, 0.5, 0, 0])
    np.testing.assert_allclose(found.chances(1, np.array([3, 9, 7, 1]), 4), [0.25] * 4)
    assert found.chances(0, np.array([9, 1]), 4) is None
    assert found.chances(0, np.zeros(0, np.int32), 4) is None
    assert TokenExperts.none(2, 2).chances(1, np.array([7]), 4) is None


@pytest.mark.parametrize("experts", [4, 300])
def test_stored_ones_come_back(experts):
    found = count_tokens(IDS, TOKENS, experts)
    again = TokenExperts.from_arrays(found.to_arrays(), layers=2, experts=experts, choices=2)
    assert (again.tokens.tolist(), again.experts.tolist()) == (found.tokens.tolist(), found.experts.tolist())
    assert len(TokenExperts.from_arrays({}, layers=2, experts=experts, choices=2).tokens) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": np.array([7, 3], np.int32)},
        {"tokens": np.array([3.0, 7.0], np.float32)},
        {"tokens": np.array([3], np.int32)},
        {"token_experts": np.full((2, 2, 2), 4, np.uint8)},
        {"token_experts": np.zeros((2, 2, 3), np.uint8)},
        {"token_experts": np.zeros((2, 2, 2), np.float32)},
        {"token_experts": None},
    ],
)
def test_malformed_ones_are_refused(change):
    arrays = {**count_tokens(IDS, TOKENS, 4).to_arrays(), **change}
    with pytest.raises(ConfigError, match="of another model"):
        TokenExperts.from_arrays(arrays, layers=2, experts=4, choices=2)
