"""Keeps the errors of answers that were dropped before they were stored, until they can be raised."""

import logging

from jaxllm.errors import JaxllmError

_LOG = logging.getLogger("jaxllm")


class PendingErrors:
    """Errors of storing dropped answers, by context.

    They are logged at once, and raised by the context's next call, or when all contexts are closed.
    """

    def __init__(self) -> None:
        self._errors: dict[str, JaxllmError] = {}

    def note(self, name: str, error: JaxllmError) -> None:
        """Keeps and logs a context's error."""
        self._errors[name] = error
        _LOG.warning("the last answer in the context %s could not be kept: %s", name, error)

    def forget(self, name: str) -> JaxllmError | None:
        """Removes a context's error and returns it."""
        return self._errors.pop(name, None)

    def raise_for(self, name: str) -> None:
        """Raises a context's error, once."""
        error = self.forget(name)
        if error is not None:
            raise type(error)(
                f"the last answer in the context {name} could not be kept when it was dropped: {error}"
            ) from error

    def raise_first(self) -> None:
        """Raises the first error; the others stay."""
        for name in list(self._errors):
            self.raise_for(name)
