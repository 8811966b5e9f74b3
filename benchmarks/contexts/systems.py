"""Describes ours and the baselines as options of one context manager."""

import dataclasses
from pathlib import Path

from serving.contexts.options import ContextOptions, Writing
from serving.host.direct_io import Storage

OURS = "jaxllm"


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
    """A system that keeps contexts.

    Attributes:
      name: as rows have it.
      codec: of `EngineOptions.kv_codec`.
      ratio, policy, writing, recompute, overlap_prompt: see `ContextOptions`.
      attend_coded: see `EngineOptions`.
    """

    name: str
    codec: str = "channel"
    ratio: float = 0.5
    policy: str = "lctru"
    writing: Writing = "ahead"
    recompute: bool = True
    overlap_prompt: bool = False
    attend_coded: bool = False

    def options(self, folder: Path, budget_bytes: int, storage: Storage) -> ContextOptions:
        """Options of the manager in a folder, with a budget, on storage."""
        return ContextOptions(
            folder=folder,
            budget_bytes=budget_bytes,
            ratio=self.ratio,
            policy=self.policy,
            writing=self.writing,
            recompute=self.recompute,
            overlap_prompt=self.overlap_prompt,
            # No baseline shares anything: a ratio shows the switch alone.
            share_beginnings=False,
            storage=storage,
        )


_OURS = System(name=OURS, overlap_prompt=True)
SYSTEMS = (
    _OURS,
    System(name="LMK", codec="raw", policy="whole-contexts", writing="never", recompute=False),
    System(name="Swapping", codec="raw", policy="whole-contexts", writing="at-eviction", recompute=False),
    System(name="VLLM-S", codec="raw", policy="lru", writing="at-eviction", recompute=False),
    System(name="VLLM-SQ", ratio=1.0, policy="lru", writing="at-eviction", recompute=False),
)
# Without each of the three techniques in turn, without computing prompts while chunks are read, and with
# chunks that are attended to where they lie.
ABLATIONS = (
    dataclasses.replace(_OURS, name=f"{OURS}-no-compression", ratio=1.0),
    dataclasses.replace(_OURS, name=f"{OURS}-no-pipeline", recompute=False),
    dataclasses.replace(_OURS, name=f"{OURS}-no-lifecycle", policy="lru", writing="at-eviction"),
    dataclasses.replace(_OURS, name=f"{OURS}-no-overlap", overlap_prompt=False),
    dataclasses.replace(_OURS, name=f"{OURS}-attend-coded", attend_coded=True),
)
