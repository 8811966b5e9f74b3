"""Tests what the system is read to say of memory."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm.errors import ConfigError
from jaxllm.serving.host.process_memory import ProcessMemory, parsed, process_memory

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
    memory = parsed(SMAPS, STATUS)
    files = {"/models/with a space.jaxllm": 40 << 10, "/lib/code.so": 16 << 10}
    assert memory == ProcessMemory(anonymous=124 << 10, files=files, peak=512 << 10)
    assert memory.resident == 180 << 10


_WRITING = """
import numpy as np
from jaxllm.serving.host.process_memory import process_memory
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


def test_a_system_without_proc_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("jaxllm.serving.host.process_memory._SMAPS", tmp_path / "smaps")
    with pytest.raises(ConfigError, match=r"smaps: cannot be read .* on Linux"):
        process_memory()
