"""Tests which experts each predictor foresees, and how far ahead."""

import numpy as np

from jaxllm.experts.prediction import count_paths, count_tokens
from jaxllm.serving.experts.predictors import make_predictor
from jaxllm.serving.ground.expert_options import ExpertOptions

E, TOKEN = 8, 7
# At each of four layers the token visits other experts.
IDS = np.stack([np.tile([[at, at + 1]], (20, 1)) for at in (0, 2, 4, 6)])
COUNTS, TOKENS = count_paths(IDS, E), count_tokens(IDS, np.full(20, TOKEN), E)


def foreseen(name, visited, ahead, steps):
    """Whom a predictor thinks worth reading, most probable first."""
    predictor = make_predictor(name, COUNTS, TOKENS)
    predictor.begin(np.array([TOKEN]))
    chances = predictor.probabilities(visited, ahead, steps)
    worth = predictor.worthwhile(visited, chances, steps)
    return [int(each) for each in np.argsort(-chances, kind="stable") if worth[each]]


def test_routers_see_the_next_layers_and_the_token_those_behind_them():
    """So that foreseeing two layers, as is the default, reads for two."""
    assert ExpertOptions().layers_ahead == 2
    ahead = np.zeros((2, E), np.float32)
    ahead[0, 5] = ahead[1, 2] = 1.0
    visited = [np.array([[0, 1]])]
    assert foreseen("router", visited, ahead, 1)[0] == 5
    assert foreseen("router", [*visited, np.array([[5, 0]])], ahead, 2) == [2]


def test_what_a_token_visits_weighs_routers():
    """The token visits 2 and 3 at this layer; another one is as the router says."""
    ahead = np.full((1, E), 1 / E, np.float32)
    visited = [np.array([[0, 1]])]
    assert foreseen("router", visited, ahead, 1)[:2] == [2, 3]
    ahead[0, 6] = 0.99
    assert foreseen("router", visited, ahead, 1)[0] == 2
    predictor = make_predictor("router", COUNTS, TOKENS)
    predictor.begin(np.array([TOKEN + 1]))
    np.testing.assert_array_equal(predictor.probabilities(visited, ahead, 1), ahead[0])


def test_farther_ahead_those_are_read_that_have_half_of_the_probability():
    predictor = make_predictor("router", COUNTS, TOKENS)
    visited, chances = [np.array([[0, 1]])] * 2, np.zeros(E, np.float32)
    chances[:4] = 0.3, 0.15, 0.4, 0.15
    assert np.flatnonzero(predictor.worthwhile(visited, chances, 2)).tolist() == [0, 2]
    chances[:4] = 0.05, 0.05, 0.6, 0.3
    assert np.flatnonzero(predictor.worthwhile(visited, chances, 2)).tolist() == [2]


def test_of_the_first_layer_the_token_tells():
    assert foreseen("router", [], np.zeros((1, E)), 1) == [0, 1]


def test_a_routers_best_are_read_whatever_their_lead():
    assert len(foreseen("router", [np.array([[0, 1]])], np.full((1, E), 1 / E), 1)) == E
    # By statistics those of an unknown token are no likelier than others.
    predictor = make_predictor("tokens", COUNTS, TOKENS)
    predictor.begin(np.array([TOKEN + 1]))
    chances = np.full(E, 1 / E)
    assert not predictor.worthwhile([], chances, 1).any()
