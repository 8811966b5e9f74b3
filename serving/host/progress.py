"""Reports the progress of long work."""

from collections.abc import Callable

# Called with (stage, done, total).
Progress = Callable[[str, int, int], None]


def loading(progress: Progress | None, total_bytes: int) -> Callable[[int], None]:
    """A function to call with the bytes of each loaded part; it calls `progress` with the sum."""
    done = 0

    def loaded(size_bytes: int) -> None:
        nonlocal done
        done = min(total_bytes, done + size_bytes)
        if progress is not None:
            progress("load", done, total_bytes)

    return loaded
