"""Starts processes of several devices and groups of processes, and reads what they tell."""

import json
import socket
import subprocess
import sys
from typing import Any


def started(module: str, *words: object) -> subprocess.Popen:
    """A process that calls a module's `main` with words; its last line is JSON."""
    script = f"import sys; from {module} import main; main(*sys.argv[1:])"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", script, *map(str, words)], **pipes)


def started_group(module: str, *words: object) -> list[subprocess.Popen]:
    """Two processes that call a module's `main` with words, the coordinator's port and their number."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [started(module, *words, port, process) for process in range(2)]


def join(port: str, process: str, devices: int) -> None:
    """Makes the devices of one of a group's processes, and joins the other one."""
    import jax

    from jaxllm.training.loop.parallel import start_process_group

    jax.config.update("jax_num_cpu_devices", devices)
    start_process_group(f"127.0.0.1:{port}", 2, int(process))


def told_by(process: subprocess.Popen) -> Any:
    """What a process has told at its end."""
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])
