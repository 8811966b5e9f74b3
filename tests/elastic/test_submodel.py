import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.config import LayerUnits, ModelConfig, RopeConfig
from jaxllm.elastic.ladder import (
    LEVELS,
    Ladder,
    can_be_counted,
    chosen_ladder,
    counted_sub_model,
    layer_parameters,
    layers_ladder,
    shared_sub_model,
    sub_config,
    sub_model,
    unit_sizes,
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
from jaxllm.quant import Bfloat16Bits, dequantize
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
# Level 30 lacks a layer's heads, another's neurons, and a layer.
DEPTH = Ladder(levels=(30, 100), units=(((0, 32), (2, 0), (0, 0)),))


def part_of(cfg: ModelConfig, level: int) -> ModelConfig:
    return sub_config(cfg, DEPTH if level == 30 else LADDER, level)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "level"),
    [("llama", 20), ("llama", 30), ("gpt2", 30), ("mixtral", 20), *((name, 50) for name in MODELS)],
)
def test_a_level_computes_what_its_units_alone_compute(name, level):
    cfg = part_of(MODELS[name], level)
    params = scaled_params(MODELS[name])
    expected = documents(cut_by_hand(cfg, params), cfg)
    whole = documents(params, cfg.whole)
    assert np.abs(expected - whole).max() > 1e-2 * np.abs(whole).max()
    on_device = jax.tree.map(jnp.asarray, params)
    for parts in (sub_model(on_device, cfg), shared_sub_model(on_device, cfg)):
        out = documents(parts, cfg, differentiable=False)
        np.testing.assert_allclose(out, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


DENSE = [name for name, cfg in MODELS.items() if not cfg.experts]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bits", "level", "kernels"),
    [
        *((name, 8, 50, "native") for name in DENSE),
        *((name, 8, 30, "native") for name in ("llama", "gpt2")),
        ("llama", 4, 30, "native"),
        ("llama", 8, 50, "xla"),
    ],
)
def test_a_level_may_be_told_by_counts_alone(name, bits, level, kernels, monkeypatch):
    """Documents and caches, with an adapter of which only the first ranks are used."""
    if kernels == "xla":
        fall_back(monkeypatch)
    elif not native.kernels().native:
        pytest.skip("without native kernels")
    whole = MODELS[name]
    cfg = part_of(whole, level)
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


def test_without_adapters_no_rank_is_used():
    """Factors that are there for other levels are zeros, which nobody reads; other weights keep them."""
    params = in_blocks(LLAMA, scaled_params(LLAMA), 8)
    counted = counted_sub_model(params, LLAMA, LLAMA, ranks={"layers.0.attn.q": 3})
    assert counted["layers.0.attn.q"].left.shape == (3, *param_specs(LLAMA)["layers.0.attn.q"].shape[:-1])
    assert [counted[f"layers.{layer}.used_units"][2] for layer in range(3)] == [0, 0, 0]
    others = in_blocks(LLAMA, scaled_params(LLAMA, seed=1), 8)
    found = with_weights(counted, others)
    assert found.keys() == counted.keys()
    assert found["layers.0.attn.q"].base is others["layers.0.attn.q"]
    assert found["layers.0.attn.q"].left is counted["layers.0.attn.q"].left
    assert found["layers.1.used_units"] is counted["layers.1.used_units"]
    # Experts and floats are not counted.
    assert not can_be_counted(in_blocks(MIXTRAL, scaled_params(MIXTRAL), 8), MIXTRAL)
    assert not can_be_counted(jax.tree.map(jnp.asarray, scaled_params(LLAMA)), LLAMA)


def as_bits(params):
    return {
        name: Bfloat16Bits(jnp.asarray(value, jnp.bfloat16).view(jnp.uint16)) if value.ndim > 1 else value
        for name, value in params.items()
    }


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


# The shape of a Llama of 7 B with grouped queries: 32 layers, of which a fifth are anchors.
LARGE = ModelConfig(
    model_type="llama", vocab_size=32000, hidden_size=4096, layers=32, heads=32, kv_heads=32, head_dim=128,
    ffn_size=11008, window_tokens=4096, rope=RopeConfig(dim=128),
)  # fmt: skip
ANCHORS = (0, 1, 2, 3, 30, 31)


def test_half_of_a_large_model_keeps_its_anchors_and_38_percent_of_the_rest():
    half = sub_config(LARGE, Ladder(anchors=ANCHORS), 50)
    assert all(half.units(layer) == LARGE.units(layer) for layer in ANCHORS)
    others = {half.units(layer) for layer in range(32) if layer not in ANCHORS}
    (units,) = others
    assert units.kv_heads == 12
    assert units.neurons == pytest.approx(0.3846 * 11008, rel=0.02)
    assert layer_parameters(half) / layer_parameters(LARGE) == pytest.approx(0.5, abs=0.002)


def test_parameters_of_a_unit():
    # q, k, v, o of a group of two heads of 8; gate, up and down rows.
    assert unit_sizes(LLAMA, 0) == ((2 * 8 + 8 + 8 + 2 * 8) * 32, 3 * 32)
    assert unit_sizes(QWEN3_MOE, 0)[1] == 4 * 3 * 32
    assert unit_sizes(MODELS["gpt2"], 0) == ((8 + 8 + 8 + 8) * 32 + 3 * 8, 2 * 32 + 1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("anchors", [(), (1,), (0, 1, 2)])
def test_a_level_is_never_larger_than_its_share(name, anchors):
    cfg = MODELS[name]
    sizes = [layer_parameters(sub_config(cfg, Ladder(anchors=anchors), level)) for level in LEVELS]
    whole = layer_parameters(cfg)
    assert sizes == sorted(sizes)
    for level, size in zip(LEVELS, sizes, strict=True):
        # These layers have few kv-groups and neurons, so steps are coarse.
        assert level - 12 <= 100 * size / whole <= level or size == min(sizes)


@settings(max_examples=50)
@given(
    kv_heads=st.sampled_from([1, 2, 3, 8]),
    ffn=st.integers(1, 400),
    layers=st.integers(1, 5),
    level=st.integers(1, 100),
    data=st.data(),
)
def test_every_layer_keeps_something(kv_heads, ffn, layers, level, data):
    cfg = dataclasses.replace(
        LLAMA, heads=kv_heads, kv_heads=kv_heads, ffn_size=ffn, layers=layers, attention_windows=()
    )
    anchors = tuple(sorted(data.draw(st.sets(st.integers(0, layers - 1)))))
    kept = sub_config(cfg, Ladder(levels=tuple(sorted({level, 100})), anchors=anchors), level)
    for layer in range(layers):
        assert 1 <= kept.units(layer).kv_heads <= kv_heads
        assert 1 <= kept.units(layer).neurons <= ffn


def test_anchors_shrink_when_nothing_else_is_left():
    cfg = dataclasses.replace(LARGE, layers=8, attention_windows=())
    kept = sub_config(cfg, Ladder(anchors=(0, 4)), 20)
    assert kept.units(1) == LayerUnits(kv_heads=1, neurons=32)
    assert kept.units(0) == kept.units(4) != cfg.units(0)
    assert layer_parameters(kept) / layer_parameters(cfg) == pytest.approx(0.2, abs=0.002)


@pytest.mark.parametrize(
    ("levels", "more", "message"),
    [
        ((), {}, "that end with 100"),
        ((0, 100), {}, "at least 1 percent"),
        ((60, 50, 100), {}, "ascending"),
        ((50.0, 100), {}, "whole percentages"),
        ((50, 100), {"anchors": (2, 1)}, "ascending numbers of layers"),
        ((50, 100), {"units": ((1, 1),) * 2}, "units of 2 levels for 1"),
        ((50, 100), {"units": (((1, -1),),)}, "at least 0"),
    ],
)
def test_malformed_ladders_are_refused(levels, more, message):
    with pytest.raises(ConfigError, match=message):
        Ladder(levels=levels, **more)


def test_levels_anchors_and_units_must_be_the_models():
    with pytest.raises(ConfigError, match="no level 55; there are 20, 30"):
        sub_config(LLAMA, Ladder(), 55)
    with pytest.raises(ConfigError, match="layer 3 is an anchor of a model of 3 layers"):
        sub_config(LLAMA, Ladder(anchors=(3,)), 50)
    for units in (((1, 1),), ((99, 1),) * LLAMA.layers):
        with pytest.raises(ConfigError, match="another model"):
            sub_config(LLAMA, Ladder(levels=(50, 100), units=(units,)), 50)
    for units in (LayerUnits(kv_heads=5, neurons=1), LayerUnits(kv_heads=1, neurons=-1)):
        with pytest.raises(ConfigError, match="of layer 0 must be a whole number in"):
            dataclasses.replace(LLAMA, layer_units=(units,) * 3)
    with pytest.raises(ConfigError, match="3 entries"):
        dataclasses.replace(LLAMA, layer_units=(LayerUnits(kv_heads=1, neurons=1),))


def test_ladders_and_their_configs_survive_json_that_is_not_malformed():
    half = sub_config(QWEN3_MOE, Ladder(), 50)
    assert ModelConfig.from_json(half.to_json()) == half != QWEN3_MOE
    assert half.whole == QWEN3_MOE
    ladder = Ladder(levels=(20, 100), anchors=(0, 2))
    assert Ladder.from_json(ladder.to_json()) == ladder
    for key in ({"rungs": []}, {"levels": 3}):
        with pytest.raises(ConfigError, match="malformed levels"):
            Ladder.from_json({**ladder.to_json(), **key})
    for data in ({"levels": [100]}, [100]):
        with pytest.raises(ConfigError, match="malformed levels"):
            Ladder.from_json(data)


CHOSEN = (20, 40, 60, 80, 100)


def importances(cfg, seed=0):
    draw = np.random.default_rng(seed)
    lead = (cfg.experts,) if cfg.experts else ()
    groups = [draw.exponential(size=cfg.kv_heads) * (layer + 1) for layer in range(cfg.layers)]
    return groups, [draw.exponential(size=(*lead, cfg.units(layer).neurons)) for layer in range(cfg.layers)]


@pytest.mark.parametrize("cfg", [LLAMA, MIXTRAL], ids=lambda cfg: cfg.model_type)
def test_levels_fill_their_share_and_layers_differ(cfg):
    ladder = chosen_ladder(cfg, CHOSEN, *importances(cfg))
    seen = set()
    for level in CHOSEN[1:-1]:
        part = sub_config(cfg, ladder, level)
        share = layer_parameters(part) / layer_parameters(cfg)
        assert level / 100 - 0.05 < share <= level / 100
        seen |= {part.units(layer) for layer in range(cfg.layers)}
    assert len(seen) > len(CHOSEN)
    assert sub_config(cfg, ladder, 100) is cfg
    assert Ladder.from_json(ladder.to_json()) == ladder


@pytest.mark.parametrize("depth", [False, True])
def test_the_choice_is_the_best_but_for_an_item(depth):
    cfg = dataclasses.replace(LLAMA, layers=2, attention_windows=(), ffn_size=8)
    groups, neurons = importances(cfg)
    ladder = chosen_ladder(cfg, (50, 100), groups, neurons, depth=depth)
    falling = [[np.append(0, np.cumsum(-np.sort(-each))) for each in kind] for kind in (groups, neurons)]
    sizes = [unit_sizes(cfg, layer) for layer in range(2)]

    def value(units):
        return sum(falling[0][layer][own[0]] + falling[1][layer][own[1]] for layer, own in enumerate(units))

    def size(units):
        return sum(np.dot(own, cost) for own, cost in zip(units, sizes, strict=True))

    every = itertools.product(range(0 if depth else 1, 5), range(0 if depth else 1, 9))
    choices = [pair for pair in itertools.product(every, repeat=2) if size(pair) <= layer_parameters(cfg) / 2]
    best, item = max(map(value, choices)), max(map(np.max, (*groups, *neurons)))
    assert best - item <= value(ladder.units[0]) <= best


def test_layers_without_importance_go_first_where_levels_may_lack_them():
    groups, neurons = importances(LLAMA)
    groups[1], neurons[2] = np.zeros_like(groups[1]), np.zeros_like(neurons[2])
    units = chosen_ladder(LLAMA, (40, 100), groups, neurons, depth=True).units[0]
    assert units[1][0] == units[2][1] == 0
    assert all(sum(each) for each in units)


def test_whole_layers_are_the_most_important_that_fit():
    importance = np.arange(LLAMA.layers)[::-1] * 1.0
    ladder = layers_ladder(LLAMA, (50, 100), importance)
    kept = [sum(own) > 0 for own in ladder.units[0]]
    assert kept == [layer < LLAMA.layers // 2 for layer in range(LLAMA.layers)]
    part = sub_config(LLAMA, ladder, 50)
    assert all(part.units(layer) == LLAMA.units(layer) for layer, own in enumerate(kept) if own)
