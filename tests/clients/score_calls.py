"""Scores a service's function calls on questions of the Berkeley Function Calling Leaderboard.

python -m tests.clients.score_calls http://127.0.0.1:8080/v1 QUESTIONS.jsonl ANSWERS.jsonl [MODEL]
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI

TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


def schema(of: Any) -> Any:
    """BFCL's types by JSON Schema's names, and the names of functions without dots."""
    if isinstance(of, dict):
        return {
            name: TYPES.get(each, each) if name == "type" and isinstance(each, str) else schema(each)
            for name, each in of.items()
        }
    return [schema(each) for each in of] if isinstance(of, list) else of


def right(calls: Any, wanted: dict[str, Any]) -> bool:
    """Whether there is one call, of the function, with allowed values of all arguments."""
    ((name, allowed),) = wanted.items()
    if len(calls or ()) != 1 or calls[0].function.name != re.sub(r"\W", "_", name):
        return False
    try:
        given = json.loads(calls[0].function.arguments)
    except ValueError:
        return False
    if not isinstance(given, dict) or set(given) - set(allowed):
        return False
    return all(given.get(name, "") in values for name, values in allowed.items())


url, questions, answers, *model = sys.argv[1:]
client, found = OpenAI(base_url=url, api_key="none"), {"auto": 0, "required": 0}
pairs = [[json.loads(line) for line in Path(each).read_text().splitlines()] for each in (questions, answers)]
for asked, answer in zip(*pairs, strict=True):
    functions = [{**schema(each), "name": re.sub(r"\W", "_", each["name"])} for each in asked["function"]]
    tools = [{"type": "function", "function": each} for each in functions]
    for choice in found:
        reply = client.chat.completions.create(
            model=(model or ["default"])[0], messages=asked["question"][0], tools=tools, tool_choice=choice,
            temperature=0, max_tokens=200,
        )  # fmt: skip
        found[choice] += right(reply.choices[0].message.tool_calls, answer["ground_truth"][0])
print(
    {choice: f"{100 * count / len(pairs[0]):.1f} %" for choice, count in found.items()}, "of", len(pairs[0])
)
