"""Limits the bytes that contexts take on storage, of one app and of all."""

import dataclasses
from collections.abc import Callable

from jaxllm.errors import BudgetExceeded


@dataclasses.dataclass(frozen=True)
class BrokenQuota:
    """A quota that files would break.

    Attributes:
      app: whose quota it is; None for that of all contexts.
      reason: as a sentence.
    """

    app: str | None
    reason: str


@dataclasses.dataclass(frozen=True)
class Quotas:
    """Most bytes of files; 0 for no limit.

    Attributes:
      all_bytes: of all contexts.
      app_bytes: of each app's.
    """

    all_bytes: int = 0
    app_bytes: int = 0

    def beyond(
        self, app: str, more_bytes: int, used_bytes: Callable[[str | None], int]
    ) -> BrokenQuota | None:
        """The quota that files of an app would break if they took so many bytes more; None for none. A change
        that does not grow the store breaks none.

        Args:
          app: that owns them.
          more_bytes: than now.
          used_bytes: measures the files of an app, or of all for None.
        """
        for quota, whose, name in (
            (self.app_bytes, f"the contexts of {app}", app),
            (self.all_bytes, "all contexts", None),
        ):
            if quota and more_bytes > 0 and used_bytes(name) + more_bytes > quota:
                reason = (
                    f"{whose} may take {quota:,} bytes on storage, and {more_bytes:,} more do not fit: "
                    "delete contexts, or raise the quota"
                )
                return BrokenQuota(name, reason)
        return None

    def require(self, app: str, more_bytes: int, used_bytes: Callable[[str | None], int]) -> None:
        """Checks that files of an app may take so many bytes more; see `beyond`.

        Raises:
          BudgetExceeded: they may not.
        """
        if (broken := self.beyond(app, more_bytes, used_bytes)) is not None:
            raise BudgetExceeded(broken.reason)
