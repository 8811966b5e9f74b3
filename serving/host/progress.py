"""How long work tells how far it is."""

from collections.abc import Callable

# Called with what is done, how much of it is done by now, and how much there is in all.
Progress = Callable[[str, int, int], None]


def loading(progress: Progress | None, total_bytes: int) -> Callable[[int], None]:
    """What is to be called with the bytes of each part that was loaded; it tells `progress`."""
    done = 0

    def loaded(size_bytes: int) -> None:
        nonlocal done
        done = min(total_bytes, done + size_bytes)
        if progress is not None:
            progress("load", done, total_bytes)

    return loaded
