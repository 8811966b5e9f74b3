"""Chooses a prompt's chunks together with the order of their subgraphs on two processors.

Short chunks give more freedom of order, long ones have a lower total cost; which is faster depends on the
prompt and on the times of subgraphs. So each way to split the prompt is simulated with measured times.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

from jaxllm.int8_prefill.schedule import Order, Stage, Subgraph, Times, simulate
from jaxllm.serving.int8_prefill.subgraph_times import StageKey, SubgraphTimes
from jaxllm.serving.runners.chunks import plan_chunks

# Lengths of a prompt's chunks.
Plan = tuple[int, ...]


def chunk_plans(tokens: int, lengths: Sequence[int]) -> list[Plan]:
    """Ways to cut a prompt into chunks: the cheapest first, then the cheapest without the longest lengths."""
    ascending = sorted(lengths)
    plans = (tuple(plan_chunks(tokens, ascending[: count + 1])) for count in reversed(range(len(ascending))))
    return list(dict.fromkeys(plans))


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkPlanner:
    """Plans the chunks of prompts on two processors.

    Attributes:
      lengths: lengths of chunks with buckets.
      order: order of subgraphs.
      measured: times of stages.
      bucket_of: (layer, stage, tokens of a chunk, capacity of the cache) -> bucket.
      subgraphs_of: number of chunks -> the prompt's subgraphs.
      chosen: plans by tokens, position and capacity; cleared when times change.
    """

    lengths: tuple[int, ...]
    order: Order
    measured: SubgraphTimes
    bucket_of: Callable[[int, Stage, int, int], StageKey]
    subgraphs_of: Callable[[int], Sequence[Subgraph]]
    chosen: dict[tuple[int, int, int], Plan] = dataclasses.field(default_factory=dict)

    def plan(self, tokens: int, at: int, capacity: int) -> Plan:
        """The chunks with the minimum simulated time for a prompt of `tokens` tokens after `at` others;
        those of minimum cost if not all stages of all plans are timed."""
        case = tokens, at, capacity
        if case in self.chosen:
            return self.chosen[case]
        plans = chunk_plans(tokens, self.lengths)
        if len(plans) == 1 or not self._timed({length for plan in plans for length in plan}, capacity):
            return plans[0]

        def makespan_ms(plan: Plan) -> float:
            chunks = list(zip(plan, itertools.accumulate(plan, initial=at), strict=False))
            return simulate(
                self.subgraphs_of(len(plan)),
                self.times(chunks, capacity),
                self.order,
                overhead_ms=self.measured.handover_ms,
                shared=self.times(chunks, capacity, shared=True),
            ).makespan_ms

        self.chosen[case] = min(plans, key=makespan_ms)
        return self.chosen[case]

    def times(self, chunks: Sequence[tuple[int, int]], capacity: int, *, shared: bool = False) -> Times:
        """A function for the measured times of subgraphs in milliseconds: with the other processor idle, or
        busy
        if `shared`; 1 for unmeasured ones. `chunks` are lengths and positions."""

        def time_of(each: Subgraph) -> float:
            length, at = chunks[each.chunk]
            bucket = self.bucket_of(each.layer, each.stage, length, capacity)
            if bucket not in self.measured:
                return 1.0
            known = self.measured[bucket]
            empty, full = known.shared if shared else known.alone
            # Attention is slower with more tokens before it.
            return empty + (full - empty) * min(1.0, at / max(1, capacity - length))

        return time_of

    def _timed(self, lengths: set[int], capacity: int) -> bool:
        return all(
            self.bucket_of(each.layer, each.stage, length, capacity) in self.measured
            for length in lengths
            for each in self.subgraphs_of(1)
        )
