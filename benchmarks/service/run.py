"""Runs every system under the same loads, one at a time and in turns, each in a new process.

The limits of answers come from the idle whole model, timed once at the start. One load unit is as many
requests per second as it would answer one after another.
"""

import dataclasses
import itertools
import math
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.elastic.baselines import elastic_shape
from benchmarks.harness.bench import Run
from benchmarks.harness.machine import memory_of, wait_for_quiet, wait_until_asleep
from benchmarks.harness.report import OURS, Row
from benchmarks.models import Checkpoint
from benchmarks.peers.process import threads_of
from benchmarks.service import Plan
from benchmarks.service import systems as servers
from benchmarks.service.load import send
from benchmarks.service.outcomes import Cell, Window, judged, load_rows, memory_rows
from benchmarks.service.outcomes import draw as draw
from benchmarks.traces import write_lines
from jaxllm.elastic.slo import SLOS
from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.serving.ground.bundles import open_model


@dataclasses.dataclass(frozen=True)
class Reference:
    """Times of the idle whole model."""

    tokens: tuple[int, ...]
    ttft_ms: tuple[float, ...]
    tpot_ms: float

    def ttft(self, prompt_tokens: int) -> float:
        """Milliseconds to the first token after a prompt of so many tokens."""
        return float(np.interp(prompt_tokens, self.tokens, self.ttft_ms))

    def answer_s(self, request: servers.Request) -> float:
        """Seconds of a whole answer."""
        return (self.ttft(len(request.prompt)) + self.tpot_ms * (request.answer_tokens - 1)) / 1000

    def limits(self, request: servers.Request, scale: float) -> servers.Limits:
        """Most TTFT and TPOT in milliseconds: the app's shares of `scale` times the idle whole model's."""
        return SLOS[request.app].limits(scale * self.ttft(len(request.prompt)), scale * self.tpot_ms)

    @property
    def note(self) -> str:
        """Its times."""
        lengths = ", ".join(
            f"{ttft:.1f} ms at {tokens}" for tokens, ttft in zip(self.tokens, self.ttft_ms, strict=True)
        )
        return f"idle whole model: TTFT {lengths} tokens, TPOT {self.tpot_ms:.2f} ms"


@dataclasses.dataclass(frozen=True)
class _Load:
    """Requests to send, by `clients` or, where that is 0, at their times."""

    case: str
    requests: Sequence[servers.Request]
    duration_s: float
    patience_s: float
    clients: int = 0


def run(bench: Run[Plan]) -> list[Row]:
    """Measures one model; the outcomes of all requests are kept for figures."""
    plan, progress = bench.plan, bench.progress
    servers.require_httpx()
    arrivals = None if plan.trace is None else servers.Arrivals.read(plan.trace)
    # The bundle that ours serves, and the float weights that peers are made of.
    model = checkpoint_of = bench.path()
    if bench.shape is not None:
        model = elastic_shape(bench.shape, plan.weights, progress)
    elif model.is_dir():
        raise ConfigError(f"{model} is a folder; make a bundle with `jaxllm prepare` or `jaxllm elasticize`")
    with open_model(model) as bundle:
        cfg, weights, name = bundle.cfg, bundle.layout.weights, bundle.layout.name
    systems, left_out = servers.systems_of(plan.systems, plan.llama_server, plan.slots, cfg)
    for each in (*left_out, *(f"{system.name}: {system.note}" for system in systems if system.note)):
        bench.tell(each)
    # Room for prompts and answers four times as long as the medians.
    context = min(cfg.window_tokens, 4 * (plan.prompt_tokens + plan.answer_tokens))
    sizes = servers.Sizes(
        prompt_tokens=plan.prompt_tokens,
        answer_tokens=plan.answer_tokens,
        context_tokens=context,
        vocab_size=cfg.vocab_size,
    )
    with tempfile.TemporaryDirectory(prefix="jaxllm-bench-") as folder:
        given = servers.Conditions(
            model=model,
            floats=Checkpoint.find(checkpoint_of, progress).folder(progress)
            if any(isinstance(e, servers.LlamaServer) for e in systems)
            else None,
            weights=weights,
            threads=threads_of(plan.threads),
            context_tokens=context,
            folder=Path(folder),
            keys=servers.keys_of(Path(folder)),
        )
        with servers.OurService().start(given, progress) as server:
            reference = measure(server, given, sizes, repeats=plan.reference_repeats, seed=plan.seed)
        bench.tell(reference.note)
        peaks: dict[str, list[int]] = {}
        shares: dict[str, int] = {}
        measured: dict[tuple[str, str], Cell] = {}
        for repetition in range(plan.repetitions):
            loads = _loads(name, bench, sizes, reference, arrivals, repetition)
            if not repetition:
                sent = [load for system in systems for load in _loads_of(system, loads)]
                least = plan.repetitions * sum(each.duration_s for each in sent) / 60
                most = least + plan.repetitions * sum(each.patience_s for each in sent) / 60
                bench.tell(
                    f"takes {least:.1f} minutes, at most {most:.1f} where answers are late, and the servers' "
                    "starts"
                )
            # Each system is first in its turn.
            first = repetition % len(systems)
            for system in (*systems[first:], *systems[:first]):
                own, stage = _loads_of(system, loads), f"{system.name}, run {repetition + 1}"
                if not own:
                    continue
                with system.start(given, progress) as server:
                    for number, load in enumerate(own):
                        progress(stage, number, len(own))
                        wait_until_asleep(server.pid, limit_s=5.0)
                        window = _sent(system, server, load, given, reference, plan)
                        key = load.case, system.name
                        measured.setdefault(key, Cell(*key, [])).windows.append(window)
                        late_s = max((each.late_s for each in window.outcomes), default=0.0)
                        # A sender that is so much late would be measured with the servers.
                        if late_s > 0.05:
                            bench.tell(f"{', '.join(key)}: a request was sent {1000 * late_s:.0f} ms late")
                    progress(stage, len(own), len(own))
                    # Mapped files are among its peak; the share is the proportional one (PSS).
                    if (peak := memory_of(server.pid, "VmHWM")) is not None:
                        peaks.setdefault(system.name, []).append(peak)
                    if (share := memory_of(server.pid, "Pss", "smaps_rollup")) is not None:
                        shares[system.name] = share
        starts = servers.start_rows(name, given, plan.starts, progress) if "start" in plan.parts else []
    bench.kept.extend(cells := list(measured.values()))
    if plan.outcomes is not None:
        write_outcomes(plan.outcomes, cells)
    rows = load_rows([cell for cell in cells if ", load " in cell.case], objectives=True)
    rows += load_rows([cell for cell in cells if ", load " not in cell.case], objectives=False)
    return [*rows, *memory_rows(name, peaks, shares), *starts]


def _sent(
    system: servers.System,
    server: servers.Server,
    load: _Load,
    given: servers.Conditions,
    reference: Reference,
    plan: Plan,
) -> Window:
    """What came of a load, in its measured part."""
    limits = [None if load.clients else reference.limits(each, plan.slo_scale) for each in load.requests]
    job: dict[str, Any] = {
        "url": server.url,
        "requests": [
            system.message(request, limit, given) | {"time_s": request.time_s}
            for request, limit in zip(load.requests, limits, strict=True)
        ],
        "patience_s": load.patience_s,
        "clients": load.clients,
        "duration_s": load.duration_s,
    }
    outcomes = [
        judged(each, load.requests[each["number"]], limits[each["number"]] or (math.inf, math.inf))
        for each in send(job, alive=server.require_alive)
    ]
    return Window(plan.warm_up_share * load.duration_s, load.duration_s, outcomes)


def _loads(
    name: str,
    bench: Run[Plan],
    sizes: servers.Sizes,
    reference: Reference,
    arrivals: servers.Arrivals | None,
    repetition: int,
) -> list[_Load]:
    """The loads of one repetition, the same for all systems."""
    plan, tell = bench.plan, bench.tell
    # No two loads send the same prompts: a server would have them in its cache.
    loads, seeds = [], itertools.count(plan.seed + 1000 * repetition, 10)
    answer_s = statistics.fmean(
        map(reference.answer_s, servers.back_to_back(sizes, clients=1, count=500, seed=plan.seed))
    )
    if "apps" in plan.parts:
        for load in plan.loads:
            rate, seed = load / answer_s, next(seeds)
            duration_s = max(plan.load_s, plan.least_requests / rate)
            if arrivals is None:
                sent = servers.poisson(sizes, rate_per_s=rate, duration_s=duration_s, seed=seed)
            else:
                sent, faster = servers.from_trace(
                    sizes, arrivals, rate_per_s=rate, duration_s=duration_s, seed=seed
                )
                tell(f"load {load:g} comes {faster:,.2g} times as fast as in the trace")
            tell(f"load {load:g}: {len(sent)} requests, {rate:.3g} per second")
            loads.append(_Load(f"{name}, load {load:g}", sent, duration_s, plan.patience_s))
    if "clients" in plan.parts:
        duration_s = max(plan.clients_s, plan.least_requests * answer_s)
        for count in plan.clients:
            patience_s = max(plan.patience_s, 2 * count * answer_s)
            # For eight times as many answers as the idle whole model gives one after another: a prompt that
            # is sent twice would be in a cache.
            most = count + math.ceil(8 * duration_s / answer_s)
            sent = servers.back_to_back(sizes, clients=count, count=most, seed=next(seeds))
            loads.append(_Load(f"{name}, {count} clients", sent, duration_s, patience_s, count))
    return loads


def _loads_of(system: servers.System, loads: Sequence[_Load]) -> list[_Load]:
    """Those that say something of a system: without objectives, nothing is planned."""
    return [each for each in loads if not each.clients or system.name != f"{OURS}-no-planning"]


def write_outcomes(path: Path, cells: Sequence[Cell]) -> None:
    """Writes the outcome of every request, a JSON line each."""
    lines = (
        one.to_json() | {"case": each.case, "system": each.system, "repetition": repetition}
        for each in cells
        for repetition, window in enumerate(each.windows)
        for one in window.outcomes
    )
    write_lines(path, lines)


_ANSWER_TOKENS = 24


def measure(
    server: servers.Server, given: servers.Conditions, sizes: servers.Sizes, *, repeats: int, seed: int
) -> Reference:
    """Times the whole model on our idle service.

    Args:
      repeats: of each length, of which medians are taken, after one that is not counted.
    """
    draw, ours = random.Random(seed), servers.OurService()
    most = sizes.within(sizes.context_tokens, _ANSWER_TOKENS)[0]
    wanted = (0, sizes.prompt_tokens // 2, sizes.prompt_tokens, 2 * sizes.prompt_tokens)
    tokens = tuple(sorted({min(max(each, servers.LEAST_PROMPT_TOKENS), most) for each in wanted} | {most}))
    requests = []
    for _ in range(repeats + 1):
        for each in tokens:
            # No prompt begins as another, so that nothing is reused.
            request = servers.Request(
                app=0, prompt=servers.random_prompt(sizes, each, draw), answer_tokens=_ANSWER_TOKENS
            )
            # Without an objective the whole model answers.
            requests.append(ours.message(request, None, given) | {"time_s": 0.0})
    wait_for_quiet()
    job = {"url": server.url, "requests": requests, "clients": 1, "duration_s": 0, "patience_s": 600.0}
    found = send(job, alive=server.require_alive)
    for outcome in found:
        if outcome["error"] or outcome["tokens"] < 2:
            raise JaxllmError(f"the reference was not answered: {outcome['error'] or outcome}")
    counted = found[len(tokens) :]
    ttft = [1000 * (each["first_s"] - each["sent_s"]) for each in counted]
    tpot = [1000 * (each["last_s"] - each["first_s"]) / (each["tokens"] - 1) for each in counted]
    medians = [statistics.median(ttft[place :: len(tokens)]) for place in range(len(tokens))]
    # A longer prompt never takes less time, whatever disturbed a sample.
    rising = tuple(itertools.accumulate(medians, max))
    return Reference(tokens, rising, statistics.median(tpot))
