"""A model's name follows from all that it computes, and from nothing else."""

import dataclasses

import jax
import numpy as np

from jaxllm.config import RopeConfig
from jaxllm.quant import quantize
from jaxllm.training.data.documents import model_digest
from tests.tiny import TINY

UP = np.arange(32, dtype=np.float32).reshape(4, 8)
PARAMS = {"up": UP, "down": UP + 1}


@dataclasses.dataclass(frozen=True)
class Young:
    size: int
    bias: bool = False


@dataclasses.dataclass(frozen=True)
class Old:
    size: int
    bias: bool = False
    gated: bool = True


def test_it_differs_where_models_do():
    half = dataclasses.replace(TINY, rope=RopeConfig(dim=8))
    others = [
        model_digest(TINY),
        model_digest(half, PARAMS),
        model_digest(TINY, {**PARAMS, "down": UP}),
        model_digest(TINY, {"up": UP + 1, "down": UP}),
        model_digest(TINY, PARAMS, {"up": UP}),
        model_digest({"model": TINY, "levels": (50, 100)}, PARAMS),
        model_digest(TINY, {**PARAMS, "up": quantize(UP, bits=8, axis=-1)}),
    ]
    assert len({model_digest(TINY, PARAMS), *others}) == 8


def test_it_is_the_same_however_a_model_is_held():
    once = model_digest(TINY, PARAMS)
    turned = {name: np.asfortranarray(PARAMS[name]) for name in sorted(PARAMS)}
    assert model_digest(dataclasses.replace(TINY), turned) == once
    assert model_digest(TINY, jax.tree.map(jax.numpy.asarray, PARAMS)) == once


def test_a_field_that_is_added_later_changes_no_name():
    assert model_digest(Young(3)) == model_digest(Old(3)) != model_digest(Old(3, gated=False))
    assert model_digest(Young(3, bias=True)) not in (model_digest(Young(3)), model_digest(Young(4)))
