"""Makes conversations with function calls, from the functions, requests and results of a packaged file:
single calls, several in one answer, results that are reported, and questions that need none of the tools.

Names and shapes of schemas vary (snake and camel case, prefixes, optional parameters, other tools beside the
right one), so that a model learns to read a schema and not to remember names. All that is made follows from a
seed.
"""

import functools
import json
import random
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

# Shares of conversations with two calls in an answer, with results of calls, and without a call.
_TWO, _ANSWERED, _NONE = 0.15, 0.5, 0.15
_MOST_TOOLS = 6
_SLOT = re.compile(r"\{(\w+)\}")
_JOINS = (" And ", " Also, ", " Then ", " ")
_CASES = ("snake", "snake", "camel", "dotted")


def conversations(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yields conversations as `jaxllm.training.data.documents` reads them: `messages` and `tools`."""
    draw = random.Random(seed)
    functions, pools, talks = _functions()
    for _ in range(count):
        made = [_Function(each, pools, draw) for each in draw.sample(functions, draw.randint(1, _MOST_TOOLS))]
        kind = draw.random()
        if kind < _NONE:
            question, answer = draw.choice(talks)
            messages = [_said("user", question), _said("assistant", answer)]
        else:
            asked = [made[0]]
            if kind > 1 - _TWO:
                asked.append(draw.choice(made))
            messages = _called([each.request() for each in asked], draw)
        draw.shuffle(made)
        yield {"messages": messages, "tools": [each.tool for each in made]}


class _Function:
    """A function with the names and the schema of one conversation."""

    def __init__(self, entry: Mapping[str, Any], pools: Mapping[str, list[str]], draw: random.Random) -> None:
        self._entry, self._pools, self._draw = entry, pools, draw
        case = draw.choice(_CASES)
        self._named = {name: _cased(name, case) for name in entry["parameters"]}
        self.name = _cased(entry["name"], case)
        asks = [_parts(each) for each in entry["asks"]]
        always = [set(_SLOT.findall(words)) | {*fixed} for words, fixed in asks]
        required = [own for name, own in self._named.items() if all(name in each for each in always)]
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {
                self._named[name]: _schema(kind, about) for name, (kind, about) in entry["parameters"].items()
            },
        }
        if required or draw.random() < 0.5:
            schema["required"] = required
        function = {"name": self.name, "description": entry["about"], "parameters": schema}
        self.tool = {"type": "function", "function": function}

    def request(self) -> tuple[str, dict[str, Any], str, str]:
        """A request, its call, the call's result as JSON, and what is then said."""
        words, fixed = _parts(self._draw.choice(self._entry["asks"]))
        kinds = {name: kind for name, (kind, _) in self._entry["parameters"].items()}
        values = {name: self._value(kinds[name]) for name in _SLOT.findall(words)}
        values |= {name: _typed(kinds[name], text) for name, text in fixed.items()}
        arguments = {self._named[name]: values[name] for name in kinds if name in values}
        given = {name: self._value(kind) for name, kind in self._entry["gives"].items()}
        able = [each for each in self._entry["says"] if {*_SLOT.findall(each)} <= {*values, *given}]
        said = _filled(self._draw.choice(able), {**values, **given}) if able else "It is done."
        asked = _filled(words, values)
        return (
            asked[0].upper() + asked[1:],
            {"name": self.name, "arguments": arguments},
            json.dumps(given),
            said,
        )

    def _value(self, kind: str) -> Any:
        draw = self._draw
        if kind.startswith("some "):
            return draw.sample(self._pools[kind.removeprefix("some ")], draw.randint(1, 3))
        if found := re.fullmatch(r"(int|number) (-?\d+) (-?\d+)", kind):
            low, high = int(found[2]), int(found[3])
            whole = found[1] == "int" or draw.random() < 0.6
            return draw.randint(low, high) if whole else round(draw.uniform(low, high), 1)
        return draw.choice(self._pools[kind] if kind in self._pools else kind.split("|"))


def _called(
    requests: Sequence[tuple[str, dict[str, Any], str, str]], draw: random.Random
) -> list[dict[str, Any]]:
    asked = requests[0][0]
    for text, *_ in requests[1:]:
        join = draw.choice(_JOINS)
        asked += join + (text if join == " " else text[0].lower() + text[1:])
    calls = [{"type": "function", "function": call} for _, call, *_ in requests]
    messages = [_said("user", asked), {"role": "assistant", "content": "", "tool_calls": calls}]
    if draw.random() < _ANSWERED:
        messages += [
            {"role": "tool", "name": call["name"], "content": result} for _, call, result, _ in requests
        ]
        messages.append(_said("assistant", " ".join(said for *_, said in requests)))
    return messages


def _said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


@functools.cache
def _functions() -> tuple[list[dict[str, Any]], dict[str, list[str]], list[tuple[str, str]]]:
    text = resources.files("jaxllm.training.data").joinpath("functions.toml").read_text()
    read = tomllib.loads(text)
    return read["functions"], read["pools"], list(read["talks"].items())


def _parts(ask: str) -> tuple[str, dict[str, str]]:
    """A request's words, and the parameters that they fix."""
    words, *fixed = ask.split("@")
    return words, dict(each.split("=") for each in fixed)


def _filled(words: str, values: Mapping[str, Any]) -> str:
    def text(match: re.Match[str]) -> str:
        value = values[match[1]]
        return (
            ", ".join(value[:-1]) + " and " + value[-1]
            if isinstance(value, list) and value[1:]
            else (value[0] if isinstance(value, list) else str(value))
        )

    return _SLOT.sub(text, words)


def _typed(kind: str, text: str) -> Any:
    if kind == "bool":
        return text == "true"
    return int(text) if kind.startswith(("int ", "number ")) else text


def _schema(kind: str, about: str) -> dict[str, Any]:
    if kind.startswith("some "):
        return {"type": "array", "items": {"type": "string"}, "description": about}
    if "|" in kind:
        return {"type": "string", "enum": kind.split("|"), "description": about}
    names = {"int": "integer", "number": "number", "bool": "boolean"}
    return {"type": names.get(kind.split(" ")[0], "string"), "description": about}


def _cased(name: str, case: str) -> str:
    first, *others = name.split("_")
    if case == "camel":
        return first + "".join(each.capitalize() for each in others)
    return f"{first}.{'_'.join(others)}" if case == "dotted" and others else name
