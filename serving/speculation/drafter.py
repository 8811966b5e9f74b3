"""What each drafter must do."""

from collections.abc import Sequence
from typing import Protocol

from jaxllm.speculative.tree import TokenTree
from serving.host.progress import Progress


class Drafter(Protocol):
    """Proposes what a sequence goes on with, as a token tree on the host.

    Attributes:
      step_s: what a `step` takes.
      steps: how often the drafter was run, in all.
    """

    step_s: float
    steps: int

    def warm_up(self, progress: Progress | None = None, *, tokens: int | None = None) -> None:
        """Compiles all that drafting takes, or what it takes in a request of so many tokens."""
        ...

    def grow(self, sequence: Sequence[int], root: int, alpha: float, most: int) -> TokenTree:
        """A tree behind `sequence` whose root is the token `root` that follows it, grown until no branch is
        more confident than `alpha` or there are `most` nodes. A root alone where it has nothing to say."""
        ...

    def step(self) -> bool:
        """Grows the last tree a little more, as if all of it were right; tells whether it could."""
        ...

    def follow(self, path: Sequence[int], token: int) -> None:
        """The target has accepted the nodes `path` of the last tree, and said `token` behind them."""
        ...
