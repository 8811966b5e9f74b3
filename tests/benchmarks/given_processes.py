"""Defines the functions that other processes run; importing it imports nothing large."""

import os
import signal

from jaxllm.errors import ConfigError


def filled(count):
    """Bytes of memory that were filled, and a variable of the process."""
    if count < 0:
        raise ConfigError("too few")
    block = bytearray(count)
    block[::4096] = b"x" * len(block[::4096])
    return len(block), os.environ["JAXLLM_THREADS"]


def killed():
    """Ends the process as the system does for want of memory."""
    os.kill(os.getpid(), signal.SIGKILL)
