"""Runs the tiny LM of a bundle.

Its buckets, like the large model's, are compiled or loaded from disk when it is opened, for a few lengths
up to that of its training rows.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.bundle.tiny_lm import TinyLm
from jaxllm.elastic.compression import row_lengths
from jaxllm.kernels import native
from jaxllm.models import tiny_lm as tlm
from jaxllm.models.tiny_lm import TlmConfig
from jaxllm.quant import QArray, Weight, quantize, to_blocks
from jaxllm.serving.buckets.bucket import Bucket, ids, shapes_of
from jaxllm.serving.buckets.bucket_table import BucketStore, BucketTable
from jaxllm.serving.elastic.tiny_proposer import Decision, TinyOutputs, TinyProposer, known_levels
from jaxllm.serving.host.progress import Progress


@dataclasses.dataclass(frozen=True)
class TlmShapes:
    """Shapes from which the buckets of a tiny LM are lowered.

    Attributes:
      cfg: the tiny LM.
      params: shapes of its parameters.
    """

    cfg: TlmConfig
    params: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyLmBucket(Bucket):
    """Computes the scores of a prompt's tokens, and the decision.

    Attributes:
      tokens: length of the row.
    """

    tokens: int

    def lower(self, model: TlmShapes, /) -> jax.stages.Lowered:
        """(params, row, mask) -> scores, decision."""
        mask = jax.ShapeDtypeStruct((1, self.tokens), jnp.bool_)
        step = jax.jit(functools.partial(tlm.forward_both, cfg=model.cfg))
        return step.lower(model.params, ids(1, self.tokens), mask)


# Lookup matrices, which are not multiplied.
_LOOKED_UP = ("embed.tokens", "embed.positions", "embed.types")
# Minimum size of a matrix whose native product is faster: below, quantizing the activations costs more than
# XLA's float product.
_LARGE = 1 << 16


class TinyPlanner(TinyProposer):
    """Proposes with the tiny LM of a bundle."""

    def __init__(
        self,
        tiny: TinyLm,
        levels: Sequence[int],
        store: BucketStore | None = None,
        *,
        decision: Decision = "safest",
        progress: Progress | None = None,
    ) -> None:
        """Prepares its buckets.

        Args:
          tiny: the tiny LM, with the levels and ratios of its classes.
          levels: levels that the planner chooses from, ascending.
          store: store of its buckets; None compiles them.
          decision: see `TinyProposer`.
          progress: callback for ("compile", buckets done, buckets in all).

        Raises:
          ConfigError: it was trained for none of these levels.
        """
        # Before anything is compiled.
        known_levels(tiny, levels)
        lengths = row_lengths(tiny.row_tokens)
        native_here = jax.default_backend() == "cpu" and native.kernels().native
        # In the fastest formats, on the device.
        params: dict[str, Weight] = {
            name: jax.tree.map(jax.device_put, to_blocks(value) if isinstance(value, QArray) else value)
            for name, value in served_arrays(tiny.params, native_here=native_here).items()
        }
        buckets = BucketTable(TlmShapes(tiny.cfg, shapes_of(params)), store and store.of(tiny.cfg, params))
        buckets.fill([TinyLmBucket(tokens=length) for length in lengths], progress)

        def run(row: np.ndarray, mask: np.ndarray) -> TinyOutputs:
            keep, (model, prompt) = buckets.get(TinyLmBucket(tokens=row.shape[1]))(params, row, mask)
            return np.asarray(keep), np.asarray(model), np.asarray(prompt)

        super().__init__(tiny, lengths, run, levels, decision=decision)


def served_arrays(params: Mapping[str, np.ndarray], *, native_here: bool) -> dict[str, np.ndarray | QArray]:
    """A tiny LM's weights in the formats in which they are served; with native kernels, large matrices are at
    8 bits."""
    served: dict[str, np.ndarray | QArray] = {}
    for name, value in params.items():
        if native_here and value.ndim == 2 and value.size >= _LARGE and name not in _LOOKED_UP:
            served[name] = quantize(np.asarray(value, np.float32), bits=8, axis=-1)
        else:
            served[name] = value
    return served
