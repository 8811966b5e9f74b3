"""Closes contexts that are still open when the interpreter ends, before it takes apart what they need."""

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
    """Has this process close it at its end, before all that was registered earlier."""
    _OPEN[what] = os.getpid()
    # Again, behind what the engine registered: what is registered last runs first.
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def is_closed(what: Closing) -> None:
    """Forgets it."""
    _OPEN.pop(what, None)


def _close_all() -> None:
    for each, process in list(_OPEN.items()):
        # A forked child has only copies of its parent's.
        if process == os.getpid():
            try:
                each.close()
            except Exception as error:
                _LOG.warning("what was said last could not be kept at exit: %s", one_line(error))
