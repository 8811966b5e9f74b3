"""Options of growing token trees (LLMCad, sections 3.2 and 3.3), which import no JAX."""

import dataclasses
from typing import Literal

# Minimum probability of a token that opens a branch (section 3.2).
BRANCH_CONFIDENCE = 0.3

# The order in which branches grow: the most confident first; the one furthest below its fair share of
# tokens first, as published; or in the order of the nodes.
Pacer = Literal["confidence", "fair", "order"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Growth:
    """Options of growing trees.

    Attributes:
      tips: number of branches that the draft extends at a time.
      branches: maximum number of children of a node.
      threshold: see `jaxllm.speculation.tree.grow`.
      pacer: see `jaxllm.speculation.tree.next_tips`.
    """

    tips: int
    branches: int
    threshold: float = BRANCH_CONFIDENCE
    pacer: Pacer = "confidence"


# Initial confidence threshold alpha (section 3.3).
START = 0.01
# Bounds of alpha: below `LEAST` no tree would be verified early, above `MOST` nothing would be drafted.
LEAST, MOST = 1e-6, 0.9
