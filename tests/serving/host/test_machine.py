"""Facts of the machine: plausible here, and harmless where a system does not tell them."""

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxllm.errors import ConfigError
from jaxllm.serving.host import machine
from jaxllm.serving.host.machine import (
    ProcessMemory,
    cpu_features,
    parsed_memory,
    process_age_ms,
    process_memory,
    usable_cores,
)


def test_cores_are_those_that_this_process_may_use():
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("the system binds no process to cores")
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); " + (
        "from jaxllm.serving.host.machine import usable_cores; print(usable_cores())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_only_what_compilers_look_at_counts(monkeypatch, tmp_path):
    assert cpu_features() == cpu_features()
    assert platform.machine() in cpu_features()
    place = tmp_path / "cpuinfo"
    monkeypatch.setattr("jaxllm.serving.host.machine._CPUINFO", place)
    described = []
    for flags, clock in (("sse avx", 2100), ("sse avx", 3000), ("sse", 2100)):
        place.write_text(f"processor: 0\nflags: {flags}\ncpu MHz: {clock}\n\nprocessor: 1\nflags: none\n")
        described.append(cpu_features())
    assert described[0] == described[1] != described[2]
    # A system that tells no features is told apart by its name.
    for text in ("", "processor\t: 0\ncpu MHz\t\t: 2100.000\n\nprocessor\t: 1\n", None):
        place.write_text(text) if text is not None else place.unlink()
        assert platform.node() in cpu_features()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system does not tell")
def test_a_process_knows_its_age():
    age_ms = process_age_ms()
    time.sleep(0.03)
    assert 0 <= age_ms < process_age_ms()
    began = time.monotonic()
    code = "from jaxllm.serving.host.machine import process_age_ms; print(process_age_ms())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # One tick of the system's clock more at most.
    assert 0 < float(done.stdout) < 1000 * (time.monotonic() - began) + 20


# Of memory.

SMAPS = """\
7f00-7f01 r--s 00000000 fe:00 12345                      /models/with a space.jaxllm
Size:                 64 kB
Rss:                  40 kB
Anonymous:             0 kB
7f01-7f02 rw-p 00000000 fe:00 99                         /lib/code.so
Rss:                  12 kB
Anonymous:             4 kB
7f02-7f03 r-xp 00001000 fe:00 99                         /lib/code.so
Rss:                   8 kB
Anonymous:             0 kB
7f03-7f04 rw-p 00000000 00:00 0
Rss:                 100 kB
Anonymous:           100 kB
VmFlags: rd wr mr
7f04-7f05 rw-p 00000000 00:00 0                          [heap]
Rss:                  20 kB
Anonymous:            20 kB
"""
STATUS = "Name:\tpython\nVmHWM:\t     512 kB\nVmRSS:\t     180 kB\n"


def test_pages_are_of_files_or_anonymous():
    memory = parsed_memory(SMAPS, STATUS)
    files = {"/models/with a space.jaxllm": 40 << 10, "/lib/code.so": 16 << 10}
    assert memory == ProcessMemory(anonymous=124 << 10, files=files, peak=512 << 10)
    assert memory.resident == 180 << 10


_WRITING = """
import numpy as np
from jaxllm.serving.host.machine import process_memory
before = process_memory()
written = np.ones(8 << 20, np.uint8)
after = process_memory()
print(after.anonymous - before.anonymous, after.peak - after.resident)
"""


def test_what_is_written_is_seen():
    """In a process that has no other threads, which would take and free memory meanwhile."""
    done = subprocess.run([sys.executable, "-c", _WRITING], capture_output=True, text=True, check=True)
    written, below_peak = map(int, done.stdout.split())
    assert 8 << 20 <= written < 9 << 20
    assert below_peak >= -(1 << 20)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("some avg10=12.50 avg60=1.00 avg300=0.00 total=9\nfull avg10=3.00 avg60=0.00 total=2\n", 0.125),
        ("some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n", 0.0),
        ("", None),
        ("full avg10=3.00", None),
    ],
)  # fmt: skip
def test_the_share_of_waiting_tasks(text, share):
    assert machine.parsed_pressure(text) == share


def test_a_system_that_does_not_tell(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_PRESSURE", tmp_path / "memory")
    assert machine.memory_pressure() is None
    (tmp_path / "memory").write_text("some avg10=40.00 avg60=0 avg300=0 total=1\n")
    assert machine.memory_pressure() == 0.4
    monkeypatch.setattr("jaxllm.serving.host.machine._SMAPS", tmp_path / "smaps")
    with pytest.raises(ConfigError, match=r"smaps: cannot be read .* on Linux"):
        process_memory()
    monkeypatch.setattr("jaxllm.serving.host.machine._PROCESS_FACTS", tmp_path / "absent")
    assert process_age_ms() is None
