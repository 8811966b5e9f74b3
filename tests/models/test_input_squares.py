"""Mean squares of inputs, layer by layer, are those of a pass of the whole model."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.models.decoder import forward
from jaxllm.models.input_squares import unmeasured, with_input_squares
from jaxllm.models.parameters import param_specs
from jaxllm.nn.linear import dense_product
from jaxllm.quant import OwnProduct, quantize
from jaxllm.quant.weights import Measured, RowParts
from tests.models.configs import CAPACITY, CONFIGS, params_of

ROWS = np.random.default_rng(3).integers(0, 13, (3, CAPACITY)).astype(np.int32)


def in_order(cfg):
    return [(name, np.asarray(params_of(cfg)[name])) for name in param_specs(cfg)]


@pytest.mark.parametrize("name", CONFIGS)
def test_those_of_a_whole_pass(name):
    cfg, seen = CONFIGS[name], {}
    watched = {param: jnp.asarray(value) for param, value in in_order(cfg)}

    def observe(param, x, matrix, axis):
        seen.setdefault(param, []).append(np.square(np.asarray(x)))
        return dense_product(x, matrix, axis + 2)

    for param, spec in param_specs(cfg).items():
        if param.startswith("layers.") and spec.role != "vector" and ".experts." not in param:
            watched[param] = OwnProduct(watched[param], functools.partial(observe, param))
    for row in ROWS:
        forward(watched, row[None], cfg=cfg)
    assert unmeasured(cfg) is None
    got = dict(with_input_squares(in_order(cfg), cfg, ROWS.reshape(-1).tolist()))
    assert list(got) == list(param_specs(cfg))
    assert {param for param, each in got.items() if isinstance(each, Measured)} == set(seen)
    for param, found in seen.items():
        expected = np.concatenate(found).mean(0)
        np.testing.assert_allclose(got[param].input_squares, expected, rtol=2e-3, atol=1e-6, err_msg=param)
        np.testing.assert_array_equal(got[param].value, params_of(cfg)[param])


def test_an_embedding_in_parts_and_quantized_weights_pass_through():
    cfg, tokens = CONFIGS["plain"], ROWS.reshape(-1).tolist()
    own = dict(in_order(cfg))
    parts = RowParts(own["embed.tokens"].shape, iter([own["embed.tokens"][:5], own["embed.tokens"][5:]]))
    params = own | {"embed.tokens": parts}
    params["layers.0.ffn.up"] = quantize(own["layers.0.ffn.up"], bits=8, axis=-1)
    got = {}
    for name, value in with_input_squares(params.items(), cfg, tokens):
        got[name] = list(value.parts) if isinstance(value, RowParts) else value
    np.testing.assert_array_equal(np.concatenate(got["embed.tokens"]), own["embed.tokens"])
    assert got["layers.0.ffn.up"] is params["layers.0.ffn.up"]
    whole = dict(with_input_squares(own.items(), cfg, tokens))
    first, last = "layers.0.attn.o", "layers.1.ffn.down"
    np.testing.assert_array_equal(got[first].input_squares, whole[first].input_squares)
    np.testing.assert_allclose(got[last].input_squares, whole[last].input_squares, rtol=0.1)


@pytest.mark.parametrize("tokens", [[], [13], [-1]])
def test_tokens_of_another_vocabulary_are_refused(tokens):
    cfg = CONFIGS["plain"]
    with pytest.raises(ConfigError, match=r"tokens in \[0, 13\)"):
        list(with_input_squares(in_order(cfg), cfg, tokens))


def test_inputs_that_are_not_finite_are_refused():
    cfg = CONFIGS["plain"]
    own = dict(in_order(cfg))
    own["layers.0.attn_norm.scale"] = np.full_like(own["layers.0.attn_norm.scale"], 1e30)
    with pytest.raises(ConfigError, match=r"attn\.q has inputs that are not finite"):
        list(with_input_squares(own.items(), cfg, [1, 2, 3]))
