"""Simulates a prompt's integer prefill on two processors of known speed, under any order of its subgraphs.

The simulator uses the same `Dispatcher` as the runner. Handing over costs a constant per subgraph; contention
is modelled only by the time that a subgraph takes while the other processor is busy.
"""

import dataclasses
from collections.abc import Sequence

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.int8_prefill.schedule import PROCESSORS, Dispatcher, Order, Processor, Subgraph, Times
from jaxllm.int8_prefill.stages import Stage


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Start and end of every subgraph.

    Attributes:
      starts_ms, ends_ms: of each subgraph, in the order of the list.
      busy_ms: of each processor.
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
    """Runs a prompt's subgraphs on an integer and a float processor.

    Args:
      subgraphs: see `schedule.prompt_subgraphs`.
      times: of each.
      order: see `schedule.Dispatcher`.
      overhead_ms: further time of each subgraph on its processor.
      shared: times of subgraphs while the other processor is busy, longer where both share memory bandwidth;
        None if they share nothing.

      Raises:
      ConfigError: the dependencies of the subgraphs have a circle.
    """

    def time_of(place: int, both: bool) -> float:
        known = times if shared is None or not both else shared
        return known(subgraphs[place]) + overhead_ms

    dispatcher = Dispatcher(subgraphs, times, order)
    starts, ends = [0.0] * len(subgraphs), [0.0] * len(subgraphs)
    busy: dict[Processor, float] = dict.fromkeys(PROCESSORS, 0.0)
    # Processor -> (end time, index of its subgraph, whether that assumes the other processor to be busy).
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
      name: of the device.
      integer_gops: 8-bit operations per nanosecond of the integer processor in static subgraphs.
      float_gflops: floating-point operations per nanosecond of the float processor.
      attend_us_per_token: microseconds per token in an attention subgraph besides its products: norms,
        rotations, softmax.
      overhead_ms: constant time of a subgraph.
    """

    name: str
    integer_gops: float
    float_gflops: float
    attend_us_per_token: float = 0.0
    overhead_ms: float = 0.0

    def __post_init__(self) -> None:
        if min(self.integer_gops, self.float_gflops) <= 0:
            raise ConfigError(f"the speeds of {self.name} must be positive")
        if min(self.attend_us_per_token, self.overhead_ms) < 0:
            raise ConfigError(
                f"what subgraphs take besides their products on {self.name} must not be negative"
            )

    def times(self, cfg: ModelConfig, chunk_tokens: int, shadow_channels: int = 8) -> Times:
        """Times of subgraphs of a model in chunks of `chunk_tokens`."""

        def time(each: Subgraph) -> float:
            work = stage_operations(
                cfg,
                each.stage,
                chunk_tokens,
                before=each.chunk * chunk_tokens,
                shadow_channels=shadow_channels,
            )
            speed = self.integer_gops if each.processor == "integer" else self.float_gflops
            besides_ms = chunk_tokens * self.attend_us_per_token / 1000 if each.stage == "attend" else 0.0
            return work / speed / 1e6 + besides_ms + self.overhead_ms

        return time


def stage_operations(
    cfg: ModelConfig, stage: Stage, tokens: int, *, before: int = 0, shadow_channels: int = 8
) -> float:
    """Number of multiplications and additions of one subgraph over `tokens` tokens after `before` others.

    Args:
      cfg: the model.
      stage: of a layer.
      tokens: of the chunk.
      before: tokens in the cache.
      shadow_channels: channels of the compact tensors.
    """
    width, query = cfg.hidden_size, cfg.heads * cfg.head_dim
    outward = query + 2 * cfg.kv_heads * cfg.head_dim
    first = (2 if cfg.gated_ffn else 1) * cfg.ffn_size
    # Queries · keys and weights · values; a token attends to half of its own chunk on average.
    seen = 4 * query * (before + tokens / 2)
    shadow = {
        "project_shadow": 2 * shadow_channels * outward,
        "widen_shadow": 2 * shadow_channels * first,
        "narrow_shadow": 2 * shadow_channels * width,
    }
    per_token = {
        "project": 2 * width * outward,
        "attend": seen,
        "finish": 2 * width * (query + first + cfg.ffn_size),
        "widen": 2 * width * (query + first),
        "narrow": 2 * width * cfg.ffn_size,
        **shadow,
    }
    return tokens * float(per_token[stage])
