"""Which subgraph of a prompt runs next, and where (mllm-NPU, arXiv 2407.05858, section 3.4).

A prompt of C chunks through L layers is a graph of subgraphs. A subgraph needs the one before it in its own
chunk (equation 3), and attention needs that of all earlier chunks in its layer (equation 2): their keys and
values are in the cache it writes its own to. Nothing else orders chunks, so while one waits for the float
processor, the integer processor goes on with another.

Nobody knows the best order in time. Where the integer processor would wait, the float one takes the ready
subgraph that lets it do most (equation 5), and the other way round; else what has waited longest. (By
equation 5 alone chunks fall behind each other, and both processors end up waiting for them.) Both the runner
of two real processors and the simulator decide by this module, which has no clock: who calls it says what has
finished.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from jaxllm.errors import ConfigError
from jaxllm.prefill.subgraphs import INTEGER_STAGES, Stage, stages_of

Processor = Literal["integer", "float"]
PROCESSORS: tuple[Processor, ...] = ("integer", "float")
Order = Literal["in-order", "first-ready", "out-of-order"]
ORDERS: tuple[Order, ...] = ("in-order", "first-ready", "out-of-order")
_OTHER: Mapping[Processor, Processor] = {"integer": "float", "float": "integer"}
# Within a layer the subgraphs that each needs; those of a layer without shadow are a part of these.
_NEEDS: Mapping[Stage, tuple[Stage, ...]] = {
    "project": (),
    "project_shadow": (),
    "attend": ("project", "project_shadow"),
    "finish": ("attend",),
    "widen": ("attend",),
    "widen_shadow": ("widen",),
    "narrow": ("widen", "widen_shadow"),
    "narrow_shadow": ("narrow",),
    "layer": (),
}


@dataclasses.dataclass(frozen=True)
class Subgraph:
    """One run of one subgraph.

    Attributes:
      chunk, layer, stage: which.
      processor: where it runs.
      needs: places in the prompt's list of subgraphs, all before its own.
    """

    chunk: int
    layer: int
    stage: Stage
    processor: Processor
    needs: tuple[int, ...]


# Milliseconds that a subgraph takes.
Times = Callable[[Subgraph], float]


def prompt_subgraphs(
    chunks: int,
    shadowed: Sequence[bool],
    placed: Callable[[int, Stage], Processor] | None = None,
    stages: Callable[[bool], tuple[Stage, ...]] = stages_of,
) -> tuple[Subgraph, ...]:
    """The subgraphs of a prompt, chunk by chunk and layer by layer, which is an order that may be run.

    Args:
      chunks: of the prompt.
      shadowed: of each layer, whether it has a shadow.
      placed: (layer, stage) -> processor; integer stages go to the integer processor unless it says
        otherwise.
      stages: what a layer with or without shadow is cut into.
    """
    placed = natural_place if placed is None else placed
    found: list[Subgraph] = []
    at: dict[tuple[int, int, Stage], int] = {}
    for chunk in range(chunks):
        for layer, with_shadow in enumerate(shadowed):
            for stage in stages(with_shadow):
                needs = [at[chunk, layer, each] for each in _NEEDS[stage] if (chunk, layer, each) in at]
                if not needs and layer:
                    needs = [at[chunk, layer - 1, stages(shadowed[layer - 1])[-1]]]
                if stage in ("attend", "layer") and chunk:
                    needs.append(at[chunk - 1, layer, stage])
                at[chunk, layer, stage] = len(found)
                found.append(Subgraph(chunk, layer, stage, placed(layer, stage), tuple(sorted(needs))))
    return tuple(found)


def natural_place(layer: int, stage: Stage) -> Processor:
    """Integer stages on the integer processor, the others on the float one."""
    del layer
    return "integer" if stage in INTEGER_STAGES else "float"


def placed_by_memory(
    shadowed: Sequence[bool],
    bytes_of: Callable[[int, Stage], int],
    work_of: Callable[[int, Stage], float],
    most_bytes: int,
) -> Callable[[int, Stage], Processor]:
    """Places for an integer processor with little memory: the subgraphs with most to compute go there first.

    Args:
      shadowed: of each layer, whether it has a shadow.
      bytes_of: what a subgraph's weights take there.
      work_of: what it computes, in any unit.
      most_bytes: that the integer processor holds.

    Raises:
      ConfigError: not even one subgraph fits.
    """
    stages: list[tuple[int, Stage]] = [
        (layer, stage)
        for layer, with_shadow in enumerate(shadowed)
        for stage in stages_of(with_shadow)
        if stage in INTEGER_STAGES
    ]
    kept: set[tuple[int, Stage]] = set()
    left = most_bytes
    for each in sorted(stages, key=lambda each: (-work_of(*each), each[0])):
        if bytes_of(*each) <= left:
            left -= bytes_of(*each)
            kept.add(each)
    if not kept:
        least = min(bytes_of(*each) for each in stages)
        raise ConfigError(
            f"{most_bytes} bytes hold no subgraph of the integer processor; the smallest takes {least}"
        )
    return lambda layer, stage: "integer" if (layer, stage) in kept else "float"


class Dispatcher:
    """Decides what free processors do next; of one prompt, from its first subgraph to its last.

    Attributes:
      subgraphs: of the prompt.
    """

    def __init__(self, subgraphs: Sequence[Subgraph], times: Times, order: Order = "out-of-order") -> None:
        """Begins a prompt.

        Args:
          subgraphs: see `prompt_subgraphs`.
          times: profiled; a wrong one costs time and nothing else.
          order: "out-of-order" by equation 5 where a processor would wait; "first-ready" takes the subgraph
            that has waited longest; "in-order" lets each processor run its subgraphs in the order of the list
            alone.
        """
        if order not in ORDERS:
            raise ConfigError(f"subgraphs are run in one of {', '.join(ORDERS)}, got {order!r}")
        self.subgraphs = tuple(subgraphs)
        self._order: Order = order
        self._times = [times(each) for each in self.subgraphs]
        self._missing = [len(each.needs) for each in self.subgraphs]
        self._followers: list[list[int]] = [[] for _ in self.subgraphs]
        for place, each in enumerate(self.subgraphs):
            for need in each.needs:
                self._followers[need].append(place)
        self._left = len(self.subgraphs)
        # What may run, in the order in which it became so; in order, the next of each processor's list.
        self._ready: dict[Processor, list[int]] = {processor: [] for processor in PROCESSORS}
        self._queue: dict[Processor, list[int]] = {
            processor: [
                place
                for place, each in reversed(list(enumerate(self.subgraphs)))
                if each.processor == processor
            ]
            for processor in PROCESSORS
        }
        for place, count in enumerate(self._missing):
            if not count:
                self._ready[self.subgraphs[place].processor].append(place)

    @property
    def done(self) -> bool:
        """Whether all subgraphs have finished."""
        return not self._left

    def take(self, processor: Processor) -> int | None:
        """What a free processor shall run, as a place in the list; None to wait."""
        ready = self._ready[processor]
        if not ready:
            return None
        if self._order == "in-order":
            queue = self._queue[processor]
            if queue[-1] not in ready:
                return None
            chosen = queue.pop()
        elif self._order == "first-ready" or self._ready[_OTHER[processor]]:
            # Nobody waits: what has waited longest goes on, so that no chunk falls far behind.
            chosen = ready[0]
        else:
            # `max` takes the first of equals.
            chosen = max(ready, key=self.contribution)
        ready.remove(chosen)
        return chosen

    def finish(self, place: int) -> None:
        """Says that a subgraph that was taken has run."""
        self._left -= 1
        for follower in self._followers[place]:
            self._missing[follower] -= 1
            if not self._missing[follower]:
                self._ready[self.subgraphs[follower].processor].append(follower)

    def contribution(self, place: int) -> float:
        """What a subgraph adds to what the other processor can do next (equation 5): the time of the
        subgraphs there that wait for this one alone."""
        other = _OTHER[self.subgraphs[place].processor]
        return sum(
            self._times[follower]
            for follower in self._followers[place]
            if self._missing[follower] == 1 and self.subgraphs[follower].processor == other
        )
