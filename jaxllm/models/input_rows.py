"""Rows that stand in place of tokens' embeddings, such as those that an encoder makes of an image."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import Axes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InputRows:
    """Rows of some of T new tokens, which no token id can make again.

    Attributes:
      rows: `[T, D]` float32, as the first layer's input is before positions are added.
      given: `[T]` bool, which tokens have one; the others have their embedding.
    """

    rows: jax.Array | np.ndarray
    given: jax.Array | np.ndarray

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above, where a step that takes them is traced."""
        axes.check(jnp.float32, "T D", rows=self.rows)
        axes.check(jnp.bool_, "T", given=self.given)

    def over(self, x: jax.Array) -> jax.Array:
        """The embeddings `[B, T, D]` of tokens, with these rows in their places."""
        return jnp.where(jnp.asarray(self.given)[:, None], jnp.asarray(self.rows).astype(x.dtype), x)
