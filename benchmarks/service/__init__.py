"""Measures the service under load: apps with objectives that call at their own times, and clients that call
as fast as they are answered, beside ours without batching, planning or reuse of prefixes, and llama.cpp's
server.

`systems` draws what is sent and starts the servers, `load` sends it from a process of its own, `run` times
the idle whole model and the loads, `outcomes` judges what came back.
"""

import dataclasses
from pathlib import Path

import click

from benchmarks.harness import bench as plans

PARTS = {
    "apps": "answers in time of six apps that call at their own times",
    "clients": "tokens per second over clients that call as soon as they are answered",
    "start": "time from the start of the process to the first token",
}
SYSTEMS = ("no-batching", "no-planning", "no-prefix-reuse", "llama.cpp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.ShapePlan, plans.ThreadsPlan):
    """Sizes of one measurement; what an option asks for is said there.

    Attributes:
      load_s: seconds of each load, of which the first `warm_up_share` is not counted; more where these would
        be less than `least_requests`.
      clients_s: of each number of clients; more where the idle whole model would answer fewer than
        `least_requests` of one client.
      patience_s: for answers after the last request; for those of clients at least twice as long as the idle
        whole model would take to answer all of them.
      starts: of the service, from buckets on disk.
    """

    systems: tuple[str, ...] = plans.sized(
        (), "Ours without one of its techniques, or llama.cpp's server, beside ours.", "--system",
        type=click.Choice([*SYSTEMS, "none"]), default="all that run here",
    )  # fmt: skip
    llama_server: Path | None = plans.sized(
        None, "The binary of llama.cpp's server.", metavar="FILE",
        default="llama-cpp-python's server, one request at a time",
    )  # fmt: skip
    slots: int = plans.sized(8, "Answers that --llama-server decodes together.", low=1)
    loads: tuple[float, ...] = plans.sized(
        (1.0, 2.0), "Requests per second of the six apps, in those that the idle whole model answers one "
        "after another.", "--load", quick=(1.0,), above=0,
    )  # fmt: skip
    trace: Path | None = plans.sized(
        None, "Take arrivals and lengths from a trace of Azure (.csv) or Mooncake (.jsonl), compressed in "
        "time and scaled.", type=plans.FILE, metavar="FILE", default="a Poisson process",
    )  # fmt: skip
    clients: tuple[int, ...] = plans.sized(
        (1, 8, 64), "Number of clients that call as soon as they are answered.", quick=(8,), low=1, high=1024
    )
    prompt_tokens: int = plans.sized(256, "Median length of prompts.", quick=128, low=16)
    answer_tokens: int = plans.sized(48, "Median length of answers.", quick=32, low=4)
    slo_scale: float = plans.sized(
        3.0, "Objectives are shares of so many times the idle whole model's times.", above=0
    )
    repetitions: int = plans.sized(3, "Repetitions of everything, the systems in turns.", quick=1, low=1)
    seconds: float = plans.sized(
        0.0, "Seconds of each load, at least: more where a large model answers few calls in them.", above=0,
        default="4, of clients 2.5; with --full 40 and 10",
    )  # fmt: skip
    outcomes: Path | None = plans.sized(
        None, "Write the outcome of every request, a JSON line each.", metavar="FILE",
        type=click.Path(path_type=Path, dir_okay=False),
    )  # fmt: skip
    parts: tuple[str, ...] = plans.parts_of(PARTS)
    load_s: float = plans.sized(40.0, quick=4.0)
    clients_s: float = plans.sized(10.0, quick=2.5)
    least_requests: int = plans.sized(50, quick=20)
    warm_up_share: float = 0.2
    patience_s: float = plans.sized(30.0, quick=4.0)
    starts: int = plans.sized(5, quick=3)
    reference_repeats: int = plans.sized(5, quick=3)
    seed: int = 0


@plans.benchmark("service", Plan, shapes=plans.DENSE_SHAPES)
def service_command(bench: plans.Run[Plan]) -> plans.Run[Plan]:
    """Measure the service under load: answers in time, times, tokens per second and memory.

    Six apps call at their own times, each with an objective, and clients call as soon as they are answered.
    Every system is a server process with the same weights and threads, and gets the same requests.

    \b
    Example:
      jaxllm bench service
      jaxllm bench service --shape 250m --weights int8 --full --plot figures
    """
    if bench.plan.seconds:
        bench = bench.changed(load_s=bench.plan.seconds, clients_s=bench.plan.seconds)
    loads, clients = dict.fromkeys(bench.plan.loads), dict.fromkeys(bench.plan.clients)
    return bench.changed(loads=tuple(loads), clients=tuple(clients))
