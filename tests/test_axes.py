"""Wrong shapes and dtypes end a trace in one line; right ones add nothing to it."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.axes import Axes
from jaxllm.errors import ConfigError
from jaxllm.kv.cache import TokenPositions, new_cache
from jaxllm.kv.chunks import LayerChunks, take_chunks
from jaxllm.kv.codecs import ChunkFormat
from jaxllm.models import decoder
from jaxllm.sampling import Sampling, sample, sampler_state
from jaxllm.speculative.tree import add_nodes, new_tree
from jaxllm.steps.layers import restore_layer
from jaxllm.steps.model import BlockEnd, decode_tokens, prefill_chunk, score_chunk
from jaxllm.steps.trees import keep_path, verify
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
        (jnp.int32, "B T", ints(5), "step takes array as [B, T] int32 with B = 2, got [5] int32"),
        (jnp.int32, "B T", floats(2, 5), "step takes array as [B, T] int32 with B = 2, got [2, 5] float32"),
        (jnp.floating, "", ints(), "step takes array as [] float, got [] int32"),
        (jnp.int32, "... B", ints(5, 3), "step takes array as [..., B] int32 with B = 2, got [5, 3] int32"),
        (jnp.bool_, "M M", np.ones((3, 4), bool), "step takes array as [M, M] bool, got [3, 4] bool"),
        (jnp.uint32, "n 3", ints(4, 2), "step takes array as [n, 3] uint32, got [4, 2] int32"),
        (jnp.int32, "", 1.5, "step takes array as [] int32, got [] float"),
    ],
)  # fmt: skip
def test_wrong_arrays_are_told_in_one_line(dtype, shape, array, message):
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
OTHER_CACHE = jax.tree.map(lambda leaf: leaf[..., :8] if leaf.ndim == 4 else leaf, CACHE)
SAMPLER = sampler_state(Sampling(), [], V, 0)
ONE, YES = np.int32(1), np.True_
PAST = (CACHE.keys[0], CACHE.values[0])
AT = TokenPositions.after(ONE, 4, ONE)
CHUNKS = LayerChunks(ints(2, 3), ints(2), ChunkFormat.named("channel", 16))

WRONG = {
    "prefill_chunk takes tokens as": (functools.partial(prefill_chunk, **FIXED), ints(4), ONE, YES, CACHE),
    "prefill_chunk takes last as": (functools.partial(prefill_chunk, **FIXED), ints(1, 4), ONE, ONE, CACHE),
    "prefill_chunk takes keys as [B, K0, S, H] float with B = 1, H = 16, got [1, 2, 32, 8]": (
        functools.partial(prefill_chunk, **FIXED), ints(1, 4), ONE, YES, OTHER_CACHE,
    ),
    "score_chunk takes targets as": (
        functools.partial(score_chunk, **FIXED), ints(1, 4), ints(1, 5), ONE, CACHE,
    ),
    "decode_tokens takes token as [B] int32": (
        functools.partial(decode_tokens, **FIXED, block=4), ints(1, 1), CACHE, SAMPLER,
        BlockEnd(ints(2), ONE),
    ),
    f"decode_step takes counts as [B, V] int32 with B = 2, V = {V}": (
        functools.partial(decode_tokens, **FIXED, block=4), ints(2),
        new_cache(TINY, batch=2, tokens=32, dtype=jnp.float32), SAMPLER, BlockEnd(ints(2), ONE),
    ),
    "forward takes valid as": (
        functools.partial(decoder.forward, cfg=TINY, valid=np.float32(1)), ints(1, 4), CACHE,
    ),
    "forward_documents takes starts as [B, T] int32 with B = 2, T = 5, got [1, 5]": (
        functools.partial(decoder.forward_documents, cfg=TINY), ints(2, 5), ints(1, 5),
    ),
    "logits takes hidden as [..., D] float with D = 64": (
        functools.partial(decoder.logits, cfg=TINY), floats(1, 32),
    ),
    "restore_layer takes x as": (
        functools.partial(restore_layer, cfg=TINY, layer=0), floats(4, 64), AT, PAST, CHUNKS,
    ),
    "restore_layer takes positions as [T] int32 with T = 5": (
        functools.partial(restore_layer, cfg=TINY, layer=0), floats(1, 5, 64), AT, PAST, CHUNKS,
    ),
    "verify takes limit as": (
        functools.partial(verify, **FIXED), new_tree(ONE, 4), CACHE, SAMPLER, np.float32(1),
    ),
    "keep_path takes nodes as": (lambda _, *rest: keep_path(*rest), CACHE, floats(4), ONE),
    "add_nodes takes tokens as [T] int32 with T = 2": (
        lambda _, *rest: add_nodes(*rest), new_tree(ONE, 4), ints(2), ints(3), floats(2), np.ones(2, bool),
    ),
    "take_chunks takes rows as [1, K, S, H] float": (
        lambda _, rows, first: take_chunks(rows, first, count=1, tokens=16), floats(2, 2, 32, 16), ONE,
    ),
    "sample takes logits as [B, V] float32": (lambda _, *rest: sample(*rest), floats(V), SAMPLER),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_steps_refuse_what_has_another_shape(message):
    step, *arguments = WRONG[message]
    with pytest.raises(ConfigError) as error:
        jax.eval_shape(step, tiny_params(), *arguments)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_a_trace_has_no_operation_more(monkeypatch):
    def operations() -> str:
        step = functools.partial(prefill_chunk, **FIXED)
        return str(jax.make_jaxpr(step)(tiny_params(), ints(1, 4), ONE, YES, CACHE))

    checked = operations()
    monkeypatch.setattr(Axes, "check", lambda *_, **__: None)
    assert operations() == checked


def test_importing_steps_does_not_import_chex():
    """It takes 0.1 s, which a start whose buckets are read from disk does not spend."""
    steps = "jaxllm.steps.model, jaxllm.steps.trees, jaxllm.steps.layers"
    code = f"import sys, {steps}; print('chex' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
