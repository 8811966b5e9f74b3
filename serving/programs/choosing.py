"""The graphs that choose tokens from the logits of programs: compiled before a request, kept for later
processes."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jaxllm.sampling import SamplerState, Sampling, sample, sampler_state
from jaxllm.speculative.acceptance import choices
from jaxllm.speculative.tree import TokenTree
from serving.executables import ExecutableFolder
from serving.graph_store import digest_of, environment_facts
from serving.speculative.host_tree import root_alone


class Choosing:
    """Draws tokens of a vocabulary of so many.

    Args:
      vocab_size: V.
      store: where executables are kept; None keeps none.
    """

    def __init__(self, vocab_size: int, store: ExecutableFolder | None = None) -> None:
        self._vocab_size, self._store = vocab_size, store
        self._sampler = sampler_state(Sampling(), [], vocab_size, 0)
        # By nodes of the tree, 0 for the next token of a sequence.
        self._compiled: dict[int, Any] = {}
        self._lock = threading.Lock()

    def prepare(self, trees: Iterable[int] = ()) -> None:
        """Gets ready the graphs of the next token, and of trees of these sizes."""
        for nodes in (0, *trees):
            self._graph(nodes)

    def next_token(self, logits: Any, sampler: SamplerState) -> tuple[jax.Array, SamplerState]:
        """See `jaxllm.sampling.sample`, of logits `[1, V]`."""
        return self._graph(0)(np.asarray(logits), sampler)

    def of_tree(self, tree: TokenTree, logits: Any, sampler: SamplerState) -> jax.Array:
        """See `jaxllm.speculative.acceptance.choices`."""
        return self._graph(tree.room)(tree, np.asarray(logits), sampler)

    def _graph(self, nodes: int) -> Any:
        with self._lock:
            if nodes not in self._compiled:
                self._compiled[nodes] = self._made(nodes)
            return self._compiled[nodes]

    def _made(self, nodes: int) -> Any:
        key = digest_of(["choosing", self._vocab_size, nodes, environment_facts()])
        graph = None if self._store is None else self._store.load(key)
        if graph is None:
            logits = jax.ShapeDtypeStruct((max(1, nodes), self._vocab_size), np.float32)
            step: Callable[..., Any] = choices if nodes else sample
            tree = (root_alone(0, nodes),) if nodes else ()
            graph = jax.jit(step).lower(*tree, logits, self._sampler).compile()
            if self._store is not None:
                self._store.store(key, graph)
        return graph
