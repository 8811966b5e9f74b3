"""Facts of the machine: plausible here, and harmless where a system does not tell them."""

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxllm.serving.host.machine import cpu_features, process_age_ms, usable_cores


def test_cores_are_those_that_this_process_may_use():
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("the system binds no process to cores")
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); " + (
        "from jaxllm.serving.host.machine import usable_cores; print(usable_cores())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_the_cpu_is_described_the_same_each_time():
    assert cpu_features() == cpu_features()
    assert platform.machine() in cpu_features()


@pytest.mark.parametrize("text", [None, "", "processor\t: 0\ncpu MHz\t\t: 2100.000\n\nprocessor\t: 1\n"])
def test_a_system_that_tells_no_features_is_told_apart_by_its_name(monkeypatch, tmp_path, text):
    place = tmp_path / "cpuinfo"
    if text is not None:
        place.write_text(text)
    monkeypatch.setattr("jaxllm.serving.host.machine._CPUINFO", place)
    assert platform.node() in cpu_features()


def test_only_what_compilers_look_at_counts(monkeypatch, tmp_path):
    place = tmp_path / "cpuinfo"
    monkeypatch.setattr("jaxllm.serving.host.machine._CPUINFO", place)
    described = []
    for flags, clock in (("sse avx", 2100), ("sse avx", 3000), ("sse", 2100)):
        place.write_text(f"processor: 0\nflags: {flags}\ncpu MHz: {clock}\n\nprocessor: 1\nflags: none\n")
        described.append(cpu_features())
    assert described[0] == described[1] != described[2]


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


def test_an_unknown_age_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr("jaxllm.serving.host.machine._PROCESS_FACTS", tmp_path / "absent")
    assert process_age_ms() is None
