"""Muon beside optax's own; `test_parallel` divides it over devices."""

from typing import Any

import jax
import numpy as np
import optax.contrib

from jaxllm.training.loop.optimizer import scale_by_muon
from tests.training.loop.meshes import MATRICES, SHAPES, gradients


def test_views_give_back_what_they_show():
    for name, value in gradients(0).items():
        matrix = MATRICES[name]
        np.testing.assert_array_equal(matrix.back(matrix.view(value), value.shape), value)


def test_updates_are_those_of_optax():
    ours = scale_by_muon(lambda name, rank: MATRICES[name])
    dims = {name: optax.contrib.MuonDimensionNumbers(m.rows, m.columns) for name, m in MATRICES.items()}
    # optax turns an update around.
    theirs = optax.contrib.muon(-1.0, consistent_rms=0.2, muon_weight_dimension_numbers=dims)
    found: dict[int, Any] = {}
    with jax.numpy_dtype_promotion("standard"):
        for number, each in enumerate((ours, theirs)):
            update, state = jax.jit(each.update), each.init(gradients(0))
            for step in range(60):
                found[number], state = update(gradients(step), state, gradients(0))
    for name in SHAPES:
        # optax corrects the bias of its first steps' momentum, which only there turns an update.
        np.testing.assert_allclose(found[0][name], found[1][name], atol=0.02)
