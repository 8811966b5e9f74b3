"""Of answers that may call tools any text is free, and calls keep what was promised of them."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.guided.compiler import GrammarCompiler
from jaxllm.serving.server.api.tools import HERMES, JSON, LLAMA3, MISTRAL, Family, optional
from jaxllm.text.tokenizer import Tokenizer
from tests.tiny import VOCAB_SIZE, tiny_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("find", "add")]


def call(name: str, arguments: Any, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments})


def follows(family: Family, text: str, strict: Sequence[str] = (), *, several: bool = True) -> bool:
    """Whether an answer can be this text, to its end."""
    grammar = optional(family, TOOLS, strict=strict, several=several)
    tokenizer = Tokenizer(tiny_tokenizer())
    ends = GenerationConfig().stop_ids(tokenizer.eos_ids)
    matcher = GrammarCompiler(tokenizer, VOCAB_SIZE).matcher(grammar, ends)
    for token in tokenizer.encode(text, add_special_tokens=False) if text else ():
        if not matcher.allowed()[token]:
            return False
        matcher.take([token])
    return matcher.complete or bool(matcher.allowed()[tokenizer.eos_ids[0]])


def hermes(arguments: Any, name: str = "find") -> str:
    return f"<tool_call>\n{call(name, arguments)}\n</tool_call>"


RIGHT, WRONG = {"n": 3}, {"n": "x"}


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        (HERMES, "", True),
        (HERMES, "Hello < 3 <tool_ca\n\n{}", True),
        (HERMES, f"Well. {hermes(RIGHT)}", True),
        (HERMES, f"{hermes(RIGHT)}\n{hermes(RIGHT)} done", True),
        (HERMES, hermes(WRONG), False),
        (HERMES, f"Well. {hermes(RIGHT)} and {hermes(WRONG)}", False),
        (HERMES, f"<tool_call>{call('find', WRONG)}</tool_call>", False),
        # Only `find` is strict.
        (HERMES, hermes(WRONG, "add"), True),
        (HERMES, hermes({}, "other"), False),
        (JSON, "Hello {", True),
        (JSON, call("find", RIGHT), True),
        (JSON, f"\n{call('find', RIGHT)}", True),
        (JSON, call("find", WRONG), False),
        (LLAMA3, call("find", RIGHT, "parameters"), True),
        (LLAMA3, call("find", WRONG, "parameters"), False),
        (MISTRAL, f"[{call('find', RIGHT)}, {call('add', WRONG)}]", True),
        (MISTRAL, f"[{call('find', WRONG)}]", False),
        (MISTRAL, "", True),
    ],
)
def test_calls_of_strict_tools_match_their_schemas(family: Family, text: str, expected: bool) -> None:
    assert follows(family, text, ["find"]) is expected


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        (HERMES, "Hello.", True),
        (HERMES, f"Well. {hermes(WRONG)}", True),
        (HERMES, f"{hermes(RIGHT)}\n{hermes(RIGHT)}", False),
        (MISTRAL, f"[{call('find', WRONG)}]", True),
        (MISTRAL, f"[{call('find', RIGHT)}, {call('find', RIGHT)}]", False),
        (JSON, call("find", WRONG), True),
        (JSON, f"{call('find', RIGHT)} {call('find', RIGHT)}", False),
    ],
)
def test_one_call_at_most(family: Family, text: str, expected: bool) -> None:
    assert follows(family, text, several=False) is expected
