"""Says how a draft grows token trees; imports no JAX (see `pacer`, which grows them)."""

import dataclasses
from typing import Literal

# A token at least this likely opens a branch of its own (section 3.2).
BRANCH_CONFIDENCE = 0.3

# The order in which branches grow: the most confident first; the one that lacks most tokens of its fair share
# first, as published; or in the order of the nodes.
Pacer = Literal["confidence", "fair", "order"]
PACERS: tuple[Pacer, ...] = ("confidence", "fair", "order")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Growth:
    """How a draft grows trees.

    Attributes:
      tips: branches that the draft runs on at a time.
      branches: most children of a node.
      threshold: see `jaxllm.speculative.pacer.grow`.
      pacer: see `jaxllm.speculative.pacer.next_tips`.
    """

    tips: int
    branches: int
    threshold: float = BRANCH_CONFIDENCE
    pacer: Pacer = "confidence"
