"""States the protocols of systems under test.

A `Peer` describes one system (ours among them) and opens a model in it; it exists in the benchmark's process
and, by the same name, in the child process that runs the model. A `Session` is the open model: it exists in
the child alone (see `child.py`), where every system gets the same cores, the same prompts and the same clock.
Libraries are imported inside of methods, so that a peer that is not installed costs nothing.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxllm.config import ModelConfig
from jaxllm.serving.host.progress import Progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opening:
    """A model for a child process to open.

    Attributes:
      peer: a name in the registry.
      model: the bundle or Hugging Face folder to open; peers of ours always get a folder.
      format: the width, in the peer's own words ("int8", "Q8_0").
      context_tokens: most tokens of prompt and answer together; 0 lets the peer choose.
      options: of the peer's own making, plain data.
    """

    peer: str
    model: Path
    format: str
    threads: int
    context_tokens: int = 0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A plain dict, of which `model` is a path's text."""
        return dataclasses.asdict(self) | {"model": str(self.model)}


class Session(Protocol):
    """An open model. One answer at a time; the calls come in the order prefill, decode, decode, ..."""

    @property
    def settings(self) -> Sequence[str]:
        """Names of settings that the benchmark tries, the usual one first; per case the fastest counts."""
        ...

    def facts(self) -> dict[str, Any]:
        """Numbers and text about the open model, for rows: weight_bytes, bits_per_weight, step_bytes (of
        weights that one decoded token reads) and others that the peer knows."""
        ...

    def prefill(self, prompt: Sequence[int], setting: str) -> int:
        """Forgets the last answer, feeds a prompt and returns the likeliest next token, on the host."""
        ...

    def decode(self, tokens: int, setting: str) -> list[int]:
        """The `tokens` likeliest tokens after the last one, one by one, each read by the host."""
        ...

    def score(self, tokens: Sequence[int], targets: Sequence[int]) -> Sequence[float]:
        """Log-probability (natural) of each target after its token and all tokens before it."""
        ...


@dataclasses.dataclass
class Peer:
    """One system that a benchmark can measure.

    Attributes:
      name: as rows and the command line call it.
      open: opens a model, in the child.
      packages: that it needs.
      systems: the systems to compare with a width of ours, by name, and the format that each of them runs.
      refusal: the reason why it cannot run such a model; None when it can.
      slow: whether a quick run leaves it out unless it is named.
    """

    name: str
    open: Callable[[Opening, Progress], Session]
    packages: tuple[str, ...] = ()
    systems: Callable[[str], Mapping[str, str]] = lambda weights: {}
    refusal: Callable[[ModelConfig], str | None] = lambda cfg: None
    slow: bool = False


def unavailable(peer: Peer, cfg: ModelConfig) -> str | None:
    """The reason why a system cannot be measured on a model here; None when it can."""
    missing = missing_packages(*peer.packages)
    return f"{missing} is not installed: pip install 'jaxllm[peers]'" if missing else peer.refusal(cfg)


def missing_packages(*packages: str) -> str | None:
    """Names the packages that are not installed; None when all are.

    None of them is imported, which would take seconds.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return " and ".join(missing) or None
