"""Options of contexts: where they are stored, and how much memory and storage they may take."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from jaxllm.contexts.eviction import find_policy
from jaxllm.errors import BudgetExceeded, ConfigError
from jaxllm.options import check_options, option
from jaxllm.serving.contexts.record import Record
from jaxllm.serving.host.direct_io import Storage

Writing = Literal["background", "ahead", "at-eviction", "never"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextOptions:
    """Options of contexts. The engine's options choose the codec of their chunks (`EngineOptions.kv_codec`).

    Attributes:
      folder: of the store, made if missing; for one process at a time.
      budget_bytes: most bytes of all chunks in memory; caches of contexts that run come on top.
      ratio: bytes of a context's chunks, scales included, relative to the same tokens at 8 bits with a low
        and a scale per channel of 16 tokens; above 0 and at most 1. The codec and the length of chunks decide
        what it means: "channel" at 8, 4 and 2 bits takes 1, 0.6 and 0.4 in chunks of 16 tokens, 0.9, 0.5 and
        0.3 in those of 32, 0.85, 0.45 and 0.25 in those of 64. Less than 2 bits take is refused; where the
        ratio is just that of a width, all chunks have it. Ignored by a codec with one width.
      newest_chunks: so many of a context's last chunks count as its densest: too few tokens have attended to
        them to tell.
      policy: what leaves memory first, by its name in `eviction.POLICIES`.
      writing: when chunks are written to storage. "background": after a call, in a thread of its own; its
        tokens are written before its answer ends, but reach the device with the chunks, so that a kill loses
        nothing and a power cut the last calls. "ahead": before the answer ends, so that a power cut loses
        nothing either. The others are for comparisons: "at-eviction": when chunks leave memory; "never":
        evicted chunks are computed again.
      recompute: compute some of the missing chunks while others are read, where that is faster.
      overlap_prompt: compute the first tokens of a new prompt while chunks are read, layer by layer, where
        all weights are in memory and the prompt is prefilled in floats.
      pinned_share: share of the budget for pinned contexts of all apps together; the rest is for the running
        context.
      app_pinned_share: share of the budget for pinned contexts of one app.
      contexts_per_app: most contexts that an app may own; 0 for no limit.
      quota_bytes: most bytes of all files of the store; 0 for no limit. While a call is stored, old and new
        files are there together.
      app_quota_bytes: most bytes of each app's files; 0 for no limit.
      share_beginnings: chunks that a new context has in common with another one of its app, because both
        begin with the same tokens, are in memory and on storage once (there not with `encryption`, nor on
        file systems without hard links). With the codec "raw" they are computed once, too.
      share_across_apps: contexts of other apps count, too. How long an answer takes tells an app then what
        others have said.
      storage: how chunks are read.
      encryption: folder of keys, one of each app, by which tokens and chunks are encrypted on storage; made
        if missing, and never in `folder`. Contexts that were stored before are encrypted when they change.
        None for no encryption. Takes `jaxllm[serve]`.
    """

    folder: str | Path
    budget_bytes: int = option(256 << 20, low=1)
    ratio: float = option(0.6, above=0, high=1)
    newest_chunks: int = option(1, low=0)
    policy: str = "lctru"
    writing: Writing = "background"
    recompute: bool = True
    overlap_prompt: bool = True
    pinned_share: float = 0.75
    app_pinned_share: float = 0.5
    contexts_per_app: int = option(0, low=0)
    quota_bytes: int = option(0, low=0)
    app_quota_bytes: int = option(0, low=0)
    share_beginnings: bool = True
    share_across_apps: bool = False
    storage: Storage = dataclasses.field(default_factory=Storage)
    encryption: str | Path | None = None

    def __post_init__(self) -> None:
        check_options(self)
        if not 0 <= self.app_pinned_share <= self.pinned_share <= 1:
            raise ConfigError(
                "app_pinned_share and pinned_share must be between 0 and 1, the first not above the second, "
                f"got {self.app_pinned_share!r:.80} and {self.pinned_share!r:.80}"
            )
        if self.share_across_apps and not self.share_beginnings:
            raise ConfigError("share_across_apps takes share_beginnings; leave out one of the two")
        # Checks the name.
        find_policy(self.policy)


def require_share(
    record: Record,
    size_bytes: int,
    others: Iterable[Record],
    options: ContextOptions,
    bytes_of: Callable[[Record], int],
) -> None:
    """Checks that a pinned context may take so much memory.

    Args:
      record: of the context.
      size_bytes: of its chunks.
      others: all contexts; the pinned ones among them count, too.
      options: have the shares.
      bytes_of: gives the most bytes of a context's chunks in memory.

    Raises:
      BudgetExceeded: the app's pinned contexts, or those of all apps, would take more than their share.
    """
    pinned = [each for each in others if each.pinned and each.name != record.name]
    own = [each for each in pinned if each.app == record.app]
    for share, those, whose in (
        ("app_pinned_share", own, f"pinned contexts of {record.app}"),
        ("pinned_share", pinned, "pinned contexts of all apps"),
    ):
        most = int(getattr(options, share) * options.budget_bytes)
        if sum(map(bytes_of, those)) + size_bytes > most:
            raise BudgetExceeded(
                f"{whose} may take {most:,} bytes of memory, and {size_bytes:,} more do not fit: unpin some, "
                f"ask for fewer tokens, or raise ContextOptions.{share}"
            )
