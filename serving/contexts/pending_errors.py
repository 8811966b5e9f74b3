"""Keeps the errors of storing that nobody waited for, until they can be raised."""

import logging

from jaxllm.errors import JaxllmError

_LOG = logging.getLogger("jaxllm")


class PendingErrors:
    """Errors of storing dropped answers, and of writing in the background, by context. From any thread.

    They are logged at once, and raised by the context's next call, or when all contexts are closed.
    """

    def __init__(self) -> None:
        # With what could not be done.
        self._errors: dict[str, tuple[str, JaxllmError]] = {}

    def note(self, name: str, error: JaxllmError) -> None:
        """Keeps and logs the error of a dropped answer in a context."""
        self._note(name, "the last answer in the context {} could not be kept when it was dropped", error)

    def note_unwritten(self, name: str, error: JaxllmError) -> None:
        """Keeps and logs the error of writing a context's chunks."""
        what = (
            "chunks of the last answer in the context {} could not be written; its tokens are kept, and the "
            "next call computes its chunks"
        )
        self._note(name, what, error)

    def has(self, name: str) -> bool:
        """Whether a context has an error."""
        return name in self._errors

    def forget(self, name: str) -> None:
        """Removes a context's error."""
        self._errors.pop(name, None)

    def raise_for(self, name: str) -> None:
        """Raises a context's error, once."""
        what, error = self._errors.pop(name, ("", None))
        if error is not None:
            raise type(error)(f"{what}: {error}") from error

    def raise_first(self) -> None:
        """Raises the first error; the others stay."""
        for name in list(self._errors):
            self.raise_for(name)

    def _note(self, name: str, what: str, error: JaxllmError) -> None:
        what = what.format(name)
        self._errors[name] = (what, error)
        _LOG.warning("%s: %s", what, error)
