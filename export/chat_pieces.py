"""Reduces a chat template to the texts between messages, for runtimes without Jinja.

    chat.json    {"version": 1, "refused": why there are none, or "",
                  "between": {"user|assistant": text between the contents of two such messages,
                              "|user": text before the first one's, ...},
                  "end": {"user": text between the last content and the answer}, "stripped": [roles]}

Chats begin with a system's message or not, and then users and assistants take turns. A template that writes
such a chat otherwise than by its pieces, as one that depends on the time or rewrites contents, is refused:
the file says why, and the library in `native/` says so to a caller.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxllm.errors import ConfigError, TemplateError, one_line
from jaxllm.text.tokenizer import Tokenizer, TokenizerFiles

VERSION = 1
# Turns of the chats that templates are asked for.
_MOST_TURNS = 3
# What may make a template write something else: white space, thoughts, tools, code, quotes, and tokens.
_CONTENTS = (
    "Hello", "", " \n padded\u3000\n", "one\n\ntwo ", "<think>\na\n</think>\n\nb",
    "<tool_call>{}</tool_call>", "{{ x }} {% y %} '\"\\", "na\u00efve \u4f60\u597d \U0001f600",
    "a<|im_end|>b</s>[INST]<eos>",
    "system\nuser assistant",
)  # fmt: skip
Pieces = dict[str, Any]


def chat_pieces(files: TokenizerFiles) -> Pieces:
    """Returns the content of `chat.json` for a tokenizer."""
    if files.chat_template is None:
        return _refused("the model has no chat template; give a text instead of messages")
    try:
        return _reduced(Tokenizer(files))
    except (ConfigError, TemplateError) as error:
        return _refused(
            f"the model's chat template needs more than texts between messages ({one_line(error)})"
        )


def rendered(pieces: Mapping[str, Any], messages: Sequence[Mapping[str, str]]) -> str:
    """The text of a chat up to its answer, by pieces; KeyError if these have no such order of roles."""
    found, before = [], ""
    for each in messages:
        role, content = each["role"], each["content"]
        found += [
            pieces["between"][f"{before}|{role}"],
            content.strip() if role in pieces["stripped"] else content,
        ]
        before = role
    return "".join([*found, pieces["end"][before]])


def _refused(reason: str) -> Pieces:
    return {"version": VERSION, "refused": reason, "between": {}, "end": {}, "stripped": []}


def _chats() -> Iterator[list[str]]:
    for system, turns in itertools.product((False, True), range(_MOST_TURNS)):
        yield ["system"] * system + ["user", "assistant"] * turns + ["user"]


def _reduced(tokenizer: Tokenizer) -> Pieces:
    pieces = _refused("")
    allowed = list[list[str]]()
    for roles in _chats():
        # Words that no template has.
        words = [f"qz{number}xj" for number in range(len(roles))]
        try:
            text = tokenizer.render_chat(_messages(roles, words))
        except TemplateError:
            # Some know no system's messages.
            if "system" not in roles:
                raise
            continue
        allowed.append(roles)
        for before, role, word in zip(["", *roles], roles, words, strict=False):
            piece, found, text = text.partition(word)
            name = f"{before}|{role}"
            if not found or pieces["between"].setdefault(name, piece) != piece:
                raise ConfigError(f"it writes messages of a {role} otherwise by their place")
        if pieces["end"].setdefault("user", text) != text:
            raise ConfigError("it writes the end of a chat otherwise by its length")
    for role in ("system", "user", "assistant"):
        with_role = next((roles for roles in allowed if role in roles), None)
        if with_role is None:
            continue
        padded = [" qz " if each == role else "qz" for each in with_role]
        if " qz " not in tokenizer.render_chat(_messages(with_role, padded)):
            pieces["stripped"].append(role)
    for roles, content in itertools.product(allowed, _CONTENTS):
        for place in range(len(roles)):
            contents = [content if at == place else "Good" for at in range(len(roles))]
            messages = _messages(roles, contents)
            if rendered(pieces, messages) != tokenizer.render_chat(messages):
                raise ConfigError(f"it writes {json.dumps(content)} of a {roles[place]} otherwise")
    return pieces


def _messages(roles: Sequence[str], contents: Sequence[str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
