"""Decides by measured times how far a tree grows, and how many of its nodes are verified.

A pass drafts and verifies; it takes time, and brings tokens. Over many passes the most tokens per second come
from spending time on whatever brings more tokens than passes bring on average in that time: at `rate` tokens
per second, a second costs `rate` tokens. The rate follows from the passes that are chosen by it, and settles
at the highest one that can be reached.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

# Before anything is measured, a run of the drafter has to bring so many tokens.
_FIRST_RUN_TOKENS = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Times of the parts of a pass, in seconds.

    Attributes:
      run_s: of a run of the drafter, without its branches.
      branch_s: of each branch that a run extends.
      verify_s: of a verification, by the size of its tree.
      free_s: drafting for so long delays nothing, because storage reads meanwhile.
    """

    run_s: float
    branch_s: float
    verify_s: Mapping[int, float]
    free_s: float = 0.0

    @property
    def node_s(self) -> float:
        """Time that a further node takes to verify."""
        least, most = min(self.verify_s), max(self.verify_s)
        return max(0.0, self.verify_s[most] - self.verify_s[least]) / max(1, most - least)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Worth:
    """What a drafter's work has to bring, in expected tokens.

    Attributes:
      run: by all branches that a run extends, beyond what each has to bring.
      branch: by each of them, as its confidence.
      node: by a node that is drafted at no cost, as its confidence.
      free_runs: so many runs may bring less.
    """

    run: float
    branch: float
    node: float
    free_runs: int


def worth(times: PassTimes, rate: float, *, tips: int, yields: float) -> Worth:
    """What a drafter's work has to bring.

    Args:
      times: of the parts of a pass.
      rate: tokens per second that passes bring; 0 before the first.
      tips: most branches that a run extends.
      yields: sum of the confidences of a branch's new nodes, as a share of its own.
    """
    if rate <= 0:
        return Worth(run=_FIRST_RUN_TOKENS, branch=0.0, node=0.0, free_runs=0)
    node = rate * times.node_s
    # Each branch brings a node at least, which is verified.
    branch = (rate * times.branch_s + node) / yields
    whole_s = times.run_s + tips * times.branch_s
    free = int(times.free_s / whole_s) if whole_s > 0 else 0
    return Worth(run=rate * times.run_s / yields, branch=branch, node=node, free_runs=free)


def verified_nodes(confidences: Sequence[float] | np.ndarray, times: PassTimes, rate: float) -> int:
    """The size of the tree to verify that brings most beyond what its time costs.

    Args:
      confidences: of the nodes, falling; their sum is the expected number of tokens, of which the root's
        stands for the target's own.
      times: of the parts of a pass.
      rate: tokens per second that passes bring; 0 before the first: the least size that has room for all.

    Returns:
      A size of `times.verify_s`, at most the least that has room for all nodes.
    """
    promised, count = np.cumsum(confidences), len(confidences)
    sizes = sorted(times.verify_s)
    room = next((size for size in sizes if size >= count), sizes[-1])
    return (
        max(
            (size for size in sizes if size <= room),
            key=lambda size: promised[min(count, size) - 1] - rate * times.verify_s[size],
        )
        if rate > 0
        else room
    )
