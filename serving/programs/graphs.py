"""Programs as JAX runs them: compiled once, kept for later processes, caches donated."""

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.programs.manifest import Manifest, Signature
from serving.executables import ExecutableFolder
from serving.graph_store import digest_of, environment_facts
from serving.machine import usable_cores
from serving.progress import Progress

Caches = dict[str, jax.Array]


class JaxPrograms:
    """The part that executors on JAX share.

    Args:
      manifest: what there is to run.
      weights: by level, what its programs take.
      step: the function `(weights, caches, tokens, input_pos[, mask])` of a signature.
      key: names a signature's program among all others, in hex.
      store: where executables are kept; None keeps none.
    """

    def __init__(
        self,
        manifest: Manifest,
        weights: Mapping[int, Mapping[str, Any]],
        step: Callable[[Signature], Callable[..., dict[str, jax.Array]]],
        key: Callable[[Signature], str],
        store: ExecutableFolder | None,
    ) -> None:
        self.manifest = manifest
        self._weights, self._step, self._key, self._store = weights, step, key, store
        self._compiled: dict[str, Any] = {}

    def prepare(self, signatures: Sequence[Signature], progress: Progress | None = None) -> None:
        """See `Executor`: several at a time, from disk where an earlier process left them."""
        missing = [each for each in signatures if each.name not in self._compiled]
        with concurrent.futures.ThreadPoolExecutor(usable_cores()) as pool:
            graphs = pool.map(self._build, missing)
            for done, (signature, graph) in enumerate(zip(missing, graphs, strict=True)):
                self._compiled[signature.name] = graph
                if progress is not None:
                    progress("compile", done + 1, len(missing))

    def compile(self, signature: Signature) -> None:
        """Gets one program ready, in this thread."""
        self._compiled[signature.name] = self._build(signature)

    def start(self, level: int) -> Caches:
        """See `Executor`."""
        dtype = jax.numpy.dtype(self.manifest.cache_dtype)
        shapes = self.manifest.cache_shapes(level)
        return {name: jax.device_put(np.zeros(shape, dtype)) for name, shape in shapes.items()}

    def run(
        self,
        signature: Signature,
        caches: Caches,
        tokens: np.ndarray,
        input_pos: np.ndarray,
        mask: np.ndarray | None = None,
    ) -> tuple[jax.Array | None, Caches]:
        """See `Executor`."""
        if signature.name not in self._compiled:
            self.prepare([signature])
        inputs = (tokens, input_pos) if mask is None else (tokens, input_pos, mask)
        out = self._compiled[signature.name](self._weights[signature.level], caches, *inputs)
        return out.pop("logits", None), out

    def _build(self, signature: Signature) -> Any:
        key = digest_of([self._key(signature), environment_facts()])
        graph = None if self._store is None else self._store.load(key)
        if graph is None:
            graph = self._lowered(signature).compile()
            if self._store is not None:
                self._store.store(key, graph)
        return graph

    def _lowered(self, signature: Signature) -> jax.stages.Lowered:
        dtype, count = jax.numpy.dtype(self.manifest.cache_dtype), signature.tokens
        caches = {
            name: jax.ShapeDtypeStruct(shape, dtype)
            for name, shape in self.manifest.cache_shapes(signature.level).items()
        }
        inputs = [jax.ShapeDtypeStruct((1, count), np.int32), jax.ShapeDtypeStruct((count,), np.int32)]
        if signature.kind == "verify":
            inputs.append(jax.ShapeDtypeStruct((count, count), np.bool_))
        # The export knows no donation: without it every step would copy the caches.
        step = jax.jit(self._step(signature), donate_argnums=(1,), keep_unused=True)
        return step.lower(self._weights[signature.level], caches, *inputs)
