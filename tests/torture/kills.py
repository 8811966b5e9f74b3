"""Kills processes at random moments: apps that use contexts, and writers of bundles."""

import concurrent.futures
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from jaxllm.bundle import Bundle
from jaxllm.errors import JaxllmError
from jaxllm.serving.ground.options import EngineOptions
from tests.serving.contexts.dying import Known, live_and_die
from tests.torture.outcome import Outcome, Tally
from tests.torture.process import ROOT

_OPTIONS = EngineOptions(
    context_tokens=128, cache_tokens=(128,), chunk_tokens=(16,), decode_block=4, kv_codec="raw",
    buckets_bytes=1 << 28,
)  # fmt: skip
_PREPARE = """
import sys
from pathlib import Path
from jaxllm.prepare import prepare
print("ready", flush=True)
while True:
    prepare(Path(sys.argv[1]), Path(sys.argv[2]), weights="int8")
"""
# Of all kills, those of writers of bundles.
_WRITERS = 0.1


def kill(
    victims: Path,
    scratch: Path,
    tally: Tally,
    *,
    kills: int,
    seed: int,
    lanes: int,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Kills `kills` processes and looks at what they leave: nothing that had ended is lost, nothing is half.

    Args:
      victims: the folder that `make_victims` wrote.
      scratch: for stores and bundles.
      tally: counts what came of it.
      kills: how many.
      seed: of the moments.
      lanes: lives at a time, each with a store of its own.
      tick: called after each kill.
    """
    writers = max(1, round(kills * _WRITERS))

    def lives(lane: int) -> None:
        draw, known = random.Random(f"{seed}:{lane}"), Known()
        for number in range(lane, kills - writers, lanes):
            name = f"{seed}:{lane}:{number}"
            tally.add(
                "kill a service", name, _life(known, victims, scratch / f"lane-{lane}", draw, seed + number)
            )
            tick()

    with concurrent.futures.ThreadPoolExecutor(lanes) as pool:
        for each in [pool.submit(lives, lane) for lane in range(lanes)]:
            each.result()
    draw = random.Random(seed)
    for number in range(writers):
        tally.add("kill a writer", f"{seed}:{number}", _writer(victims, scratch / "prepared", draw))
        tick()


def _life(known: Known, victims: Path, folder: Path, draw: random.Random, seed: int) -> Outcome:
    began = time.perf_counter()
    try:
        live_and_die(
            known, folder / "store", victims / "model" / "model.jaxllm", _OPTIONS,
            seed=seed, after_s=draw.uniform(0.0, 0.4), cache=folder / "cache",
        )  # fmt: skip
    except AssertionError as error:
        return Outcome(ending="wrong", says=str(error)[:300])
    return Outcome(ending="ok", took_s=time.perf_counter() - began)


def _writer(victims: Path, folder: Path, draw: random.Random) -> Outcome:
    """Kills `prepare` while it writes: the file is whole, and the next writer leaves nothing beside it."""
    folder.mkdir(exist_ok=True)
    out = folder / "model.jaxllm"
    process = subprocess.Popen(
        [sys.executable, "-c", _PREPARE, str(victims / "folder"), str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()
        time.sleep(draw.uniform(0.0, 0.2))
        process.send_signal(draw.choice((signal.SIGKILL, signal.SIGTERM)))
        process.wait()
    try:
        if out.exists():
            with Bundle.open(out) as bundle:
                bundle.verify()
    except JaxllmError as error:
        return Outcome(ending="wrong", says=str(error)[:300])
    from jaxllm.prepare import prepare

    prepare(victims / "folder", out, weights="int8")
    left = sorted(set(os.listdir(folder)) - {out.name})
    return Outcome(ending="wrong", says=f"left behind: {left}") if left else Outcome(ending="ok")
