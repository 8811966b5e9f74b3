"""Divides documents over the processes of a group; each reads and encodes its own files.

If there are fewer files than processes, all read them and each encodes every n-th block of documents, which
is most of the work. The result is the same for any number of processes.
"""

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxllm.errors import ConfigError, JaxllmError

_DONE, _FAILED = b"\0", b"\1"


def takes_file(number: int, files: int) -> bool:
    """Whether this process reads a file, of so many in all, to encode it."""
    processes = jax.process_count()
    return files < processes or number % processes == jax.process_index()


def takes_block(number: int, files: int) -> bool:
    """Whether this process encodes a block of documents of a file that it reads, of so many files in all."""
    processes = jax.process_count()
    return files >= processes or number % processes == jax.process_index()


def exchanged(work: Callable[[], bytes]) -> list[bytes]:
    """Returns the result of `work` in each process, by process; all call this together, and wait for each
    other.

    Raises:
      ConfigError: `work` fails in one of them, and then in all.
    """
    try:
        own = _DONE + work()
    except (JaxllmError, OSError) as error:
        if jax.process_count() == 1:
            raise
        own = _FAILED + f"process {jax.process_index()}: {error}".encode()
    found = _gathered(own)
    for each in found:
        if each[:1] == _FAILED:
            raise ConfigError(each[1:].decode())
    return [each[1:] for each in found]


def _gathered(own: bytes) -> list[bytes]:
    if jax.process_count() == 1:
        return [own]
    sizes = np.asarray(multihost_utils.process_allgather(np.array([len(own)], np.int32))).reshape(-1)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(own)] = np.frombuffer(own, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]
