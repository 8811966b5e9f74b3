"""Layers in stacks compute what layers by name do, in code whose length does not follow their number."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm.config import LayerUnits
from jaxllm.elastic.ladder import shared_sub_model, sub_model
from jaxllm.kernels import converted
from jaxllm.kv.cache import new_cache
from jaxllm.models import decoder
from jaxllm.models.layer_stack import STACK, by_stacking
from jaxllm.models.lora import LoraConfig, adapt, init_adapter
from jaxllm.models.parameters import init_params, param_specs
from jaxllm.models.scanned_layers import scan_runs, stack_name, stacked, unstacked
from jaxllm.quant import Adapted, Bfloat16Bits, OwnProduct, by_form, quantize, to_blocks
from jaxllm.quant.parts import StackEntry, stack_entries
from tests.kernels.switching import fall_back
from tests.models.configs import CAPACITY, CONFIGS, PLAIN, TOKENS, jit, params_of

LAYERS = 4
DEEP = {
    name: dataclasses.replace(
        cfg,
        layers=LAYERS,
        attention_windows=tuple(np.resize(cfg.attention_windows, LAYERS).tolist()),
        rope_layers=cfg.rope_layers and tuple(np.resize(cfg.rope_layers, LAYERS).tolist()),
        sparse_layers=(*cfg.sparse_layers, True, True) if cfg.sparse_layers else (),
    )
    for name, cfg in CONFIGS.items()
}
BITS = {"int8": 8, "int4": 4, "int2": 2, "blocks": 8}


def in_matrices(cfg, store):
    """A model's parameters with matrices as `store` gives them, by name, floats and axis."""
    specs, found = param_specs(cfg), {}
    for name, value in params_of(cfg).items():
        matrix = specs[name].role != "vector" and name.startswith("layers.")
        axis = -2 if specs[name].role == "from_units" else -1
        found[name] = store(name, value, axis) if matrix else value
    return jax.tree.map(jnp.asarray, found)


def stored(form, name, value, axis):
    if form == "bfloat16":
        return Bfloat16Bits(value.astype(ml_dtypes.bfloat16).view(np.uint16))
    if form == "own-product":
        return OwnProduct(value, plain_product)
    if form in ("adapted", "adapted-int8"):
        base = quantize(value, bits=8, axis=axis) if form == "adapted-int8" else value
        lead = value.shape[:1] if ".experts." in name else ()
        units = value.shape[len(lead) : -1]
        noise = np.random.default_rng(len(name)).standard_normal
        left, right = noise((*lead, 2, *units)), noise((*lead, 2, value.shape[-1]))
        return Adapted(base, np.float32(0.3 * left), np.float32(0.3 * right))
    if form == "experts-by-form" and ".experts." in name:
        wide = [quantize(each, bits=bits, axis=axis) for each, bits in zip(value, (8, 4, 8, 4), strict=False)]
        return by_form(wide, np.stack)
    if form in BITS:
        # Experts are cut one by one, so that their units are in blocks of their own.
        levels = quantize(value, bits=BITS[form], axis=axis)
        return to_blocks(levels) if form == "blocks" else levels
    return value


def plain_product(rows, matrix, axis):
    return rows @ (matrix.T if axis == -1 else matrix)


@functools.partial(jit, static_argnames=("cfg", "block_bytes"))
def chunk_states(params, tokens, cache, valid, *, cfg, block_bytes):
    """`block_bytes` is what `converted.BLOCK_BYTES` is while this is traced, so that none else's trace is
    taken."""
    assert block_bytes == converted.BLOCK_BYTES
    return decoder.forward(sub_model(params, cfg), tokens, cache, cfg=cfg, valid=valid)


@functools.partial(jit, static_argnames=("cfg", "block_bytes"))
def document_states(params, *, cfg, block_bytes):
    assert block_bytes == converted.BLOCK_BYTES
    return decoder.forward_documents(sub_model(params, cfg), TOKENS, cfg=cfg, differentiable=False)


def host_states(cfg, params):
    """Of a prompt in two chunks, the second padded, over a cache, both by one program; and of a document
    without a cache."""
    of = {"cfg": cfg, "block_bytes": converted.BLOCK_BYTES}
    cache = new_cache(cfg, batch=2, tokens=CAPACITY, dtype=jnp.float32, stacked=STACK in params)
    first, cache = chunk_states(params, TOKENS[:, :4], cache, np.int32(4), **of)
    second, cache = chunk_states(params, TOKENS[:, 4:8], cache, np.int32(3), **of)
    return jax.device_get((first, second[:, :3], document_states(params, **of), cache.length))


def same(cfg, left, right):
    same_as(host_states(cfg, left), cfg, right)


def same_as(known, cfg, params):
    for a, b in zip(known, host_states(cfg, params), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@functools.cache
def known_states(name, form):
    """Of the layers by name of a whole decoder, which several tests compare with."""
    return host_states(DEEP[name], in_matrices(DEEP[name], functools.partial(stored, form)))


def entries(params, layers):
    """The same parameters with those of each group of layers as entries of a stack."""
    found = dict(params)
    for group in layers:
        prefixes = [f"layers.{layer}." for layer in group]

        def of(prefix):
            return {
                name.removeprefix(prefix): each for name, each in params.items() if name.startswith(prefix)
            }

        found |= stack_entries({prefix: functools.partial(of, prefix) for prefix in prefixes})
    return found


FORMS = ("float32", "bfloat16", "int8", "int4", "adapted")


@pytest.mark.parametrize(
    ("name", "form"),
    # Every form in products of the dense kind and of experts; of the others, whose matrices are multiplied by
    # the same code, coded weights, and floats with adapters.
    [
        *((name, form) for name in ("plain", "experts") for form in FORMS),
        *((name, form) for name in DEEP if name not in ("plain", "experts") for form in ("int8", "adapted")),
        # Other types of storage, and experts of several widths.
        *(("plain", form) for form in ("int2", "blocks", "own-product", "adapted-int8")),
        ("experts", "experts-by-form"),
    ],
)
def test_every_kind_of_decoder_computes_the_same(name, form, monkeypatch):
    fall_back(monkeypatch)
    cfg = DEEP[name]
    params = in_matrices(cfg, functools.partial(stored, form))
    same_as(known_states(name, form), cfg, by_stacking(params, cfg))


def test_a_product_by_blocks_computes_the_same(monkeypatch):
    """Of weights larger than a block, whose rows are taken from the stack."""
    fall_back(monkeypatch)
    monkeypatch.setattr("jaxllm.kernels.converted.BLOCK_BYTES", 100)
    # Of two layers: code for so many blocks takes long to compile.
    cfg = PLAIN
    for form in ("int4", "bfloat16", "adapted-int8"):
        params = in_matrices(cfg, functools.partial(stored, form))
        same(cfg, params, by_stacking(params, cfg))


LEVEL_UNITS = {"equal": [(1, 6)] * LAYERS, "anchored": [(2, 10), (1, 6), (2, 10), (1, 6)]}


@pytest.mark.parametrize("units", LEVEL_UNITS)
@pytest.mark.parametrize(
    ("name", "form"),
    [
        *(("plain", form) for form in ("float32", "int8", "int4", "bfloat16")),
        *((name, form) for name in ("everything", "experts") for form in ("float32", "int8")),
    ],
)
def test_a_level_is_a_view_of_the_stacks(name, form, units, monkeypatch):
    fall_back(monkeypatch)
    cfg = DEEP[name]
    level = dataclasses.replace(
        cfg, layer_units=tuple(LayerUnits(kv_heads=heads, neurons=each) for heads, each in LEVEL_UNITS[units])
    )
    params = in_matrices(cfg, functools.partial(stored, form))
    whole = entries(params, [range(LAYERS)])
    cut = by_stacking(shared_sub_model(whole, level), level)
    stacks = {id(leaf.stack) for leaf in jax.tree.leaves(whole) if isinstance(leaf, StackEntry)}
    assert {id(leaf) for leaf in jax.tree.leaves(cut[STACK])} <= stacks
    same(level, shared_sub_model(params, level), cut)
    if units == "equal":
        same_as(known_states(name, form), cfg, by_stacking(whole, cfg))


def test_what_is_beside_stacks_gets_rows_of_its_own(monkeypatch):
    """Layers of a level that are some rows of a stack, with adapters that are in no stack."""
    fall_back(monkeypatch)
    cfg = DEEP["plain"]
    params = in_matrices(cfg, functools.partial(stored, "int8"))
    adapted = in_matrices(cfg, functools.partial(stored, "adapted-int8"))
    whole = entries(params, [range(LAYERS)])
    for layer in (1, 3):
        name = f"layers.{layer}.ffn.up"
        change = adapted[name]
        whole[name] = Adapted(whole[name], change.left, change.right)
        params[name] = Adapted(params[name], change.left, change.right)
    stack: Any = by_stacking(whole, cfg)
    assert [row for _, row in stack[STACK].places] == [0, 1, 2, 3]
    assert len(stack[STACK].stacks) == 2
    same(cfg, params, stack)


def traced(cfg, form="int8"):
    params = by_stacking(in_matrices(cfg, functools.partial(stored, form)), cfg)
    cache = new_cache(cfg, batch=1, tokens=CAPACITY, dtype=jnp.float32)

    def step(params, tokens, cache):
        return decoder.forward(params, tokens, cache, cfg=cfg)

    return jax.jit(step).trace(params, jnp.zeros((1, 4), jnp.int32), cache)


@pytest.mark.parametrize("form", ["float32", "int8", "adapted-int8"])
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_code_does_not_grow_with_layers(platform, form, monkeypatch):
    fall_back(monkeypatch)
    deeper = dataclasses.replace(PLAIN, layers=9, attention_windows=())
    few, many = (
        traced(cfg, form).lower(lowering_platforms=(platform,)).as_text() for cfg in (DEEP["plain"], deeper)
    )
    assert len(few.splitlines()) == len(many.splitlines())


def test_a_loop_over_layers_gathers_nothing(monkeypatch):
    fall_back(monkeypatch)
    (loop,) = [each for each in traced(DEEP["plain"]).jaxpr.eqns if each.primitive.name in ("scan", "while")]
    assert "dynamic_slice" in str(loop)
    assert "gather" not in str(loop)


FIVE = dataclasses.replace(PLAIN, layers=5, attention_windows=())
ALTERNATING = dataclasses.replace(FIVE, attention_windows=(3, 0, 3, 0, 3))
SPARSE = dataclasses.replace(CONFIGS["experts"], layers=4, attention_windows=(), sparse_layers=())
FULL_LEVEL, LESS = (
    LayerUnits(kv_heads=PLAIN.kv_heads, neurons=n) for n in (PLAIN.ffn_size, PLAIN.ffn_size // 2)
)
LEVEL = dataclasses.replace(FIVE, layer_units=(FULL_LEVEL, LESS, LESS, FULL_LEVEL, LESS))
TEXTS = jnp.asarray(np.random.default_rng(0).integers(0, PLAIN.vocab_size, (2, 12)), jnp.int32)
STARTS = jnp.asarray([[0] * 5 + [5] * 7, [0] * 12], jnp.int32)


def test_equal_layers_are_runs():
    def told(cfg):
        return [(run.first, run.period, run.repeats) for run in scan_runs(cfg)]

    assert told(FIVE) == [(0, 1, 5)]
    assert told(ALTERNATING) == [(0, 2, 2), (4, 1, 1)]
    assert told(LEVEL) == [(0, 1, 1), (1, 1, 2), (3, 1, 1), (4, 1, 1)]
    assert stack_name(ALTERNATING, "layers.3.attn.q") == ("stacks.1.attn.q", 1)
    assert stack_name(ALTERNATING, "layers.4.attn.q") == ("layers.4.attn.q", -1)
    assert stack_name(ALTERNATING, "head") == ("head", -1)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize(
    "cfg", [FIVE, ALTERNATING, SPARSE, LEVEL], ids=["equal", "windows", "experts", "level"]
)
def test_a_loop_has_the_outputs_and_gradients_of_single_layers(cfg, remat):
    params = init_params(cfg, jax.random.key(0))

    def loss(params):
        if not cfg.experts:
            return decoder.forward_documents(params, TEXTS, STARTS, cfg=cfg, remat=remat).std(), ()
        hidden, routing = decoder.forward_documents_with_routing(params, TEXTS, STARTS, cfg=cfg, remat=remat)
        return hidden.std() + routing.weights.std(), routing

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (one, routing), gradients = run(params)
    (other, its_routing), stacks = run(stacked(params, cfg))
    np.testing.assert_allclose(one, other, rtol=1e-5)
    apart = unstacked(stacks, cfg)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(apart[name], gradient, atol=2e-5, err_msg=name)
    for each, its in zip(jax.tree.leaves(routing), jax.tree.leaves(its_routing), strict=True):
        np.testing.assert_allclose(each, its, atol=1e-5)


def test_adapters_are_stacked_beside_their_weights():
    params, lora = init_params(FIVE, jax.random.key(0)), LoraConfig(rank=2)
    adapter = {
        name: each + np.float32(0.01) for name, each in init_adapter(FIVE, lora, jax.random.key(1)).items()
    }
    alone = decoder.forward_documents(adapt(params, adapter, 1.5), TEXTS, cfg=FIVE)
    beside = adapt(stacked(params, FIVE), stacked(adapter, FIVE), 1.5)
    np.testing.assert_allclose(decoder.forward_documents(beside, TEXTS, cfg=FIVE), alone, atol=1e-5)


def test_a_step_of_many_layers_has_no_more_code():
    def operations(layers):
        cfg = dataclasses.replace(PLAIN, layers=layers, attention_windows=())
        shapes = jax.eval_shape(lambda: stacked(init_params(cfg, jax.random.key(0)), cfg))

        def loss(params):
            return decoder.forward_documents(params, TEXTS, cfg=cfg, remat="full").std()

        return jax.jit(jax.grad(loss)).lower(shapes).as_text().count(" = ")

    assert operations(24) == operations(4)
