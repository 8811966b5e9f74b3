"""Attention over a cache, on every processor's kernels: rotation, writing and reading in one go."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.config import RopeConfig
from jaxllm.kernels import native_attention
from jaxllm.kv.cache import Past, TokenPositions
from jaxllm.nn.layers import AttentionOptions, Heads, cached_attention, causal_mask, rotary_cos_sin
from tests.kernels import oracle
from tests.kernels.drawing import answers, compiled, same_on_threads
from tests.kernels.switching import needs_native

pytestmark = needs_native
# Scores, their softmax and their sums in float32.
ROOM = 2e-5


class Case(NamedTuple):
    """What a kernel is given: `args` as arrays, `options` in the graph."""

    args: tuple[Any, ...]
    options: dict[str, Any]


def case(
    seed=0, *, B=1, T=1, K=2, G=1, H=16, S=64, start=0, at=None, valid=None, rotary=0, half=False, **options
) -> Case:
    """Queries that attend sharply; stale rows behind the last that any query may see are NaN. Tokens follow
    one another from `start`, or are `at` some positions."""
    draw = np.random.default_rng(seed)

    def normal(*shape):
        return draw.normal(size=shape).astype(np.float32)

    q, k, v = 2 * normal(B, T, K, G, H), normal(B, T, K, H), normal(B, T, K, H)
    angle = draw.uniform(-3, 3, (T, rotary))
    table = (np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)) if rotary else None
    keys, values = (normal(B, K, S, H).astype(np.float16 if half else np.float32) for _ in "kv")
    positions = np.asarray(range(start, start + T) if at is None else at, np.int32)
    for rows in (keys, values):
        rows[:, :, positions[-1] + 1 :] = np.nan
    valid = T if valid is None else valid
    args = (q, k, v, table, keys, values, positions, np.int32(valid))
    return Case(args, {"scale": H**-0.5, "softcap": 0.0, "window": 0} | options)


def door(options):
    return lambda *args: native_attention.attention(*args, **options)[:3]


def check(case: Case, found: dict[str, Any]) -> None:
    """The cache that comes back is the old one and the new rows; the answer is attention over it."""
    q, k, v, table, keys, values, positions, valid = case.args
    fresh = positions[:valid][positions[:valid] < keys.shape[2]]
    turned_q, turned_k = (each if table is None else oracle.rotated(each, *table) for each in (q, k))
    written = np.s_[:, :, fresh]
    for kernels, (out, new_keys, new_values) in found.items():
        for old, new, rows in ((keys, new_keys, turned_k), (values, new_values, v)):
            assert new.dtype == old.dtype
            rows = rows.transpose(0, 2, 1, 3)[:, :, : len(fresh)]
            room = 1e-3 if old.dtype == np.float16 else 1e-6
            np.testing.assert_allclose(new[written].astype(np.float64), rows, rtol=room, atol=room)
            expected = old.copy()
            expected[written] = new[written]
            np.testing.assert_array_equal(new, expected, err_msg=kernels)
        np.testing.assert_array_equal(
            new_values[written], v.transpose(0, 2, 1, 3)[:, :, : len(fresh)].astype(values.dtype)
        )
        assert out.dtype == np.float32
        real = defined(q, valid)
        if not real:
            continue
        expected, _ = oracle.attention(
            turned_q[:, :real], new_keys, new_values, positions[:real], **case.options
        )
        np.testing.assert_allclose(out[:, :real], expected, atol=ROOM * 4, rtol=0, err_msg=kernels)


def defined(q: np.ndarray, valid: int) -> int:
    """How many tokens have outputs: of one sequence those that are real."""
    return int(valid) if len(q) == 1 else q.shape[1]


def run(case: Case, mass: np.ndarray | None = None) -> None:
    """With `mass` also that what real tokens attend to is summed over queries, on top of what was there."""
    args, count = (case.args, 3) if mass is None else ((*case.args, mass), 4)
    found = answers(lambda *args: native_attention.attention(*args, **case.options)[:count], *args)
    check(case, {kernels: each[:3] for kernels, each in found.items()})
    q, _, _, table, _, _, positions, valid = case.args
    turned, real = q if table is None else oracle.rotated(q, *table), defined(q, valid)
    for kernels, (_, keys, values, *got) in found.items():
        after = None if mass is None else mass.astype(np.float64)
        if got and real:
            sizes = (turned[:, :real], keys, values, positions[:real])
            added = oracle.attention(*sizes, **case.options)[1][:, :, :valid].sum((1, 2, 3))
            after[:, : added.shape[1]] += added
        for each in got:
            np.testing.assert_allclose(each, after, atol=2e-4, rtol=0, err_msg=kernels)


@settings(max_examples=40)
@given(
    B=st.integers(1, 3), T=st.integers(1, 70), K=st.integers(1, 3), G=st.integers(1, 8),
    H=st.integers(2, 40) | st.sampled_from([64, 80, 128]),
    S=st.integers(1, 300) | st.just(2000), at=st.floats(0, 1),
    window=st.sampled_from([0, 1, 2, 63, 64, 65, 500]),
    softcap=st.sampled_from([0.0, 0.5, 30.0]), turned=st.sampled_from([0, 1, 2]), half=st.booleans(),
    gaps=st.booleans(), counted=st.booleans(), real=st.floats(0, 1), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_any_shape(B, T, K, G, H, S, at, window, softcap, turned, half, gaps, counted, real, seed):
    """Any start, also where the chunk or its padding reaches past the cache's end; tokens with gaps between
    them, which attend to all that stands before each, new or old; with mass and without."""
    draw, places = np.random.default_rng(seed), {"start": round(at * (S - 1))}
    if gaps:
        T = min(T, S)
        places = {"at": np.sort(draw.choice(S, T, replace=False))}
    shape = dict(B=B, T=T, K=K, G=G, H=H, S=S, valid=round(real * T), half=half, rotary=turned * (H // 4))
    mass = draw.random((B, S)).astype(np.float32) if counted else None
    run(case(seed, **shape, **places, window=window, softcap=softcap), mass)


@pytest.mark.parametrize(("T", "start"), [(1, 3), (1, 3000), (7, 20), (70, 100)])
def test_sink_logits(T, start):
    """They take their part of each head's softmax, far above and far below all scores too."""
    logits = np.array([[-50.0, 0.0, 2.0], [30.0, -1.0, 500.0]], np.float32)
    for window in (0, 40):
        run(case(T, T=T, K=2, G=3, S=3072, start=start, window=window, rotary=4, sink_logits=logits))


@pytest.mark.parametrize("T", [1, 5, 40])
def test_the_same_again_whatever_the_threads(T):
    """To the last bit, also where threads share one token's keys and what they find is merged."""
    many = case(0, T=T, K=2, G=2, H=32, S=1024, start=900, rotary=16)
    args = (*many.args, np.zeros((1, 1024), np.float32))
    run = compiled(lambda *args: native_attention.attention(*args, **many.options), *args)
    same_on_threads(run, *args)


@pytest.mark.parametrize(
    ("T", "window", "run"), [(1, 0, True), (1, 4, False), (6, 0, False), (6, 4, True), (6, 4, False)]
)
def test_the_door_gives_what_xla_gives(T, window, run):
    """The function that models call, on native kernels and without, in both types of cache that kernels
    take and in one that they leave to XLA; for tokens that follow one another and others."""
    config, sinks = RopeConfig(dim=8, theta=100.0), jnp.asarray([[0.5, -1.0], [1.5, 0.0]])
    for dtype in (jnp.float32, jnp.float16, jnp.bfloat16):
        at = None if run else [2, 5, 9, 12, 20, 20][6 - T :]
        shape = dict(T=T, K=2, G=2, H=16, S=24, start=9, at=at, valid=max(1, T - 1))
        plain = case(3, **shape, window=window, softcap=2.0)
        q, k, v, _, keys, values, positions, valid = plain.args
        keys, values = (jnp.nan_to_num(jnp.asarray(each)).astype(dtype) for each in (keys, values))

        mass = np.arange(24, dtype=np.float32)[None]

        def attend(q, k, v, keys, values, positions, valid, mass):
            table, mask = rotary_cos_sin(positions, config), causal_mask(positions, 24, window)
            out, past, mass = cached_attention(
                Heads(q, k, v), table, Past(keys, values), mask,
                TokenPositions(positions, valid, consecutive=run), mass,
                options=AttentionOptions(scale=0.3, softcap=2.0, window=window, sink_logits=sinks),
            )  # fmt: skip
            # Of the others nothing is said.
            return out[:, : max(1, T - 1)], past.keys, past.values, mass

        found = answers(attend, q, k, v, keys, values, positions, valid, mass, xla=True)
        ours = [np.asarray(each, np.float32) for each in found.pop("xla")]
        room = {jnp.float32: 1e-6, jnp.float16: 1e-3, jnp.bfloat16: 1e-6}[dtype]
        for native_ones in found.values():
            for got, expected in zip(native_ones, ours, strict=True):
                np.testing.assert_allclose(np.asarray(got, np.float32), expected, atol=ROOM + room, rtol=room)


@pytest.mark.parametrize("half", [False, True])
def test_a_layer_of_a_stack_is_its_cache_alone(half):
    """To the last bit; other layers, whose rows are NaN, are neither read nor written."""
    for slot, T, B, valid, start in (
        (0, 1, 1, 1, 40),
        (3, 9, 1, 9, 40),
        (1, 40, 1, 23, 20),
        (2, 5, 3, 4, 43),
    ):
        shape = dict(T=T, B=B, S=48, start=start, valid=valid, G=2, rotary=4, half=half)
        single = case(slot, **shape)
        q, k, v, table, keys, values, positions, count = single.args
        mass = np.ones((B, 48), np.float32)
        stacks = [np.full((4, *keys.shape), np.nan, keys.dtype) for _ in "kv"]
        for stack, rows in zip(stacks, (keys, values), strict=True):
            stack[slot] = rows

        def stacked(*args, options=single.options):
            return native_attention.attention(*args[:-1], slot=args[-1], **options)[:4]

        def alone(*args, options=single.options):
            return native_attention.attention(*args, **options)[:4]

        found = answers(stacked, q, k, v, table, *stacks, positions, count, mass, np.int32(slot))
        expected = answers(alone, *single.args, mass)
        real = defined(q, valid)
        for kernels, (out, new_keys, new_values, new_mass) in found.items():
            one, own_keys, own_values, own_mass = expected[kernels]
            np.testing.assert_array_equal(out[:, :real], one[:, :real], err_msg=kernels)
            np.testing.assert_array_equal(new_mass, own_mass, err_msg=kernels)
            for new, own in ((new_keys, own_keys), (new_values, own_values)):
                np.testing.assert_array_equal(new[slot], own, err_msg=kernels)
                assert np.isnan(np.delete(new, slot, axis=0)).all(), kernels


def test_sharp_scores():
    """One key far above all others takes everything; equal scores share; the largest floats do not
    overflow on their way."""
    for factor in (50.0, 1e4, 1e18):
        sharp = case(0, T=9, K=1, G=1, H=16, S=200, start=120, scale=factor)
        for kernels, (out, keys, values) in answers(door(sharp.options), *sharp.args).items():
            scores = np.einsum("tgh,sh->tgs", sharp.args[0][0, :, 0], keys[0, 0, :129].astype(np.float64))
            for t in range(9):
                seen = scores[t, 0, : 121 + t]
                if np.diff(np.sort(seen)[-2:]) * factor > 90:
                    best = values[0, 0, np.argmax(seen)]
                    np.testing.assert_allclose(out[0, t, 0, 0], best, rtol=1e-5, err_msg=kernels)
    flat = case(0, T=3, K=1, G=2, H=16, S=100, start=50, scale=0.0)
    for out, _, values in answers(door(flat.options), *flat.args).values():
        for t in range(3):
            mean = values[0, 0, : 51 + t].astype(np.float64).mean(0)
            np.testing.assert_allclose(out[0, t, 0], np.stack([mean, mean]), atol=1e-6)
