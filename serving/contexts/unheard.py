"""Keeps the errors of answers that were dropped before they were stored, until somebody can be told."""

import logging

from jaxllm.errors import JaxllmError

_LOG = logging.getLogger("jaxllm")


class UnheardErrors:
    """The reasons why what was said could not be kept, by context, where nobody held the answer any more.

    They are logged at once, and raised to whoever uses the context next, or closes all contexts.
    """

    def __init__(self) -> None:
        self._errors: dict[str, JaxllmError] = {}

    def note(self, name: str, error: JaxllmError) -> None:
        """Keeps and logs a context's error."""
        self._errors[name] = error
        _LOG.warning("what was said last in the context %s could not be kept: %s", name, error)

    def forget(self, name: str) -> JaxllmError | None:
        """Drops a context's error, and gives it."""
        return self._errors.pop(name, None)

    def tell(self, name: str) -> None:
        """Raises a context's error, once."""
        error = self.forget(name)
        if error is not None:
            raise type(error)(
                f"the last answer in the context {name} could not be kept when it was dropped: {error}"
            ) from error

    def tell_all(self) -> None:
        """Raises the first error there is; the others stay."""
        for name in list(self._errors):
            self.tell(name)
