"""Flax (linen) modules over the shared forwards: the decoder and its mixtures, the encoder, the tiny LM.

A module's parameters are one flat dict with the names and shapes of `parameters.py` or of
`encoder/parameters.py`, so that whatever is trained here is prepared, exported and served like any other
model. Modules are for training alone: a plain dict as argument of a compiled step is several times cheaper.
"""

import functools
from collections.abc import Callable, Iterable, Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxllm.config import ModelConfig
from jaxllm.kv.cache import KVCache
from jaxllm.models import decoder, parameters, tiny_lm
from jaxllm.models.encoder.config import EncoderConfig
from jaxllm.models.encoder.forward import encode
from jaxllm.models.encoder.parameters import Shape, encoder_shapes, init_values
from jaxllm.models.parameters import Params
from jaxllm.models.scanned_layers import Remat
from jaxllm.models.tiny_lm import TlmConfig


class DecoderLM(nn.Module):
    """A decoder with its language-model head, with or without experts.

    `init(key, tokens)` makes `{"params": {name: array}}`; `apply({"params": params}, tokens)` gives
    next-token logits. `apply(..., mutable="intermediates")` of a mixture also gives its routing, for the
    losses in `jaxllm.experts.routing`: `logits, state = ...; state["intermediates"]["routing"]`.

    Attributes:
      cfg: the model.
      dtype: of the activations.
      param_dtype: of the parameters that `init` makes.
      remat: see `decoder.forward_documents`.
    """

    cfg: ModelConfig
    dtype: jnp.dtype = jnp.float32
    param_dtype: jnp.dtype = jnp.float32
    remat: Remat = "none"

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        cache: KVCache | None = None,
        *,
        valid: jax.Array | None = None,
        starts: jax.Array | None = None,
    ) -> jax.Array | tuple[jax.Array, KVCache]:
        """Logits of every new token.

        Args:
          tokens: `[B, T]` int32. They follow the `cache.length` tokens already seen.
          cache: past keys and values; None attends within `tokens` alone (training).
          valid: int32 scalar, how many of the T tokens are real; None means all. With a cache only.
          starts: `[B, T]` int32, where in its row each token's document begins; None: a row is one document.
            Without a cache only.

        Returns:
          Logits `[B, T, V]` float32; with a cache, a pair of them and the cache that follows.
        """
        initial = functools.partial(_initial_of_decoder, self.cfg, self.param_dtype)
        params = _params_of(self, parameters.param_specs(self.cfg), initial)
        if cache is not None:
            hidden, cache = decoder.forward(
                params, tokens, cache, cfg=self.cfg, valid=valid, dtype=self.dtype
            )
            return decoder.logits(params, hidden, cfg=self.cfg), cache
        cfg, dtype, remat = self.cfg, self.dtype, self.remat
        if not cfg.experts:
            hidden = decoder.forward_documents(params, tokens, starts, cfg=cfg, dtype=dtype, remat=remat)
            return decoder.logits(params, hidden, cfg=cfg)
        hidden, routing = decoder.forward_documents_with_routing(
            params, tokens, starts, cfg=cfg, dtype=dtype, remat=remat
        )
        # The routing itself, where Flax would put it into a tuple of all that were given by this name.
        latest = dict(init_fn=lambda: routing, reduce_fn=lambda _, latest: latest)
        self.sow("intermediates", "routing", routing, **latest)
        return decoder.logits(params, hidden, cfg=self.cfg)


class Encoder(nn.Module):
    """An encoder: every token sees every real token of its row.

    Attributes:
      cfg: the encoder.
      dtype: of the activations.
      param_dtype: of the parameters that `init` makes.
    """

    cfg: EncoderConfig
    dtype: jnp.dtype = jnp.float32
    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(
        self, tokens: jax.Array, mask: jax.Array | None = None, *, types: jax.Array | None = None
    ) -> jax.Array:
        """Hidden states `[B, T, D]` of tokens `[B, T]` int32; for the rest see `encode`."""
        params = _params_of(self, *_of_shapes(encoder_shapes(self.cfg), self.param_dtype))
        return encode(params, tokens, mask, cfg=self.cfg, types=types, dtype=self.dtype)


class DualHeadEncoder(nn.Module):
    """The tiny LM with both of its heads, trained together or one after the other.

    A trained encoder becomes the parameters to go on from by `jaxllm.models.tiny_lm.tlm_from_encoder`.

    Attributes:
      cfg: the tiny LM.
      dtype: of the activations.
      param_dtype: of the parameters that `init` makes.
    """

    cfg: TlmConfig
    dtype: jnp.dtype = jnp.float32
    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, tokens: jax.Array, mask: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Both heads' logits.

        Args:
          tokens: `[B, T]` int32; the first of a row is what the decision is read from.
          mask: `[B, T]` bool, True = a real token.

        Returns:
          Logits of keeping each token `[B, T]`, and those of the levels `[B, levels]` and of the prompt's
          `[B, prompt_levels]`, float32.
        """
        params = _params_of(self, *_of_shapes(tiny_lm.tlm_shapes(self.cfg), self.param_dtype))
        return tiny_lm.forward_both(params, tokens, mask, cfg=self.cfg, dtype=self.dtype)


Initial = Callable[[str, jax.Array], jax.Array]


def _params_of(module: nn.Module, names: Iterable[str], initial: Initial) -> Params:
    """A module's parameters by name; `initial` makes one from its name and a key."""
    if not module.is_initializing():
        # Not `module.param`, which traces every initializer again just to compare shapes.
        return module.variables["params"]
    return {name: module.param(name, functools.partial(initial, name)) for name in names}


def _initial_of_decoder(cfg: ModelConfig, dtype: jnp.dtype, name: str, key: jax.Array) -> jax.Array:
    return parameters.init_param(cfg, name, key, dtype)


def _of_shapes(shapes: Mapping[str, Shape], dtype: jnp.dtype) -> tuple[Iterable[str], Initial]:
    """The names of an encoder's parameters, and what makes one."""

    def initial(name: str, key: jax.Array) -> jax.Array:
        return init_values({name: shapes[name]}, key, dtype)[name]

    return shapes, initial
