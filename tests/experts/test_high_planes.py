"""Tiles of experts of which the high plane alone is computed."""

import numpy as np
import pytest

from jaxllm.experts.mixture import tiles_and_weights
from jaxllm.experts.routing import Routing, high_alone


@pytest.mark.parametrize("loss", [0.3, 1.0])
def test_high_planes_alone_have_tiles_of_their_own(loss):
    """Each pair is in one tile, of its expert or of its expert's high plane, whatever other tokens do."""
    experts, choices = 4, 3
    logits = np.random.default_rng(5).standard_normal((1, 9, experts)).astype(np.float32)
    ids = np.argsort(-logits, -1)[..., :choices].astype(np.int32)
    weights = np.take_along_axis(np.exp(logits), ids, -1)
    routing = Routing(logits=logits, ids=ids, weights=weights)
    tiles, _ = tiles_and_weights(routing, experts, live=np.arange(9) < 8, loss=loss)
    alone = np.asarray(high_alone(weights[0], loss))
    wanted = {
        (token, int(ids[0, token, k]) + experts * bool(alone[token, k]))
        for token in range(8)
        for k in range(3)
    }
    found = [
        (int(token), int(tiles.expert[tile]))
        for tile in range(int(tiles.count))
        for token in np.asarray(tiles.token[tile])[: int(tiles.size[tile])]
    ]
    assert len(found) == len(wanted)
    assert set(found) == wanted
