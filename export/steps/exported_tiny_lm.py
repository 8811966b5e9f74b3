"""Defines the step of exported tiny LMs (see `jaxllm.export.folder_format.tiny_lm`).

Large matrices are at 8 bits if native kernels serve them; programs get the same levels and scales, as
`{name}.levels` `[U, D]` int8 and `{name}.scale` `[U, 1]` float32, and round activations as those kernels
do.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.export.folder_format.tiny_lm import KEEP, MODEL, PROMPT
from jaxllm.models.encoder.parameters import Params
from jaxllm.models.tiny_lm import TlmConfig, forward_both
from jaxllm.quant import OwnProduct, Weight

LEVELS, SCALE = ".levels", ".scale"
# Number of inputs that share a scale of activations in native kernels, and number of its steps.
_SPAN, _TOP = 256, 127


def run_tiny_lm(
    weights: Mapping[str, jax.Array],
    caches: Mapping[str, jax.Array],
    tokens: jax.Array,
    mask: jax.Array,
    *,
    cfg: TlmConfig,
) -> dict[str, jax.Array]:
    """Scores the tokens of a row, and classifies it.

    Args:
      weights: parameters by name (see the module).
      caches: empty.
      tokens: `[1, T]` int32, with the marks first.
      mask: `[1, T]` bool, True = a mark or a valid token.
      cfg: config of the tiny LM.

    Returns:
      `keep` `[1, T]`, `model` `[1, levels]` and `prompt` `[1, prompt ratios]`, logits in float32.
    """
    del caches
    keep, (model, prompt) = forward_both(_params(weights), tokens, mask, cfg=cfg)
    return {KEEP: keep, MODEL: model, PROMPT: prompt}


def _params(weights: Mapping[str, jax.Array]) -> Params:
    params: dict[str, Weight] = {}
    for name, each in weights.items():
        if name.endswith(LEVELS):
            bare = name.removesuffix(LEVELS)
            wide = each.astype(jnp.float32) * weights[f"{bare}{SCALE}"]
            params[bare] = OwnProduct(wide, rounded_product)
        elif f"{name.removesuffix(SCALE)}{LEVELS}" not in weights:
            params[name] = each
    return params


def rounded_product(rows: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
    """Multiplies activations `[M, N]`, rounded to 8 bits span by span, by a matrix whose `axis` is
    contracted."""
    contracted = 1 if axis == -1 else 0
    return jax.lax.dot_general(_rounded(rows), matrix, (((1,), (contracted,)), ((), ())))


def _rounded(rows: jax.Array) -> jax.Array:
    parts = []
    for at in range(0, rows.shape[1], _SPAN):
        part = rows[:, at : at + _SPAN]
        scale = jnp.max(jnp.abs(part), axis=1, keepdims=True) / np.float32(_TOP)
        scale = jnp.where(scale > 0, scale, np.float32(1))
        parts.append(jnp.round(part / scale) * scale)
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
