"""Limits the memory of pinned contexts, so that others can run beside them."""

from collections.abc import Callable, Iterable

from jaxllm.errors import BudgetExceeded
from serving.contexts.options import ContextOptions
from serving.contexts.record import Record


def require_share(
    record: Record,
    size_bytes: int,
    others: Iterable[Record],
    options: ContextOptions,
    bytes_of: Callable[[Record], int],
) -> None:
    """Checks that a pinned context may take so much memory.

    Args:
      record: of the context.
      size_bytes: of its chunks.
      others: all contexts; the pinned ones among them count, too.
      options: have the shares.
      bytes_of: gives the most bytes of a context's chunks in memory.

    Raises:
      BudgetExceeded: the app's pinned contexts, or those of all apps, would take more than their share.
    """
    pinned = [each for each in others if each.pinned and each.name != record.name]
    own = [each for each in pinned if each.app == record.app]
    for option, those, whose in (
        ("app_pinned_share", own, f"pinned contexts of {record.app}"),
        ("pinned_share", pinned, "pinned contexts of all apps"),
    ):
        most = int(getattr(options, option) * options.budget_bytes)
        if sum(map(bytes_of, those)) + size_bytes > most:
            raise BudgetExceeded(
                f"{whose} may take {most:,} bytes of memory, and {size_bytes:,} more do not fit: unpin some, "
                f"ask for fewer tokens, or raise ContextOptions.{option}"
            )
