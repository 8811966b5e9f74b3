"""Runs one prompt through the layers, subgraph by subgraph, in any valid order."""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxllm.int8_prefill.schedule import Subgraph
from jaxllm.int8_prefill.subgraphs import Projected
from jaxllm.kv.cache import KVCache, Past, TokenPositions


class PromptPass:
    """The state of a prompt between its subgraphs: layers' inputs, the cache, and intermediates of stages.

    Independent subgraphs may run at the same time.

    Attributes:
      chunks: the positions of the tokens of each chunk.
      x: per chunk, the input `[1, T, D]` of its current layer.
      counts: per subgraph with shadows, the number of channels with outliers of each product.
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
        self.chunks, self.x = list(chunks), list(inputs)
        self.counts: list[tuple[Subgraph, Any]] = []
        self.capacity = cache.capacity_tokens
        self._call = call
        self._cache = cache
        # Per chunk, the results of the stages of its current layer.
        self._values: list[dict[str, Any]] = [{} for _ in chunks]
        # Both processors append counts.
        self._counting = threading.Lock()

    def run(self, each: Subgraph) -> None:
        """Runs one subgraph, after its dependencies."""
        getattr(self, f"_{each.stage}")(each, self._values[each.chunk])

    def repeated(self, each: Subgraph) -> Callable[[], None]:
        """A function that runs a subgraph at each call, after its dependencies."""
        at, x = self._values[each.chunk], self.x[each.chunk]
        before = dict(at)

        def once() -> None:
            at.clear()
            at.update(before)
            self.x[each.chunk] = x
            self.run(each)

        return once

    def cache(self) -> KVCache:
        """The cache as it is now; the caller sets its length."""
        return self._cache

    def _keep(self, layer: int, past: Past, mass: jax.Array | None) -> None:
        self._cache = dataclasses.replace(self._cache.with_past(layer, past), mass=mass)

    def _run(self, each: Subgraph, *operands: Any) -> Any:
        return self._call(each, self.x[each.chunk].shape[1], self.capacity, *operands)

    def _counted(self, each: Subgraph, count: Any) -> None:
        with self._counting:
            self.counts.append((each, count))

    def _layer(self, each: Subgraph, at: dict[str, Any]) -> None:
        operands = self.x[each.chunk], self.chunks[each.chunk], self._cache.past(each.layer), self._cache.mass
        self.x[each.chunk], past, mass, count = self._run(each, *operands)
        self._keep(each.layer, past, mass)
        if count is not None:
            self._counted(each, count)

    def _project(self, each: Subgraph, at: dict[str, Any]) -> None:
        at["heads"] = self._run(each, self.x[each.chunk])

    def _project_shadow(self, each: Subgraph, at: dict[str, Any]) -> None:
        at["head_shadows"], count = self._run(each, self.x[each.chunk])
        self._counted(each, count)

    def _attend(self, each: Subgraph, at: dict[str, Any]) -> None:
        projected = Projected(at.pop("heads"), at.pop("head_shadows", None))
        positions = self.chunks[each.chunk]
        operands = projected, positions, self._cache.past(each.layer), self._cache.mass
        at["out"], at["added"], past, mass, count = self._run(each, *operands)
        self._keep(each.layer, past, mass)
        if count is not None:
            self._counted(each, count)

    def _finish(self, each: Subgraph, at: dict[str, Any]) -> None:
        self.x[each.chunk] = self._run(each, self.x[each.chunk], at["out"])

    def _widen(self, each: Subgraph, at: dict[str, Any]) -> None:
        at["x"], at["products"] = self._run(each, self.x[each.chunk], at["out"], at["added"])

    def _widen_shadow(self, each: Subgraph, at: dict[str, Any]) -> None:
        at["product_shadows"], count = self._run(each, at["x"])
        self._counted(each, count)

    def _narrow(self, each: Subgraph, at: dict[str, Any]) -> None:
        at["mixed"], at["hidden"] = self._run(each, at["x"], at.pop("products"), at.pop("product_shadows"))

    def _narrow_shadow(self, each: Subgraph, at: dict[str, Any]) -> None:
        self.x[each.chunk], count = self._run(each, at["x"], at.pop("mixed"), at.pop("hidden"))
        self._counted(each, count)
