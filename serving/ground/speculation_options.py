"""Options of speculation."""

import dataclasses
from pathlib import Path
from typing import Any, Literal, Self

from jaxllm.errors import ConfigError
from jaxllm.options import check_options, option
from jaxllm.speculation.growth import BRANCH_CONFIDENCE, LEAST, MOST, START, Growth, Pacer

_MOST_NODES = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeShape:
    """Sizes of token trees, for which buckets are compiled.

    LLMCad opens a branch for tokens with a probability over 0.3 (see `published`). If a verification waits
    for storage, more nodes cost next to nothing, so trees are wider here; the measured cost decides how
    many are verified.

    Attributes:
      nodes: sizes of verified trees, ascending; see `trimmed`.
      room: maximum number of nodes of the drafter's trees, which may be larger: it drafts on during a
        verification.
      tips: number of branches that the drafter extends at a time.
      branches: maximum number of children of a node; 1 makes the tree a line.
      threshold: minimum probability of a token that opens a branch.
      pacer: the order in which branches grow (see `jaxllm.speculation.tree`).
      trimmed: whether each verification uses the most profitable size, without the least confident nodes;
        else the whole tree, up to the largest size.
    """

    nodes: tuple[int, ...] = option((8, 16, 32, 64), low=2, entries=1, ascending=True)
    room: int = option(128, low=2, high=_MOST_NODES)
    tips: int = option(8, low=1)
    branches: int = option(6, low=1)
    threshold: float = option(0.02, above=0, high=1)
    pacer: Pacer = "confidence"
    trimmed: bool = True

    def __post_init__(self) -> None:
        check_options(self)
        largest = max(self.nodes[-1], self.tips, self.branches)
        if self.room < largest:
            raise ConfigError(
                f"room must be at least {largest}, the largest of nodes, tips and branches, got {self.room}"
            )

    @classmethod
    def published(cls) -> Self:
        """LLMCad's trees (section 3.2): one branch at a time gets the next token, by equations 1 and 2; each
        token with a probability over 0.3 opens a branch, so that a node has at most three children; the whole
        tree is verified."""
        return cls(tips=1, branches=3, threshold=BRANCH_CONFIDENCE, pacer="fair", trimmed=False)

    def within(self, context_tokens: int) -> Self:
        """Trees of at most half of a short context."""
        most = max(context_tokens // 2, self.nodes[0])
        nodes = tuple(size for size in self.nodes if size <= most)
        room = min(self.room, most)
        sizes = {"tips": min(self.tips, room), "branches": min(self.branches, room)}
        return dataclasses.replace(self, nodes=nodes, room=room, **sizes)

    @property
    def growth(self) -> Growth:
        """The shape of trees that the drafter grows."""
        return Growth(tips=self.tips, branches=self.branches, threshold=self.threshold, pacer=self.pacer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """Options of drafting (LLMCad).

    Attributes:
      drafter: a name of `jaxllm.serving.speculation.drafters.DRAFTERS`.
      model: model of the drafter "model": its path or name.
      level: level of the target for the drafters "level" and "nested", in percent; 0 for the whole model's
        high planes.
      trees: sizes of token trees.
      alpha: initial confidence threshold below which drafting stops (section 3.3).
      fallback: when drafting stops: "measured" if another run of the drafter costs as much as its tokens
        are expected to save (see `jaxllm.speculation.token_tree`); "learned" by an alpha that follows
        accepted drafts (section 3.3); "fixed" by a constant alpha.
      pipelined: whether drafting continues while the target's weights are read (section 3.4).
      pausing: whether drafting pauses while it gives no speedup, and is retried later.
      calibrated: whether confidences are calibrated by the target's acceptance (see
        `jaxllm.speculation.tree`); else they are the drafter's probabilities.
      optional: whether a model without support or memory for this drafter is opened without drafts.
      lookup: whether prompt lookup is added to the drafter's trees, or replaces them if trees are lines and
        it is expected to give more tokens.
    """

    drafter: str = "model"
    model: str | Path | None = None
    level: int = option(0, low=0, high=100)
    trees: TreeShape = dataclasses.field(default_factory=TreeShape)
    alpha: float = option(START, low=LEAST, high=MOST)
    fallback: Literal["measured", "learned", "fixed"] = "measured"
    pipelined: bool = True
    pausing: bool = True
    calibrated: bool = True
    optional: bool = False
    lookup: bool = True

    def within(self, context_tokens: int) -> Self:
        """The options with trees for a context (see `TreeShape.within`)."""
        return dataclasses.replace(self, trees=self.trees.within(context_tokens))

    @classmethod
    def by_itself(cls) -> Self:
        """Self-drafting with the high planes of nested weights, while that is faster."""
        return cls(drafter="nested", optional=True)

    @classmethod
    def published(cls, **changes: Any) -> Self:
        """LLMCad as published: its trees, the threshold of equation 3 from 0.01 on, drafting while weights
        are read, and nothing beyond the paper; `changes` override fields."""
        asked = {"trees": TreeShape.published(), "fallback": "learned"}
        without = dict.fromkeys(("pausing", "calibrated", "lookup"), False)
        return cls(**{**asked, **without, **changes})

    def __post_init__(self) -> None:
        check_options(self)
        if (self.drafter == "model") != (self.model is not None):
            raise ConfigError("the drafter 'model', and no other, needs a model to draft with")
        if self.drafter != "nested" and (self.drafter == "level") != bool(self.level):
            raise ConfigError(
                "the drafter 'level' needs a level to draft with, and no other but 'nested' takes one"
            )
