"""Defines the protocol of samplers of tokens from the logits of programs.

`bucket_chooser.py` samples by compiled buckets, `export/device/host_sampling.py` by NumPy.
"""

from collections.abc import Iterable
from typing import Any, Protocol

from jaxllm.sampling_state import SamplerState
from jaxllm.speculation.token_tree import TokenTree


class TokenChooser(Protocol):
    """Draws tokens of a vocabulary of V."""

    def prepare(self, trees: Iterable[int] = ()) -> None:
        """Prepares to sample the next token, and the tokens of trees of these sizes."""
        ...

    def next_token(self, logits: Any, sampler: SamplerState) -> tuple[Any, SamplerState]:
        """The token `[1]` after logits `[1, V]`, and the next state (see `jaxllm.sampling.sample`)."""
        ...

    def of_tree(self, tree: TokenTree, logits: Any, sampler: SamplerState) -> Any:
        """The tokens `[M]` after each node (see `jaxllm.speculation.tree.choices`)."""
        ...


def bucket_chooser(vocab_size: int) -> TokenChooser:
    """Returns a chooser by compiled buckets that are not cached on disk."""
    # Here, because LiteRT's programs run without JAX.
    from jaxllm.export.programs.bucket_chooser import BucketChooser

    return BucketChooser(vocab_size)
