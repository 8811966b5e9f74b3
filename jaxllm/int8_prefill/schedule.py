"""Schedules the stages of a prompt on two processors, and simulates it (mllm-NPU, arXiv 2407.05858, section
3.4)."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.int8_prefill.recipe import Order

# The stages of a layer for two processors (section 3.2). One without a shadow has three, of which the integer
# processor runs two:
#
#     project   norm, quantize, products of queries, keys and values
#     attend    attention over the cache, in floats
#     finish    output product of attention, the feed-forward block
#
# A layer with a shadow is cut at every product, so that the float processor multiplies the excess
# (`shadow.py`) while the integer processor multiplies the clipped activations; both results are added in the
# next stage:
#
#     project        project_shadow     ->  attend (adds both; multiplies its own output's excess)
#     widen                                 output product of attention, norm, first products of the block
#     narrow         widen_shadow       ->  (adds both) activation, last product of the block
#                    narrow_shadow          adds the excess of the last product's inputs


Stage = Literal[
    "project",
    "attend",
    "finish",
    "project_shadow",
    "widen",
    "widen_shadow",
    "narrow",
    "narrow_shadow",
    "layer",
]
INTEGER_STAGES: frozenset[Stage] = frozenset(("project", "finish", "widen", "narrow"))
# Stage -> prefixes of the names of its parameters within the layer.
STAGE_PARAMETERS: Mapping[Stage, tuple[str, ...]] = {
    "project": ("attn_norm.", "attn.q", "attn.k", "attn.v"),
    "project_shadow": ("attn_norm.", "attn.q", "attn.k", "attn.v"),
    "attend": ("attn.q_norm.", "attn.k_norm.", "attn.o"),
    "finish": ("attn.o", "attn_post_norm.", "ffn_norm.", "ffn.", "ffn_post_norm."),
    "widen": ("attn.o", "attn_post_norm.", "ffn_norm.", "ffn.gate", "ffn.up"),
    "widen_shadow": ("ffn_norm.", "ffn.gate", "ffn.up"),
    "narrow": ("ffn.down",),
    "narrow_shadow": ("ffn.down", "ffn_post_norm."),
    "layer": ("",),
}
# Stage -> names of its operands, and of its results: "x" is the input of a layer, "block" that of its
# feed-forward block, "at", "past" and "mass" are positions and cache, "count" is of channels with outliers.
STAGE_VALUES: Mapping[Stage, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "project": (("x",), ("heads",)),
    "project_shadow": (("x",), ("head_shadows", "count")),
    "attend": (
        ("heads", "head_shadows", "at", "past", "mass"),
        ("out", "added", "past", "mass", "count"),
    ),
    "finish": (("x", "out"), ("x",)),
    "widen": (("x", "out", "added"), ("block", "products")),
    "widen_shadow": (("block",), ("product_shadows", "count")),
    "narrow": (("block", "products", "product_shadows"), ("mixed", "hidden")),
    "narrow_shadow": (("block", "mixed", "hidden"), ("x", "count")),
    "layer": (("x", "at", "past", "mass"), ("x", "past", "mass", "count")),
}


def stages_of(shadowed: bool) -> tuple[Stage, ...]:
    """The stages of a layer for two processors, in an order in which one can run them."""
    if not shadowed:
        return "project", "attend", "finish"
    return "project", "project_shadow", "attend", "widen", "widen_shadow", "narrow", "narrow_shadow"


# A prompt is many subgraphs: stages x layers x chunks. A subgraph depends on the one before it in its own
# chunk (equation 3), and attention depends on the attention of all earlier chunks in its layer (equation 2),
# whose keys and values it reads from the cache. Nothing else orders chunks, so while one chunk waits for the
# float processor, the integer processor continues with another.
#
# The best order is too expensive to compute. If the integer processor would wait, the float processor takes
# the ready subgraph that enables most work there (equation 5), and the other way round; else a processor
# takes the subgraph that has waited longest. (With equation 5 alone some chunks fall behind, and both
# processors end up waiting for them; the order "equation-5" is the paper's, to compare with.) The runner on
# two real processors and the simulator both use this module. It has no clock: the caller reports what has
# finished.


Processor = Literal["integer", "float"]
PROCESSORS: tuple[Processor, ...] = ("integer", "float")
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
      needs: indices of its dependencies in the prompt's list, all smaller than its own.
    """

    chunk: int
    layer: int
    stage: Stage
    processor: Processor
    needs: tuple[int, ...]


# Subgraph -> its time in milliseconds.
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
            f"{most_bytes} bytes hold no subgraph of the integer processor; the smallest requires {least}"
        )
    return lambda layer, stage: "integer" if (layer, stage) in kept else "float"


class Dispatcher:
    """Chooses the next subgraph of a free processor, for one prompt from its first subgraph to its last."""

    def __init__(self, subgraphs: Sequence[Subgraph], times: Times, order: Order = "out-of-order") -> None:
        """Starts a prompt.

        Args:
          subgraphs: see `prompt_subgraphs`.
          times: profiled times of subgraphs; wrong times cost speed, never correctness.
          order: "out-of-order" by equation 5 if a processor would wait; "equation-5" always by that
            equation, as in the paper; "first-ready" chooses the subgraph that has waited longest;
            "in-order" runs each processor's subgraphs in the order of the list.
        """
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
        self._queue: dict[Processor, list[int]] = {processor: [] for processor in PROCESSORS}
        for place, each in enumerate(self.subgraphs):
            self._queue[each.processor].append(place)
            if not each.needs:
                self._ready[each.processor].append(place)

    @property
    def done(self) -> bool:
        """Whether all subgraphs have finished."""
        return not self._left

    def take(self, processor: Processor) -> int | None:
        """The index of the next subgraph for a free processor; None to wait."""
        ready = self._ready[processor]
        if not ready:
            return None
        if self._order == "in-order":
            queue = self._queue[processor]
            if queue[0] not in ready:
                return None
            chosen = queue.pop(0)
        elif self._order == "equation-5":
            chosen = max(ready, key=self.literal_contribution)
        elif self._order == "first-ready" or self._ready[_OTHER[processor]]:
            # The other processor has work: choose the longest waiting one, so that no chunk falls far behind.
            chosen = ready[0]
        else:
            # Of equals, `max` returns the first, which has waited longest.
            chosen = max(ready, key=self.contribution)
        ready.remove(chosen)
        return chosen

    def finish(self, place: int) -> None:
        """Reports that a chosen subgraph has finished."""
        self._left -= 1
        for follower in self._followers[place]:
            self._missing[follower] -= 1
            if not self._missing[follower]:
                self._ready[self.subgraphs[follower].processor].append(follower)

    def literal_contribution(self, place: int) -> float:
        """The contribution of a subgraph by equation 5 as published: time of all subgraphs that only wait
        for this one, negative if this one is on the integer processor."""
        freed = [each for each in self._followers[place] if self._missing[each] == 1]
        taken = sum(self._times[each] for each in freed)
        return taken if self.subgraphs[place].processor == "float" else -taken

    def contribution(self, place: int) -> float:
        """The contribution of a subgraph in the order "out-of-order": time of the subgraphs on the other
        processor that only wait for this one."""
        other = _OTHER[self.subgraphs[place].processor]
        return sum(
            self._times[follower]
            for follower in self._followers[place]
            if self._missing[follower] == 1 and self.subgraphs[follower].processor == other
        )


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Start and end of every subgraph.

    Attributes:
      starts_ms, ends_ms: times of each subgraph, in the order of the list.
    """

    starts_ms: tuple[float, ...]
    ends_ms: tuple[float, ...]
    busy_ms: dict[Processor, float]

    @property
    def makespan_ms(self) -> float:
        """From the start of the first to the end of the last."""
        return max(self.ends_ms, default=0.0) - min(self.starts_ms, default=0.0)

    @property
    def idle_share(self) -> float:
        """The share of the time in which the integer processor is idle: the paper's bubble rate."""
        return 1 - self.busy_ms["integer"] / self.makespan_ms if self.makespan_ms else 0.0


def simulate(
    subgraphs: Sequence[Subgraph],
    times: Times,
    order: Order = "out-of-order",
    *,
    overhead_ms: float = 0.0,
    shared: Times | None = None,
) -> Timeline:
    """Simulates a prompt's subgraphs on an integer and a float processor, by the same `Dispatcher` as the
    runner. Contention is only the time that a subgraph takes while the other processor is busy.

    Args:
      subgraphs: see `schedule.prompt_subgraphs`.
      times: time of each.
      order: see `schedule.Dispatcher`.
      overhead_ms: additional time of each subgraph on its processor.
      shared: times of subgraphs while the other processor is busy, longer if both share memory bandwidth;
        None if they share nothing.

    Raises:
      ConfigError: the dependencies of the subgraphs are cyclic.
    """

    def time_of(place: int, both: bool) -> float:
        known = times if shared is None or not both else shared
        return known(subgraphs[place]) + overhead_ms

    dispatcher = Dispatcher(subgraphs, times, order)
    starts, ends = [0.0] * len(subgraphs), [0.0] * len(subgraphs)
    busy: dict[Processor, float] = dict.fromkeys(PROCESSORS, 0.0)
    # Processor -> (end time, index of its subgraph, whether the other processor is assumed busy).
    running: dict[Processor, tuple[float, int, bool]] = {}
    now = 0.0
    while not dispatcher.done:
        begun = {}
        for processor in PROCESSORS:
            if processor not in running and (place := dispatcher.take(processor)) is not None:
                starts[place], begun[processor] = now, place
        both = len(running) + len(begun) == len(PROCESSORS)
        for processor, (end, place, before) in running.items():
            if before != both:
                # The rest of the running subgraph becomes faster or slower.
                end = now + (end - now) * time_of(place, both) / max(time_of(place, before), 1e-30)
                running[processor] = end, place, both
        running |= {each: (now + time_of(place, both), place, both) for each, place in begun.items()}
        if not running:
            raise ConfigError("no subgraph can run, and some are left: they wait for each other")
        processor = min(running, key=lambda each: running[each][:2])
        now, place, _ = running.pop(processor)
        ends[place] = now
        busy[processor] += now - starts[place]
        dispatcher.finish(place)
    return Timeline(tuple(starts), tuple(ends), busy)


def lower_bound_ms(subgraphs: Sequence[Subgraph], times: Times) -> float:
    """A lower bound on the makespan of any order: the longest chain of dependencies, and for each processor
    the sum of its subgraphs, after the shortest chain to its first and before the shortest chain from its
    last."""
    heads, tails = [0.0] * len(subgraphs), [0.0] * len(subgraphs)
    for place, each in enumerate(subgraphs):
        heads[place] = max((heads[need] + times(subgraphs[need]) for need in each.needs), default=0.0)
    for place in reversed(range(len(subgraphs))):
        own = times(subgraphs[place])
        for need in subgraphs[place].needs:
            tails[need] = max(tails[need], tails[place] + own)
    longest = max(
        (heads[place] + times(each) + tails[place] for place, each in enumerate(subgraphs)), default=0.0
    )
    for processor in PROCESSORS:
        own = [place for place, each in enumerate(subgraphs) if each.processor == processor]
        if own:
            load = sum(times(subgraphs[place]) for place in own)
            shortest = min(heads[place] for place in own) + min(tails[place] for place in own)
            longest = max(longest, load + shortest)
    return longest


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedProfile:
    """Speeds of two processors, to predict the times of subgraphs that were not measured.

    Attributes:
      integer_gops: 8-bit operations per nanosecond of the integer processor in static subgraphs.
      float_gflops: floating-point operations per nanosecond of the float processor.
      attend_us_per_token: microseconds per token in an attention subgraph besides its products: norms,
        rotations, softmax.
    """

    name: str
    integer_gops: float
    float_gflops: float
    attend_us_per_token: float = 0.0
    overhead_ms: float = 0.0

    def times(self, cfg: ModelConfig, chunk_tokens: int) -> Times:
        """Times of subgraphs of a model in chunks of `chunk_tokens`."""

        def time(each: Subgraph) -> float:
            work = stage_operations(cfg, each.stage, chunk_tokens, before=each.chunk * chunk_tokens)
            speed = self.integer_gops if each.processor == "integer" else self.float_gflops
            besides_ms = chunk_tokens * self.attend_us_per_token / 1000 if each.stage == "attend" else 0.0
            return work / speed / 1e6 + besides_ms + self.overhead_ms

        return time


# Channels of a compact tensor, to count operations.
_SHADOW_CHANNELS = 8


def stage_operations(cfg: ModelConfig, stage: Stage, tokens: int, *, before: int = 0) -> float:
    """Number of multiplications and additions of one subgraph over `tokens` tokens after `before` others."""
    width, query = cfg.hidden_size, cfg.heads * cfg.head_dim
    outward = query + 2 * cfg.kv_heads * cfg.head_dim
    first = (2 if cfg.gated_ffn else 1) * cfg.ffn_size
    per_token = {
        "project": 2 * width * outward,
        # Queries · keys and weights · values; a token attends to half of its own chunk on average.
        "attend": 4 * query * (before + tokens / 2),
        "finish": 2 * width * (query + first + cfg.ffn_size),
        "widen": 2 * width * (query + first),
        "narrow": 2 * width * cfg.ffn_size,
        "project_shadow": 2 * _SHADOW_CHANNELS * outward,
        "widen_shadow": 2 * _SHADOW_CHANNELS * first,
        "narrow_shadow": 2 * _SHADOW_CHANNELS * width,
    }
    return tokens * float(per_token[stage])
