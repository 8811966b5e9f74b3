"""Layers by address give what their parameters give, in a loop of the same code for any number of layers."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.kv.cache import new_cache
from jaxllm.models.decoder import forward, forward_documents
from jaxllm.models.layer_stack import STACK, LayerRun, by_address, can_be_addressed, layer_runs, one_by_one
from jaxllm.models.parameters import param_specs
from jaxllm.quant import PerExpert, quantize, to_blocks
from tests.elastic.models import (
    GEMMA,
    LLAMA,
    MIXTRAL,
    PLAIN,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    in_blocks,
    scaled_params,
)
from tests.kernels.drawing import placed
from tests.kernels.switching import fall_back, needs_native
from tests.quick_jit import jit


def run(first, period, repeats):
    return LayerRun(first, period, repeats)


@settings(max_examples=50)
@given(st.one_of(
    st.lists(st.integers(0, 3), max_size=40),
    # Patterns that repeat, with something before and behind.
    st.builds(lambda a, b, n, c: a + b * n + c, *(
        st.lists(st.integers(0, 3), max_size=5), st.lists(st.integers(0, 3), max_size=6), st.integers(0, 6),
        st.lists(st.integers(0, 3), max_size=5),
    )),
))  # fmt: skip
def test_runs_are_all_layers_in_order(kinds):
    alike = [kinds.index(each) for each in kinds]
    runs, covered = layer_runs(alike), []
    for each in runs:
        assert each.first == len(covered)
        assert each.period >= 1
        assert each.repeats >= 1
        covered += range(each.first, each.first + each.period * each.repeats)
        for number in range(each.first, each.first + each.period * each.repeats):
            assert alike[number] == alike[each.first + (number - each.first) % each.period]
        # What is computed once is not called a pattern.
        assert each.repeats > 1 or each.period == 1
    assert covered == list(range(len(alike)))
    again = [each for each in runs if each.repeats == 1]
    for one, other in itertools.pairwise(runs):
        if one in again and other in again:
            assert alike[one.first] != alike[other.first]


GEMMA3 = dataclasses.replace(
    QWEN3, model_type="gemma3_text", layers=8, post_norms=True, attention_windows=(5, 5, 0, 5, 5, 0, 5, 5),
    local_rope=dataclasses.replace(LLAMA.rope, theta=100.0),
)  # fmt: skip
MODELS = {
    "llama": LLAMA,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA3,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gpt2": PLAIN,
    "opt": dataclasses.replace(PLAIN, model_type="opt", activation="relu"),
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
}
RUNS = {"gemma2": [(0, 1, 1), (1, 1, 1), (2, 1, 1)], "gemma3_text": [(0, 3, 2), (6, 1, 2)]}
RUNS |= {"qwen3_moe": RUNS["gemma2"]}
TOKENS = np.random.default_rng(0).integers(0, LLAMA.vocab_size, (1, 13), dtype=np.int32)


@functools.cache
def stored(name, bits=8):
    """Parameters in blocks; each expert's matrices apart, of `bits` or half of them."""
    cfg, params = MODELS[name], scaled_params(MODELS[name])
    found = in_blocks(cfg, params, bits)
    for each in (each for each in params if ".experts." in each):
        axis = -2 if param_specs(cfg)[each].role == "from_units" else -1
        widths = [bits // (1 + number % 2) for number in range(cfg.experts)]
        forms = [
            quantize(matrix, bits=width, axis=axis)
            for matrix, width in zip(params[each], widths, strict=True)
        ]
        found[each] = PerExpert(tuple(placed(to_blocks(form)) for form in forms))
    return found


def steps(params, tokens, *, cfg):
    """Documents, and a cache: a padded chunk, then tokens one by one."""
    # Each compiled once: of one program for all steps, a token's is compiled as often as it runs.
    read = jit(functools.partial(forward, cfg=cfg))
    documents = jit(functools.partial(forward_documents, cfg=cfg, differentiable=False))(params, tokens)
    cache = new_cache(cfg, batch=len(tokens), tokens=16, dtype=jnp.float32, mass=True)
    first, cache = read(params, tokens[:, :9], cache, valid=np.int32(7))
    outs = [np.asarray(first)[:, :7]]
    for at in range(7, 10):
        out, cache = read(params, tokens[:, at : at + 1], cache)
        outs.append(np.asarray(out))
    return documents, np.concatenate(outs, axis=1), cache.keys, cache.values, cache.mass


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bits"),
    # Of 4 bits a dense model and one with experts, whose widths are then 4 and 2: no other part of a layer
    # depends on the width.
    [*((name, 8) for name in MODELS), ("llama", 4), ("mixtral", 4)],
)
def test_layers_by_address_are_the_layers(name, bits):
    cfg, params = MODELS[name], stored(name, bits)
    assert can_be_addressed(params, cfg)
    addressed = by_address(params, cfg)
    assert not any(each.startswith("layers.") for each in addressed)
    found = layer_runs(addressed[STACK].alike)
    assert found == [run(*each) for each in RUNS.get(name, [(0, 1, 3)])]
    for layer, alone in enumerate(one_by_one(addressed, cfg)):
        assert alone[STACK].row == layer
        assert alone[STACK].form is addressed[STACK].at(addressed[STACK].alike[layer]).form
    expected, got = steps(params, TOKENS, cfg=cfg), steps(addressed, TOKENS, cfg=cfg)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)


@needs_native
def test_layers_of_other_kinds_or_forms_are_not_equal():
    cfg, params = MODELS["gemma3_text"], stored("gemma3_text")
    assert by_address(params, cfg)[STACK].alike == (0, 0, 2, 0, 0, 2, 0, 0)
    other = in_blocks(cfg, scaled_params(cfg), 4)
    mixed = {name: other[name] if name.startswith("layers.1.ffn") else each for name, each in params.items()}
    assert by_address(mixed, cfg)[STACK].alike == (0, 1, 2, 0, 0, 2, 0, 0)
    lacking = {name: each for name, each in params.items() if not name.startswith("layers.3.attn.q_norm")}
    assert by_address(lacking, cfg)[STACK].alike == (0, 0, 2, 3, 0, 2, 0, 0)


def test_floats_and_processes_without_kernels_have_no_addresses(monkeypatch):
    assert not can_be_addressed(jax.tree.map(jnp.asarray, scaled_params(LLAMA)), LLAMA)
    # Experts in one array, and experts whose own matrices differ.
    assert not can_be_addressed(in_blocks(MIXTRAL, scaled_params(MIXTRAL), 8), MIXTRAL)
    name, other = "layers.1.experts.up", dict(stored("mixtral"))
    other[name] = PerExpert(other[name].matrices[::-1])
    assert not can_be_addressed(other, MIXTRAL)
    fall_back(monkeypatch)
    assert not can_be_addressed(stored("llama"), LLAMA)


def lowered(layers, tokens, capacity, name="llama"):
    """A step of a model of so many layers with caches of so many positions, compiled."""
    cfg = dataclasses.replace(MODELS[name], layers=layers, attention_windows=(), sparse_layers=())
    params = by_address({**stored_deep(name, layers)}, cfg)
    cache = new_cache(cfg, batch=1, tokens=capacity, dtype=jnp.float32, mass=True)

    def step(params, tokens, valid, cache):
        return forward(params, tokens, cache, cfg=cfg, valid=valid if tokens.shape[1] > 1 else None)

    donating = jax.jit(step, donate_argnums=3)
    compiled = donating.lower(params, jnp.zeros((1, tokens), jnp.int32), jnp.int32(tokens), cache).compile()
    return compiled, cache.keys[0].nbytes // layers


def stored_deep(name, layers):
    """Parameters of a model of more layers, all the first one's."""
    found = {each: value for each, value in stored(name).items() if not each.startswith("layers.")}
    first = {each: value for each, value in stored(name).items() if each.startswith("layers.0.")}
    for layer in range(layers):
        found |= {each.replace("layers.0.", f"layers.{layer}."): value for each, value in first.items()}
    return found


@needs_native
@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_code_does_not_grow_with_the_layers(name, tokens):
    """Of a step of 4 layers and of 16."""
    few, many = (lowered(layers, tokens, 64, name)[0] for layers in (4, 16))
    lines = [compiled.as_text().count("\n") for compiled in (few, many)]
    assert lines[0] == lines[1] > 10
    temporaries = [compiled.memory_analysis().temp_size_in_bytes for compiled in (few, many)]
    assert temporaries[0] == temporaries[1] > 0


@needs_native
@pytest.mark.parametrize("tokens", [1, 8])
def test_the_cache_is_not_copied(tokens):
    """Temporaries are less than one layer's keys, and grow by less than a row of them per position; all of
    the cache is updated in place."""
    found = {}
    for capacity in (1024, 8192):
        compiled, layer_bytes = lowered(6, tokens, capacity)
        memory = compiled.memory_analysis()
        found[capacity] = memory.temp_size_in_bytes
        assert found[capacity] < layer_bytes / 4
        # Keys and values of six layers.
        assert memory.alias_size_in_bytes >= 2 * 6 * layer_bytes
        shape = f"f32[6,1,{LLAMA.kv_heads},{capacity},{LLAMA.head_dim}]"
        text = compiled.as_text()
        assert shape in text
        copies = [line for line in text.splitlines() if f"= {shape}" in line and " copy(" in line]
        assert not copies
    row_bytes = LLAMA.kv_heads * LLAMA.head_dim * 4
    assert found[8192] - found[1024] < (8192 - 1024) * row_bytes / 8
