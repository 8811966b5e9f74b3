"""Opens the systems of one run, each in a child process, and groups them by the width they are compared at.

A child is opened once, though it may be compared at several widths (transformers has the same two for all)
or run under two names (ours, with and without blocks of tokens).
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.models.checkpoint import Checkpoint
from benchmarks.peers import OURS as OUR_PEER
from benchmarks.peers import PEERS, Opening
from benchmarks.peers.alternation import System
from benchmarks.peers.jaxllm_engine import BLOCKS, ONE_TOKEN
from benchmarks.peers.process import Child
from serving.host.progress import Progress
from serving.options import EngineOptions

OURS, PER_TOKEN = OUR_PEER.name, "jaxllm-one-token-per-dispatch"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conditions:
    """The same model, options, threads and context length for every system."""

    checkpoint: Checkpoint
    options: EngineOptions
    threads: int
    context_tokens: int


class OpenSystems:
    """Open systems. A context manager: leaving it ends all of their processes."""

    def __init__(self, conditions: Conditions, progress: Progress) -> None:
        self._given = conditions
        self._progress = progress
        self._stack = contextlib.ExitStack()
        self._children: dict[tuple[str, str], Child] = {}
        self._beside: dict[str, dict[str, System]] = {}

    def __enter__(self) -> "OpenSystems":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @property
    def systems(self) -> list[System]:
        """All systems, once each."""
        return list({each.name: each for group in self._beside.values() for each in group.values()}.values())

    def beside(self, width: str) -> Mapping[str, System]:
        """Ours at a width and the systems it is compared with, by name."""
        return self._beside[width]

    def open_ours(self, width: str) -> Child:
        """Opens our engine at a width.

        Raises:
          PeerFailed: it cannot be opened.
        """
        child = self.float_child() if width == "f32" else self._ours(width)
        self._beside[width] = {
            system: System(f"{system} {width}", child, (setting,))
            for system, setting in ((OURS, BLOCKS), (PER_TOKEN, ONE_TOKEN))
        }
        return child

    def open_peer(self, name: str) -> None:
        """Opens a peer beside every width of ours that is open.

        Raises:
          PeerFailed: it cannot be opened.
        """
        folder = self._given.checkpoint.folder(self._progress)
        for width, group in self._beside.items():
            for system, format_ in PEERS[name].systems(width).items():
                child = self._open(name, folder, format_, {})
                group[system] = System(f"{system} {format_}", child, tuple(child.settings))

    def float_child(self) -> Child:
        """Our engine with float32 weights, opened unless it is: the reference of quality."""
        return self._ours("f32")

    def _ours(self, width: str) -> Child:
        checkpoint = self._given.checkpoint
        own = checkpoint.stored in (None, width)
        model = checkpoint.model if own else checkpoint.folder(self._progress)
        options = dataclasses.asdict(self._given.options)
        # A child has all weights in memory and no draft, and reads prompts as engines do by themselves.
        for name in ("storage", "trees", "experts", "prefill"):
            del options[name]
        return self._open(OURS, model, width, options)

    def _open(self, peer: str, model: Path, format_: str, options: dict[str, Any]) -> Child:
        if (peer, format_) not in self._children:
            opening = Opening(
                peer=peer,
                model=model,
                format=format_,
                threads=self._given.threads,
                context_tokens=self._given.context_tokens,
                options=options,
            )
            child = Child(f"{peer} {format_}", opening, self._progress)
            self._children[peer, format_] = self._stack.enter_context(child)
        return self._children[peer, format_]
