"""Products in bfloat16 and their gradients round once, and ask for float32 sums."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.nn.linear import dense_product

HALF = jnp.dtype(jnp.bfloat16)


@pytest.fixture(scope="module", params=[0, 1], ids=["first axis", "last axis"])
def case(request: pytest.FixtureRequest) -> tuple[int, jax.Array, jax.Array, jax.Array]:
    """An axis; activations, a matrix and a gradient in bfloat16."""
    keys = jax.random.split(jax.random.key(3), 3)
    shape = (64, 48) if request.param == 0 else (48, 64)
    rows, matrix, gradient = (
        jax.random.normal(key, size, HALF)
        for key, size in zip(keys, ((80, 64), shape, (80, 48)), strict=True)
    )
    return request.param, rows, matrix, gradient


def test_is_the_float32_product_of_the_same_numbers_rounded_once(
    case: tuple[int, jax.Array, jax.Array, jax.Array],
) -> None:
    axis, *sides = case
    rows, matrix, gradient = sides

    def with_gradients(rows: jax.Array, matrix: jax.Array, gradient: jax.Array) -> tuple[jax.Array, ...]:
        out, back = jax.vjp(lambda rows, matrix: dense_product(rows, matrix, axis), rows, matrix)
        return (out, *back(gradient))

    wide = with_gradients(*(side.astype(jnp.float32) for side in sides))
    for found, wanted in zip(with_gradients(rows, matrix, gradient), wide, strict=True):
        assert found.dtype == HALF
        # A sum in another order may round to the neighbour.
        np.testing.assert_allclose(found.astype(jnp.float32), wanted, rtol=2**-7, atol=1e-2)


def test_each_product_in_bfloat16_is_summed_in_float32(
    case: tuple[int, jax.Array, jax.Array, jax.Array],
) -> None:
    axis, rows, matrix, gradient = case

    def loss(rows: jax.Array, matrix: jax.Array) -> jax.Array:
        return jnp.vdot(dense_product(rows, matrix, axis).astype(jnp.float32), gradient.astype(jnp.float32))

    found = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(rows, matrix))
    # The value and both gradients; the loss itself is a product of vectors.
    assert not re.search(r"bf16\[[\d,]*\] = dot_general", found)
    assert len(re.findall(r":f32\[\d+,\d+\] = dot_general", found)) == 3
