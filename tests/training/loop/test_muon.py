"""Muon beside optax's own, over one device and over several."""

import json
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import optax.contrib

from jaxllm.training.loop.optimizer import Matrix, orthogonal, scale_by_muon

# A square, a wide and a tall matrix, experts, and heads on two axes.
SHAPES = {"q": (32, 4, 8), "wide": (16, 48), "tall": (48, 16), "experts": (3, 16, 48), "o": (4, 8, 32)}
MATRICES = {
    "q": Matrix((), (0,), (1, 2)),
    "wide": Matrix((), (0,), (1,)),
    "tall": Matrix((), (0,), (1,)),
    "experts": Matrix((0,), (1,), (2,)),
    "o": Matrix((), (0, 1), (2,)),
}

DIVIDED = """
import json
import jax
jax.config.update("jax_num_cpu_devices", 4)
from tests.training.loop.test_muon import gradients, views
from jaxllm.training.loop.optimizer import orthogonal
from jaxllm.training.loop.parallel import MeshShape, make_mesh

mesh = make_mesh(MeshShape(data=2, fsdp=2), 4)
with jax.set_mesh(mesh):
    step = jax.jit(orthogonal).lower(views(gradients(0))).compile()
    found = step(views(gradients(0)))
print(json.dumps({"found": {n: v.tolist() for n, v in found.items()}, "text": step.as_text()}))
"""


def gradients(seed: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    return {
        name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }


def views(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: MATRICES[name].view(value) for name, value in arrays.items()}


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


def test_devices_divide_the_matrices_of_a_shape():
    done = subprocess.run([sys.executable, "-c", DIVIDED], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    for name, value in orthogonal(views(gradients(0))).items():
        np.testing.assert_allclose(answer["found"][name], value, atol=1e-5)
    # Five matrices of 16 x 48 are eight with padding: two for each of four devices.
    assert "f32[2,16,48]" in answer["text"]
