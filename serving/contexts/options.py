"""Options of contexts: where they are stored, and how much memory and storage they may take."""

import dataclasses
from pathlib import Path
from typing import Literal, get_args

from jaxllm.errors import ConfigError
from jaxllm.kv.eviction import find_policy
from serving.host.direct_io import Storage

IdleWhen = Literal["on-mains", "always", "never"]
Writing = Literal["background", "ahead", "at-eviction", "never"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextOptions:
    """Options of contexts. The engine's options choose the codec of their chunks (`EngineOptions.kv_codec`).

    Attributes:
      folder: of the store, made if missing; for one process at a time.
      budget_bytes: most bytes of all chunks in memory; caches of contexts that run come on top.
      ratio: bytes of a context's chunks, scales included, relative to the same tokens at 8 bits with a low
        and a scale per channel of 16 tokens; above 0 and at most 1. The codec and the length of chunks decide
        how low it may be: 0.4 for "channel" in chunks of 16 tokens, where 4 bits take 0.6, and 0.25 in
        chunks of 64. Ignored by a codec with one width.
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
      idle_work: when `Contexts.idle` works, which a service calls while nothing runs: "on-mains" (not while
        a battery is emptied), "always", or "never". It prefetches the context that is likely called next, and
        computes chunks again that should have more bits by now (see `serving.contexts.idle`).
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
    budget_bytes: int = 256 << 20
    ratio: float = 0.6
    newest_chunks: int = 1
    policy: str = "lctru"
    writing: Writing = "background"
    recompute: bool = True
    overlap_prompt: bool = True
    idle_work: IdleWhen = "on-mains"
    pinned_share: float = 0.75
    app_pinned_share: float = 0.5
    contexts_per_app: int = 0
    quota_bytes: int = 0
    app_quota_bytes: int = 0
    share_beginnings: bool = True
    share_across_apps: bool = False
    storage: Storage = dataclasses.field(default_factory=Storage)
    encryption: str | Path | None = None

    def __post_init__(self) -> None:
        if type(self.budget_bytes) is not int or self.budget_bytes < 1:
            raise ConfigError(f"budget_bytes must be a whole number from 1 up, got {self.budget_bytes!r:.80}")
        if not 0 < self.ratio <= 1:
            raise ConfigError(f"ratio must be above 0 and at most 1, got {self.ratio!r:.80}")
        if not 0 <= self.app_pinned_share <= self.pinned_share <= 1:
            raise ConfigError(
                "app_pinned_share and pinned_share must be between 0 and 1, the first not above the second, "
                f"got {self.app_pinned_share!r:.80} and {self.pinned_share!r:.80}"
            )
        for name in ("newest_chunks", "contexts_per_app", "quota_bytes", "app_quota_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name} must be a whole number and not negative, got {value!r:.80}")
        if self.share_across_apps and not self.share_beginnings:
            raise ConfigError("share_across_apps takes share_beginnings; leave out one of the two")
        if self.writing not in get_args(Writing):
            raise ConfigError(f"writing must be among {get_args(Writing)}, got {self.writing!r:.80}")
        if self.idle_work not in get_args(IdleWhen):
            raise ConfigError(f"idle_work must be among {get_args(IdleWhen)}, got {self.idle_work!r:.80}")
        # Checks the name.
        find_policy(self.policy)
