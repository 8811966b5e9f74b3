"""Closes contexts that are still open when the interpreter exits, before the engine that they need is
closed."""

import atexit
import logging
import os
import weakref
from typing import Protocol

from jaxllm.errors import one_line

_LOG = logging.getLogger("jaxllm")


class Closing(Protocol):
    """Something that is closed at exit."""

    def close(self) -> None:
        """Keeps what is unsaved."""
        ...


_OPEN: "weakref.WeakKeyDictionary[Closing, int]" = weakref.WeakKeyDictionary()


def close_at_exit(what: Closing) -> None:
    """Registers an object to be closed when this process exits, before all that was registered earlier."""
    _OPEN[what] = os.getpid()
    # Registered again, after the engine's exit function: the last one runs first.
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def forget_at_exit(what: Closing) -> None:
    """Unregisters an object that was closed."""
    _OPEN.pop(what, None)


def _close_all() -> None:
    for each, process in list(_OPEN.items()):
        # A forked child must not close its parent's contexts.
        if process == os.getpid():
            try:
                each.close()
            except Exception as error:
                _LOG.warning("the last answer could not be kept at exit: %s", one_line(error))
