"""The task of choosing the next step on a phone's screen towards a goal: DroidTask (AutoDroid, arXiv
2308.15272).

An answer names the element by its text and not by its number: `tap Settings`, `type in Search`,
`check Dark mode`, or `finish` when the goal is reached.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.tasks.example import Split, TaskExample, held_out
from jaxllm.tasks.files import read_json

FILE = "tasks/ui_automation/steps.json"
INSTRUCTION = "What is the next step on this screen?"
FINISH = "finish"
HELD_OUT_SHARE = 0.2

_VERBS = {"button": "tap", "p": "tap", "input": "type in", "checkbox": "check"}
# A quoted text may contain apostrophes and tags (`text='What's new<br>Menu'`): it ends at the quote after
# which another attribute follows, or the tag ends.
_ELEMENT = re.compile(
    r"<(?P<tag>\w+) id=(?P<id>\d+)(?: text='(?P<text>.*?)'| \w+=[^\s>']*)* ?>(?P<body>.*?)</(?P=tag)>",
    re.DOTALL,
)
_NUMBER = re.compile(r" id=\d+")


def read(data: Path, split: Split) -> Iterator[TaskExample]:
    """The steps of a split's goals; all steps of a goal are in one split.

    Raises:
      ConfigError: the file is missing or has another form.
    """
    path = Path(data) / FILE
    apps = read_json(path)
    try:
        for app, goals in sorted(apps.items()):
            for goal in goals.values():
                if held_out(f"{app}\0{goal['task']}", HELD_OUT_SHARE) == (split == "valid"):
                    yield from (example(app, goal["task"], step) for step in goal["profile"])
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{path} does not hold steps per app and goal: {error!r}") from error


def example(app: str, goal: str, step: dict[str, Any]) -> TaskExample:
    """The question at one step: `{"label": [element, text], "history": ..., "state": ...}`."""
    chosen = int(step["label"][0])
    actions = screen_actions(step["state"])
    answer = FINISH if chosen < 0 else actions[chosen]
    history = _NUMBER.sub("", step["history"]).strip()
    screen = _NUMBER.sub("", step["state"]).strip()
    return TaskExample(
        system=INSTRUCTION,
        user=f"App: {app}\nGoal: {goal}\nDone:\n{history}\nScreen:\n{screen}",
        answer=answer,
        # Elements with the same text are one option.
        options=tuple(dict.fromkeys([FINISH, *actions.values()])),
    )


def screen_actions(screen: str) -> dict[int, str]:
    """Element number -> the action on it, for a screen in HTML."""
    actions = {}
    for element in _ELEMENT.finditer(screen):
        text = element["body"] if element["text"] is None else element["text"]
        name = " ".join(text.replace("<br>", " ").split())
        actions[int(element["id"])] = f"{_VERBS.get(element['tag'], 'tap')} {name}".strip()
    return actions
