"""The rows that checks print: one value each, under the names of `jaxllm bench`."""

import dataclasses
import json


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
