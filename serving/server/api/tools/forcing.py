"""Makes the grammar that forces an answer to call tools, in the form of the model's family."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from serving.server.api.tools.scanner import Family
from serving.server.calls import Grammar


def forced(family: Family, tools: Sequence[Mapping[str, Any]], *, several: bool) -> Grammar:
    """The grammar of one call, or of several.

    Args:
      family: of the model.
      tools: as OpenAI has them, those that may be called.
      several: whether more than one call may follow.
    """
    arguments = "parameters" if family.name == "llama3" else "arguments"
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                arguments: tool["function"].get("parameters") or {"type": "object"},
            },
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if family.name == "mistral":
        most = {} if several else {"maxItems": 1}
        call = {"type": "array", "items": call, "minItems": 1} | most
    if not family.opening:
        return Grammar(kind="json_schema", text=json.dumps(call))
    repeated = 'call ("\\n" call)*' if several else "call"
    opening, closing = json.dumps(family.opening + "\n"), json.dumps("\n" + family.closing)
    return Grammar(
        kind="lark", text=f"start: {repeated}\ncall: {opening} object {closing}\nobject: %json {json.dumps(call)}\n"
    )
