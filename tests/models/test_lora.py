"""Adapters beside weights: nothing where they are zero, the sum where they are not, in every form."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.bundle import Bundle
from jaxllm.config import ModelConfig
from jaxllm.elastic.ladder import Ladder, sub_config
from jaxllm.errors import ConfigError
from jaxllm.kv.cache import new_cache
from jaxllm.models import decoder
from jaxllm.models.lora import (
    TARGETS,
    LoraConfig,
    adapt,
    adapted_parameters,
    adapter_shapes,
    init_adapter,
    merge,
    padded,
    parameters_of,
    summed_factors,
)
from jaxllm.models.parameters import param_specs
from jaxllm.quant import Adapted, BlockedArray, dequantize, from_blocks
from tests.elastic.models import LLAMA
from tests.quick_jit import jit
from tests.tiny import TINY, tiny_params, write_tiny_bundle

MOE = ModelConfig(**{**dataclasses.asdict(TINY), "rope": TINY.rope, "experts": 4, "experts_per_token": 2})
TOKENS = np.random.default_rng(0).integers(0, TINY.vocab_size, (2, 7)).astype(np.int32)
ALL = LoraConfig(rank=3, alpha=6, targets=TARGETS)


def random_adapter(cfg, lora=ALL, seed=1):
    """An adapter whose factors are both away from zero."""
    draw = np.random.default_rng(seed)
    adapter = {}
    for name in adapted_parameters(cfg, lora.targets):
        for part, shape in zip(("left", "right"), adapter_shapes(cfg, name, lora.rank), strict=True):
            adapter[f"{name}.{part}"] = draw.normal(size=shape).astype(np.float32) * np.float32(0.2)
    return adapter


@functools.partial(jit, static_argnames="cfg")
def _logits(params, cfg):
    return decoder.logits(params, decoder.forward_documents(params, TOKENS, cfg=cfg), cfg=cfg)


def logits(params, cfg):
    return np.asarray(_logits(params, cfg))


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """(model, width) -> its parameters as a bundle holds them, in blocks or in rows."""
    folder = tmp_path_factory.mktemp("bundles")

    @functools.cache
    def load(cfg, width):
        if width == "f32":
            return {name: jnp.asarray(value) for name, value in tiny_params(cfg).items()}
        path = write_tiny_bundle(folder / f"{width}-{cfg.experts}", width.removesuffix("-rows"), cfg=cfg)
        params = Bundle.open(path).load()
        if width.endswith("-rows"):
            return {
                name: from_blocks(each) if isinstance(each, BlockedArray) else each
                for name, each in params.items()
            }
        return params

    return load


@pytest.mark.slow
@pytest.mark.parametrize("cfg", [TINY, MOE], ids=["dense", "experts"])
def test_a_new_adapter_changes_nothing_and_another_does(cfg):
    params = {name: jnp.asarray(value) for name, value in tiny_params(cfg).items()}
    plain = logits(params, cfg)
    fresh = init_adapter(cfg, ALL, jax.random.key(0))
    np.testing.assert_array_equal(logits(adapt(params, fresh, ALL.scaling), cfg), plain)
    # But it can learn: of every pair one factor is not zero.
    for name in parameters_of(fresh):
        assert bool(jnp.any(fresh[f"{name}.left"])) != bool(jnp.any(fresh[f"{name}.right"]))
    changed = logits(adapt(params, random_adapter(cfg), ALL.scaling), cfg)
    assert np.abs(changed - plain).mean() > 0.1 * plain.std()
    # Nor does one of rank zero.
    none = dataclasses.replace(ALL, rank=0)
    assert none.scaling == 0
    adapted = adapt(params, init_adapter(cfg, none, jax.random.key(0)), none.scaling)
    np.testing.assert_allclose(logits(adapted, cfg), plain, rtol=1e-6)


@pytest.mark.parametrize("target", [each for each in TARGETS if not each.startswith(("head", "cross"))])
def test_each_target_alone_is_the_sum_of_its_matrices(target):
    cfg = MOE if target.startswith(("experts", "router")) else TINY
    lora = LoraConfig(rank=2, alpha=3, targets=(target,))
    params = {name: jnp.asarray(value) for name, value in tiny_params(cfg).items()}
    adapter = random_adapter(cfg, lora)
    beside = adapt(params, adapter, lora.scaling)
    changed = {name for name, weight in beside.items() if isinstance(weight, Adapted)}
    assert changed == {name for name in params if name.endswith(target)}
    added = merge(params, adapter, lora.scaling)
    for name in changed:
        left, right = adapter[f"{name}.left"], adapter[f"{name}.right"]
        np.testing.assert_allclose(added[name], params[name] + 1.5 * (left @ right), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(logits(beside, cfg), logits(added, cfg), rtol=2e-3, atol=2e-4)
    assert np.abs(logits(beside, cfg) - logits(params, cfg)).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("width", ["int8-rows", "int8", "int4"])
@pytest.mark.parametrize("cfg", [TINY, MOE], ids=["dense", "experts"])
def test_adapters_stand_beside_quantized_weights(cfg, width, stored):
    lora = dataclasses.replace(ALL, targets=tuple(each for each in TARGETS if each != "router"))
    params, adapter = stored(cfg, width), random_adapter(cfg, lora)
    beside = adapt(params, adapter, lora.scaling)
    dense = {name: jnp.asarray(dequantize(weight, jnp.float32)) for name, weight in params.items()}
    expected = logits(merge(dense, adapter, lora.scaling), cfg)
    # Kernels round activations to 8 bits too.
    np.testing.assert_allclose(logits(beside, cfg), expected, atol=0.12 * expected.std())
    # With a cache as without.
    cache = new_cache(cfg, batch=2, tokens=16, dtype=jnp.float32)

    @jit
    def cached(params, cache):
        hidden, _ = decoder.forward(params, TOKENS, cache, cfg=cfg)
        return decoder.logits(params, hidden, cfg=cfg)

    by_cache = np.asarray(cached(beside, cache))
    np.testing.assert_allclose(by_cache, expected, atol=0.12 * expected.std())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cfg", "width"),
    [
        *((MOE, width) for width in ("f32", "bf16", "int8", "int4", "int8-rows")),
        (TINY, "f32"),
        (TINY, "int4"),
    ],
    ids=lambda each: each if isinstance(each, str) else ("experts" if each.experts else "dense"),
)
def test_gradients_pass_through_every_form_of_weight(cfg, width, stored):
    params = stored(cfg, width)
    dense = {name: jnp.asarray(dequantize(weight, jnp.float32)) for name, weight in params.items()}
    lora = LoraConfig(rank=2, alpha=2, targets=("attn.q", "attn.o", "ffn.down", "experts.up"))
    adapter = {name: jnp.asarray(value) for name, value in random_adapter(cfg, lora).items()}

    def loss(adapter, params):
        hidden = decoder.forward_documents(adapt(params, adapter, 1.0), TOKENS, cfg=cfg, remat="full")
        return jnp.sum(decoder.logits(params, hidden, cfg=cfg)[..., :5] ** 2)

    found, expected = jit(jax.grad(loss))(adapter, params), jit(jax.grad(loss))(adapter, dense)
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected, adapter)
    chex.assert_tree_all_finite(found)
    for name, value in expected.items():
        assert np.abs(value).max() > 0
        distance = np.linalg.norm(found[name] - value) / np.linalg.norm(value)
        # Kernels round activations to 8 bits, which sends some tokens to other experts.
        rounded = 0.5 if cfg.experts else 0.25
        assert distance < (rounded if width.startswith("int") else 1e-4), name


def test_adapters_of_lower_rank_and_fewer_targets_fit_one_graph():
    lora = LoraConfig(rank=2, alpha=4, targets=("attn.q",))
    adapter = random_adapter(TINY, lora)
    full = padded(TINY, adapter, LoraConfig.targets, 5)
    expected = {
        f"{name}.{part}": jax.ShapeDtypeStruct(shape, jnp.float32)
        for name in adapted_parameters(TINY, LoraConfig.targets)
        for part, shape in zip(("left", "right"), adapter_shapes(TINY, name, 5), strict=True)
    }
    chex.assert_trees_all_equal_shapes_and_dtypes(full, expected)
    params = {name: jnp.asarray(value) for name, value in tiny_params(TINY).items()}
    np.testing.assert_allclose(
        logits(adapt(params, full, lora.scaling), TINY),
        logits(adapt(params, adapter, lora.scaling), TINY),
        rtol=1e-4,
        atol=1e-5,
    )
    with pytest.raises(ConfigError, match="has rank 2 but the engine was opened for at most 1"):
        padded(TINY, adapter, ("attn.q",), 1)
    with pytest.raises(ConfigError, match="adapter_targets"):
        padded(TINY, adapter, ("attn.k",), 2)
    with pytest.raises(ConfigError, match="another model"):
        padded(dataclasses.replace(TINY, hidden_size=32), adapter, ("attn.q",), 2)


def test_what_does_not_fit_is_refused():
    params = {name: jnp.asarray(value) for name, value in tiny_params(TINY).items()}
    adapter = random_adapter(TINY, LoraConfig(rank=2, targets=("attn.q",)))
    with pytest.raises(ConfigError, match=r"layers\.9\.attn\.q, which this model does not have"):
        adapt(params, {"layers.9.attn.q.left": 0, "layers.9.attn.q.right": 0}, 1.0)
    with pytest.raises(ConfigError, match="lacks one of"):
        adapt(params, {"layers.0.attn.q.left": adapter["layers.0.attn.q.left"]}, 1.0)
    with pytest.raises(ConfigError, match="belongs to another model"):
        adapt(params, {**adapter, "layers.0.attn.q.right": np.zeros((2, 63), np.float32)}, 1.0)
    with pytest.raises(ConfigError, match=r"has none of experts\.up"):
        adapted_parameters(TINY, ("experts.up",))
    for wrong in (
        {"rank": -1},
        {"rank": 2.0},
        {"alpha": float("nan")},
        {"targets": ("attn.z",)},
        {"targets": ()},
    ):
        with pytest.raises(ConfigError):
            LoraConfig(**wrong)
    assert LoraConfig(rank=4, alpha=8, rank_stabilized=True).scaling == 4


# Factors of the sum of several adapters, as native kernels read them


RANKS = {"layers.0.attn.q": 3, "layers.0.attn.o": 5, "layers.2.ffn.down": 2}


def ranked_adapter(cfg, ranks, seed):
    draw, adapter = np.random.default_rng(seed), {}
    for name, rank in ranks.items():
        *units, width = param_specs(cfg)[name].shape
        adapter[f"{name}.left"] = draw.normal(size=(*units, rank)).astype(np.float32)
        adapter[f"{name}.right"] = draw.normal(size=(rank, width)).astype(np.float32)
    return adapter


def change_of(name, adapters, rank):
    """What the factors add to a parameter."""
    left, right = summed_factors(name, param_specs(LLAMA)[name].shape, adapters, rank)
    assert (left.dtype, right.dtype) == (np.float32, np.float32)
    assert left.shape == (rank, *param_specs(LLAMA)[name].shape[:-1])
    assert right.shape == (rank, param_specs(LLAMA)[name].shape[-1])
    return np.tensordot(np.moveaxis(left, 0, -1), right, axes=1)


def test_adapters_of_a_model_and_of_a_sub_model_add_up():
    cfg = sub_config(LLAMA, Ladder(anchors=(1,)), 50)
    whole = ranked_adapter(LLAMA, {"layers.0.attn.q": 2, "layers.2.ffn.down": 2}, 0)
    part = ranked_adapter(cfg, {"layers.0.attn.q": 1, "layers.0.attn.o": 4}, 1)
    assert part["layers.0.attn.q.left"].shape < whole["layers.0.attn.q.left"].shape
    for name, rank in RANKS.items():
        expected = np.zeros(param_specs(LLAMA)[name].shape)
        for adapter, scaling in ((whole, 0.5), (part, 2.0)):
            if f"{name}.left" in adapter:
                change = scaling * adapter[f"{name}.left"] @ adapter[f"{name}.right"]
                expected[tuple(map(slice, change.shape))] += change
        assert expected.any()
        found = change_of(name, [(whole, 0.5), (part, 2.0)], rank)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
