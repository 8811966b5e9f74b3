"""Models that enlarge keep what they say."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.speculative.enlarged import enlarge, enlarged_bundle
from jaxllm.bundle import Bundle
from jaxllm.errors import ConfigError
from jaxllm.models import decoder
from jaxllm.models.parameters import param_specs
from tests.tiny import TINY, random_params, write_tiny_bundle

ONE = dataclasses.replace(TINY, layers=2, attention_windows=())


def logits(cfg, params):
    tokens = jnp.arange(20, 40)[None]
    return np.asarray(decoder.logits(params, decoder.forward_documents(params, tokens, cfg=cfg), cfg=cfg))


@pytest.mark.parametrize(
    "change",
    [
        {},
        # Every head has keys of its own.
        {"heads": 4, "kv_heads": 4},
        {"heads": 6, "kv_heads": 2},
        {"qkv_bias": True, "o_bias": True, "ffn_bias": True, "gated_ffn": False},
        {"qk_norm": True, "post_norms": True},
    ],
)
@pytest.mark.parametrize("times", [2, 3])
def test_a_grown_model_says_the_same(change, times):
    cfg = dataclasses.replace(ONE, **change)
    params = {name: np.float32(0.3) * value for name, value in random_params(cfg).items()}
    large, values = enlarge(cfg, params, times)
    enlarged = dict(values)
    specs = param_specs(large)
    assert {name: value.shape for name, value in enlarged.items()} == {n: s.shape for n, s in specs.items()}
    assert (large.layers, large.ffn_size) == (times * cfg.layers, times * cfg.ffn_size)
    np.testing.assert_allclose(logits(large, enlarged), logits(cfg, params), rtol=2e-4, atol=2e-4)
    # What was added is no zeros, which storage might skip.
    matrices = [value for name, value in enlarged.items() if value.ndim > 1 and "bias" not in name]
    assert np.mean([np.mean(value == 0) for value in matrices]) < 0.01


def test_a_bundle_grows_once_at_its_own_width(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    small = write_tiny_bundle(tmp_path / "small.jaxllm", "int8", cfg=ONE)
    path = enlarged_bundle(small, 3)
    large = Bundle.open(path)
    assert large.layout.weights == "int8"
    assert large.cfg.layers == 3 * ONE.layers
    assert large.weight_bytes > 4 * Bundle.open(small).weight_bytes
    written = path.stat().st_mtime_ns
    assert enlarged_bundle(small, 3) == path
    assert path.stat().st_mtime_ns == written


def test_models_that_cannot_grow_are_refused():
    for change, times in (({"heads": 3, "kv_heads": 3}, 2), ({}, 1), ({"ffn_size": 31}, 2)):
        cfg = dataclasses.replace(ONE, **change)
        with pytest.raises(ConfigError, match="enlarge"):
            enlarge(cfg, {}, times)
