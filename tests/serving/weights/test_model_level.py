"""A level knows which parameters it has, and whose buckets take them."""

import dataclasses

import numpy as np
import pytest

from jaxllm.config import WHOLE
from jaxllm.errors import ConfigError
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.weights.model_level import ModelLevel
from tests.tiny import TINY, random_params

CFG = dataclasses.replace(TINY, layers=3, attention_windows=(0, 8, 0))


@pytest.fixture(scope="module")
def params():
    return random_params(CFG, seed=0)


def level_of(params, cfg=CFG, **more) -> ModelLevel:
    return ModelLevel(cfg, params, EngineOptions().resolve(cfg), **more)


def test_the_whole_model_runs_its_own_buckets(params):
    whole = level_of(params)
    assert (whole.level, whole.bucket_level, whole.bucket_cfg) == (WHOLE, WHOLE, CFG)
    assert whole.weights_version == (WHOLE, 0)


def test_layers_that_are_alike_share_their_buckets(params):
    whole = level_of(params)
    assert whole.alike == (0, 1, 0)
    assert whole.layer_kinds == [0, 1]


def test_a_level_may_share_the_whole_models_buckets(params):
    whole = level_of(params)
    half = level_of(params, level=50, whole=whole)
    assert (half.level, half.bucket_level) == (50, WHOLE)
    assert half.weights_version == (50, 0)
    fewer = {name: each for name, each in params.items() if "layers.2" not in name}
    with pytest.raises(ConfigError, match="of another form"):
        level_of(fewer, level=50, whole=whole)


def test_other_parameters_of_the_same_form_make_another_version(params):
    whole = level_of(params)
    other = random_params(CFG, seed=1)
    whole.swap(other)
    assert whole.params is other
    assert whole.weights_version == (WHOLE, 1)
    wider = {**other, "embed.tokens": np.zeros((3, 3), np.float32)}
    with pytest.raises(ConfigError, match="of another form"):
        whole.swap(wider)
    assert whole.params is other


def test_buckets_are_lowered_from_shapes_alone(params):
    shapes = level_of(params).shapes
    assert not any(isinstance(each, np.ndarray) for each in shapes.params.values())
    cache = shapes.cache(48)
    assert [each.shape for each in cache.keys] == [(3, 1, CFG.kv_heads, 48, CFG.head_dim)]
    assert cache.mass is None
