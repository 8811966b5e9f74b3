"""A model's chat template: from messages to the text of a prompt.

A chat template is a program written by whoever published the model. It runs in Jinja's immutable
sandbox, on a copy of the messages made of plain JSON types: it reaches no Python internals and
changes nothing of the caller's. Its running time is not bounded.
"""

import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jaxllm.errors import ConfigError, JaxllmError, TemplateError, one_line


class ChatTemplate:
    """A compiled chat template.

    Raises:
      TemplateError: `source` is no template.
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """Compiles `source`; `special` are the named tokens that it may write (`bos_token` ...)."""
        self._special = dict(special)
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # Also RecursionError and what Python's compiler may raise.
            raise TemplateError(
                f"the model's chat template is broken: {one_line(error)}; prepare the model again "
                "with a corrected template"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        now: datetime.datetime | None,
    ) -> str:
        """The prompt (see `Tokenizer.render_chat`)."""
        plain = _plain_messages(messages)
        try:
            return self._template.render(
                {
                    **self._special,
                    "messages": plain,
                    "tools": None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                    "strftime_now": _strftime_at(now),
                }
            )
        except JaxllmError:
            raise
        except Exception as error:  # Templates fail in as many ways as programs do.
            raise TemplateError(
                f"the model's chat template cannot render these messages: {one_line(error)}; "
                "change the messages, or send a plain prompt"
            ) from error


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training: here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, as in transformers, so that names set in the body stay inside it.
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


@functools.cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Jinja as Hugging Face sets it up for chat templates."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's filter, which escapes HTML and so would change prompts."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: object) -> NoReturn:
    raise TemplateError(f"the model's chat template refuses these messages: {one_line(message)}")


def _strftime_at(now: datetime.datetime | None) -> Callable[[str], str]:
    def strftime_now(format: str) -> str:  # noqa: A002 (templates may pass it by name)
        if now is None:
            raise ConfigError("the model's chat template asks for the time; pass now=datetime.now()")
        return now.strftime(format)

    return strftime_now


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A deep copy made of plain JSON types only: all that a template may see."""
    try:
        plain = json.loads(json.dumps(messages))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"messages must be plain JSON values: {one_line(error)}") from error
    if not isinstance(plain, list):
        raise ConfigError(f"messages must be a list of objects, got {type(messages).__name__}")
    for index, message in enumerate(plain):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(f"message {index} must be an object with a 'role', got {message!r:.80}")
    return plain
