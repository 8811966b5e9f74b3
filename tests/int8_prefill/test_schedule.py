"""Orders of subgraphs, and a lower bound of them; scales, channels and layers by hand, and fits by loss."""

import dataclasses
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.elastic.ladder import Ladder, sub_config, sub_model
from jaxllm.errors import ConfigError
from jaxllm.int8_prefill import calibration, fitting
from jaxllm.int8_prefill.calibration import (
    PLACES,
    OutlierRecipe,
    channel_tops,
    clipped_layers,
    clipping_steps,
    importances,
    largest_of,
    most_important,
    outlying_channels,
    product_errors,
    shadow_counts,
    whole_steps,
    with_outliers,
)
from jaxllm.int8_prefill.fitting import LEAST_TOKENS, fit_calibration
from jaxllm.int8_prefill.recipe import ORDERS, ShadowRecipe
from jaxllm.int8_prefill.reference import observed
from jaxllm.int8_prefill.schedule import (
    INTEGER_STAGES,
    Dispatcher,
    Subgraph,
    lower_bound_ms,
    placed_by_memory,
    prompt_subgraphs,
    simulate,
    stage_operations,
)
from jaxllm.models.decoder import forward
from tests.int8_prefill.calibrated import OUTLIERS, RECIPE, calibrated, floating, outlying, stored, texts
from tests.tiny import TINY, random_params, tiny_params


def names(subgraphs, places) -> list[str]:
    return [
        f"{each.stage}{each.chunk}.{each.layer}" for each in (subgraphs[place] for place in sorted(places))
    ]


def test_what_needs_what():
    """Equations 2 and 3, on two chunks of a shadowed and a plain layer."""
    subgraphs = prompt_subgraphs(2, [True, False])
    needs = {
        name: names(subgraphs, each.needs)
        for name, each in zip(names(subgraphs, range(len(subgraphs))), subgraphs, strict=True)
    }
    assert needs["project0.0"] == needs["project_shadow0.0"] == []
    assert needs["attend0.0"] == ["project0.0", "project_shadow0.0"]
    assert needs["attend1.0"] == ["attend0.0", "project1.0", "project_shadow1.0"]
    assert needs["widen0.0"] == ["attend0.0"]
    assert needs["narrow0.0"] == ["widen0.0", "widen_shadow0.0"]
    assert needs["narrow_shadow0.0"] == ["narrow0.0"]
    assert needs["project1.1"] == ["narrow_shadow1.0"]
    assert needs["attend1.1"] == ["attend0.1", "project1.1"]
    assert needs["finish1.1"] == ["attend1.1"]
    assert all(max(each.needs, default=-1) < place for place, each in enumerate(subgraphs))


def test_two_chunks_by_hand():
    """While one chunk attends, the other's products run: 1 + 4·2 + 1 beside 2·(1 + 2 + 1)."""
    subgraphs = prompt_subgraphs(2, [False])
    times = {"project": 1.0, "attend": 2.0, "finish": 1.0}

    def time(each: Subgraph) -> float:
        return times[each.stage]

    assert simulate(subgraphs, time, "in-order").makespan_ms == 8
    out = simulate(subgraphs, time, "out-of-order")
    assert out.makespan_ms == lower_bound_ms(subgraphs, time) == 6
    assert out.busy_ms == {"integer": 4, "float": 4}
    assert out.idle_share == pytest.approx(1 / 3)


SPEEDS = st.floats(0.1, 10)


@settings(max_examples=40)
@given(
    chunks=st.integers(1, 5),
    shadowed=st.lists(st.booleans(), min_size=1, max_size=5),
    speeds=st.tuples(SPEEDS, SPEEDS, SPEEDS),
    order=st.sampled_from(ORDERS),
)
def test_every_order_is_a_schedule(chunks, shadowed, speeds, order):
    """Each subgraph runs once, after all that it needs, alone on its processor; never faster than the
    bound."""
    subgraphs = prompt_subgraphs(chunks, shadowed)

    def time(each: Subgraph) -> float:
        integer, attending, other = speeds
        return attending if each.stage == "attend" else integer if each.processor == "integer" else other

    found = simulate(subgraphs, time, order)
    for place, each in enumerate(subgraphs):
        assert found.ends_ms[place] == pytest.approx(found.starts_ms[place] + time(each))
        assert all(found.ends_ms[need] <= found.starts_ms[place] for need in each.needs)
    for processor in ("integer", "float"):
        own = [place for place, each in enumerate(subgraphs) if each.processor == processor]
        runs = [(found.starts_ms[place], found.ends_ms[place]) for place in own]
        assert order != "in-order" or runs == sorted(runs)
        runs.sort()
        assert all(after[0] >= before[1] for before, after in itertools.pairwise(runs))
    assert found.makespan_ms >= lower_bound_ms(subgraphs, time) - 1e-9
    assert found.makespan_ms <= sum(map(time, subgraphs)) + 1e-9


def test_what_a_subgraph_contributes():
    """By hand: what becomes ready, and for whom."""
    subgraphs = prompt_subgraphs(2, [False, False])
    times = {"project": 1.0, "attend": 2.0, "finish": 4.0}
    dispatcher = Dispatcher(subgraphs, lambda each: times[each.stage])
    place = {name: at for at, name in enumerate(names(subgraphs, range(len(subgraphs))))}
    assert dispatcher.contribution(place["project0.0"]) == 2
    # The second chunk's attention waits for the first one's as well.
    assert dispatcher.contribution(place["project1.0"]) == 0
    assert dispatcher.contribution(place["attend0.0"]) == 4
    # The next product runs on the integer processor itself.
    assert dispatcher.contribution(place["finish0.0"]) == 0
    # As the paper has it: the sign tells the processor, and all that becomes ready counts.
    assert dispatcher.literal_contribution(place["attend0.0"]) == 4
    assert dispatcher.literal_contribution(place["project0.0"]) == -2
    assert dispatcher.literal_contribution(place["finish0.0"]) == -1


def test_little_memory_goes_to_the_heaviest():
    cfg = TINY
    shadowed = [False, True]

    def work(layer, stage):
        return stage_operations(cfg, stage, 16) / (1 + layer)

    def size(layer, stage):
        return 100

    placed = placed_by_memory(shadowed, size, work, 250)
    subgraphs = prompt_subgraphs(1, shadowed, placed)
    here = {(each.layer, each.stage) for each in subgraphs if each.processor == "integer"}
    every = [(each.layer, each.stage) for each in subgraphs if each.stage in INTEGER_STAGES]
    assert here == set(sorted(every, key=lambda each: -work(*each))[:2])
    assert simulate(subgraphs, lambda each: 1.0).makespan_ms > 0
    with pytest.raises(ConfigError, match="hold no subgraph"):
        placed_by_memory(shadowed, size, work, 99)


def test_a_circle_is_refused():
    circle = [Subgraph(0, 0, "project", "integer", (1,)), Subgraph(0, 0, "attend", "float", (0,))]
    with pytest.raises(ConfigError, match="wait for each other"):
        simulate(circle, lambda each: 1.0)


def test_what_shares_a_memory_takes_longer_together():
    """By hand: twice as long while both run; what goes on alone then goes on at its own speed."""
    pair = (
        Subgraph(0, 0, "project", "integer", ()),
        Subgraph(0, 0, "attend", "float", ()),
        Subgraph(0, 0, "finish", "integer", (1,)),
    )

    def alone(each: Subgraph) -> float:
        return {"project": 2.0, "attend": 4.0, "finish": 1.0}[each.stage]

    found = simulate(pair, alone, shared=lambda each: 2 * alone(each))
    # At 4 the float one has done half of its work; the other half takes 2 alone.
    assert found.ends_ms == (4.0, 6.0, 7.0)
    assert found.busy_ms == {"integer": 5.0, "float": 6.0}
    assert simulate(pair, alone, shared=alone) == simulate(pair, alone)
    assert simulate(pair, alone).ends_ms == (2.0, 4.0, 5.0)


def test_steps():
    """Of four channels at most one passes, and only where that makes the step enough finer."""
    tops = [[np.array([1.0, 2.0, 3.0, 100.0]), np.array([5.0, 4.0, 0.0, 0.0]), np.array([5.0, 4.8, 1, 1])]]
    recipe = ShadowRecipe(most_channels=0.25, least_gain=0.1)
    np.testing.assert_allclose(127 * clipping_steps(tops, recipe), [[3, 4, 5]], rtol=1e-6)
    two = ShadowRecipe(most_channels=0.5, least_gain=0.1)
    # Two are worth it together, though the first alone is not.
    np.testing.assert_allclose(127 * clipping_steps(tops, two), [[2, 4, 1]], rtol=1e-6)
    np.testing.assert_allclose(127 * whole_steps(tops), [[100, 5, 5]], rtol=1e-6)
    np.testing.assert_allclose(importances(tops, clipping_steps(tops, recipe)), [127 * 100 / 3], rtol=1e-6)
    assert clipping_steps([[np.zeros(3)]], recipe) > 0
    assert whole_steps([[np.zeros(3)]]) > 0


def test_texts_together():
    one, other = [[np.array([1.0, 5.0])] * 4], [[np.array([2.0, 3.0])] * 4]
    np.testing.assert_array_equal(largest_of([one, other])[0][2], [2, 5])
    with pytest.raises(ConfigError, match="no text"):
        largest_of([])
    with pytest.raises(ConfigError, match="NaN or infinite"):
        largest_of([one, [[np.array([np.nan, 1])] * 4]])


def test_layers_and_channels():
    assert outlying_channels(np.array([0, 50, 5, 0, 30, 15])).tolist() == [1, 4, 5, 2]
    assert not len(outlying_channels(np.zeros(4, np.int32)))
    importance = np.array([1.0, 9.0, 3.0, 3.0])
    assert most_important(importance, 2) == (False, True, True, False)
    assert shadow_counts(24, 0.85) == [4, 8, 16, 24]
    assert shadow_counts(1, 0.85) == [1]
    assert shadow_counts(4, 0) == [4]
    assert shadow_counts(4, 1) == [0, 1, 2, 4]


def test_a_layer_without_a_shadow_clips_where_its_products_change_less():
    """The outliers of one channel cost less to clip than a step for all channels does, unless weights make
    much of that channel."""
    floats = dict(floating())
    text = texts(TINY)[0]
    tops = largest_of([jax.device_get(channel_tops(floats, text, cfg=TINY))])
    wide = whole_steps(tops)
    fine = clipping_steps(tops, ShadowRecipe(most_channels=0.1))
    # A step that clips everything changes all of a product, one that clips nothing next to none.
    errors = jax.device_get(product_errors(floats, text, (fine / 1e6, wide), cfg=TINY))
    assert clipped_layers([errors]) == (False,) * TINY.layers
    np.testing.assert_allclose([each[0] for layer in errors for each in layer], 1, atol=1e-3)
    assert clipped_layers([[[each[::-1] for each in layer] for layer in errors]]) == (True,) * TINY.layers


def test_outliers_are_found():
    """The channels that were scaled up are those of the float rows."""
    found = calibrated(shadows=2)
    scaled = np.flatnonzero(outlying()["layers.0.attn_norm.scale"] != 1)
    assert len(scaled) == OUTLIERS.channels
    for layer in range(TINY.layers):
        for product in (0, 2):
            assert set(scaled) <= set(found.channels[layer, product])
            np.testing.assert_allclose(
                found.rows[layer, product][-1][0],
                outlying()[f"layers.{layer}.{'attn.v' if product == 0 else 'ffn.up'}"].reshape(
                    -1, TINY.hidden_size
                )[:, found.channels[layer, product][0]],
                rtol=1e-3,
                atol=1e-7,
            )
    with pytest.raises(ConfigError, match="level 50 has no integer prefill"):
        found.layers(50, TINY)


BIASED = dataclasses.replace(
    TINY, norm="layer", qkv_bias=True, o_bias=True, ffn_bias=True, gated_ffn=False, activation="relu"
)
TOKENS = np.arange(11, dtype=np.int32) * 7 % TINY.vocab_size


def run(cfg, params):
    return np.asarray(forward(params, TOKENS[None], cfg=cfg)[0])


def tops(cfg, params) -> np.ndarray:
    """The largest input of each product over a usual one, `[L, 4]`."""

    def look(layer, product, x):
        sizes = jnp.max(jnp.abs(x), axis=0)
        return jnp.max(sizes) / jnp.median(sizes)

    return np.array(jax.jit(lambda p: observed(p, TOKENS, look, cfg=cfg))(params))


@pytest.mark.parametrize("cfg", [TINY, BIASED], ids=["gated", "biased"])
@pytest.mark.parametrize("place", [*PLACES, "all"])
def test_the_function_stays(cfg, place):
    params = dict(tiny_params(cfg))
    if cfg is BIASED:
        params = {name: 0.1 * each for name, each in random_params(cfg).items()}
    recipe = OutlierRecipe(channels=3, factor=64, places=PLACES if place == "all" else (place,))
    before = {name: each.copy() for name, each in params.items()}
    changed = with_outliers(cfg, params, recipe)
    chex.assert_trees_all_equal(params, before, strict=True)
    np.testing.assert_allclose(run(cfg, changed), run(cfg, params), rtol=1e-4, atol=1e-4)
    grown = tops(cfg, changed) / tops(cfg, params)
    where = {"norm": [0, 2], "value": [1], "neuron": [3], "all": [0, 1, 2, 3]}[place]
    assert (grown[:, where] > 2).all()
    others = [product for product in range(4) if product not in where]
    np.testing.assert_allclose(grown[:, others], 1, rtol=1e-3)


@pytest.mark.parametrize(
    ("cfg", "change", "message"),
    [
        (TINY, {"channels": 65}, "65 of 64 channels"),
        (dataclasses.replace(TINY, gated_ffn=False), {}, "cannot be scaled past silu"),
        (dataclasses.replace(TINY, qkv_clip=1.0), {}, "clipped"),
        (dataclasses.replace(TINY, experts=2, experts_per_token=1), {}, "mixtures"),
    ],
)
def test_refusals(cfg, change, message):
    with pytest.raises(ConfigError, match=message):
        with_outliers(cfg, tiny_params(), OutlierRecipe(**change))


ROWS = np.random.default_rng(1).integers(0, TINY.vocab_size, (2 * LEAST_TOKENS // 64, 64)).astype(np.int32)
HALF = sub_config(TINY, Ladder(levels=(50, 100), anchors=()), 50)


@pytest.fixture
def fitted(monkeypatch):
    """What is fitted where a level loses by the number of its layers with shadow and of their float rows."""

    def fit(losses, levels=False):
        tried = []

        def losses_of(level, known):
            shadows = sum(each.rows is not None for each in known)
            rows = max(len(own.rows[0]) for each in known for own in each.rows or ())
            tried.append((level.cfg == TINY, shadows, rows))
            return losses(level.cfg == TINY, shadows, rows)

        monkeypatch.setattr(fitting._Level, "losses", losses_of)
        floats = dict(floating())
        half = {50: (HALF, sub_model(stored(), HALF))} if levels else None
        found = fit_calibration(TINY, floats, stored(), ROWS[::2], ROWS[1::2], recipe=RECIPE, sub_models=half)
        return found, tried

    return fit


def test_the_text_that_is_held_out_is_bounded_too(fitted):
    """One shadow is enough for the one text, and not for the other."""
    found, tried = fitted(lambda whole, shadows, rows: (0.005, 0.02 / shadows))
    assert [shadows for _, shadows, _ in tried] == [1, 2]
    assert sum(found.calibration.shadowed) == 2
    assert found.calibration.losses == {100: (0.005, 0.01)}
    assert not found.lossy
    assert found.recipe == RECIPE


def test_layers_without_a_shadow_clip_or_widen(fitted, monkeypatch):
    """By their products; a layer with a shadow does neither."""
    seen = {}
    for clips in (False, True):
        monkeypatch.setattr(calibration, "clipped_layers", lambda errors, clips=clips: (clips,) * TINY.layers)
        found, _ = fitted(lambda *case: (0.0, 0.0))
        shadowed = found.calibration.shadowed
        assert sum(shadowed) == 1
        assert found.clipped == tuple(clips and not own for own in shadowed)
        seen[clips] = found.calibration.steps[0]
    own = np.array(shadowed)
    np.testing.assert_array_equal(seen[True][own], seen[False][own])
    assert (seen[True][~own] <= seen[False][~own]).all()
    assert (seen[True][~own] < seen[False][~own]).any()


def test_steps_become_finer_where_shadows_are_not_enough(fitted):
    """More channels pass them then, and have rows."""
    coarse = max(rows for *_, rows in fitted(lambda *case: (0.0, 0.0))[1])
    found, tried = fitted(lambda whole, shadows, rows: (0.02, 0.0) if rows <= coarse else (0.0, 0.0))
    assert found.calibration.float_rows > coarse
    assert found.recipe.most_channels > RECIPE.most_channels
    assert found.recipe.least_gain < RECIPE.least_gain
    assert not found.lossy
    assert len(tried) == len(set(tried))


@pytest.mark.slow
def test_what_no_choice_can_do(fitted):
    """The whole model by which it loses least; a level that always loses too much leaves the others."""
    found, _ = fitted(lambda whole, shadows, rows: (0.5 - 0.1 * shadows, 0.0))
    assert found.lossy == (100,)
    assert found.calibration.loss(100) == pytest.approx(0.3)
    found, _ = fitted(lambda whole, shadows, rows: (0.001, 0.001) if whole else (0.0, 0.05), levels=True)
    assert found.lossy == (50,)
    assert sum(found.calibration.shadowed) == 1
    assert found.calibration.losses == {50: (0.0, 0.05), 100: (0.001, 0.001)}
