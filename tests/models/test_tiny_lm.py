"""The tiny LM: two heads are two encoders with the same bottom, and marks can be distinguished."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.models import tiny_lm as tlm
from jaxllm.models.encoder.mobilebert import encoder_shapes
from jaxllm.models.tiny_lm import TlmConfig, grow_vocabulary, tlm_from_encoder, tlm_shapes
from jaxllm.quant import quantize
from tests.models.encoder.tiny import MOBILE, encode, front_mask, params_of, random_values, tokens_of
from tests.quick_jit import jit

TLM = TlmConfig(
    encoder=dataclasses.replace(MOBILE, layers=3, ffn_blocks=1), shared_layers=1, levels=4, prompt_levels=5
)
TOKENS, MASK = tokens_of(TLM.encoder, 3, 7), front_mask([7, 3, 1], 7)
KEY = jax.random.key(0)
both = jit(functools.partial(tlm.forward_both, cfg=TLM))


@functools.cache
def random_params():
    return random_values(tlm_shapes(TLM))


def head_encoder(params, head):
    """The whole encoder of one head, shared and own layers."""
    return {name: params.get(f"{head}.{name}", params.get(name)) for name in encoder_shapes(TLM.encoder)}


def test_heads_are_encoders():
    """Each one what its whole encoder and its output compute, and both at once what they compute apart."""
    params = random_params()
    run = jit(functools.partial(encode, cfg=TLM.encoder))
    hidden = {head: np.asarray(run(head_encoder(params, head), TOKENS, MASK)) for head in tlm.HEADS}
    assert np.abs(hidden["score"] - hidden["decide"]).mean() > 0.1
    keep, (model, prompt) = both(params, TOKENS, MASK)
    expected = hidden["score"] @ params["score.keep"][0] + params["score.keep_bias"][0]
    np.testing.assert_allclose(keep[MASK], expected[MASK], atol=1e-4)
    for got, name in ((model, "decide.model"), (prompt, "decide.prompt")):
        expected = hidden["decide"][:, 0] @ params[name].T + params[f"{name}_bias"]
        np.testing.assert_allclose(got, expected, atol=1e-4)
    batch = len(TOKENS)
    chex.assert_shape([keep, model, prompt], [TOKENS.shape, (batch, TLM.levels), (batch, TLM.prompt_levels)])
    chex.assert_type([keep, model, prompt], jnp.float32)
    apart = [jit(functools.partial(each, cfg=TLM))(params, TOKENS, MASK) for each in (tlm.score, tlm.decide)]
    chex.assert_trees_all_close(apart, [keep, (model, prompt)], atol=1e-5, rtol=1e-7, strict=True)


def test_both_heads_begin_as_the_encoder():
    trained = {name: jnp.asarray(value) for name, value in params_of(TLM.encoder).items()}
    params = tlm_from_encoder(trained, TLM, KEY)
    chex.assert_trees_all_equal_shapes_and_dtypes(params, random_params())
    for head in tlm.HEADS:
        chex.assert_trees_all_equal(head_encoder(params, head), trained, strict=True)
    # Buffers of their own: a step that is given all of them may write into each.
    pointers = [value.unsafe_buffer_pointer() for value in params.values()]
    assert len(set(pointers)) == len(pointers)
    assert 0 < np.abs(params["decide.prompt"]).max() < 0.05
    assert not np.any(params["decide.prompt_bias"])


def test_other_encoders_are_refused():
    trained = dict(params_of(TLM.encoder))
    with pytest.raises(ConfigError, match=r"layers\.0\.widen"):
        tlm_from_encoder({**trained, "layers.0.widen": trained["layers.0.widen"].T}, TLM, KEY)
    del trained["embed.types"]
    with pytest.raises(ConfigError, match=r"disagree on embed\.types"):
        tlm_from_encoder(trained, TLM, KEY)


def test_new_rows_are_orthogonal():
    params, extra = random_params(), 6
    grown, cfg = grow_vocabulary(params, TLM, extra, KEY)
    assert cfg == dataclasses.replace(TLM, encoder=dataclasses.replace(TLM.encoder, vocab_size=29))
    assert {name: value.shape for name, value in grown.items()} == tlm_shapes(cfg)
    old, table = params["embed.tokens"], np.asarray(grown["embed.tokens"])
    np.testing.assert_array_equal(table[:23], old)
    length = np.linalg.norm(old, axis=1).mean()
    np.testing.assert_allclose(table[23:] @ table[23:].T, np.eye(extra) * length**2, atol=1e-4)
    other, _ = grow_vocabulary(params, TLM, extra, jax.random.key(1))
    assert np.abs(table[23:] - other["embed.tokens"][23:]).max() > 0.1


def test_marks_that_are_refused():
    for extra in (0, 7, True, 1.0):
        with pytest.raises(ConfigError, match=r"whole number in \[1, 6\]"):
            grow_vocabulary(random_params(), TLM, extra, KEY)
    table = quantize(random_params()["embed.tokens"], bits=8, axis=-1)
    with pytest.raises(ConfigError, match="quantized"):
        grow_vocabulary({**random_params(), "embed.tokens": table}, TLM, 2, KEY)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("encoder", [None, {}]),
        ("shared_layers", [-1, 4, True, 1.0]),
        ("levels", [0, tlm.MAX_LEVELS + 1, "4"]),
        ("prompt_levels", [0, tlm.MAX_LEVELS + 1]),
    ],
)
def test_refused(field, values):
    for value in values:
        with pytest.raises(ConfigError, match=field):
            dataclasses.replace(TLM, **{field: value})
