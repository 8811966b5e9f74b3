"""What a service may be told about its contexts: where they are kept, and how much they may take."""

import dataclasses
from pathlib import Path
from typing import Literal, get_args

from jaxllm.errors import ConfigError
from jaxllm.kv.tolerance import RATIOS
from serving.contexts.eviction import find_policy
from serving.host.direct_io import Storage

Writing = Literal["ahead", "at-eviction", "never"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextOptions:
    """How contexts are kept. How their chunks are stored is the engine's business (`EngineOptions.kv_codec`).

    Attributes:
      folder: of the store, made if missing; for one process at a time.
      budget_bytes: of all chunks in memory together; the cache of the context that runs comes on top.
      ratio: bytes of a context's chunks relative to 8 bits, between 0.25 and 1; a codec that has no widths to
        choose from takes what it takes.
      newest_chunks: so many of a context's last chunks stay at the highest width, as far as the ratio allows.
      policy: what leaves memory first, by its name in `eviction.POLICIES`.
      writing: when chunks are written to storage. "ahead": when a call ends, so that they may leave memory
        at any time. The others are what systems without that do, for comparisons: "at-eviction", when they
        leave; "never": what left is computed again. Tokens are written when a call ends in any case.
      recompute: compute some of the missing chunks beside the reading of others, where that is faster.
      pinned_share: of the budget, that pinned contexts of all apps together may take; the rest is for whoever
        runs.
      app_pinned_share: of the budget, that those of one app may take.
      contexts_per_app: most contexts that an app may own; 0 for no limit.
      quota_bytes: of all files of the store together; 0 for no limit. While a call is stored, what takes the
        place of something else is there beside it.
      app_quota_bytes: of each app's.
      storage: how chunks are read.
    """

    folder: str | Path
    budget_bytes: int = 256 << 20
    ratio: float = 0.5
    newest_chunks: int = 1
    policy: str = "lctru"
    writing: Writing = "ahead"
    recompute: bool = True
    pinned_share: float = 0.75
    app_pinned_share: float = 0.5
    contexts_per_app: int = 0
    quota_bytes: int = 0
    app_quota_bytes: int = 0
    storage: Storage = dataclasses.field(default_factory=Storage)

    def __post_init__(self) -> None:
        if self.budget_bytes < 1:
            raise ConfigError(f"budget_bytes must be at least 1, got {self.budget_bytes!r:.80}")
        if not RATIOS[2] <= self.ratio <= 1:
            raise ConfigError(f"ratio must be between {RATIOS[2]} and 1, got {self.ratio!r:.80}")
        if not 0 <= self.app_pinned_share <= self.pinned_share <= 1:
            raise ConfigError(
                "app_pinned_share and pinned_share must be between 0 and 1, the first not above the second, "
                f"got {self.app_pinned_share!r:.80} and {self.pinned_share!r:.80}"
            )
        for name in ("newest_chunks", "contexts_per_app", "quota_bytes", "app_quota_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name} must be a whole number and not negative, got {value!r:.80}")
        if self.writing not in get_args(Writing):
            raise ConfigError(f"writing must be among {get_args(Writing)}, got {self.writing!r:.80}")
        # Checks the name.
        find_policy(self.policy)
