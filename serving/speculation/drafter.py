"""The protocol of drafters."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.speculation.costs import DraftTimes
from jaxllm.speculation.token_tree import Growing, TokenTree

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
