"""A level reads the first units of the whole model's buffers: no copies, and less time."""

import dataclasses
import functools
import re
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import LayerUnits, ModelConfig, RopeConfig
from jaxllm.elastic.ladder import shared_sub_model
from jaxllm.kernels import native
from jaxllm.kv.cache import new_cache
from jaxllm.models.decoder import forward
from jaxllm.models.parameters import init_params, param_specs
from jaxllm.quant import BlockedArray, quantize, to_blocks

pytestmark = [
    pytest.mark.skipif(not native.kernels().native, reason="XLA copies a prefix of units"),
    pytest.mark.slow,
]


def models(**sizes):
    """Config and parameters of a model in blocks, all layers alike but in own buffers, and of its half."""
    cfg = ModelConfig(model_type="llama", vocab_size=64, window_tokens=32, rope=RopeConfig(dim=16), **sizes)
    one = dataclasses.replace(cfg, layers=1, attention_windows=())

    def stored(name, value):
        role = param_specs(one)[name].role
        axis = -2 if role == "from_units" else -1
        return value if role == "vector" else to_blocks(quantize(np.asarray(value), bits=8, axis=axis))

    first = {name: stored(name, value) for name, value in init_params(one, jax.random.key(0)).items()}
    names = {name: re.sub(r"^layers\.\d+", "layers.0", name) for name in param_specs(cfg)}
    params = {name: jax.tree.map(jnp.array, first[source]) for name, source in names.items()}
    units = LayerUnits(kv_heads=cfg.kv_heads // 2, neurons=cfg.ffn_size // 2)
    half = dataclasses.replace(cfg, layer_units=(units,) * cfg.layers)
    return {"full": (cfg, params), "half": (half, shared_sub_model(params, half))}


def empty_cache(cfg):
    return new_cache(cfg, batch=1, tokens=32, dtype=jnp.float32)


@functools.cache
def decode_step(cfg, tokens=1):
    """Some tokens of `cfg` in one dispatch, for a cache of 32 positions."""

    def step(_, carry):
        params, token, cache = carry
        hidden, cache = forward(params, token, cache, cfg=cfg)
        return params, jnp.argmax(hidden[0, -1]).astype(jnp.int32)[None, None] % cfg.vocab_size, cache

    def steps(params, token, cache):
        return jax.lax.fori_loop(0, tokens, step, (params, token, cache))[1:]

    return jax.jit(steps, donate_argnums=(2,))


def test_half_a_model_allocates_no_weights():
    """A step takes the whole buffers as arguments and has no room for a copy of any matrix."""
    sizes, of = [], models(hidden_size=256, layers=2, heads=8, kv_heads=4, head_dim=16, ffn_size=1024)
    for cfg, params in of.values():
        cache = jax.eval_shape(lambda cfg=cfg: empty_cache(cfg))
        token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        memory = decode_step(cfg).lower(params, token, cache).compile().memory_analysis()
        matrices = [value.data.nbytes for value in params.values() if isinstance(value, BlockedArray)]
        assert memory.temp_size_in_bytes < min(matrices) / 2
        sizes.append(
            memory.argument_size_in_bytes - sum(leaf.nbytes for leaf in jax.tree.leaves(empty_cache(cfg)))
        )
    assert sizes[0] == sizes[1]


@pytest.mark.alone
def test_half_a_model_takes_half_the_time():
    """At most 0.55 of a full decode step, where weights come from memory and all else is small."""
    of = models(hidden_size=1024, layers=8, heads=16, kv_heads=4, head_dim=64, ffn_size=4096)
    ratios = []
    for _ in range(5):  # a shared machine may disturb one side of a comparison
        times = {name: [] for name in of}
        for _ in range(9):
            for name, (cfg, params) in of.items():
                step = decode_step(cfg, 8)
                token, cache = step(params, np.zeros((1, 1), np.int32), empty_cache(cfg))
                token.block_until_ready()
                began = time.perf_counter()
                token, cache = step(params, token, cache)
                token.block_until_ready()
                times[name].append(time.perf_counter() - began)
        ratios.append(statistics.median(times["half"]) / statistics.median(times["full"]))
        if ratios[-1] <= 0.55:
            return
    pytest.fail(f"half a model takes {min(ratios):.2f} of the time of the whole, in the best of {ratios}")
