"""Serves one open model in a child process: `python -m benchmarks.peers.child`.

One JSON object per line on standard input, one per line back (before it any number of
`{"progress": [stage, done, total]}`):

    {"do": "open", "opening": {...}}                    -> {"facts": {...}, "settings": [...]}
    {"do": "answer", "prompt": [ids], "tokens": 128, "setting": "...", "repeats": 1}
                                                        -> {"prefill_ms": 1, "decode_ms": 2, "ids": [...]}
    {"do": "score", "tokens": [ids], "targets": [ids]}  -> {"losses": [nats]}

Every answer also has `cpu_s`, the processor time of the command, and `peak_bytes`, the peak of memory since
the command before. A failure is `{"error": text}`. The clock is read here, so that no pipe is timed; times
are medians of the repeats. The end of standard input ends the process at once: it cannot outlive its
parent.
"""

import json
import os
import queue
import sys
import threading
import time
import traceback
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from benchmarks.harness.machine import peak_resident_bytes, reset_peak_memory
from benchmarks.peers import SYSTEMS, Opening, Session
from jaxllm.errors import JaxllmError, one_line

TIMES = ("prefill_ms", "decode_ms", "prefill_kernel_ms", "decode_kernel_ms")


class Server:
    """Holds the session and turns commands into answers."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._session: Session | None = None

    def handle(self, command: dict[str, Any]) -> dict[str, Any]:
        """The answer to one command; never raises."""
        began_cpu = time.process_time()
        try:
            answer = self._answer(command)
        except JaxllmError as error:
            answer = {"error": one_line(error)}
        except Exception as error:  # The parent gets every error of a library.
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {one_line(error)}"}
        answer |= {"cpu_s": time.process_time() - began_cpu, "peak_bytes": peak_resident_bytes()}
        reset_peak_memory()
        return answer

    def send(self, message: dict[str, Any]) -> None:
        """Writes one line to the parent."""
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def _answer(self, command: dict[str, Any]) -> dict[str, Any]:
        if command["do"] == "open":
            opening = Opening(**command["opening"] | {"model": Path(command["opening"]["model"])})
            self._session = SYSTEMS[opening.peer].open(
                opening, lambda *step: self.send({"progress": list(step)})
            )
            return {"facts": self._session.facts(), "settings": list(self._session.settings)}
        session = self._session
        if session is None:
            raise RuntimeError("no model is open")
        if command["do"] == "score":
            scores = session.score(command["tokens"], command["targets"])
            return {"losses": [-float(score) for score in scores]}
        if command["do"] == "answer":
            prompt, tokens, setting = command["prompt"], command["tokens"], command["setting"]
            answers = [_timed_answer(session, prompt, tokens, setting) for _ in range(command["repeats"])]
            times = {key: median(each[key] for each in answers) for key in TIMES}
            return answers[-1] | times
        raise RuntimeError(f"unknown command {command['do']!r}")


def _timed_answer(session: Session, prompt: list[int], tokens: int, setting: str) -> dict[str, Any]:
    def counted(what: str) -> float:
        """So far: `kernel_ms`, time in native kernels, or `passes`, verifications of drafts; else 0."""
        return getattr(session, what, lambda: 0)()

    kernels, passes, began = [counted("kernel_ms")], counted("passes"), time.perf_counter()
    first = session.prefill(prompt, setting)
    between = time.perf_counter()
    kernels.append(counted("kernel_ms"))
    rest = session.decode(tokens, setting) if tokens else []
    ended = time.perf_counter()
    kernels.append(counted("kernel_ms"))
    return {
        "prefill_kernel_ms": kernels[1] - kernels[0],
        "decode_kernel_ms": kernels[2] - kernels[1],
        "prefill_ms": 1000 * (between - began),
        "decode_ms": 1000 * (ended - between),
        "passes": counted("passes") - passes,
        "ids": [first, *rest],
    }


def main() -> None:
    """Serves until standard input ends."""
    # Libraries print; what they print must not reach the parent as answers.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            commands.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    server = Server(out)
    while True:
        server.send(server.handle(commands.get()))


if __name__ == "__main__":
    main()
