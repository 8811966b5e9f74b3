"""Of answers that may call tools any text is free, and calls keep what was promised of them."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.guided.compiler import GrammarCompiler
from jaxllm.serving.server.api.tools import HERMES, JSON, LLAMA3, MISTRAL, Family, optional
from jaxllm.text.tokenizer import Tokenizer

PROPERTIES = {"n": {"type": "integer"}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["n"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("find", "add")]


def call(name: str, arguments: Any, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments})


Follows = Callable[..., bool]


@pytest.fixture(scope="module")
def follows(tokenizer: Tokenizer, compiler: GrammarCompiler) -> Follows:
    """Whether an answer can be a text, to its end."""
    ends = GenerationConfig().stop_ids(tokenizer.eos_ids)

    def found(family: Family, text: str, strict: Sequence[str] = (), *, several: bool = True) -> bool:
        matcher = compiler.matcher(optional(family, TOOLS, strict=strict, several=several), ends)
        for token in tokenizer.encode(text, add_special_tokens=False) if text else ():
            if not matcher.allowed()[token]:
                return False
            matcher.take([token])
        return matcher.complete or bool(matcher.allowed()[tokenizer.eos_ids[0]])

    return found


def hermes(arguments: Any, name: str = "find") -> str:
    return f"<tool_call>\n{call(name, arguments)}\n</tool_call>"


RIGHT, WRONG = {"n": 3}, {"n": "x"}


def test_calls_of_strict_tools_match_their_schemas(follows: Follows) -> None:
    for family, text, expected in (
        (HERMES, "", True), (HERMES, "Hello < 3 <tool_ca\n\n{}", True),
        (HERMES, f"Well. {hermes(RIGHT)}", True), (HERMES, f"{hermes(RIGHT)}\n{hermes(RIGHT)} done", True),
        (HERMES, hermes(WRONG), False), (HERMES, f"Well. {hermes(RIGHT)} and {hermes(WRONG)}", False),
        (HERMES, f"<tool_call>{call('find', WRONG)}</tool_call>", False),
        # Only `find` is strict.
        (HERMES, hermes(WRONG, "add"), True), (HERMES, hermes({}, "other"), False),
        (JSON, "Hello {", True), (JSON, call("find", RIGHT), True), (JSON, f"\n{call('find', RIGHT)}", True),
        (JSON, call("find", WRONG), False), (LLAMA3, call("find", RIGHT, "parameters"), True),
        (LLAMA3, call("find", WRONG, "parameters"), False),
        (MISTRAL, f"[{call('find', RIGHT)}, {call('add', WRONG)}]", True),
        (MISTRAL, f"[{call('find', WRONG)}]", False), (MISTRAL, "", True),
    ):  # fmt: skip
        assert follows(family, text, ["find"]) is expected, (family.name, text)


def test_one_call_at_most(follows: Follows) -> None:
    for family, text, expected in (
        (HERMES, "Hello.", True), (HERMES, f"Well. {hermes(WRONG)}", True),
        (HERMES, f"{hermes(RIGHT)}\n{hermes(RIGHT)}", False), (MISTRAL, f"[{call('find', WRONG)}]", True),
        (MISTRAL, f"[{call('find', RIGHT)}, {call('find', RIGHT)}]", False),
        (JSON, call("find", WRONG), True), (JSON, f"{call('find', RIGHT)} {call('find', RIGHT)}", False),
    ):  # fmt: skip
        assert follows(family, text, several=False) is expected, (family.name, text)
