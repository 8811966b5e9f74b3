"""Exports the tiny LM of a bundle as programs: its weights as served, its signatures and its step.

Large matrices are at 8 bits if native kernels serve them; programs get the same levels and scales, as
`{name}.levels` `[U, D]` int8 and `{name}.scale` `[U, 1]` float32, and round activations as those kernels
do.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.bundle.tiny_lm import TinyLm
from jaxllm.config import WHOLE
from jaxllm.elastic.compression import row_lengths
from jaxllm.export.folder_format.parts import KEEP, MODEL, PROMPT, TinyLmFacts
from jaxllm.export.folder_format.signature import MASK, TOKENS, Signature
from jaxllm.export.steps.exported import Arrays
from jaxllm.models.encoder.mobilebert import Params
from jaxllm.models.tiny_lm import TlmConfig, forward_both
from jaxllm.quant import OwnProduct, QArray, Weight
from jaxllm.serving.elastic.tiny_lm import served_arrays

LEVELS, SCALE = ".levels", ".scale"
# Number of inputs that share a scale of activations in native kernels, and number of its steps.
_SPAN, _TOP = 256, 127


def tiny_facts(tiny: TinyLm) -> TinyLmFacts:
    """Returns the manifest's facts about a tiny LM."""
    return TinyLmFacts(
        levels=tiny.levels,
        prompt_ratios=tiny.prompt_ratios,
        mark_ids=tiny.mark_ids,
        row_tokens=tiny.row_tokens,
        own_tokenizer=tiny.tokenizer is not None,
    )


def tiny_signatures(tiny: TinyLm | None, file: Callable[[str], str]) -> list[Signature]:
    """The signatures of a tiny LM, none of None; `file`: name of a signature -> its file."""
    if tiny is None:
        return []
    return [
        Signature(kind="tiny_lm", tokens=each, level=WHOLE, file=file(f"tiny_lm_{each}"))
        for each in row_lengths(tiny.row_tokens)
    ]


def tiny_weights(tiny: TinyLm) -> dict[str, np.ndarray]:
    """The weight arguments of a tiny LM's programs: float32, and large matrices at 8 bits as native kernels
    serve them."""
    weights = {}
    for name, each in served_arrays(tiny.params, native_here=True).items():
        if isinstance(each, QArray):
            weights[f"{name}{LEVELS}"] = np.asarray(each.data, np.int8)
            weights[f"{name}{SCALE}"] = np.asarray(each.scale, np.float32)
        else:
            weights[name] = np.asarray(each, np.float32)
    return weights


def run_tiny_lm(weights: Arrays, caches: Arrays, inputs: Arrays, *, cfg: TlmConfig) -> dict[str, jax.Array]:
    """Scores the tokens of a row, and classifies it (see `jaxllm.export.folder_format.parts`); `caches` is
    empty."""
    del caches
    keep, (model, prompt) = forward_both(_params(weights), inputs[TOKENS], inputs[MASK], cfg=cfg)
    return {KEEP: keep, MODEL: model, PROMPT: prompt}


def _params(weights: Arrays) -> Params:
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
