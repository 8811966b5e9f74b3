"""Times subgraphs on this machine's two processors once, and keeps the times for later processes.

A file of times belongs to a bundle, a machine and an engine's options. It affects only the order of
subgraphs: if it is missing or malformed, times are measured again.
"""

import dataclasses
import functools
import itertools
import json
import logging
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.bundle import Bundle
from jaxllm.errors import ConfigError
from jaxllm.files.atomic import atomic_file
from jaxllm.int8_prefill.schedule import PROCESSORS, Processor, Subgraph
from jaxllm.kernels import native
from serving.buckets.integer_stage import IntegerStageBucket
from serving.buckets.store import compiled_options, digest_of, environment_facts
from serving.host.user_cache import cache_folder, make_private_folder, private_file
from serving.int8_prefill.processors import TwoProcessors
from serving.int8_prefill.prompt_pass import PromptPass
from serving.options import EngineOptions

_VERSION = 1
_MAX_FILE_BYTES = 4 << 20
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SubgraphTime:
    """Milliseconds of a subgraph, in an empty cache and in a full one.

    Attributes:
      alone: while the other processor is idle.
      shared: while the other processor is busy.
    """

    alone: tuple[float, float]
    shared: tuple[float, float]


class SubgraphTimes:
    """Times of subgraphs, by their buckets.

    Attributes:
      handover_ms: of a subgraph, besides its work.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Reads the file if it exists; None for times that are not kept."""
        self._path = path
        self._times: dict[IntegerStageBucket, SubgraphTime] = {}
        self.handover_ms = 0.0
        if path is not None:
            self._read(path)

    def __getitem__(self, bucket: IntegerStageBucket) -> SubgraphTime:
        return self._times[bucket]

    def __contains__(self, bucket: IntegerStageBucket) -> bool:
        return bucket in self._times

    def put(self, times: Mapping[IntegerStageBucket, SubgraphTime], handover_ms: float) -> None:
        """Replaces the times of some buckets."""
        self._times |= times
        self.handover_ms = handover_ms

    def keep(self) -> None:
        """Merges the times into the file, which another process may have extended; a failure is logged, since
        it must not fail a request."""
        if self._path is None:
            return
        kept = SubgraphTimes(self._path)
        kept.put(self._times, self.handover_ms)
        rows = [
            {**dataclasses.asdict(each), **dataclasses.asdict(time)} for each, time in kept._times.items()
        ]
        facts = {"version": _VERSION, "handover_ms": self.handover_ms, "times": rows}
        try:
            make_private_folder(self._path.parent)
            with atomic_file(self._path) as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(json.dumps(facts).encode())
        except (OSError, ConfigError) as error:
            _log.warning(
                "%s: times of subgraphs cannot be kept (%s); they are measured at every start",
                self._path,
                error,
            )

    def _read(self, path: Path) -> None:
        try:
            with private_file(path) as number, open(number, "rb", closefd=False) as file:
                raw = file.read(_MAX_FILE_BYTES + 1)
            facts = json.loads(raw) if len(raw) <= _MAX_FILE_BYTES else {}
            if facts["version"] != _VERSION:
                return
            times = dict(map(_row, facts["times"]))
            (handover_ms,) = _milliseconds([facts["handover_ms"]])
        except FileNotFoundError:
            return
        except (OSError, ConfigError, ValueError, KeyError, TypeError, RecursionError) as error:
            _log.warning("%s: times of subgraphs cannot be read (%s); they are measured again", path, error)
            return
        self._times, self.handover_ms = times, handover_ms


def times_path(bundle: Bundle, options: EngineOptions) -> Path:
    """Path of the times of a bundle's subgraphs on this machine with these resolved options."""
    how = options.prefill
    facts = [
        bundle.fingerprint,
        [native.kernels().name, native.threads()],
        environment_facts(),
        compiled_options(options),
        [how.integer_device, how.integer_bytes],
    ]
    return cache_folder() / "profiles" / f"{digest_of(facts)[:32]}.subgraphs.json"


def measured_times(
    processors: TwoProcessors,
    begin: Callable[[bool], PromptPass],
    subgraphs_of: Callable[[PromptPass], Sequence[Subgraph]],
    bucket_of: Callable[[Subgraph], IntegerStageBucket],
    runs: int,
) -> tuple[dict[IntegerStageBucket, SubgraphTime], float]:
    """Times each kind of subgraph of one chunk.

    Args:
      processors: idle ones.
      begin: (full) -> a chunk before its first layer, in an empty cache or at the end of a full one.
      subgraphs_of: the subgraphs of a chunk.
      bucket_of: the bucket of a subgraph.
      runs: of all layers in each case, for medians.

    Returns:
      Times by bucket, and milliseconds of a handover.
    """
    taken: dict[tuple[IntegerStageBucket, bool, bool], list[float]] = {}
    handovers: list[float] = []
    for _, full, busy in itertools.product(range(runs), (False, True), (False, True)):
        prompt = begin(full)
        besides = _work_of_each(processors, begin(full), subgraphs_of) if busy else {}
        for each in subgraphs_of(prompt):
            work = functools.partial(prompt.run, each)
            beside = besides.get("float" if each.processor == "integer" else "integer")
            spent_ms, handover_ms = processors.timed(each.processor, work, beside)
            taken.setdefault((bucket_of(each), full, busy), []).append(spent_ms)
            if not busy:
                handovers.append(handover_ms)
    medians = {key: statistics.median(times) for key, times in taken.items()}

    def both(bucket: IntegerStageBucket, busy: bool) -> tuple[float, float]:
        return medians[bucket, False, busy], medians[bucket, True, busy]

    buckets = dict.fromkeys(bucket for bucket, _, _ in taken)
    times = {each: SubgraphTime(alone=both(each, False), shared=both(each, True)) for each in buckets}
    return times, statistics.median(handovers)


def _work_of_each(
    processors: TwoProcessors, prompt: PromptPass, subgraphs_of: Callable[[PromptPass], Sequence[Subgraph]]
) -> dict[Processor, Callable[[], None]]:
    """Work that keeps each processor busy: its first long subgraph, repeated."""
    found: dict[Processor, Callable[[], None]] = {}
    for each in subgraphs_of(prompt):
        if each.processor not in found and (each.processor == "integer" or each.stage == "attend"):
            found[each.processor] = prompt.repeated(each)
        if len(found) == len(PROCESSORS):
            break
        processors.timed(each.processor, functools.partial(prompt.run, each))
    return found


def _row(row: Mapping[str, Any]) -> tuple[IntegerStageBucket, SubgraphTime]:
    named = dict(row)
    alone, shared = _milliseconds(named.pop("alone")), _milliseconds(named.pop("shared"))
    if len(alone) != 2 or len(shared) != 2:
        raise ValueError("a time is not a pair")
    return IntegerStageBucket(**named), SubgraphTime(
        alone=(alone[0], alone[1]), shared=(shared[0], shared[1])
    )


def _milliseconds(values: Iterable[Any]) -> list[float]:
    found = list(values)
    if not all(type(each) in (int, float) and math.isfinite(each) and each >= 0 for each in found):
        raise ValueError("a time is not a number of milliseconds")
    return [float(each) for each in found]
