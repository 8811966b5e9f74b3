"""Options of contexts: their store, and their limits of memory and storage."""

import dataclasses
from pathlib import Path
from typing import Literal

from jaxllm.contexts.eviction import find_policy
from jaxllm.errors import ConfigError
from jaxllm.options import check_options, option
from jaxllm.serving.host.storage import Storage

Writing = Literal["background", "ahead", "at-eviction", "never"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextOptions:
    """Options of contexts. The engine's options choose the codec of their chunks (`EngineOptions.kv_codec`).

    Attributes:
      folder: folder of the store, created if missing; for one process at a time.
      budget_bytes: memory limit of all chunks; caches of running contexts are not included.
      ratio: bytes of a context's chunks, scales included, relative to the same tokens at 8 bits with a low
        and a scale per channel of 16 tokens; above 0 and at most 1. Its meaning depends on the codec and
        the chunk length: "channel" at 8, 4 and 2 bits has 1, 0.6 and 0.4 in chunks of 16 tokens, 0.9, 0.5
        and 0.3 in those of 32, 0.85, 0.45 and 0.25 in those of 64. Less than that of 2 bits is refused; if
        the ratio is exactly that of a width, all chunks have it. Ignored by a codec with one width.
      newest_chunks: number of a context's last chunks that count as its densest, because too few tokens
        have attended to them yet.
      policy: eviction policy, by its name in `eviction.POLICIES`.
      writing: time of writing chunks to storage. "background": after a call, in another thread; its tokens
        are written before its answer ends, but reach the device with the chunks, so that a kill loses
        nothing and a power cut the last calls. "ahead": before the answer ends, so that a power cut loses
        nothing either. The others are for comparisons: "at-eviction": when chunks are evicted; "never":
        evicted chunks are recomputed.
      recompute: whether to recompute some of the missing chunks while others are read, if that is faster.
      overlap_prompt: whether to compute the first tokens of a new prompt while chunks are read, layer by
        layer; requires resident weights and float prefill.
      pinned_share: share of the budget for pinned contexts of all apps; the rest is for the running context.
      app_pinned_share: share of the budget for pinned contexts of one app.
      contexts_per_app: maximum number of contexts of an app; 0 for no limit.
      quota_bytes: size limit of all files of the store; 0 for no limit. While a call is stored, old and new
        files exist together.
      app_quota_bytes: size limit of each app's files; 0 for no limit.
      share_beginnings: whether chunks of a common prefix with another context of the app are in memory and
        on storage once (on storage not with `encryption`, nor on file systems without hard links). With the
        codec "raw" they are also computed once.
      share_across_apps: whether to share with contexts of other apps. The time of an answer then reveals to
        an app what others have said.
      storage: options of storage reads.
      encryption: folder of keys, one per app, that encrypt stored tokens and chunks; created if missing, and
        never in `folder`. Earlier contexts are encrypted when they change. None for no encryption. Requires
        `jaxllm[serve]`.
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
            raise ConfigError("share_across_apps requires share_beginnings; leave out one of the two")
        # Validates the name.
        find_policy(self.policy)
