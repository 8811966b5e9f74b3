"""Products of the first rows of some are those among all of them, and leave the others as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernels import native_products
from tests.kernels.drawing import WIDTHS, answers, compiled, floats, weight_of
from tests.kernels.refusing import COUNTS, NOTHING, STEPS, UNITS, formats
from tests.kernels.switching import needs_native

pytestmark = needs_native
every_width = pytest.mark.parametrize("width", WIDTHS, ids=str)
EPS = 1e-5


@every_width
def test_the_first_rows_are_what_they_are_among_all(width):
    """Bit for bit what a call of all rows gives, whatever is behind them: a token is the same however
    full its chunk is. Where weights are not widened, also what these rows give alone."""
    draw = np.random.default_rng(0)
    up, gate = (weight_of(draw, (90, 300), width, -1) for _ in "ug")
    down, stack = weight_of(draw, (90, 300), width, -2), weight_of(draw, (3, 41, 50), width, -2)
    rows, scale = floats(draw, 19, 300), floats(draw, 300)

    def door(x, live, up, gate, down, stack, scale):
        norm = dict(norm_scale=scale, norm_eps=EPS)
        return [
            *native_products.to_units(x, [up, gate], **norm, live=live),
            native_products.from_units(x[:, :123], stack, residual=x[:, :50], live=live),
            native_products.feed_forward(
                x, gate, up, down, activation="gelu", residual=True, **norm, live=live
            ),
            native_products.add_normed(x, x, scale, EPS, live),
        ]

    weights = up, gate, down, stack, scale
    run = compiled(door, rows, np.int32(1), *weights)
    among = answers(lambda x, *weights: door(x, None, *weights), rows, *weights)
    for live in (1, 2, 7, 19):
        x = np.where(np.arange(19)[:, None] < live, rows, np.nan).astype(np.float32)
        found, first = jax.tree.map(
            lambda each, live=live: each[:live], (run(x, np.int32(live), *weights), among)
        )
        same(found, first)
        if width in ((8, 0), (8, 32), (8, 64)):
            same(found, answers(lambda x, *weights: door(x, None, *weights), rows[:live], *weights))


def same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_rows_behind_them_are_not_touched():
    """Results in the memory of an operand keep what is there."""
    draw = np.random.default_rng(0)
    up, down = weight_of(draw, (300, 300), (8, 0), -1), weight_of(draw, (300, 300), (8, 0), -2)
    x, more, scale = floats(draw, 19, 300), floats(draw, 19, 300), floats(draw, 300)
    nothing = np.zeros(0, np.uint32), np.zeros(0, np.int32)
    live, plain = np.int32(7), [up.data, up.scale, NOTHING, NOTHING, NOTHING]
    block = [NOTHING, COUNTS, STEPS, *[NOTHING] * 5, *plain, down.data, down.scale, *[NOTHING] * 3]
    calls = {
        "to_units": ([x, live], [NOTHING, COUNTS, STEPS, *plain], UNITS),
        "from_units": (
            [x, live, more], [down.data, down.scale, *[NOTHING] * 3, COUNTS, STEPS],
            dict(segments=np.int64(1), stacked=False, units_at=np.int64(-1)),
        ),
        "feed_forward": (
            [x, live], block,
            dict(
                units=np.int64(300), activation=np.int64(3), residual=False, eps=np.float32(0),
                units_at=np.int64(-1),
            ),
        ),
        "add_normed": ([x, more, live], [scale], dict(eps=np.float32(EPS))),
    }  # fmt: skip
    for name, (buffers, operands, options) in calls.items():
        options = dict(options, columns=np.full(len(operands), -1, np.int64))
        if name != "add_normed":
            options |= formats()
        shape = jax.ShapeDtypeStruct((19, 300), np.float32)
        result = [shape] if name == "to_units" else shape
        # The residual, where there is one, is the memory of the result.
        at = {"from_units": 2, "add_normed": 1}.get(name, 0)
        kernel = jax.ffi.ffi_call(f"jaxllm_{name}", result, input_output_aliases={at: 0})

        def door(*args, kernel=kernel, options=options):
            return kernel(*args, **options)

        args = [jnp.array(each) for each in (*buffers, *nothing, *operands)]
        before = np.array(args[at])
        (found,) = jax.tree.leaves(jax.jit(door, donate_argnums=at)(*args))
        np.testing.assert_array_equal(found[7:], before[7:], err_msg=name)
        assert not np.any(np.all(np.asarray(found[:7]) == before[:7], axis=1)), name
