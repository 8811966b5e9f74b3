"""Levels whose units are chosen over all layers."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxllm.elastic.ladder import Ladder, chosen_ladder, layer_parameters, sub_config, unit_sizes
from jaxllm.errors import ConfigError
from tests.elastic.models import LLAMA, MIXTRAL

LEVELS = (20, 40, 60, 80, 100)


def importances(cfg, seed=0):
    draw = np.random.default_rng(seed)
    lead = (cfg.experts,) if cfg.experts else ()
    groups = [draw.exponential(size=cfg.kv_heads) * (layer + 1) for layer in range(cfg.layers)]
    return groups, [draw.exponential(size=(*lead, cfg.units(layer).neurons)) for layer in range(cfg.layers)]


@pytest.mark.parametrize("cfg", [LLAMA, MIXTRAL], ids=lambda cfg: cfg.model_type)
def test_levels_fill_their_share_and_layers_differ(cfg):
    ladder = chosen_ladder(cfg, LEVELS, *importances(cfg))
    seen = set()
    for level in LEVELS[1:-1]:
        part = sub_config(cfg, ladder, level)
        share = layer_parameters(part) / layer_parameters(cfg)
        assert level / 100 - 0.05 < share <= level / 100
        seen |= {part.units(layer) for layer in range(cfg.layers)}
    assert len(seen) > len(LEVELS)
    assert sub_config(cfg, ladder, 100) is cfg
    assert Ladder.from_json(ladder.to_json()) == ladder


def test_the_choice_is_the_best_but_for_an_item():
    cfg = dataclasses.replace(LLAMA, layers=2, attention_windows=(), ffn_size=8)
    groups, neurons = importances(cfg)
    ladder = chosen_ladder(cfg, (50, 100), groups, neurons)
    falling = [[np.cumsum(-np.sort(-each)) for each in kind] for kind in (groups, neurons)]
    sizes = [unit_sizes(cfg, layer) for layer in range(2)]

    def value(units):
        return sum(
            falling[0][layer][own[0] - 1] + falling[1][layer][own[1] - 1] for layer, own in enumerate(units)
        )

    def size(units):
        return sum(np.dot(own, cost) for own, cost in zip(units, sizes, strict=True))

    every = itertools.product(range(1, 5), range(1, 9))
    choices = [pair for pair in itertools.product(every, repeat=2) if size(pair) <= layer_parameters(cfg) / 2]
    best, item = max(map(value, choices)), max(map(np.max, (*groups, *neurons)))
    assert best - item <= value(ladder.units[0]) <= best


def test_units_that_do_not_fit_are_refused():
    for units, message in ((((1, 1),) * 2, "units of 2 levels for 1"), ((((1, 0),),), "at least 1")):
        with pytest.raises(ConfigError, match=message):
            Ladder(levels=(50, 100), units=units)
    for units in (((1, 1),), ((99, 1),) * LLAMA.layers):
        with pytest.raises(ConfigError, match="another model"):
            sub_config(LLAMA, Ladder(levels=(50, 100), units=(units,)), 50)
