"""Knows contexts whose last change may not have ended, because an interrupt or an error came."""

from pathlib import Path

from serving.contexts.record import Record
from serving.contexts.write_queue import WriteQueue


class Unsettled:
    """Folders of contexts that are being changed, or whose change was left in the middle, by name.

    A change of the thread that writes is that thread's alone while it runs.

    Args:
      queue: of writes.
    """

    def __init__(self, queue: WriteQueue[Record]) -> None:
        self._queue = queue
        self._folders: dict[str, tuple[Path, bool]] = {}

    def begin(self, name: str, folder: Path) -> None:
        """Notes that a context is about to be changed."""
        self._folders[name] = (folder, self._queue.inside)

    def end(self, name: str) -> None:
        """Forgets a context whose change has ended, or was settled."""
        self._folders.pop(name, None)

    def folder(self, name: str) -> Path | None:
        """The folder of a context; None where nothing is to be settled."""
        folder, _ = self._folders.get(name, (None, False))
        return folder

    def left(self) -> list[str]:
        """The contexts that this thread has to settle before it looks at the store."""
        inside = self._queue.inside
        return [
            name
            for name, (_, written) in list(self._folders.items())
            if written == inside or (written and not self._queue.busy(name))
        ]
