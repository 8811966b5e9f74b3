"""Small hand-made files in the forms that the tasks read."""

import json
from pathlib import Path
from typing import Any

SCREEN = "\n ".join(
    [
        "<input id=0 >Search folders</input>",
        "<button id=1 text='What's new<br>Menu'></button>",
        "<checkbox id=2 checked=False>Dark mode</checkbox>",
        "<button id=3>Internal<br>2</button>",
        "<p id=4 text='Photo'></p>",
        "<button id=5 text='Photo'>x</button>",
        "<button id=6></button>",
    ]
)


def write_lines(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(each) for each in records) + "\n")
    return path


def call(number: int, *functions: str, request: str = "") -> dict[str, Any]:
    """A function-calling question that offers `functions`, the first of which is right."""
    return {
        "id": f"q{number}",
        "question": [[{"role": "user", "content": request or f"Do\n  thing {number}"}]],
        "function": [{"name": name, "description": f"Does {name}. And more."} for name in functions],
    }


def write_calls(data: Path, records: list[dict[str, Any]]) -> None:
    """All records in one of the two files; the other is blank."""
    folder = data / "tasks" / "api_calling"
    answers = [{"id": each["id"], "ground_truth": [{each["function"][0]["name"]: {}}]} for each in records]
    write_lines(folder / "BFCL_v4_multiple.jsonl", *records)
    write_lines(folder / "BFCL_v4_multiple_answers.jsonl", *answers)
    for name in ("BFCL_v4_simple_python.jsonl", "BFCL_v4_simple_python_answers.jsonl"):
        (folder / name).write_text("\n")


def write_steps(data: Path, apps: dict[str, list[str]]) -> None:
    """Two steps for each goal of each app: the checkbox, then the end."""
    steps = {
        app: {
            goal: {
                "task": goal,
                "profile": [
                    {"label": [2, "null"], "history": f"\n- Start the {app} app.", "state": SCREEN},
                    {"label": [-1, "null"], "history": "\n- TapOn: <button id=7>x</button>", "state": SCREEN},
                ],
            }
            for goal in goals
        }
        for app, goals in apps.items()
    }
    path = data / "tasks" / "ui_automation" / "steps.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(steps))
