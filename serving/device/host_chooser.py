"""Draws tokens of programs by NumPy, where no bucket can be compiled (see `TokenChooser`)."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxllm.sampling_state import SamplerState
from jaxllm.speculative.token_tree import TokenTree
from serving.device.host_sampling import choose, sample


class HostChooser:
    """Draws tokens without JAX, and compiles nothing."""

    def prepare(self, trees: Iterable[int] = ()) -> None:
        """Does nothing."""
        del trees

    def next_token(self, logits: Any, sampler: SamplerState) -> tuple[np.ndarray, SamplerState]:
        """See `TokenChooser`."""
        token, sampler = sample(np.asarray(logits)[0], sampler)
        return np.array([token], np.int32), sampler

    def of_tree(self, tree: TokenTree, logits: Any, sampler: SamplerState) -> np.ndarray:
        """See `TokenChooser`."""
        rows, chosen = np.asarray(logits), np.zeros(tree.room, np.int32)
        tokens, said = np.asarray(tree.tokens), np.array(tree.ancestors)
        # The root's token is counted already.
        said[:, 0] = False
        for node in range(int(tree.count)):
            counts = np.array(sampler.counts)
            np.add.at(counts[0], tokens[said[node]], 1)
            drawn = np.int32(int(sampler.drawn) + int(np.asarray(tree.depths)[node]))
            state = dataclasses.replace(sampler, counts=counts, drawn=drawn)  # pyright: ignore
            chosen[node] = choose(rows[node], state)
        return chosen
