"""Detects processes that were forked from one with an open model.

A fork has neither the threads of JAX, of the native kernels and of weight readers, nor a release of their
locks: its first bucket would wait forever. So engines refuse to be used or opened in a fork.
"""

import functools
import os

from jaxllm.errors import ConfigError

_forked = False


@functools.cache
def watch_for_forks() -> None:
    """Marks processes that are forked from this one from now on."""
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
