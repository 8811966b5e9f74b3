"""The memory of a process by kind, which adds up; and what is given back."""

import mmap
import subprocess
import sys

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.serving.host import allocator
from jaxllm.serving.host import process_memory as memories
from jaxllm.serving.host.allocator import Stages, resident_bytes
from jaxllm.serving.host.process_memory import (
    ProcessMemory,
    children_bytes,
    give_back_libraries,
    parsed_memory,
    process_memory,
    resident_of,
)

MEGABYTE = 1 << 20
SMAPS = """\
7f00-7f01 r--s 00000000 fe:00 12345                      /models/with a space.jaxllm
Size:                 64 kB
Rss:                  40 kB
Anonymous:             0 kB
7f01-7f02 rw-p 00000000 fe:00 99                         /lib/code.so
Rss:                  12 kB
Anonymous:             4 kB
7f03-7f04 rw-p 00000000 00:00 0
Rss:                 100 kB
Anonymous:           100 kB
VmFlags: rd wr mr
7f05-7f06 rw-p 00000000 00:00 0                          [heap]
Rss:                  24 kB
Anonymous:            24 kB
7f06-7f07 r-xp 00000000 00:00 0
Rss:                   8 kB
Anonymous:             8 kB
7f08-7f09 ---p 00000000 00:00 0
Rss:                   0 kB
Anonymous:             0 kB
7f09-7f0a rw-p 00000000 00:00 0
Rss:                  16 kB
Anonymous:            16 kB
7f0c000000-7f0c021000 rw-p 00000000 00:00 0
Rss:                  32 kB
Anonymous:            32 kB
"""
STATUS = "Name:\tpython\nVmHWM:\t     512 kB\nVmRSS:\t     180 kB\n"


def test_pages_by_kind():
    memory = parsed_memory(SMAPS, STATUS)
    files = {"/models/with a space.jaxllm": 40 << 10, "/lib/code.so": 8 << 10}
    kinds = {"heap": 56, "stacks": 16, "machine_code": 8, "relocated": 4, "blocks": 100}
    kinds = {kind: kilobytes << 10 for kind, kilobytes in kinds.items()}
    assert memory == ProcessMemory(kinds=kinds, files=files, peak=512 << 10)
    assert memory.resident == 232 << 10


def test_this_process_adds_up_and_systems_that_do_not_tell(tmp_path, monkeypatch):
    found, resident = process_memory(), resident_bytes()
    assert abs(found.resident - resident) < 0.05 * resident + 8 * MEGABYTE
    stages = Stages()
    stages.end("before")
    # A mapping of its own: an allocator may give what is in memory already.
    block = np.frombuffer(mmap.mmap(-1, 32 * MEGABYTE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    assert resident_of(block.ctypes.data, block.nbytes) <= 4 * MEGABYTE
    block[: 16 * MEGABYTE] = 1
    assert 16 * MEGABYTE <= resident_of(block.ctypes.data, block.nbytes) <= 20 * MEGABYTE
    stages.end("block")
    assert 15 * MEGABYTE <= stages.grown["block"] <= 24 * MEGABYTE
    with subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1) as child:
        child.stdout.readline()
        assert children_bytes() > 2 * MEGABYTE
        child.kill()
    for module, name in ((memories, "_SMAPS"), (memories, "_PAGEMAP"), (allocator, "_STATM")):
        monkeypatch.setattr(module, name, tmp_path / name)
    for call in (process_memory, resident_bytes, lambda: resident_of(0, 1)):
        with pytest.raises(ConfigError, match=r"cannot be read .* on Linux"):
            call()
    stages.end("unknown")
    assert "unknown" not in stages.grown
    assert give_back_libraries() == 0


def test_libraries_still_work_after_their_pages_were_given_back():
    code = """
import jax, numpy as np
from jaxllm.serving.host.allocator import resident_bytes
from jaxllm.serving.host.process_memory import give_back_libraries
before = jax.jit(lambda x: (x @ x).sum())(np.eye(8))
resident = resident_bytes()
print(give_back_libraries() >> 20, resident - resident_bytes() >> 20)
print(float(before) == float(jax.jit(lambda x: (x @ x).sum() + 0)(np.eye(8))) == 8)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    given, less, equal = done.stdout.split()
    assert int(given) > 20
    assert int(less) > 15
    assert equal == "True"
