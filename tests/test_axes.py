"""Wrong shapes and dtypes end a trace in one line; right ones add nothing to it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.axes import Axes
from jaxllm.contexts.codecs import CODECS, ChunkFormat, ChunkShape
from jaxllm.errors import ConfigError
from jaxllm.int8_prefill.shadow import FloatRows, shadow_products
from jaxllm.int8_prefill.subgraphs import IntegerLayer, LayerCalibration
from jaxllm.kv.cache import TokenPositions, new_cache, write_rows
from jaxllm.kv.chunks import LayerChunks
from jaxllm.models import decoder
from jaxllm.quant.formats import unpack
from jaxllm.sampling import (
    Sampling,
    filtered,
    sampler_state,
)
from jaxllm.speculation.tree import add_nodes, new_tree
from jaxllm.steps.layers import restore_layer
from jaxllm.steps.model import BlockEnd, decode_tokens, prefill_chunk, score_chunk
from jaxllm.steps.trees import verify
from tests.tiny import TINY, tiny_params

V, FIXED = TINY.vocab_size, {"cfg": TINY, "dtype": jnp.float32}


def ints(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


def floats(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("dtype", "shape", "array"),
    [
        (jnp.int32, "B T", ints(2, 5)),
        (jnp.int32, "", np.int32(3)),
        (jnp.floating, "B 3", floats(2, 3).astype(np.float16)),
        (jnp.floating, "* T", floats(9, 5)),
        (jnp.floating, "... T", floats(7, 2, 5)),
        (jnp.floating, "... T", floats(5)),
        (jnp.bool_, "M M", np.eye(4, dtype=bool)),
        (jnp.int32, "B", None),
    ],
)
def test_right_arrays_pass(dtype, shape, array):
    Axes("step", B=2, T=5).check(dtype, shape, array=array)


@pytest.mark.parametrize(
    ("dtype", "shape", "array", "message"),
    [
        (jnp.int32, "B T", ints(3, 5), "step takes array as [B, T] int32 with B = 2, got [3, 5] int32"),
        (jnp.int32, "B T", floats(2, 5), "step takes array as [B, T] int32 with B = 2, got [2, 5] float32"),
        (jnp.floating, "", ints(), "step takes array as [] float, got [] int32"),
        (jnp.int32, "... B", ints(5, 3), "step takes array as [..., B] int32 with B = 2, got [5, 3] int32"),
        (jnp.int32, "", 1.5, "step takes array as [] int32, got [] float"),
    ],
)  # fmt: skip
def test_wrong_arrays_are_described_in_one_line(dtype, shape, array, message):
    with pytest.raises(ConfigError) as error:
        Axes("step", B=2).check(dtype, shape, array=array)
    assert str(error.value) == message


def test_lengths_are_those_of_the_first_array():
    axes = Axes("step")
    axes.check(jnp.int32, "B T", tokens=ints(2, 5), targets=ints(2, 5))
    axes.check(jnp.int32, "T B", turned=ints(5, 2))
    with pytest.raises(ConfigError, match=r"starts as \[B, T\] int32 with B = 2, T = 5, got \[2, 4\]"):
        axes.check(jnp.int32, "B T", starts=ints(2, 4))


CACHE = new_cache(TINY, batch=1, tokens=32, dtype=jnp.float32)
OTHER_CACHE = jax.tree.map(lambda leaf: leaf[..., :8] if leaf.ndim == 5 else leaf, CACHE)
SAMPLER = sampler_state(Sampling(), [], V, 0)
ONE, YES = np.int32(1), np.True_
PAST = CACHE.past(0)
AT = TokenPositions.after(ONE, 4, ONE)
CHUNKS = LayerChunks(ints(2, 3), ints(2), ChunkFormat.named("channel", 16))
CHUNK = ChunkShape(heads=2, tokens=16, width=8)
STEPS = LayerCalibration(floats(4))
STAGE = {"cfg": TINY, "layer": 0}


def stage(name):
    """A stage of `IntegerLayer` as a function of parameters, calibration and operands."""

    def run(params, calibration, *operands, cfg, layer):
        return getattr(IntegerLayer(params, calibration, cfg, layer), name)(*operands)

    return run


HEADS = [floats(1, 4, 2, 32), floats(1, 4, 2, 16), floats(1, 4, 2, 16)]


TREE, MASK, BITS = new_tree(ONE, 4), np.ones(3, bool), np.zeros((5, 64), np.uint8)
prefill, score, decode, verified = (
    functools.partial(step, **FIXED) for step in (prefill_chunk, score_chunk, decode_tokens, verify)
)
# Message -> a step over parameters and its arguments.
STEPS_OF_PARAMS = {
    "prefill_chunk takes tokens as": (prefill, ints(4), ONE, YES, CACHE),
    "prefill_chunk takes keys as [*, B, K0, S, H] float with B = 1, H = 16, got [2, 1, 2, 32, 8]": (
        prefill, ints(1, 4), ONE, YES, OTHER_CACHE,
    ),
    "decode_tokens takes token as [B] int32": (
        functools.partial(decode, block=4), ints(1, 1), CACHE, SAMPLER, BlockEnd(ints(2), ONE),
    ),
    "forward_documents takes starts as [B, T] int32 with B = 2, T = 5, got [1, 5]": (
        functools.partial(decoder.forward_documents, cfg=TINY), ints(2, 5), ints(1, 5),
    ),
    "logits takes hidden as [..., D] float with D = 64": (
        functools.partial(decoder.logits, cfg=TINY), floats(1, 32),
    ),
}  # fmt: skip
# Of one layer of the parameters.
STEPS_OF_A_LAYER = {
    "restore_layer takes positions as [T] int32 with T = 5": (
        restore_layer, floats(1, 5, 64), AT, PAST, CHUNKS,
    ),
    "project takes steps as [4] float32, got [2, 4]": (
        stage("project"), LayerCalibration(floats(2, 4)), floats(1, 4, 64),
    ),
    "project takes x as [1, T, D] float with D = 64": (stage("project"), STEPS, floats(4, 64)),
    "attend takes mass as [1, S] float32 with S = 32": (
        stage("attend"), STEPS, HEADS, None, AT, PAST, floats(1, 5, 32),
    ),
    "finish takes out as [1, T, K, *] float with T = 4": (
        stage("finish"), STEPS, floats(1, 4, 64), floats(1, 4, 64),
    ),
    "widen takes added as [1, T, D] float with T = 4, D = 64": (
        stage("widen"), STEPS, floats(1, 4, 64), HEADS[0], floats(1, 4, 80),
    ),
    "narrow_shadow takes hidden as [1, T, F] float": (
        stage("narrow_shadow"), STEPS, floats(1, 4, 64), floats(1, 4, 64), floats(4, 80),
    ),
    "layer takes positions as [T] int32 with T = 5": (
        stage("layer"), STEPS, floats(1, 5, 64), AT, PAST, None,
    ),
}  # fmt: skip
STEPS_WITHOUT = {
    "add_nodes takes tokens as [T] int32 with T = 2": (
        add_nodes, TREE, ints(2), ints(3), floats(2), np.ones(2, bool), floats(2),
    ),
    f"filtered takes bias as [V] float32 with V = 7, got [{V}]": (filtered, floats(1, 7), SAMPLER),
    "write_rows takes new as [B, K, T, H] float with B = 1, K = 2, H = 16, got [1, 4, 2, 16]": (
        write_rows, PAST.own[0], floats(1, 4, 2, 16), ONE, ONE,
    ),
    "encode takes keys as [N, K, C, H] float with K = 2, C = 16, H = 8, got [3, 16, 2, 8]": (
        lambda *rows: CODECS["kivi"].encode(*rows, CHUNK, 4), floats(3, 16, 2, 8), floats(3, 16, 2, 8),
    ),
    "decode takes blobs as [N, bytes] uint8 with bytes = 448, got [3, 447]": (
        lambda blobs: CODECS["kivi"].decode(blobs, CHUNK, 4), np.zeros((3, 447), np.uint8),
    ),
    "unpack takes packed as [..., bytes] uint8 with bytes = 32, got [5, 64]": (
        lambda packed: unpack(packed, 40, 4, jnp.float32), BITS,
    ),
    "shadow_products takes place as [D] int32 with D = 8, got [9]": (
        lambda x, step, place: shadow_products(x, step, [x], FloatRows(place, (x,)), last=True),
        floats(3, 8), np.float32(1), ints(9),
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", [*STEPS_OF_PARAMS, *STEPS_OF_A_LAYER, *STEPS_WITHOUT])
def test_steps_refuse_what_has_another_shape(message):
    step, *arguments = (STEPS_OF_PARAMS | STEPS_OF_A_LAYER | STEPS_WITHOUT)[message]
    step = functools.partial(step, **STAGE) if message in STEPS_OF_A_LAYER else step
    given = arguments if message in STEPS_WITHOUT else [tiny_params(), *arguments]
    with pytest.raises(ConfigError) as error:
        jax.eval_shape(step, *given)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_a_trace_has_no_operation_more(monkeypatch):
    def operations() -> str:
        step = functools.partial(prefill_chunk, **FIXED)
        return str(jax.make_jaxpr(step)(tiny_params(), ints(1, 4), ONE, YES, CACHE))

    checked = operations()
    monkeypatch.setattr(Axes, "check", lambda *_, **__: None)
    assert operations() == checked
