"""Measures the cost of levels: time to the first token and per token, memory, and copying one."""

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.elastic.policies import OURS
from benchmarks.measuring.memory import peak_resident_bytes
from benchmarks.measuring.report import Row
from jaxllm.config import WHOLE
from jaxllm.elastic.ladder import is_unit_parameter
from jaxllm.errors import ConfigError, one_line
from jaxllm.models.parameters import Params, param_specs
from serving.engine import Engine
from serving.options import EngineOptions
from serving.planning.profile import DeviceProfile
from serving.request import GenerationConfig

# Prompt of the process whose memory is measured.
_PROMPT_TOKENS = 64


def time_rows(profile: DeviceProfile) -> list[Row]:
    """Rows of every level's times, each against the whole model's."""
    rows = []
    for metric, times_of in (("ttft_ms", profile.ttft_ms), ("tpot_ms", profile.tpot_ms)):
        whole = times_of[profile.levels.index(WHOLE)]
        for level, times in zip(profile.levels, times_of, strict=True):
            for tokens, value, of_whole in zip(profile.tokens, times, whole, strict=True):
                rows.append(
                    Row(
                        case=f"level {level}, prompt {tokens}",
                        system=OURS,
                        metric=metric,
                        value=value,
                        unit="ms",
                        baseline="whole model",
                        ratio=of_whole / value,
                    )
                )
    return rows


def own_bytes(engine: Engine, level: int) -> int:
    """Bytes of a level's weights outside of the whole model's memory, without its recovery adapter."""
    shared = {_address(leaf) for leaf in jax.tree.leaves(engine.runner_at(WHOLE).params)}
    own = 0
    for leaf in jax.tree.leaves(_without_adapters(engine.runner_at(level).params)):
        own += 0 if _address(leaf) in shared else leaf.nbytes
    return own


def memory_rows(model: Path, levels: Sequence[int]) -> list[Row]:
    """Peak memory of a process that serves all levels, against one that serves the whole model.

    Both read their buckets from disk, as a service does from its second start on: each runs twice.
    """
    peaks = {}
    for name, asked in (("all levels", levels), ("whole model", ())):
        command = [sys.executable, "-m", "benchmarks.elastic.levels", str(model), *map(str, asked)]
        for _ in range(2):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise ConfigError(f"memory of {name} could not be measured: {one_line(done.stderr[-300:])}")
            peaks[name] = json.loads(done.stdout.splitlines()[-1])["peak_bytes"]
    ratio = peaks["whole model"] / peaks["all levels"]
    return [
        Row(
            case="serving all levels", system=OURS, metric="peak_memory_bytes", value=peaks["all levels"],
            unit="bytes", baseline="whole model", ratio=ratio,
        ),
        Row(
            case="serving all levels", system="whole model", metric="peak_memory_bytes",
            value=peaks["whole model"], unit="bytes",
        ),
    ]  # fmt: skip


def move(engine: Engine, level: int) -> tuple[float, int]:
    """Milliseconds and bytes of copying the units of a level out of the whole model in memory."""
    whole, part = engine.cfg.whole, engine.runner_at(level).cfg
    sizes, kept = (
        {name: math.prod(spec.shape) for name, spec in param_specs(cfg).items()} for cfg in (whole, part)
    )
    parts = [
        # As many bytes as the level has, from anywhere in the buffer.
        np.asarray(leaf).reshape(-1)[: -(-leaf.size * kept[name] // sizes[name])]
        for name, weight in engine.runner_at(WHOLE).model.weights.items()
        if is_unit_parameter(name)
        for leaf in jax.tree.leaves(getattr(weight, "base", weight))
    ]
    times = []
    for _ in range(5):
        began = time.perf_counter()
        copies = [part.copy() for part in parts]
        times.append(1000 * (time.perf_counter() - began))
        del copies
    return statistics.median(times), sum(part.nbytes for part in parts)


def _without_adapters(params: Params) -> list[Any]:
    return [getattr(weight, "base", weight) for weight in params.values()]


def _address(leaf: jax.Array) -> int:
    return leaf.unsafe_buffer_pointer()


def _peak(model: str, levels: Sequence[int]) -> int:
    """Peak memory of this process in bytes, after it answered at every level."""
    engine = Engine.open(model, options=EngineOptions(levels=tuple(levels)))
    config = GenerationConfig(max_tokens=4, ignore_eos=True)
    for level in engine.levels:
        engine.stream(list(range(_PROMPT_TOKENS)), config, level=level).result()
    return peak_resident_bytes()


if __name__ == "__main__":
    print(json.dumps({"peak_bytes": _peak(sys.argv[1], [int(each) for each in sys.argv[2:]])}))
