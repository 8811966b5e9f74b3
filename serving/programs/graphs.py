"""Programs as JAX runs them: compiled once, kept for later processes, caches donated."""

import concurrent.futures
import functools
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.programs.manifest import Manifest, Signature
from jaxllm.programs.shapes import input_shapes
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

    moves_rows = True

    def __init__(
        self,
        manifest: Manifest,
        weights: Mapping[int, Mapping[str, Any]],
        step: Callable[[Signature], Callable[..., dict[str, jax.Array]]],
        key: Callable[[Signature], str],
        store: ExecutableFolder | None,
    ) -> None:
        self.manifest, self.lock = manifest, threading.RLock()
        self._weights, self._step, self._key, self._store = weights, step, key, store
        self._compiled: dict[str, Any] = {}

    def prepare(self, signatures: Sequence[Signature], progress: Progress | None = None) -> None:
        """See `Executor`: several at a time, from disk where an earlier process left them."""
        missing = [each for each in signatures if not self.is_ready(each)]
        with concurrent.futures.ThreadPoolExecutor(usable_cores()) as pool:
            graphs = pool.map(self._build, missing)
            for done, (signature, graph) in enumerate(zip(missing, graphs, strict=True)):
                self._compiled[signature.name] = graph
                if progress is not None:
                    progress("compile", done + 1, len(missing))
        rooms = {(each.level, self.manifest.room(each)) for each in signatures}
        for level in {level for level, _ in rooms}:
            for short, long in itertools.pairwise(self.manifest.cache_tokens(level)):
                if {(level, short), (level, long)} <= rooms:
                    self._growing(level, short, long)
        for signature in signatures:
            if signature.kind == "verify":
                self._keeping(signature)

    def is_ready(self, signature: Signature) -> bool:
        """See `Executor`."""
        return signature.name in self._compiled

    def compile(self, signature: Signature) -> None:
        """Gets one program ready, in this thread."""
        self._compiled[signature.name] = self._build(signature)

    def start(self, level: int, cache_tokens: int) -> Caches:
        """See `Executor`."""
        shapes = self._cache_shapes(level, cache_tokens)
        return {name: jax.device_put(np.zeros(each.shape, each.dtype)) for name, each in shapes.items()}

    def grow(self, level: int, caches: Caches, cache_tokens: int) -> Caches:
        """See `Executor`."""
        short = next(iter(caches.values())).shape[2]
        return self._growing(level, short, cache_tokens)(caches)

    def run(
        self,
        signature: Signature,
        caches: Caches,
        tokens: np.ndarray,
        input_pos: np.ndarray,
        mask: np.ndarray | None = None,
    ) -> tuple[jax.Array | None, Caches]:
        """See `Executor`."""
        if not self.is_ready(signature):
            self.prepare([signature])
        inputs = (tokens, input_pos) if mask is None else (tokens, input_pos, mask)
        out = self._compiled[signature.name](self._weights[signature.level], caches, *inputs)
        return out.pop("logits", None), out

    def keep(self, signature: Signature, caches: Caches, at: int, path: np.ndarray) -> Caches:
        """See `Executor`."""
        nodes = np.arange(signature.tokens, dtype=np.int32)
        nodes[: len(path)] = path
        return self._keeping(signature)(caches, np.int32(at), nodes)

    def _build(self, signature: Signature) -> Any:
        return self._kept(self._key(signature), functools.partial(self._made, signature))

    def _made(self, signature: Signature) -> jax.stages.Compiled:
        """A signature's program, compiled."""
        return self._lowered(signature).compile()

    def _growing(self, level: int, short: int, long: int) -> Any:
        """The graph that pads a level's caches."""
        name = f"grow_{level}_{short}_{long}"
        if name not in self._compiled:
            shapes = self._cache_shapes(level, short)
            # Nothing to donate: no buffer of the short caches has the size of one of the long.
            grow = jax.jit(functools.partial(_padded, tokens=long - short))
            self._compiled[name] = self._kept(
                _key("grow", long, shapes), lambda: grow.lower(shapes).compile()
            )
        return self._compiled[name]

    def _keeping(self, signature: Signature) -> Any:
        """The graph that moves a path of a signature's tree."""
        name = f"keep_{signature.name}"
        if name not in self._compiled:
            shapes = self._cache_shapes(signature.level, self.manifest.room(signature))
            nodes = jax.ShapeDtypeStruct((signature.tokens,), np.int32)
            keep = jax.jit(_moved, donate_argnums=(0,))
            self._compiled[name] = self._kept(
                _key("keep", signature.tokens, shapes),
                lambda: keep.lower(shapes, np.int32(0), nodes).compile(),
            )
        return self._compiled[name]

    def _kept(self, key: str, made: Callable[[], jax.stages.Compiled]) -> Any:
        """An executable from disk, or compiled and stored there."""
        key = digest_of([key, environment_facts()])
        graph = None if self._store is None else self._store.load(key)
        if graph is None:
            graph = made()
            if self._store is not None:
                self._store.store(key, graph)
        return graph

    def _lowered(self, signature: Signature) -> jax.stages.Lowered:
        manifest = self.manifest
        cfg, dtype = manifest.levels[signature.level].cfg, jax.numpy.dtype(manifest.cache_dtype)
        shapes = input_shapes(signature, cfg, manifest.room(signature), dtype)
        # The export knows no donation: without it every step would copy the caches.
        step = jax.jit(self._step(signature), donate_argnums=(1,), keep_unused=True)
        return step.lower(self._weights[signature.level], *shapes)

    def _cache_shapes(self, level: int, cache_tokens: int) -> dict[str, jax.ShapeDtypeStruct]:
        dtype = jax.numpy.dtype(self.manifest.cache_dtype)
        shapes = self.manifest.cache_shapes(level, cache_tokens)
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}


def _padded(caches: Caches, *, tokens: int) -> Caches:
    return {name: jax.numpy.pad(rows, ((0, 0), (0, 0), (0, tokens), (0, 0))) for name, rows in caches.items()}


def _moved(caches: Caches, at: jax.Array, nodes: jax.Array) -> Caches:
    """The rows of some nodes one behind the other from `at` on, where the rows of all began."""
    return {
        name: jax.lax.dynamic_update_slice_in_dim(rows, jax.numpy.take(rows, at + nodes, axis=2), at, axis=2)
        for name, rows in caches.items()
    }


def _key(what: str, size: int, shapes: dict[str, jax.ShapeDtypeStruct]) -> str:
    """Names a graph over caches among all others."""
    return str((what, size, sorted((name, each.shape, str(each.dtype)) for name, each in shapes.items())))
