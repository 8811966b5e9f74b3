"""Rows that are decoded together get to the bit what they get alone: tokens, caches and samplers."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import LayerUnits
from jaxllm.elastic.ladder import counted_sub_model
from jaxllm.errors import ConfigError
from jaxllm.kv.cache import new_cache
from jaxllm.models.decoder import forward
from jaxllm.models.layer_stack import by_address
from jaxllm.models.parameters import param_specs
from jaxllm.quant import PerExpert, quantize, to_blocks
from jaxllm.sampling import Sampling, sampler_state
from jaxllm.steps.batch import RowLimits, can_mix_levels, decode_rows
from jaxllm.steps.model import BlockEnd, decode_tokens
from tests.elastic.models import LLAMA, MODELS, in_blocks, scaled_params
from tests.kernels.drawing import placed
from tests.kernels.switching import needs_native
from tests.quick_jit import jit

pytestmark = [needs_native, pytest.mark.usefixtures("shipped_compilations")]
V, CAPACITY, BLOCK, STOPS = LLAMA.vocab_size, 32, 6, 4
LENGTHS = (5, 1, 11, 7, 3, 12, 2, 9)
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01),
    Sampling(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
    Sampling(temperature=1.3, logit_bias=((3, 2.0), (4, -np.inf))),
)


@functools.cache
def model(name, bits):
    cfg = MODELS[name]
    plain, params = scaled_params(cfg), in_blocks(cfg, scaled_params(cfg), bits)
    for each, spec in param_specs(cfg).items():
        if ".experts." in each:
            axis = -2 if spec.role == "from_units" else -1
            forms = [to_blocks(quantize(matrix, bits=bits, axis=axis)) for matrix in plain[each]]
            params[each] = PerExpert(tuple(placed(form) for form in forms))
    return cfg, by_address(params, cfg)


@functools.cache
def filling(cfg):
    return jit(functools.partial(forward, cfg=cfg))


@functools.cache
def alone(cfg):
    return jit(functools.partial(decode_tokens, cfg=cfg, block=BLOCK, dtype=jnp.dtype("float32")))


@functools.cache
def together(cfg):
    return jit(functools.partial(decode_rows, cfg=cfg, block=BLOCK, dtype=jnp.dtype("float32")))


def begun(cfg, params, row, *, dtype="float16", mass=True):
    """A row's last token, cache and sampler, after a prompt of its own."""
    prompt = np.random.default_rng(row).integers(0, V, (1, LENGTHS[row]), dtype=np.int32)
    cache = new_cache(cfg, batch=1, tokens=CAPACITY, dtype=jnp.dtype(dtype), mass=mass)
    _, cache = filling(cfg)(params, prompt, cache)
    sampling = SAMPLINGS[row % len(SAMPLINGS)]
    return np.int32(row + 1), cache, jax.tree.map(jnp.asarray, sampler_state(sampling, prompt[0], V, 7 + row))


def padding(cfg):
    cache = new_cache(cfg, batch=1, tokens=CAPACITY, dtype=jnp.dtype("float16"), mass=True)
    return np.int32(0), cache, jax.tree.map(jnp.asarray, sampler_state(Sampling(), [], V, 0))


def stops(*ids):
    return np.array([*ids, *[-1] * (STOPS - len(ids))], np.int32)


def check(cfg, params, rows, ends, levels=None, units=None):
    """Decodes rows together and alone; `ends` has each row's stop ids and limit, 0 for padding, `levels` its
    parameters, if they are others."""
    tokens, caches, samplers = zip(*rows, strict=True)
    limits = np.array([limit for _, limit in ends], np.int32)
    end = RowLimits(np.stack([each for each, _ in ends]), limits, units)
    found, counts, after, states = together(cfg)(params, np.array(tokens), caches, samplers, end)
    for row, (token, cache, sampler) in enumerate(rows):
        if ends[row][1] == 0:
            assert int(counts[row]) == 0
            assert found[row].tolist() == [-1] * BLOCK
            chex.assert_trees_all_equal(after[row], cache)
            chex.assert_trees_all_equal(states[row], sampler)
            continue
        end = BlockEnd(ends[row][0], np.int32(ends[row][1]))
        one = alone(cfg)(params if levels is None else levels[row], token[None], cache, sampler, end)
        chex.assert_trees_all_equal((found[row], counts[row], after[row], states[row]), (one[0][0], *one[1:]))
    return found, counts, after, states


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "name",
    [each if each in ("llama", "gemma2") else pytest.param(each, marks=pytest.mark.slow) for each in MODELS],
)
def test_a_row_among_others_is_the_row_alone(name, bits):
    """Every kind of layer, of either width; rows of other lengths, samplings and limits, and padding."""
    cfg, params = model(name, bits)
    rows = [begun(cfg, params, 2), begun(cfg, params, 3), padding(cfg)]
    found, *_ = check(cfg, params, rows, [(stops(), BLOCK), (stops(), 4), (stops(), 0)])
    assert len({*found[:2].ravel().tolist()}) > 3


@pytest.fixture
def two():
    """A model, and two rows of it."""
    cfg, params = model("llama", 8)
    return cfg, params, [begun(cfg, params, row) for row in range(2)]


def test_a_row_ends_at_its_own_stop_token(two):
    cfg, params, rows = two
    found, *_ = check(cfg, params, rows, [(stops(), BLOCK)] * 2)
    # Stop ids of the other row are no stop for this one.
    second = int(found[1, 2])
    ends = [(stops(second), BLOCK), (stops(V - 1, second), BLOCK)]
    _, counts, *_ = check(cfg, params, rows, ends)
    assert int(counts[1]) == 1 + found[1].tolist().index(second) < BLOCK
    assert second in found[0].tolist() or int(counts[0]) == BLOCK


def test_a_row_whose_logits_are_not_finite_ends_alone(two):
    cfg, params, rows = two
    broken = dataclasses.replace(rows[0][2], penalized=jnp.array(True), bias=jnp.full(V, -jnp.inf))
    rows[0] = (*rows[0][:2], broken)
    found, counts, *_ = check(cfg, params, rows, [(stops(), BLOCK)] * 2)
    assert found[0, 0] == -1
    assert counts.tolist() == [1, BLOCK]


def test_one_trace_serves_all_lengths_limits_and_samplings(compiles):
    cfg, params = model("llama", 8)
    run = jit(functools.partial(decode_rows, cfg=cfg, block=BLOCK, dtype=jnp.dtype("float32")))
    for number, rows in enumerate(([0, 1], [2, 3], [4, 0])):
        tokens, caches, samplers = zip(*(begun(cfg, params, row) for row in rows), strict=True)
        ends = RowLimits(np.stack([stops(number)] * 2), np.array([1 + number, BLOCK], np.int32))
        with compiles() as count:
            run(params, np.array(tokens), caches, samplers, ends)
        assert count() == (number == 0)


def test_caches_stay_where_they_are():
    """No cache is copied: what the program needs besides its arguments does not grow with their length."""
    cfg, params = model("llama", 8)

    def compiled(tokens):
        kind = dict(batch=1, tokens=tokens, dtype=jnp.dtype("float16"), mass=False)
        caches = tuple(new_cache(cfg, **kind) for _ in range(4))
        states = tuple(jax.tree.map(jnp.asarray, sampler_state(Sampling(), [], V, 0)) for _ in range(4))
        step = functools.partial(decode_rows, cfg=cfg, block=BLOCK, dtype=jnp.dtype("float32"))
        ends = RowLimits(np.stack([stops()] * 4), np.full(4, BLOCK, np.int32))
        given = (params, np.zeros(4, np.int32), caches, states, ends)
        lowered = jax.jit(step, donate_argnums=(2,)).lower(*given)
        return lowered.compile().memory_analysis(), sum(each.nbytes for each in jax.tree.leaves(caches))

    (short, _), (long, size) = compiled(64), compiled(4096)
    assert short.temp_size_in_bytes == long.temp_size_in_bytes < size / 8
    assert long.alias_size_in_bytes >= size


def leveled(cfg, bits, shares):
    """A model by address, and its levels: of each config, counts of units `[L, 2]` and parameters."""
    stored, found = in_blocks(cfg, scaled_params(cfg), bits), []
    for share in shares:
        # Another share of the neurons in each layer.
        sizes = [max(1, round(cfg.ffn_size * share * (3 + layer) / 5)) for layer in range(cfg.layers)]
        units = tuple(LayerUnits(kv_heads=round(cfg.kv_heads * share) or 1, neurons=each) for each in sizes)
        level = dataclasses.replace(cfg, layer_units=units)
        counts = np.array([[each.kv_heads, each.neurons] for each in units], np.int32)
        found.append((counts, by_address(counted_sub_model(stored, cfg, level), cfg)))
    return found


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("llama", 8),
        ("llama", 4),
        *(pytest.param(each, 8, marks=pytest.mark.slow) for each in ("gpt2", "gemma2", "qwen3")),
    ],
)
def test_rows_of_different_levels_share_products(name, bits):
    """Each is to the bit what its level gives alone, whichever level's parameters the batch has."""
    cfg = MODELS[name]
    levels = leveled(cfg, bits, (1.0, 0.5, 0.3))
    assert all(can_mix_levels(params) for _, params in levels)
    rows = [begun(cfg, params, row) for row, (_, params) in enumerate(levels)]
    units, own = np.stack([counts for counts, _ in levels]), [params for _, params in levels]
    for params in (own[0], own[2]):
        found, *_ = check(cfg, params, rows, [(stops(), limit) for limit in (BLOCK, 4, BLOCK)], own, units)
    assert len({*found.ravel().tolist()}) > 4


def test_levels_with_adapters_of_their_own_do_not_mix():
    stored = in_blocks(LLAMA, scaled_params(LLAMA), 8)
    assert not can_mix_levels(by_address(stored, LLAMA))
    counted = counted_sub_model(stored, LLAMA, LLAMA, ranks={"layers.0.attn.q": 2})
    assert not can_mix_levels(by_address(counted, LLAMA))


def test_weights_that_xla_multiplies_are_refused():
    """Its products of several rows have other last bits than those of one."""
    params = in_blocks(LLAMA, scaled_params(LLAMA), 8)
    rows = [padding(LLAMA)] * 2
    tokens, caches, samplers = zip(*rows, strict=True)
    ends, how = RowLimits(np.stack([stops()] * 2), np.ones(2, np.int32)), {"dtype": jnp.dtype("float32")}
    with pytest.raises(ConfigError, match="one by one"):
        decode_rows(params, np.array(tokens), caches, samplers, ends, cfg=LLAMA, block=2, **how)
