"""What proposes token trees: the registry of drafters, and what each must do.

A new one is a class with `Drafter`'s methods and a line in `DRAFTERS`.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from jaxllm.errors import ConfigError
from jaxllm.speculative.tree import TokenTree
from serving.engine import Engine
from serving.progress import Progress
from serving.speculative.level_drafter import level_drafter
from serving.speculative.model_drafter import model_drafter
from serving.speculative.ngram_drafter import ngram_drafter
from serving.speculative.options import SpeculationOptions


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


Making = Callable[[Engine, SpeculationOptions, Progress | None], Drafter]

DRAFTERS: dict[str, Making] = {
    "model": model_drafter,
    "ngram": ngram_drafter,
    "level": level_drafter,
}


def make_drafter(target: Engine, options: SpeculationOptions, progress: Progress | None = None) -> Drafter:
    """The drafter that options name, for a target.

    Raises:
      ConfigError: there is none of the name, or it does not fit the target.
    """
    if options.drafter not in DRAFTERS:
        raise ConfigError(f"there is no drafter {options.drafter!r}; there are {', '.join(DRAFTERS)}")
    return DRAFTERS[options.drafter](target, options, progress)
