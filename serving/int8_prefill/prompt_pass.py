"""Runs one prompt through the layers, subgraph by subgraph, in any valid order."""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxllm.int8_prefill.schedule import STAGE_VALUES, Subgraph
from jaxllm.kv.cache import KVCache, TokenPositions

# Results of stages that several later ones use; others are dropped when they are used.
_LASTING = ("out", "added", "block")


class PromptPass:
    """The state of a prompt between its subgraphs: layers' inputs, the cache, and intermediates of stages.

    Independent subgraphs may run at the same time.

    Attributes:
      chunks: the positions of the tokens of each chunk.
      x: per chunk, the input `[1, T, D]` of its current layer.
      counts: per subgraph with shadows, the number of channels with outliers of each product.
      cache: the cache as it is now; the caller sets its length.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        chunks: Sequence[TokenPositions],
        inputs: Sequence[jax.Array],
        cache: KVCache,
    ) -> None:
        """The state before the first layer.

        Args:
          call: `(subgraph, tokens of its chunk, capacity of the cache, *operands)` -> its results.
          chunks: see the class.
          inputs: per chunk, the first layer's input.
          cache: cache of the preceding tokens; its arrays are donated.
        """
        self.chunks, self.x, self.cache = list(chunks), list(inputs), cache
        self.counts: list[tuple[Subgraph, Any]] = []
        self.capacity = cache.capacity_tokens
        self._call = call
        # Per chunk, the results of the stages of its current layer.
        self._values: list[dict[str, Any]] = [{} for _ in chunks]
        # Both processors append counts.
        self._counting = threading.Lock()

    def run(self, each: Subgraph) -> None:
        """Runs one subgraph, after its dependencies (see `STAGE_VALUES`)."""
        names, results = STAGE_VALUES[each.stage]
        operands = [self._operand(each, name) for name in names]
        found = self._call(each, self.x[each.chunk].shape[1], self.capacity, *operands)
        values = dict(zip(results, found if len(results) > 1 else (found,), strict=True))
        if "x" in values:
            self.x[each.chunk] = values.pop("x")
        if "past" in values:
            past, mass = values.pop("past"), values.pop("mass")
            self.cache = dataclasses.replace(self.cache.with_past(each.layer, past), mass=mass)
        if (count := values.pop("count", None)) is not None:
            with self._counting:
                self.counts.append((each, count))
        self._values[each.chunk] |= values

    def repeated(self, each: Subgraph) -> Callable[[], None]:
        """A function that runs a subgraph at each call, after its dependencies."""
        values, x = self._values[each.chunk], self.x[each.chunk]
        before = dict(values)

        def once() -> None:
            values.clear()
            values.update(before)
            self.x[each.chunk] = x
            self.run(each)

        return once

    def _operand(self, each: Subgraph, name: str) -> Any:
        if name == "x":
            return self.x[each.chunk]
        if name == "at":
            return self.chunks[each.chunk]
        if name == "past":
            return self.cache.past(each.layer)
        if name == "mass":
            return self.cache.mass
        values = self._values[each.chunk]
        if name == "head_shadows":
            # A layer without a shadow has none.
            return values.pop(name, None)
        return values[name] if name in _LASTING else values.pop(name)
