import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.config import LayerUnits, ModelConfig, RopeConfig
from jaxllm.elastic.ladder import LEVELS, Ladder, chosen_ladder, layer_parameters, sub_config, unit_sizes
from jaxllm.errors import ConfigError
from tests.elastic.models import LLAMA, MIXTRAL, MODELS, QWEN3_MOE

# The shape of a Llama of 7 B with grouped queries: 32 layers, of which a fifth are anchors.
LARGE = ModelConfig(
    model_type="llama", vocab_size=32000, hidden_size=4096, layers=32, heads=32, kv_heads=32, head_dim=128,
    ffn_size=11008, window_tokens=4096, rope=RopeConfig(dim=128),
)  # fmt: skip
ANCHORS = (0, 1, 2, 3, 30, 31)


def test_half_of_a_large_model_keeps_its_anchors_and_38_percent_of_the_rest():
    half = sub_config(LARGE, Ladder(anchors=ANCHORS), 50)
    assert all(half.units(layer) == LARGE.units(layer) for layer in ANCHORS)
    others = {half.units(layer) for layer in range(32) if layer not in ANCHORS}
    (units,) = others
    assert units.kv_heads == 12
    assert units.neurons == pytest.approx(0.3846 * 11008, rel=0.02)
    assert layer_parameters(half) / layer_parameters(LARGE) == pytest.approx(0.5, abs=0.002)


def test_the_whole_level_is_the_model_itself():
    assert sub_config(LLAMA, Ladder(anchors=(1,)), 100) is LLAMA
    every = tuple(LLAMA.units(layer) for layer in range(LLAMA.layers))
    assert dataclasses.replace(LLAMA, layer_units=every) == LLAMA


def test_parameters_of_a_unit():
    # q, k, v, o of a group of two heads of 8; gate, up and down rows.
    assert unit_sizes(LLAMA, 0) == ((2 * 8 + 8 + 8 + 2 * 8) * 32, 3 * 32)
    assert unit_sizes(QWEN3_MOE, 0)[1] == 4 * 3 * 32
    assert unit_sizes(MODELS["gpt2"], 0) == ((8 + 8 + 8 + 8) * 32 + 3 * 8, 2 * 32 + 1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("anchors", [(), (1,), (0, 1, 2)])
def test_a_level_is_never_larger_than_its_share(name, anchors):
    cfg = MODELS[name]
    sizes = [layer_parameters(sub_config(cfg, Ladder(anchors=anchors), level)) for level in LEVELS]
    whole = layer_parameters(cfg)
    assert sizes == sorted(sizes)
    for level, size in zip(LEVELS, sizes, strict=True):
        # These layers have few kv-groups and neurons, so steps are coarse.
        assert level - 12 <= 100 * size / whole <= level or size == min(sizes)


@settings(max_examples=50)
@given(
    kv_heads=st.sampled_from([1, 2, 3, 8]),
    ffn=st.integers(1, 400),
    layers=st.integers(1, 5),
    level=st.integers(1, 100),
    data=st.data(),
)
def test_every_layer_keeps_something(kv_heads, ffn, layers, level, data):
    cfg = dataclasses.replace(
        LLAMA, heads=kv_heads, kv_heads=kv_heads, ffn_size=ffn, layers=layers, attention_windows=()
    )
    anchors = tuple(sorted(data.draw(st.sets(st.integers(0, layers - 1)))))
    kept = sub_config(cfg, Ladder(levels=tuple(sorted({level, 100})), anchors=anchors), level)
    for layer in range(layers):
        assert 1 <= kept.units(layer).kv_heads <= kv_heads
        assert 1 <= kept.units(layer).neurons <= ffn


def test_anchors_shrink_when_nothing_else_is_left():
    cfg = dataclasses.replace(LARGE, layers=8, attention_windows=())
    kept = sub_config(cfg, Ladder(anchors=(0, 4)), 20)
    assert kept.units(1) == LayerUnits(kv_heads=1, neurons=32)
    assert kept.units(0) == kept.units(4) != cfg.units(0)
    assert layer_parameters(kept) / layer_parameters(cfg) == pytest.approx(0.2, abs=0.002)


@pytest.mark.parametrize(
    ("levels", "more", "message"),
    [
        ((50,), {}, "that end with 100"),
        ((), {}, "that end with 100"),
        ((0, 100), {}, "at least 1 percent"),
        ((60, 50, 100), {}, "ascending"),
        ((50.0, 100), {}, "whole percentages"),
        ((50, 100), {"anchors": (2, 1)}, "ascending numbers of layers"),
        ((50, 100), {"anchors": (-1,)}, "ascending numbers of layers"),
        ((50, 100), {"units": ((1, 1),) * 2}, "units of 2 levels for 1"),
        ((50, 100), {"units": (((1, 0),),)}, "at least 1"),
    ],
)
def test_malformed_ladders_are_refused(levels, more, message):
    with pytest.raises(ConfigError, match=message):
        Ladder(levels=levels, **more)


def test_levels_anchors_and_units_must_be_the_models():
    with pytest.raises(ConfigError, match="no level 55; there are 20, 30"):
        sub_config(LLAMA, Ladder(), 55)
    with pytest.raises(ConfigError, match="layer 3 is an anchor of a model of 3 layers"):
        sub_config(LLAMA, Ladder(anchors=(3,)), 50)
    for units in (((1, 1),), ((99, 1),) * LLAMA.layers):
        with pytest.raises(ConfigError, match="another model"):
            sub_config(LLAMA, Ladder(levels=(50, 100), units=(units,)), 50)
    for units in (LayerUnits(kv_heads=5, neurons=1), LayerUnits(kv_heads=1, neurons=0)):
        with pytest.raises(ConfigError, match="of layer 0 must be a whole number in"):
            dataclasses.replace(LLAMA, layer_units=(units,) * 3)
    with pytest.raises(ConfigError, match="3 entries"):
        dataclasses.replace(LLAMA, layer_units=(LayerUnits(kv_heads=1, neurons=1),))


def test_ladders_and_their_configs_survive_json_that_is_not_malformed():
    half = sub_config(QWEN3_MOE, Ladder(), 50)
    assert ModelConfig.from_json(half.to_json()) == half != QWEN3_MOE
    assert half.whole == QWEN3_MOE
    ladder = Ladder(levels=(20, 100), anchors=(0, 2))
    assert Ladder.from_json(ladder.to_json()) == ladder
    for key in ({"rungs": []}, {"levels": 3}):
        with pytest.raises(ConfigError, match="malformed levels"):
            Ladder.from_json({**ladder.to_json(), **key})
    for data in ({"levels": [100]}, [100]):
        with pytest.raises(ConfigError, match="malformed levels"):
            Ladder.from_json(data)


CHOSEN = (20, 40, 60, 80, 100)


def importances(cfg, seed=0):
    draw = np.random.default_rng(seed)
    lead = (cfg.experts,) if cfg.experts else ()
    groups = [draw.exponential(size=cfg.kv_heads) * (layer + 1) for layer in range(cfg.layers)]
    return groups, [draw.exponential(size=(*lead, cfg.units(layer).neurons)) for layer in range(cfg.layers)]


@pytest.mark.parametrize("cfg", [LLAMA, MIXTRAL], ids=lambda cfg: cfg.model_type)
def test_levels_fill_their_share_and_layers_differ(cfg):
    ladder = chosen_ladder(cfg, CHOSEN, *importances(cfg))
    seen = set()
    for level in CHOSEN[1:-1]:
        part = sub_config(cfg, ladder, level)
        share = layer_parameters(part) / layer_parameters(cfg)
        assert level / 100 - 0.05 < share <= level / 100
        seen |= {part.units(layer) for layer in range(cfg.layers)}
    assert len(seen) > len(CHOSEN)
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
