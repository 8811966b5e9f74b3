"""Schedules the subgraphs of a prompt on two processors (mllm-NPU, arXiv 2407.05858, section 3.4).

A prompt is many subgraphs: stages x layers x chunks. A subgraph depends on the one before it in its own chunk
(equation 3), and attention depends on the attention of all earlier chunks in its layer (equation 2), whose
keys and values it reads from the cache. Nothing else orders chunks, so while one chunk waits for the float
processor, the integer processor continues with another.

The best order is too expensive to compute. If the integer processor would wait, the float processor takes the
ready subgraph that enables most work there (equation 5), and the other way round; else a processor takes the
subgraph that has waited longest. (With equation 5 alone some chunks fall behind, and both processors end up
waiting for them; the order "equation-5" is the paper's, to compare with.) The runner on two real processors
and the simulator both use this module. It has no clock: the caller reports what has finished.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from jaxllm.errors import ConfigError
from jaxllm.int8_prefill.stages import INTEGER_STAGES, Stage, stages_of

Processor = Literal["integer", "float"]
PROCESSORS: tuple[Processor, ...] = ("integer", "float")
Order = Literal["in-order", "first-ready", "equation-5", "out-of-order"]
ORDERS: tuple[Order, ...] = ("in-order", "first-ready", "equation-5", "out-of-order")
_OTHER: Mapping[Processor, Processor] = {"integer": "float", "float": "integer"}
# Dependencies of stages within a layer; a layer without a shadow has a part of them.
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
    """A stage of one layer and one chunk.

    Attributes:
      chunk, layer: indices.
      stage: of the layer.
      processor: where it runs.
      needs: indices of the subgraphs that it depends on, in the prompt's list, all smaller than its own.
    """

    chunk: int
    layer: int
    stage: Stage
    processor: Processor
    needs: tuple[int, ...]


# Subgraph -> milliseconds that it takes.
Times = Callable[[Subgraph], float]


def prompt_subgraphs(
    chunks: int,
    shadowed: Sequence[bool],
    placed: Callable[[int, Stage], Processor] | None = None,
    stages: Callable[[bool], tuple[Stage, ...]] = stages_of,
) -> tuple[Subgraph, ...]:
    """The subgraphs of a prompt, chunk by chunk and layer by layer, which is a valid order.

    Args:
      chunks: number of the prompt's chunks.
      shadowed: per layer, whether it has a shadow.
      placed: (layer, stage) -> processor; by default integer stages go to the integer processor.
      stages: whether a layer has a shadow -> its stages.
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
    """A placement for an integer processor with little memory: stages with most work go there first.

    Args:
      shadowed: per layer, whether it has a shadow.
      bytes_of: (layer, stage) -> bytes of its weights on the integer processor.
      work_of: (layer, stage) -> amount of computation, in any unit.
      most_bytes: memory of the integer processor.

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
    """Chooses the next subgraph of a free processor, for one prompt from its first subgraph to its last.

    Attributes:
      subgraphs: of the prompt.
    """

    def __init__(self, subgraphs: Sequence[Subgraph], times: Times, order: Order = "out-of-order") -> None:
        """Begins a prompt.

        Args:
          subgraphs: see `prompt_subgraphs`.
          times: of subgraphs, profiled; wrong times cost speed, never correctness.
          order: "out-of-order" by equation 5 where a processor would wait; "equation-5" by that equation,
            as the paper has it, always; "first-ready" takes the subgraph that has waited longest; "in-order"
            lets each processor run its subgraphs in the order of the list alone.
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
        # Ready subgraphs in the order in which they became ready; with "in-order", the next of each
        # processor's list.
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
        """The index of the subgraph that a free processor runs next; None to wait."""
        ready = self._ready[processor]
        if not ready:
            return None
        if self._order == "in-order":
            queue = self._queue[processor]
            if queue[-1] not in ready:
                return None
            chosen = queue.pop()
        elif self._order == "equation-5":
            chosen = max(ready, key=self.literal_contribution)
        elif self._order == "first-ready" or self._ready[_OTHER[processor]]:
            # The other processor has work: take what has waited longest, so that no chunk falls far behind.
            chosen = ready[0]
        else:
            # Of equals, `max` takes the first, which has waited longest.
            chosen = max(ready, key=self.contribution)
        ready.remove(chosen)
        return chosen

    def finish(self, place: int) -> None:
        """Reports that a taken subgraph has finished."""
        self._left -= 1
        for follower in self._followers[place]:
            self._missing[follower] -= 1
            if not self._missing[follower]:
                self._ready[self.subgraphs[follower].processor].append(follower)

    def literal_contribution(self, place: int) -> float:
        """The contribution of a subgraph by equation 5 as the paper has it: time of all subgraphs that wait
        for this one alone, negative if this one is on the integer processor."""
        freed = [each for each in self._followers[place] if self._missing[each] == 1]
        taken = sum(self._times[each] for each in freed)
        return taken if self.subgraphs[place].processor == "float" else -taken

    def contribution(self, place: int) -> float:
        """The contribution of a subgraph in the order "out-of-order": time of the subgraphs on the other
        processor that wait for this one alone."""
        other = _OTHER[self.subgraphs[place].processor]
        return sum(
            self._times[follower]
            for follower in self._followers[place]
            if self._missing[follower] == 1 and self.subgraphs[follower].processor == other
        )
