"""The service's front on a port, over a model that plays one script: it thinks, asks for the weather where it
may, and answers with what a tool told it, or with a value of the schema that it is given."""

import contextlib
import dataclasses
import json
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from jaxllm.errors import ContextOverflow
from jaxllm.serving.server.api.app import make_app
from jaxllm.serving.server.calls import Call, Conversation, ModelFacts
from tests.serving.server.api.conftest import FakeBackend, FakeTicket
from tests.serving.server.api.scripted import TEMPLATE, Told, patched
from tests.serving.server.services import running

THOUGHT = "They ask for the weather."
# The tools that tell the weather, with their arguments: the last three are of agents, which run commands.
TOOLS = {
    "weather": {"city": "Paris"}, "bash": {"command": "echo 21 degrees", "description": "Tells it."},
    "exec_command": {"cmd": "echo 21 degrees"},
    "Bash": {"command": "echo 21 degrees", "description": "Tells it."},
}  # fmt: skip
TEXT, HELLO = "It is 21 degrees in Paris.", "Hello there."


def example(schema: Any, root: Mapping[str, Any]) -> Any:
    """A value of a schema."""
    if not isinstance(schema, Mapping):
        return "Paris"
    if "$ref" in schema:
        found: Any = root
        for name in schema["$ref"].removeprefix("#/").split("/"):
            found = found[name]
        return example(found, root)
    for name in ("enum", "anyOf", "oneOf", "allOf"):
        if name in schema:
            return schema[name][0] if name == "enum" else example(schema[name][0], root)
    kind = schema.get("type", "object")
    if kind == "object":
        return {name: example(each, root) for name, each in schema.get("properties", {}).items()}
    if kind == "array":
        return [example(schema.get("items"), root)]
    return {"integer": 21, "number": 21.5, "boolean": True}.get(kind, "Paris")


def said(call: Call) -> Sequence[str]:
    """The pieces of the model's answer."""
    prompt, grammar = call.prompt, call.config.grammar
    if not isinstance(prompt, Conversation):
        return pieces(HELLO)
    thought = (
        f"<think>\n{THOUGHT}\n</think>\n\n" if prompt.template_options.get("enable_thinking") is True else ""
    )
    tools = {each["function"]["name"]: each["function"]["parameters"] for each in prompt.tools}
    schema = grammar if grammar and grammar.text else None
    if isinstance(grammar, Told):
        schema, tools = grammar.schema, {name: tools[name] for name in grammar.names}
    knows = any(each["role"] == "tool" for each in prompt.messages)
    asks = [name for name in tools if name in TOOLS]
    if asks and not knows:
        return pieces(f"{thought}{called(asks[0], TOOLS[asks[0]])}")
    others = (
        [] if {*asks} & {"Bash", "bash", "exec_command"} else [name for name in tools if name not in asks]
    )
    if others:
        # A typed answer by a tool of its own.
        return pieces(f"{thought}{called(others[0], example(tools[others[0]], tools[others[0]]))}")
    if schema is not None:
        parsed = json.loads(schema.text or "{}")
        return pieces(thought + json.dumps(example(parsed, parsed)))
    return pieces(thought + (TEXT if knows else HELLO))


def called(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def pieces(text: str) -> Sequence[str]:
    return re.findall(r".{1,7}", text, re.DOTALL)


class Backend(FakeBackend):
    """A model with a window for agents' prompts."""

    def facts(self) -> ModelFacts:
        return dataclasses.replace(super().facts(), window_tokens=1 << 17)

    def submit(self, call: Call) -> FakeTicket:
        messages = call.prompt.messages if isinstance(call.prompt, Conversation) else ()
        if any(len(str(each["content"])) > 1 << 17 for each in messages):
            raise ContextOverflow("the prompt has more tokens than that; shorten it")
        return super().submit(call)


@contextlib.contextmanager
def served() -> Iterator[str]:
    """The address of a running service."""
    with pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as listening:
        patched(patch)
        backend = Backend(template=TEMPLATE)
        backend.script = said
        with running(make_app(backend, identify=lambda scope: "app"), [listening]):
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
