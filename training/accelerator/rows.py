"""The rows that checks print: one value each, under the names of `jaxllm bench`."""

import dataclasses
import json
import statistics
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured value of a case; `note` says how it was measured."""

    case: str
    metric: str
    value: float
    unit: str = ""
    note: str = ""

    def line(self) -> str:
        """The row as a line of JSON."""
        return json.dumps(dataclasses.asdict(self)) + "\n"


def median(values: Iterable[float]) -> float:
    """Median of repeated measurements."""
    return statistics.median(values)
