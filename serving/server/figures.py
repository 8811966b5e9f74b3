"""Names the figures that a backend tells of now: what `Backend.snapshot` gives to metrics and the dashboard.

Every part may be missing, where a service has nothing of its kind: no contexts, no experts, no budget.
"""

from collections.abc import Mapping, Sequence
from typing import TypedDict

# Of a context's chunks, as they lie in memory: bits, or as they are.
WIDTHS = ("raw", "8", "4", "2")


class QueueFigures(TypedDict, total=False):
    """Calls that wait for their first step.

    Attributes:
      waiting: number of them.
      limit: most of them.
      oldest_ms: for which the oldest has waited.
    """

    waiting: int
    limit: int
    oldest_ms: float


class RunningFigures(TypedDict):
    """Answers of one app at one level that run now.

    Attributes:
      app: that asked.
      level: that answers, in percent.
      count: number of them.
    """

    app: str
    level: int
    count: int


class HoldingFigures(TypedDict, total=False):
    """Memory of one kind.

    Attributes:
      size_bytes: that it takes.
      limit_bytes: most that it may take now; missing where its size is fixed.
      least_bytes: that it cannot do without.
    """

    size_bytes: int
    limit_bytes: int
    least_bytes: int


class MemoryFigures(TypedDict, total=False):
    """Memory of the process.

    Attributes:
      process_bytes: resident.
      limit_bytes: of `--memory`; 0 for none.
      holdings: by kind: "weights", "kv", "contexts", "prefixes", "drafts", "layers", "experts",
        "adapters".
      pressure: share of time for which tasks of this machine waited for memory; missing where the system does
        not tell.
    """

    process_bytes: int
    limit_bytes: int
    holdings: Mapping[str, HoldingFigures]
    pressure: float


class ContextsFigures(TypedDict, total=False):
    """Contexts of one app.

    Attributes:
      contexts: number of them.
      pinned: of them.
      stored_bytes: on storage.
      chunks: number of resident chunks by width, see `WIDTHS`.
    """

    contexts: int
    pinned: int
    stored_bytes: int
    chunks: Mapping[str, int]


class ExpertFigures(TypedDict, total=False):
    """The expert buffer since the start, see `serving.weights.experts.counts.ExpertCounts`.

    Attributes:
      visits: experts that layers asked for.
      hits: of resident experts.
      foreseen: hits of prefetched experts.
    """

    visits: int
    hits: int
    foreseen: int


class Figures(TypedDict, total=False):
    """All figures of now.

    Attributes:
      queue: calls that wait.
      running: answers that run, by app and level.
      memory: of the process.
      contexts: app -> its contexts.
      adapters: name -> memory of each low-rank adapter that is loaded.
      experts: of a mixture whose experts are on storage.
      read_bytes: since the start, from storage, by what was read: "weights", "experts", "contexts".
    """

    queue: QueueFigures
    running: Sequence[RunningFigures]
    memory: MemoryFigures
    contexts: Mapping[str, ContextsFigures]
    adapters: Mapping[str, int]
    experts: ExpertFigures
    read_bytes: Mapping[str, int]
