"""Tells processes that were forked from one with an open model.

The threads of JAX, of the native kernels and of those that read weights do not come along into a forked
process, nor do the locks that they held get free: its first graph would wait for ever. So engines refuse to
be used, or opened, in such a process.
"""

import functools
import os

from jaxllm.errors import ConfigError

_forked = False


@functools.cache
def watch_for_forks() -> None:
    """Processes that are forked from here on are told."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_mark)


def require_not_forked() -> None:
    """Raises ConfigError in a process that was forked from one with an open model."""
    if _forked:
        raise ConfigError(
            "this process was forked from one that had opened a model, whose threads did not come along; "
            "start it by multiprocessing's 'spawn' or 'forkserver', and open the model in it"
        )


def _mark() -> None:
    global _forked
    _forked = True
