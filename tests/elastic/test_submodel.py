import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import LayerUnits, ModelConfig
from jaxllm.elastic.ladder import (
    Ladder,
    can_be_counted,
    counted_sub_model,
    shared_sub_model,
    sub_config,
    sub_model,
    with_weights,
)
from jaxllm.elastic.units import UnitOrder, check_order, order_of_scores, reorder
from jaxllm.errors import ConfigError
from jaxllm.kernels import native
from jaxllm.kv.cache import new_cache
from jaxllm.models.decoder import forward, forward_documents
from jaxllm.models.layer_stack import by_address
from jaxllm.models.lora import LoraConfig, adapt, init_adapter, parameters_of
from jaxllm.models.parameters import param_specs
from jaxllm.quant import Adapted, Bfloat16Bits, dequantize
from tests.elastic.models import (
    LLAMA,
    MIXTRAL,
    MODELS,
    QWEN3_MOE,
    TOKENS,
    in_blocks,
    random_order,
    scaled_params,
)
from tests.kernels.switching import fall_back
from tests.quick_jit import jit

LADDER = Ladder(anchors=(1,))


@functools.partial(jit, static_argnames=("cfg", "differentiable", "kernels"))
def _documents(params, *, cfg, differentiable, kernels):
    # With their name, or a test would run what another one traced with other kernels.
    assert kernels == native.kernels().name
    return forward_documents(params, TOKENS, cfg=cfg, differentiable=differentiable)


def documents(params, cfg, differentiable=True):
    """Compiled as a whole: each operation by itself is compiled for each shape."""
    kernels = native.kernels().name
    return np.asarray(_documents(params, cfg=cfg, differentiable=differentiable, kernels=kernels))


def cut_by_hand(cfg: ModelConfig, params):
    """Each parameter's first units as a dense array, cut by numpy alone."""
    cut = {}
    for name, spec in param_specs(cfg).items():
        value = np.asarray(dequantize(params[name], jnp.float32))
        cut[name] = value[tuple(slice(length) for length in spec.shape)]
    return cut


def pointers(weight):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(weight)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "level"), [("llama", 20), ("mixtral", 20), *((name, 50) for name in MODELS)]
)
def test_a_level_computes_what_its_units_alone_compute(name, level):
    cfg = sub_config(MODELS[name], LADDER, level)
    params = scaled_params(MODELS[name])
    expected = documents(cut_by_hand(cfg, params), cfg)
    whole = documents(params, cfg.whole)
    assert np.abs(expected - whole).max() > 1e-2 * np.abs(whole).max()
    on_device = jax.tree.map(jnp.asarray, params)
    for parts in (sub_model(on_device, cfg), shared_sub_model(on_device, cfg)):
        out = documents(parts, cfg, differentiable=False)
        np.testing.assert_allclose(out, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_levels_of_quantized_weights(name, bits):
    cfg = sub_config(MODELS[name], LADDER, 50)
    params = in_blocks(MODELS[name], scaled_params(MODELS[name]), bits)
    parts = shared_sub_model(params, cfg)
    expected = documents(cut_by_hand(cfg, params), cfg)
    out = documents(parts, cfg, differentiable=False)
    # Native kernels round activations to 8 bits.
    assert np.linalg.norm(out - expected) < 0.06 * np.linalg.norm(expected)


DENSE = [name for name, cfg in MODELS.items() if not cfg.experts]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bits", "kernels"),
    [*((name, 8, "native") for name in DENSE), ("llama", 4, "native"), ("llama", 8, "xla")],
)
def test_a_level_may_be_told_by_counts_alone(name, bits, kernels, monkeypatch):
    """Documents and caches, with an adapter of which only the first ranks are used."""
    if kernels == "xla":
        fall_back(monkeypatch)
    elif not native.kernels().native:
        pytest.skip("without native kernels")
    whole = MODELS[name]
    cfg = sub_config(whole, LADDER, 50)
    params = in_blocks(whole, scaled_params(whole), bits)
    assert can_be_counted(params, whole) == (kernels == "native")
    addressed = functools.partial(by_address, cfg=whole) if kernels == "native" else dict
    lora = LoraConfig(rank=2, targets=("attn.k", "attn.o", "ffn.up", "ffn.down"))
    adapter = {
        key: np.full(value.shape, 0.05, np.float32)
        for key, value in init_adapter(cfg, lora, jax.random.key(0)).items()
    }
    views = adapt(shared_sub_model(params, cfg), adapter, 1.0)
    ranks = dict.fromkeys(parameters_of(adapter), 5)
    counted = counted_sub_model(params, whole, cfg, adapters=[(adapter, 1.0)], ranks=ranks)

    def run(params, cfg):
        if cfg is not whole:
            params = sub_model(params, cfg)
        documents = forward_documents(params, TOKENS, cfg=cfg, differentiable=False)
        cache = new_cache(cfg, batch=2, tokens=32, dtype=jnp.float32, mass=True)
        first, cache = forward(params, TOKENS[:, :13], cache, cfg=cfg)
        rest, cache = forward(params, TOKENS[:, 13:14], cache, cfg=cfg)
        return documents, first, rest, cache.mass

    expected = jit(run, static_argnums=1)(views, cfg)
    counts = [counted[f"layers.{layer}.used_units"].tolist() for layer in range(3)]
    assert counts == [[cfg.units(each).kv_heads, cfg.units(each).neurons, 5] for each in range(3)]
    found = jit(run, static_argnums=1)(addressed(counted), whole)
    for one, other in zip(found, expected, strict=True):
        # XLA adds in another order.
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * np.abs(other).max())
    unadapted = jit(run, static_argnums=1)(addressed(counted_sub_model(params, whole, cfg)), whole)
    assert np.abs(unadapted[0] - expected[0]).max() > 1e-3 * np.abs(expected[0]).max()


@pytest.mark.skipif(not native.kernels().native, reason="XLA knows no ranks")
def test_ranks_beyond_the_count_are_not_used():
    cfg = sub_config(LLAMA, LADDER, 50)
    params = in_blocks(LLAMA, scaled_params(LLAMA), 8)
    # A matrix of fewer ranks than are used has all of them used.
    ranks = {"layers.0.attn.q": 3, "layers.1.ffn.down": 1}
    adapted = counted_sub_model(params, LLAMA, cfg, ranks=ranks)
    for name in ranks:
        ones = (np.ones_like(side) for side in (adapted[name].left, adapted[name].right))
        adapted[name] = Adapted(params[name], *ones)

    def run(params, rank):
        counted = dict(params)
        for layer in range(3):
            counts = np.array(params[f"layers.{layer}.used_units"])
            counts[2] = rank
            counted[f"layers.{layer}.used_units"] = counts
        addressed = by_address(counted, LLAMA)
        return documents(addressed, LLAMA, differentiable=False)

    unadapted = counted_sub_model(params, LLAMA, cfg)
    outs = [run(adapted, rank) for rank in (0, 1, 2, 3, 4)]
    # Without adapters all layers are equal, and XLA's sums in their loop are taken in another order.
    np.testing.assert_allclose(run(unadapted, 0), outs[0], rtol=0, atol=1e-5 * np.abs(outs[0]).max())
    same = [(one == other).all() for one, other in itertools.pairwise(outs)]
    assert same == [False, False, False, True]


def test_without_adapters_no_rank_is_used():
    """Factors that are there for other levels are zeros, which nobody reads; other weights keep them."""
    params = in_blocks(LLAMA, scaled_params(LLAMA), 8)
    counted = counted_sub_model(params, LLAMA, LLAMA, ranks={"layers.0.attn.q": 3})
    assert counted["layers.0.attn.q"].left.shape == (3, *param_specs(LLAMA)["layers.0.attn.q"].shape[:-1])
    assert not counted["layers.0.attn.q"].right.any()
    assert [counted[f"layers.{layer}.used_units"][2] for layer in range(3)] == [0, 0, 0]
    assert not any(name.endswith("used_units") for name in counted_sub_model(params, LLAMA))
    others = in_blocks(LLAMA, scaled_params(LLAMA, seed=1), 8)
    found = with_weights(counted, others)
    assert found.keys() == counted.keys()
    assert found["layers.0.attn.q"].base is others["layers.0.attn.q"]
    assert found["layers.0.attn.q"].left is counted["layers.0.attn.q"].left
    assert found["layers.1.attn.q"] is others["layers.1.attn.q"]
    assert found["layers.1.used_units"] is counted["layers.1.used_units"]
    # Experts and floats are not counted.
    assert not can_be_counted(in_blocks(MIXTRAL, scaled_params(MIXTRAL), 8), MIXTRAL)
    assert not can_be_counted(jax.tree.map(jnp.asarray, scaled_params(LLAMA)), LLAMA)


@pytest.mark.slow
def test_a_cache_of_a_level_has_its_kv_groups_and_decodes_what_documents_say():
    cfg = sub_config(LLAMA, LADDER, 40)
    parts = shared_sub_model(jax.tree.map(jnp.asarray, scaled_params(LLAMA)), cfg)
    cache = new_cache(cfg, batch=2, tokens=32, dtype=jnp.float32)
    heads = [cfg.units(layer).kv_heads for layer in range(3)]
    assert heads[0] == heads[2] != heads[1]
    assert cache.places == ((0, 0), (1, 0), (0, 1))
    shapes = [(2, 2, heads[0], 32, cfg.head_dim), (1, 2, heads[1], 32, cfg.head_dim)]
    chex.assert_shape([*cache.keys, *cache.values], shapes + shapes)
    expected = documents(parts, cfg)
    read = jit(functools.partial(forward, cfg=cfg))
    first, cache = read(parts, TOKENS[:, :13], cache)
    rest, _ = read(parts, TOKENS[:, 13:], cache)
    np.testing.assert_allclose(np.concatenate([first, rest], 1), expected, rtol=0, atol=1e-4)


def as_bits(params):
    return {
        name: Bfloat16Bits(jnp.asarray(value, jnp.bfloat16).view(jnp.uint16)) if value.ndim > 1 else value
        for name, value in params.items()
    }


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="views of memory are a CPU's")
@pytest.mark.parametrize("form", ["f32", "bf16", "int8", "int4"])
def test_no_weight_is_copied(form):
    cfg = sub_config(LLAMA, LADDER, 50)
    params = jax.tree.map(jnp.asarray, scaled_params(LLAMA))
    if form == "bf16":
        params = as_bits(params)
    elif form != "f32":
        params = in_blocks(LLAMA, params, int(form[3:]))
    parts = shared_sub_model(params, cfg)
    smaller = [name for name in params if tuple(parts[name].shape) != tuple(params[name].shape)]
    assert len(smaller) == 3 * 7 - 7  # all matrices of the two layers that are no anchors
    for name in params:
        assert pointers(parts[name]) == pointers(params[name]), name
    if form.startswith("int") and native.kernels().native:
        # A graph takes blocks as they are, where XLA slices the others.
        assert all(a is b for a, b in zip(jax.tree.leaves(parts), jax.tree.leaves(params), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_other_devices_slice_in_the_graph(monkeypatch, form, name):
    cfg = sub_config(MODELS[name], LADDER, 50)
    params = jax.tree.map(jnp.asarray, scaled_params(MODELS[name]))
    stored = (
        params if form == "f32" else as_bits(params) if form == "bf16" else in_blocks(cfg.whole, params, 8)
    )
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        marked = shared_sub_model(stored, cfg)
    for leaf, whole in zip(jax.tree.leaves(marked), jax.tree.leaves(stored), strict=True):
        assert leaf is whole
    lora = LoraConfig(rank=2)
    adapter = {
        key: jnp.ones_like(value) * 0.1 for key, value in init_adapter(cfg, lora, jax.random.key(0)).items()
    }

    def run(parts):
        return forward_documents(sub_model(parts, cfg), TOKENS, cfg=cfg, differentiable=False)

    for of in (lambda each: each, lambda each: adapt(each, adapter, 0.5)):
        expected = jit(run)(of(sub_model(stored, cfg)))
        np.testing.assert_allclose(jit(run)(of(marked)), expected, atol=1e-4 * np.abs(expected).max())


def test_a_level_of_a_level():
    params = jax.tree.map(jnp.asarray, scaled_params(LLAMA))
    large, small = sub_config(LLAMA, LADDER, 80), sub_config(LLAMA, LADDER, 40)
    twice, once = sub_model(sub_model(params, large), small), sub_model(params, small)
    chex.assert_trees_all_equal(twice, once, strict=True)


def test_a_level_is_not_cut_from_one_that_lacks_its_units():
    """A larger level may have a kv-group in place of some neurons."""
    params = jax.tree.map(jnp.asarray, scaled_params(MODELS["qwen2"]))
    large, small = (sub_config(MODELS["qwen2"], Ladder(), level) for level in (40, 30))
    assert large.units(0).kv_heads > small.units(0).kv_heads
    for cut in (sub_model, shared_sub_model):
        with pytest.raises(ConfigError, match=r"layers\.0\.ffn\.gate has 30 units, the sub-model 32"):
            cut(sub_model(params, large), small)
    # Nor are its experts.
    params = jax.tree.map(jnp.asarray, scaled_params(MIXTRAL))
    large, small = (
        dataclasses.replace(MIXTRAL, layer_units=(LayerUnits(kv_heads=1, neurons=count),) * 3)
        for count in (8, 12)
    )
    with pytest.raises(ConfigError, match=r"experts\.gate has 8 units, the sub-model 12"):
        sub_model(sub_model(params, large), small)


@pytest.mark.parametrize("name", MODELS)
def test_units_in_another_order_are_the_same_model(name):
    cfg = MODELS[name]
    params = scaled_params(cfg)
    moved = dict(reorder(cfg, params.items(), random_order(cfg)))
    differing = {key.split(".", 2)[-1] for key in params if not np.array_equal(params[key], moved[key])}
    assert {"attn.q", "attn.k", "attn.v", "attn.o"} <= differing
    assert not any("norm" in key or key in ("router", "attn.o_bias", "ffn.down_bias") for key in differing)
    assert len(differing) >= 6
    before, after = (np.asarray(forward_documents(each, TOKENS, cfg=cfg)) for each in (params, moved))
    np.testing.assert_allclose(after, before, rtol=0, atol=2e-5 * np.abs(before).max())


def test_the_most_important_units_come_first_and_ties_stay():
    importance = np.array([0.5, 2.0, 0.5, 3.0])
    one = dataclasses.replace(LLAMA, layers=1, attention_windows=())
    scores = {"groups.0": importance, "neurons.0": np.stack([importance, -importance])}
    order = order_of_scores(one, scores)
    np.testing.assert_array_equal(order.groups[0], [3, 1, 0, 2])
    np.testing.assert_array_equal(order.neurons[0], [[3, 1, 0, 2], [0, 2, 1, 3]])
    for value in (np.nan, np.inf):
        with pytest.raises(ConfigError, match="not finite"):
            order_of_scores(one, {**scores, "groups.0": np.array([1.0, value])})


def test_an_order_of_another_model_is_refused():
    order = random_order(LLAMA)
    with pytest.raises(ConfigError, match="of 3 layers, the model has 2"):
        check_order(dataclasses.replace(LLAMA, layers=2, attention_windows=()), order)
    with pytest.raises(ConfigError, match="layer 0's neurons is no permutation"):
        check_order(QWEN3_MOE, order)
    twice = UnitOrder((np.array([0, 0, 1, 2]), *order.groups[1:]), order.neurons)
    with pytest.raises(ConfigError, match="layer 0's kv-groups is no permutation"):
        check_order(LLAMA, twice)
