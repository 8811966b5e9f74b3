"""The Flax modules have the forwards' parameters, compute what they compute, train, and are served."""

import dataclasses
import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm import Engine, EngineOptions, GenerationConfig
from jaxllm.bundle import Bundle, write_bundle
from jaxllm.config import ModelConfig, RopeConfig
from jaxllm.errors import ConfigError
from jaxllm.experts.routing import load_balancing_loss
from jaxllm.kv.cache import new_cache
from jaxllm.models import decoder, parameters, tiny_lm
from jaxllm.models.encoder.forward import encode
from jaxllm.models.encoder.parameters import init_encoder
from jaxllm.models.flax_front import DecoderLM, DualHeadEncoder, Encoder
from jaxllm.models.tiny_lm import TlmConfig, init_tlm
from serving.runners.runner import prefill_prompt
from tests.models.encoder.tiny import MOBILE, front_mask
from tests.quick_jit import jit
from tests.tiny import TINY, tiny_tokenizer

CFG = ModelConfig(
    model_type="llama", vocab_size=17, hidden_size=16, layers=2, heads=4, kv_heads=2, head_dim=4,
    ffn_size=24, window_tokens=32, rope=RopeConfig(dim=4), qkv_bias=True,
)  # fmt: skip
MIXTURE = dataclasses.replace(CFG, experts=3, experts_per_token=2, sparse_layers=(False, True))
TLM = TlmConfig(encoder=MOBILE, shared_layers=1, levels=3, prompt_levels=4)
TOKENS = np.random.default_rng(0).integers(0, 17, (2, 9), dtype=np.int32)
MASK = front_mask([9, 4], 9)
# Module, what it is called with, and the initial parameters of its forward.
MODULES = {
    "decoder": (DecoderLM(CFG), (TOKENS,), functools.partial(parameters.init_params, CFG)),
    "mixture": (DecoderLM(MIXTURE), (TOKENS,), functools.partial(parameters.init_params, MIXTURE)),
    "encoder": (Encoder(MOBILE), (TOKENS, MASK), functools.partial(init_encoder, MOBILE)),
    "tiny LM": (DualHeadEncoder(TLM), (TOKENS, MASK), functools.partial(init_tlm, TLM)),
}


@functools.cache
def params_of(name):
    module, inputs, _ = MODULES[name]
    return jit(module.init)(jax.random.key(0), *inputs)["params"]


def plain(name, params):
    """What the forward behind a module computes."""
    match name:
        case "encoder":
            return encode(params, TOKENS, MASK, cfg=MOBILE)
        case "tiny LM":
            return tiny_lm.forward_both(params, TOKENS, MASK, cfg=TLM)
    cfg = MODULES[name][0].cfg
    return decoder.logits(params, decoder.forward(params, TOKENS, cfg=cfg)[0], cfg=cfg)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_parameters_are_the_forwards(name):
    params, initial = params_of(name), MODULES[name][2]
    assert type(params) is dict
    chex.assert_trees_all_equal_shapes_and_dtypes(params, jax.eval_shape(initial, jax.random.key(0)))
    fixed = ("bias", "norm.scale")
    assert all(np.std(value) > 0 for each, value in params.items() if not each.endswith(fixed))
    drawn = [value for each, value in params.items() if each.endswith(("0.attn.q", "1.attn.q"))]
    assert len({np.asarray(value).tobytes() for value in drawn}) == len(drawn) >= 2


@pytest.mark.parametrize("module", [DecoderLM(CFG), Encoder(MOBILE), DualHeadEncoder(TLM)], ids=type)
def test_param_dtype(module):
    inputs = (TOKENS,) if isinstance(module, DecoderLM) else (TOKENS, MASK)
    made = jax.eval_shape(module.clone(param_dtype=jnp.bfloat16).init, jax.random.key(0), *inputs)["params"]
    assert {leaf.dtype for leaf in made.values()} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_outputs_are_the_forwards(name):
    module, inputs, _ = MODULES[name]
    params = params_of(name)
    got = jit(module.apply)({"params": params}, *inputs)
    chex.assert_trees_all_equal(got, jit(functools.partial(plain, name))(params))
    if isinstance(module, DecoderLM):
        chex.assert_shape(got, (2, 9, 17))


def test_cache_continues_the_sequence():
    params = params_of("decoder")
    apply = jit(DecoderLM(CFG).apply)
    whole = apply({"params": params}, TOKENS)
    cache = new_cache(CFG, batch=2, tokens=12, dtype=jnp.float32)
    first, cache = apply({"params": params}, TOKENS[:, :6], cache, valid=jnp.int32(4))
    rest, cache = apply({"params": params}, TOKENS[:, 4:], cache)
    assert int(cache.length) == 9
    got = np.concatenate([first[:, :4], rest], axis=1)
    np.testing.assert_allclose(got, whole, atol=1e-5, rtol=0)


def test_packed_documents_do_not_see_each_other():
    params = params_of("mixture")
    starts = np.where(np.arange(9) < 4, 0, 4).astype(np.int32)[None]
    apply = jit(DecoderLM(MIXTURE).apply)
    packed = apply({"params": params}, TOKENS[:1], starts=starts)
    alone = apply({"params": params}, TOKENS[:1, 4:])
    np.testing.assert_allclose(packed[:, 4:], alone, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_mixture_gives_its_routing_to_losses():
    def loss_of(params):
        logits, state = DecoderLM(MIXTURE).apply({"params": params}, TOKENS, mutable="intermediates")
        routing = state["intermediates"]["routing"]
        return load_balancing_loss(routing.probs, routing.ids), (logits, routing)

    params = params_of("mixture")
    gradients, (logits, routing) = jit(jax.grad(loss_of, has_aux=True))(params)
    chex.assert_shape(routing.ids, (1, 2, 9, 2))
    chex.assert_shape(routing.probs, (1, 2, 9, 3))
    assert np.any(gradients["layers.1.router"])
    chex.assert_trees_all_equal(logits, jit(DecoderLM(MIXTURE).apply)({"params": params}, TOKENS))


def train(module: nn.Module, params, loss_of, steps: int):
    """Parameters behind some steps of Adam, and the losses; the step is traced once."""
    optimizer = optax.adam(1e-2)

    @jit
    @chex.assert_max_traces(n=1)
    def step(params, state):
        loss, gradients = jax.value_and_grad(lambda params: loss_of(module, params))(params)
        # Optax mixes integers and floats.
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss, gradients

    chex.clear_trace_counter()
    state, losses = optimizer.init(params), []
    for number in range(steps):
        params, state, loss, gradients = step(params, state)
        losses.append(float(loss))
        if not number:
            chex.assert_tree_all_finite(gradients)
    return params, losses, gradients


def next_token_loss(module, params):
    logits = module.apply({"params": params}, TOKENS[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:]).mean()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decoder", "mixture"])
def test_training_reduces_the_loss(name):
    _, losses, gradients = train(MODULES[name][0], params_of(name), next_token_loss, 20)
    assert all(np.any(each) for each in gradients.values())
    assert losses[0] == pytest.approx(np.log(17), rel=0.1)
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.slow
def test_training_teaches_both_heads_of_the_tiny_lm():
    keep = np.random.default_rng(1).integers(0, 2, TOKENS.shape).astype(np.float32)
    levels = np.array([0, 2], np.int32)

    def loss_of(module, params):
        scores, (model, prompt) = module.apply({"params": params}, TOKENS, MASK)
        loss = jnp.where(MASK, optax.sigmoid_binary_cross_entropy(scores, keep), 0).mean()
        for logits in (model, prompt):
            loss = loss + optax.softmax_cross_entropy_with_integer_labels(logits, levels).mean()
        return loss

    _, losses, _ = train(DualHeadEncoder(TLM), params_of("tiny LM"), loss_of, 40)
    assert losses[-1] < 0.5 * losses[0]


def test_missing_parameter_is_named():
    rest = {name: value for name, value in params_of("decoder").items() if name != "layers.1.ffn.up"}
    with pytest.raises(KeyError, match=r"layers\.1\.ffn\.up"):
        jax.eval_shape(DecoderLM(CFG).apply, {"params": rest}, TOKENS)


def test_wrong_tokens_are_told_in_one_line():
    with pytest.raises(ConfigError, match=r"takes tokens as \[B, T\] int32, got \[9\] int32"):
        DecoderLM(CFG).apply({"params": params_of("decoder")}, TOKENS[0])
    with pytest.raises(ConfigError, match=r"takes mask as \[B, T\] bool with B = 2, T = 9, got \[2, 8\]"):
        Encoder(MOBILE).apply({"params": params_of("encoder")}, TOKENS, MASK[:, :8])


@pytest.mark.slow
@pytest.mark.parametrize("experts", [0, 4])
def test_trained_parameters_are_served_as_they_are(experts, tmp_path):
    """A bundle of them answers as the module does, and holds the very numbers."""
    cfg = TINY if not experts else dataclasses.replace(TINY, experts=experts, experts_per_token=2)
    module, text = DecoderLM(cfg), np.array([[5, 9, 40, 2, 77, 31, 8, 8, 3]], np.int32)

    def loss_of(module, params):
        logits = module.apply({"params": params}, text[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

    initial = jit(module.init)(jax.random.key(0), text)["params"]
    params, losses, _ = train(module, initial, loss_of, 12)
    assert losses[-1] < losses[0]
    path = tmp_path / "trained.jaxllm"
    write_bundle(
        path,
        cfg=cfg,
        params=jax.device_get(params),
        weights="f32",
        tokenizer=tiny_tokenizer(),
        name="trained",
    )
    options = EngineOptions(context_tokens=32, chunk_tokens=(16,), cache_tokens=(32,), decode_block=8)
    engine = Engine.open(path, options=options)
    try:
        apply, sequence = jit(module.apply), text.copy()
        logits, _ = prefill_prompt(engine.runner, engine.runner.start(16), text[0].tolist(), 0)
        expected = apply({"params": params}, text)[:, -1]
        chex.assert_trees_all_close(np.asarray(logits), np.asarray(expected), atol=1e-4, rtol=0)
        answer = engine.generate(text[0, :3].tolist(), GenerationConfig(max_tokens=6, ignore_eos=True))
        for at in range(3, 9):
            sequence[0, at] = np.argmax(apply({"params": params}, sequence)[0, at - 1])
        assert answer.tokens == sequence[0, 3:].tolist()
    finally:
        engine.close()
    with Bundle.open(path) as bundle:
        chex.assert_trees_all_equal(jax.device_get(bundle.load()), jax.device_get(params))
