"""Runs the tiny LM of a bundle.

Its buckets, like the large model's, are compiled or loaded from disk when it is opened, for a few lengths
up to that of its training rows.
"""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jaxllm.bundle.tiny_lm import TinyLm
from jaxllm.elastic.compression import row_lengths
from jaxllm.kernels import native
from jaxllm.quant import QArray, Weight, quantize, to_blocks
from jaxllm.serving.buckets.bucket import shapes_of
from jaxllm.serving.buckets.bucket_table import BucketTable
from jaxllm.serving.buckets.store import BucketStore
from jaxllm.serving.elastic.tiny_lm_bucket import TinyLmBucket, TlmShapes
from jaxllm.serving.elastic.tiny_proposer import Decision, TinyOutputs, TinyProposer, known_levels

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
    ) -> None:
        """Prepares its buckets.

        Args:
          tiny: the tiny LM, with the levels and ratios of its classes.
          levels: levels that the planner chooses from, ascending.
          store: store of its buckets; None compiles them.
          decision: see `TinyProposer`.

        Raises:
          ConfigError: it was trained for none of these levels.
        """
        # Before anything is compiled.
        known_levels(tiny, levels)
        super().__init__(tiny, _Buckets(tiny, store), levels, decision=decision)


class _Buckets:
    """The tiny LM's buckets (see `TinyPasses`)."""

    def __init__(self, tiny: TinyLm, store: BucketStore | None) -> None:
        self.lengths = row_lengths(tiny.row_tokens)
        self._params = _served(tiny)
        mine = None if store is None else store.of(tiny.cfg, self._params)
        self._buckets = BucketTable(TlmShapes(tiny.cfg, shapes_of(self._params)), mine)
        self._buckets.fill(TinyLmBucket(tokens=length) for length in self.lengths)

    def run(self, row: np.ndarray, mask: np.ndarray) -> TinyOutputs:
        read = self._buckets.get(TinyLmBucket(tokens=row.shape[1]))
        keep, (model, prompt) = read(self._params, row, mask)
        return np.asarray(keep), np.asarray(model), np.asarray(prompt)


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


def _served(tiny: TinyLm) -> dict[str, Weight]:
    """The tiny LM's weights in the fastest formats, on the device."""
    native_here = jax.default_backend() == "cpu" and native.kernels().native
    return {
        name: jax.tree.map(jax.device_put, to_blocks(value))
        if isinstance(value, QArray)
        else jax.device_put(value)
        for name, value in served_arrays(tiny.params, native_here=native_here).items()
    }
