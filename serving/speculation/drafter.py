"""The protocol of drafters, and prompt lookup, which drafts without a model.

Lookup proposes the tokens that followed earlier occurrences of the last few tokens, as in llama.cpp and
transformers, but as a tree: each different continuation is a branch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.serving.ground.speculation_options import TreeShape
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.speculation.costs import DraftTimes
from jaxllm.speculation.token_tree import Growing, TokenTree, grown, root_alone, united

if TYPE_CHECKING:
    from jaxllm.bundle import Bundle
    from jaxllm.serving.ground.options import EngineOptions
    from jaxllm.serving.runners.level_runner import LevelRunner
    from jaxllm.serving.runners.resident import ResidentRunner
    from jaxllm.text.tokenizer import Tokenizer


class Target(Protocol):
    """The open target model (`jaxllm.serving.opening.loading.LoadedModel`).

    Attributes:
      bundle: the open model file.
      options: resolved options.
      tokenizer: tokenizer of the model.
      streamed: streamed weights; None if all are resident.
    """

    bundle: "Bundle"
    options: "EngineOptions"
    tokenizer: "Tokenizer"
    streamed: Any

    def runner(self, level: int) -> "LevelRunner":
        """The runner of a level."""
        ...

    def resident_runner(self, level: int) -> "ResidentRunner":
        """The runner of a level; raises ConfigError unless all weights are in memory."""
        ...

    def beside(self, bundle: "Bundle", options: "EngineOptions", progress: Progress | None) -> "Target":
        """Opens another model, which drafts."""
        ...


class Drafter(Protocol):
    """Proposes continuations of a sequence, as a token tree on the host. A class that inherits from it only
    defines what differs from a drafter of negligible memory, without buckets and steps.

    Attributes:
      times: measured times.
      most_bytes: maximum size of the weights and caches that can be released while it does not draft; 0 if
        negligible.
    """

    times: DraftTimes
    most_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """Current size of its weights and caches."""
        return 0

    def release(self) -> None:
        """Releases its weights and caches; the next tree allocates them again."""

    def warm_up(self, progress: Progress | None = None, *, tokens: int | None = None) -> None:
        """Compiles all buckets for drafting, or those for a request of so many tokens."""

    def read(self, source: tuple[int, ...]) -> None:
        """Sets the source of the next sequences; empty for decoder-only models, whose prompt is in them."""

    def grow(self, sequence: Sequence[int], root: int, growing: Growing, cache: Any) -> tuple[TokenTree, Any]:
        """Grows a tree after `sequence`, whose root is the next token `root`; only the root if it proposes
        nothing.

        Args:
          sequence: tokens before the root.
          root: the next token.
          growing: stop rule.
          cache: the target's cache of `sequence`; donated. A drafter may write the rows after the sequence,
            which verification overwrites.

        Returns:
          The tree, and the cache.
        """
        ...

    def step(self) -> bool:
        """Grows the last tree by one step, as if all of it were accepted; returns whether it could."""
        return False

    def follow(self, path: Sequence[int], token: int) -> None:
        """Follows the accepted nodes `path` of the last tree, and the target's next `token`."""


def require_same_kind(
    draft: Path | str, cfg: ModelConfig, target: Path | str, target_cfg: ModelConfig
) -> None:
    """Raises ConfigError unless both or none of a draft and its target, by their paths, read a source."""
    kinds = {True: "an encoder-decoder", False: "decoder-only"}
    of_draft, of_target = cfg.encoder is not None, target_cfg.encoder is not None
    if of_draft != of_target:
        raise ConfigError(
            f"{draft} ({cfg.model_type}) is {kinds[of_draft]}, and {target} "
            f"({target_cfg.model_type}) is {kinds[of_target]}: they do not read the same prompts; use a "
            f"draft that is {kinds[of_target]}, or draft with ngram"
        )


# Lengths of n-grams to look up, longest first.
_LENGTHS = (5, 4, 3, 2)
# Assumed share of accepted tokens of each length before the first verification.
_FIRST_RATE = 0.6
_NEW_SHARE = 0.2
# Stands between a source and its answer; no token has this id.
_END = -1


class NgramDrafter(Drafter):
    """Grows trees of earlier continuations in the text (see `Drafter`)."""

    def __init__(self, shape: TreeShape) -> None:
        self.times, self._shape = DraftTimes(), shape
        self._rates: dict[int, float] = dict.fromkeys(_LENGTHS, _FIRST_RATE)
        self._length, self._tree = 0, root_alone(0, shape.room)
        self._source: tuple[int, ...] = ()

    def read(self, source: tuple[int, ...]) -> None:
        """See `Drafter`; the source is looked up, too."""
        self._source = (*source, _END) if source else ()

    def grow(self, sequence: Sequence[int], root: int, growing: Growing, cache: Any) -> tuple[TokenTree, Any]:
        """See `Drafter`."""
        text = np.array([*self._source, *sequence, root], np.int64)
        tree, most = root_alone(root, self._shape.room), min(growing.most, self._shape.room)
        self._length = next((each for each in _LENGTHS if _ends(text, each)[:1]), 0)
        self._tree = tree
        self.times.steps += 1
        if not self._length:
            return tree, cache
        rate, children = self._rates[self._length], dict[tuple[int, int], int]()
        tokens, parents, confidences = list[int](), list[int](), list[float]()
        # The latest first, as many as a node may have children.
        for end in _ends(text, self._length)[: self._shape.branches]:
            continuation = text[end : end + self._shape.room].tolist()
            if _END in continuation:
                del continuation[continuation.index(_END) :]
            node, confidence = 0, 1.0
            ends = (at + 1 for at, each in enumerate(continuation) if each in growing.stop_ids)
            for token in continuation[: min(growing.depth, next(ends, growing.depth))]:
                confidence *= rate
                if confidence < growing.alpha:
                    break
                if (child := children.get((node, token))) is None:
                    if len(tokens) + 1 >= most:
                        break
                    tokens.append(token)
                    parents.append(node)
                    confidences.append(confidence)
                    child = children[node, token] = len(tokens)
                node = child
        self._tree = grown(tree, tokens, parents, confidences)
        return self._tree, cache

    def follow(self, path: Sequence[int], token: int) -> None:
        """See `Drafter`."""
        depth = int(np.max(self._tree.depths))
        if self._length and depth:
            right, rate = len(path) - 1, self._rates[self._length]
            # Tokens after the first wrong one were not verified.
            for each in [1.0] * right + [0.0] * (right < depth):
                rate += _NEW_SHARE * (each - rate)
            # Clipped, so that every length is tried again: texts change.
            self._rates[self._length] = float(np.clip(rate, 0.05, 0.95))


def _ends(text: np.ndarray, length: int) -> list[int]:
    """The ends of earlier occurrences of the last `length` tokens, the latest first."""
    if len(text) <= length:
        return []
    windows = np.lib.stride_tricks.sliding_window_view(text[:-1], length)
    return (np.flatnonzero((windows == text[-length:]).all(axis=1))[::-1] + length).tolist()


class LookupDrafter:
    """Adds prompt lookup to the trees of another drafter (see `Drafter`).

    Small models copy badly, and copies (names, quotes, code, a text to shorten) need no model. Both propose
    trees with the same root; their union is one tree, in which a token that both propose is one node. If
    trees are lines, the line that is expected to give more tokens is used.
    """

    def __init__(self, drafter: Drafter, shape: TreeShape) -> None:
        self._drafter, self._ngrams, self._lines = drafter, NgramDrafter(shape), shape.branches == 1
        self.times, self.most_bytes = drafter.times, drafter.most_bytes
        self.release, self.warm_up, self.step = drafter.release, drafter.warm_up, drafter.step
        # The last tree, the number of the drafter's nodes in it, and the lookup's index of each node, or -1.
        self._tree: TokenTree | None = None
        self._known = 1
        self._places = np.zeros(1, np.int64)

    @property
    def size_bytes(self) -> int:
        """See `Drafter`."""
        return self._drafter.size_bytes

    def read(self, source: tuple[int, ...]) -> None:
        """See `Drafter`."""
        self._drafter.read(source)
        self._ngrams.read(source)

    def grow(self, sequence: Sequence[int], root: int, growing: Growing, cache: Any) -> tuple[TokenTree, Any]:
        """See `Drafter`; the union may have twice as many nodes as are enough."""
        tree, cache = self._drafter.grow(sequence, root, growing, cache)
        other, cache = self._ngrams.grow(sequence, root, growing, cache)
        self._known = int(tree.count)
        if not self._lines:
            self._tree, self._places = united(tree, other)
        elif _promised(other) > _promised(tree):
            self._tree, self._known, self._places = other, 1, np.arange(int(other.count))
        else:
            self._tree, self._places = tree, np.full(int(tree.count), -1)
        return self._tree, cache

    def follow(self, path: Sequence[int], token: int) -> None:
        """See `Drafter`."""
        assert self._tree is not None
        nodes = np.asarray(path)
        found = self._places[nodes]
        if (found >= 0).any():
            self._ngrams.follow(found[found >= 0].tolist(), token)
        # For the other drafter, the first accepted node that only the lookup had is the target's token.
        known = nodes[nodes < self._known]
        if len(known) < len(nodes):
            token = int(np.asarray(self._tree.tokens)[nodes[len(known)]])
        self._drafter.follow(known.tolist(), token)


def _promised(tree: TokenTree) -> float:
    """The expected number of accepted tokens of a line."""
    return float(np.asarray(tree.confidences)[: int(tree.count)].sum())
