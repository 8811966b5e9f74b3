"""Predicts which context is called next: a Markov chain of contexts, which backs off to the hour of the day
and to how often each is called.

    P(next | last, hour) = (n(last, next) + S·Q(next | hour)) / (n(last) + S)
    Q(next | hour)       = (h(hour, next) + S·F(next)) / (h(hour) + S)
    F(next)              = share of calls

n, h and calls are counts that age: a row is halved when it is full, so that habits may change. Rows that have
seen little say little: S calls' worth comes from the next estimate. Of equals the one called last comes
first. Nothing is written to storage: when apps are used is their users' own business. A service begins with
the order in which the store's contexts were last used.
"""

import collections
from collections.abc import Mapping

# S of the equations above, in calls.
_PRIOR_CALLS = 1.0
# A row of counts is halved when it has so many, and loses what was counted less than `_LEAST` then.
_FULL, _LEAST = 64.0, 0.2
_HOURS = 24


class _Row:
    """Counts of contexts, which age; a bounded number of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.counts: dict[str, float] = {}
        self.total = 0.0

    def add(self, name: str) -> list[str]:
        """Counts one call; returns what was dropped."""
        # The last one counted stands last.
        self.counts[name] = self.counts.pop(name, 0.0) + 1
        self.total += 1
        if self.total <= _FULL and len(self.counts) <= self._most:
            return []
        before = set(self.counts)
        if self.total > _FULL:
            halved = {each: count / 2 for each, count in self.counts.items()}
            self.counts = {each: count for each, count in halved.items() if count >= _LEAST or each == name}
        if len(self.counts) > self._most:
            # Of equals the one that came first.
            del self.counts[min((each for each in self.counts if each != name), key=self.counts.__getitem__)]
        self.total = sum(self.counts.values())
        return [each for each in before if each not in self.counts]

    def drop(self, name: str) -> None:
        """Forgets a context."""
        if self.counts.pop(name, None) is not None:
            self.total = sum(self.counts.values())

    def smoothed(self, behind: Mapping[str, float]) -> dict[str, float]:
        """Probabilities of the contexts of `behind`, which has them where nothing was counted."""
        whole = self.total + _PRIOR_CALLS
        return {
            name: (self.counts.get(name, 0.0) + _PRIOR_CALLS * share) / whole
            for name, share in behind.items()
        }


class CallPredictor:
    """Learns from calls which context is called next.

    Args:
      most_contexts: that it knows; beyond these it forgets the least called.
      most_followers: contexts that it knows of each to follow it.
    """

    def __init__(self, most_contexts: int = 256, most_followers: int = 16) -> None:
        self._most_followers = most_followers
        self._calls = _Row(most_contexts)
        self._after: dict[str, _Row] = {}
        self._at: dict[int, _Row] = collections.defaultdict(lambda: _Row(most_followers))
        self._last = ""

    @property
    def size(self) -> int:
        """Number of counts: at most (contexts)·(1 + followers) + 24·followers."""
        rows = [self._calls, *self._after.values(), *self._at.values()]
        return sum(len(row.counts) for row in rows)

    def called(self, name: str, hour: int | None) -> None:
        """Learns of a call.

        Args:
          name: of its context.
          hour: of the day, 0 to 23; None if it is not known.
        """
        for gone in self._calls.add(name):
            self._forget_row(gone)
        if hour is not None:
            self._at[hour % _HOURS].add(name)
        if self._last:
            self._after.setdefault(self._last, _Row(self._most_followers)).add(name)
        self._last = name

    def likely(self, hour: int) -> dict[str, float]:
        """The probability of each known context to be called next, the likeliest first.

        Args:
          hour: of the day, 0 to 23.
        """
        if not self._calls.total:
            return {}
        found = {name: count / self._calls.total for name, count in self._calls.counts.items()}
        if (row := self._at.get(hour % _HOURS)) is not None:
            found = row.smoothed(found)
        if (row := self._after.get(self._last)) is not None:
            found = row.smoothed(found)
        newest_first = dict(reversed(found.items()))
        return dict(sorted(newest_first.items(), key=lambda each: -each[1]))

    def calls(self, name: str) -> float:
        """How often a context was called, of late more than long ago."""
        return self._calls.counts.get(name, 0.0)

    def forget(self, name: str) -> None:
        """Forgets a context, which was deleted."""
        self._calls.drop(name)
        self._forget_row(name)

    def _forget_row(self, name: str) -> None:
        """Forgets what follows a context, and what it follows: probabilities are of known contexts alone."""
        self._after.pop(name, None)
        for row in (*self._after.values(), *self._at.values()):
            row.drop(name)
        if self._last == name:
            self._last = ""
