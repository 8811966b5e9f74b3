"""Compiles and runs chat templates in Jinja's immutable sandbox, as Hugging Face sets it up for them.

A template cannot reach Python internals or change the caller's objects. Neither its time nor its memory is
bounded here.
"""

import dataclasses
import datetime
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jaxllm.errors import ConfigError, JaxllmError, TemplateError, one_line

# Published templates have some ten thousand characters.
MAX_SOURCE_CHARACTERS = 1 << 18


def parse(source: str) -> jinja2.nodes.Template:
    """A template's syntax tree; no part of the template runs.

    Raises:
      TemplateError: `source` is too long, or no template.
    """
    if len(source) > MAX_SOURCE_CHARACTERS:
        raise TemplateError(
            f"the model's chat template has {len(source)} characters; at most "
            f"{MAX_SOURCE_CHARACTERS} are read"
        )
    try:
        return _environment().parse(source)
    except Exception as error:  # Also RecursionError.
        raise _broken(error) from error


@dataclasses.dataclass(frozen=True)
class RenderBounds:
    """Bounds of a rendering that is not a prompt: its time, and the characters of its output."""

    seconds: float
    characters: int


class TemplateProgram:
    """A compiled chat template.

    Raises:
      TemplateError: `source` is no template.
    """

    def __init__(self, source: str) -> None:
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # Including RecursionError and errors of Python's compiler.
            raise _broken(error) from error

    def run(self, variables: Mapping[str, Any], now: datetime.datetime | None) -> str:
        """The output of the template.

        Args:
          variables: plain JSON values by name.

        Raises:
          ConfigError: the template requires the time, and `now` is None.
          TemplateError: the template refuses the variables, or is broken.
        """
        try:
            return self._template.render({**variables, "strftime_now": _strftime_at(now)})
        except JaxllmError:
            raise
        except Exception as error:  # Templates fail in as many ways as programs do.
            raise TemplateError(
                f"the model's chat template cannot render these messages: {one_line(error)}; "
                "change the messages, or send a plain prompt"
            ) from error


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, as in transformers, so that names set in the body stay inside it.
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox; templates may add to lists and take from them, of which they only get copies."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (type(obj) is list and attr in ("append", "pop")) or super().is_safe_attribute(
            obj, attr, value
        )


def variables_of(tree: jinja2.nodes.Template) -> frozenset[str]:
    """The names that a template reads, including its own. Jinja's `meta` would compute constants."""
    return frozenset(each.name for each in tree.find_all(jinja2.nodes.Name) if each.ctx == "load")


@functools.cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


def _broken(error: Exception) -> TemplateError:
    return TemplateError(
        f"the model's chat template is broken: {one_line(error)}; prepare the model again with a corrected "
        "template"
    )


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's `tojson`, which escapes HTML and so would change prompts."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_listed,
    )


def _listed(value: Any) -> list[Any]:
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _refuse(message: object) -> NoReturn:
    raise TemplateError(f"the model's chat template refuses these messages: {one_line(message)}")


def _strftime_at(now: datetime.datetime | None) -> Callable[[str], str]:
    def strftime_now(format: str) -> str:  # noqa: A002 (templates may pass it by name)
        if now is None:
            raise ConfigError("the model's chat template asks for the time; pass now=datetime.now()")
        return now.strftime(format)

    return strftime_now
