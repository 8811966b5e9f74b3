"""A Flax (linen) front on the shared decoder, for people who train with Flax.

The parameters stay one flat dict, with the names and shapes of `parameters.init_params`, so whatever is
trained here is prepared, exported and served like any other model. Nothing else in this project uses
Flax modules: passing a plain dict to a compiled step is several times cheaper.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxllm.config import ModelConfig
from jaxllm.kv.cache import KVCache
from jaxllm.models import decoder, parameters


class DecoderLM(nn.Module):
    """A decoder with its language-model head.

    `init(key, tokens)` makes `{"params": {name: array}}`; `apply({"params": params}, tokens)` gives
    next-token logits.

    Attributes:
      cfg: the model.
      dtype: of the activations.
      param_dtype: of the parameters that `init` makes.
    """

    cfg: ModelConfig
    dtype: jnp.dtype = jnp.float32
    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(
        self, tokens: jax.Array, cache: KVCache | None = None, *, valid: jax.Array | None = None
    ) -> jax.Array | tuple[jax.Array, KVCache]:
        """Logits of every new token.

        Args:
          tokens: `[B, T]` int32. They follow the `cache.length` tokens already seen.
          cache: past keys and values; None attends within `tokens` alone (training).
          valid: int32 scalar, how many of the T tokens are real; None means all.

        Returns:
          Logits `[B, T, V]` float32; with a cache, a pair of them and the cache that follows.
        """
        if self.is_initializing():
            params = {name: self._initial(name) for name in parameters.param_specs(self.cfg)}
        else:
            # Not `self.param`, which traces every initializer again just to compare shapes.
            params = self.variables["params"]
        hidden, cache = decoder.forward(params, tokens, cache, cfg=self.cfg, valid=valid, dtype=self.dtype)
        logits = decoder.logits(params, hidden, cfg=self.cfg)
        return logits if cache is None else (logits, cache)

    def _initial(self, name: str) -> jax.Array:
        make = functools.partial(parameters.init_param, self.cfg, name)
        return self.param(name, lambda key: make(key, self.param_dtype))
