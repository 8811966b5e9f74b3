"""Memory, bandwidth and quiet: what is read off the machine around a measurement."""

import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.measuring import quiet
from benchmarks.measuring.bandwidth import MemoryProbe
from benchmarks.measuring.memory import array_bytes, peak_resident_bytes
from serving.host.direct_io import PAGE, aligned


def test_peak_memory_counts_what_the_process_holds():
    before = peak_resident_bytes()
    block = bytearray(64 << 20)
    block[::4096] = b"x" * len(block[::4096])
    assert peak_resident_bytes() >= before
    assert peak_resident_bytes() > len(block)


def test_arrays_take_the_pages_that_were_filled():
    memory = aligned(100 * PAGE)
    assert array_bytes([memory]) == 0
    memory[5 * PAGE - 1 : 8 * PAGE] = 1
    assert array_bytes([memory]) == 4 * PAGE
    # A part of a page counts as it is.
    assert array_bytes([memory[:100], np.zeros(10, np.float32)]) == 140
    array = jax.block_until_ready(jnp.ones((PAGE, 8)))
    assert array_bytes([array]) == array.nbytes


def test_bandwidth_is_bytes_per_second():
    with MemoryProbe(1, buffer_bytes=1 << 22) as probe:
        # Between a floppy drive and what no cache reaches.
        assert 1e6 < probe.bytes_per_s() < 1e13


@pytest.mark.parametrize(("others_s", "disturbed"), [(0.0, False), (0.05, False), (0.5, True)])
def test_what_others_take_is_what_is_left_of_all(monkeypatch, others_s, disturbed):
    own_s, now = 2.0, {"busy": 100.0, "wall": 0.0}
    monkeypatch.setattr(quiet, "_busy_s", lambda: now["busy"])
    monkeypatch.setattr(quiet.time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(quiet.time, "process_time", lambda: 0.0)
    disturbance = quiet.Disturbance()
    now |= {"busy": 100.0 + own_s + others_s, "wall": 1.0}
    assert disturbance.ended(own_s=own_s) is disturbed


def test_nothing_is_known_where_the_system_does_not_tell(monkeypatch):
    monkeypatch.setattr(quiet, "_busy_s", lambda: None)
    assert quiet.Disturbance().ended(own_s=0.0) is None


@pytest.mark.alone  # a process that others keep from running looks asleep
@pytest.mark.skipif(quiet._process_s(1) is None, reason="needs /proc")
def test_a_process_is_waited_for_until_it_sleeps():
    code = "import sys, time\nend = time.time() + 0.3\nwhile time.time() < end: pass\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        time.sleep(0.1)
        quiet.wait_until_asleep(process.pid, limit_s=30)
        asleep = quiet._process_s(process.pid)
        time.sleep(0.1)
        assert quiet._process_s(process.pid) == asleep
        process.stdin.close()
