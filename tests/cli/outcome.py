"""Describes the end of a command, and checks what every end must look like."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tiny import TINY, random_params

WINDOW = 64
CFG = dataclasses.replace(TINY, window_tokens=WINDOW)
PARAMS = random_params(CFG)


@dataclasses.dataclass
class Outcome:
    """How a command ended and what it wrote."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


def succeeded(outcome: Outcome) -> str:
    assert outcome.code == 0, outcome.err
    assert outcome.err == ""
    return outcome.out


def answer(outcome: Outcome) -> dict[str, Any]:
    """The one JSON object, which is all that was written."""
    out = succeeded(outcome)
    assert out.endswith("}\n")
    assert out.count("\n") == 1
    return json.loads(out)


def failed(outcome: Outcome, *parts: str) -> None:
    """Exit code 1, one line on stderr and nothing on stdout."""
    assert outcome.code == 1
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    assert outcome.err.endswith("\n")
    assert outcome.err.count("\n") == 1
    for part in parts:
        assert part in outcome.err


def edit_config(folder: Path, **change: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
