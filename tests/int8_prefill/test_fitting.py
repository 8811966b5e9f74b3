"""Tests the choice of a calibration: the first that loses little enough on both texts, at all levels."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.elastic.ladder import Ladder, sub_config, sub_model
from jaxllm.int8_prefill import fitting
from jaxllm.int8_prefill.fitting import LEAST_TOKENS, fit_calibration
from jaxllm.int8_prefill.recipe import ShadowRecipe
from tests.int8_prefill.calibrated import RECIPE, outlying, stored
from tests.tiny import TINY

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
        floats = {name: jnp.asarray(each) for name, each in outlying().items()}
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
        monkeypatch.setattr(fitting, "clipped_layers", lambda errors, clips=clips: (clips,) * TINY.layers)
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


def test_ever_finer_recipes():
    found = list(ShadowRecipe().finer())
    assert found[0] == ShadowRecipe()
    shares = [each.most_channels for each in found]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(0.24)
    assert all(each.most_channels <= 1 for each in ShadowRecipe(most_channels=0.6).finer())
