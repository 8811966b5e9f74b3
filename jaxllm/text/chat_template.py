"""Renders messages as a prompt with a model's chat template.

The result records for each character whether it comes from a message (`MarkedText`), so that no message can
spell a special token and impersonate another role. For this the template runs twice: on the messages, and
on the same messages with every character replaced by a private one, which shows where the template put
them.

A chat template is a program by the publisher of the model. It runs in Jinja's sandbox, in a child process
with limits of time and memory. The templates of `KNOWN_TEMPLATES`, such as that of the packaged models, run
in this process.
"""

import datetime
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2.nodes
import numpy as np

from jaxllm.errors import ConfigError, TemplateError, one_line
from jaxllm.text.answer_syntax import THINKING_SWITCHES
from jaxllm.text.child_process import ChildFailed, TextProcess
from jaxllm.text.marked_text import MarkedText, Marks
from jaxllm.text.template_program import RenderBounds, TemplateProgram, parse, variables_of

if TYPE_CHECKING:
    from jaxllm.text.answer_syntax import AnswerFormat

# Roles that every template accepts; others must be named in the template. A role must be known, because a
# template may write it within a special token.
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

# Names and identifiers that templates look up or compare; text of this form is not content.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_NAMING_KEYS = ("role", "type")

# Variables that templates get from here; options cannot replace them.
_OWN = frozenset(
    {
        "messages", "tools", "xml_tools", "python_tools", "available_tools", "custom_tools", "functions",
        "datetime", "documents", "add_generation_prompt", "continue_final_message", "strftime_now",
        "raise_exception", "loop", "range", "dict", "lipsum", "cycler", "joiner", "namespace", "caller",
    }
)  # fmt: skip
# Names of the tools' variable, the best one first.
_TOOLS = ("tools", "xml_tools", "functions")
# What templates call a message's thought.
_THOUGHTS = ("reasoning_content", "thinking", "reasoning", "reasoning_text", "thought")
# Options are the caller's and part of the prompt: they must not spell special tokens.
_OPTION_TEXT = re.compile(r"[\w .,:;/+'()-]{0,256}")
_OPTION_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
# Options of many models, which the others ignore.
_USUAL_OPTIONS = frozenset({*THINKING_SWITCHES, "reasoning_effort"})
_MAX_OPTIONS, _OPTION_DEPTH = 32, 3

# SHA-256 of templates that are known to end: that of the packaged models and of the pretraining recipes.
KNOWN_TEMPLATES = {"6f24638e0e8f35881f2cea5bb934b6761941fe69fab9d8c55ec003dcab379c6f"}
# Time limit of any other template; ordinary ones take milliseconds.
RENDER_S = 5.0
_START_S = 60.0
RENDER_BYTES = 1 << 29


class ChatTemplate:
    """A compiled chat template.

    Attributes:
      source: its Jinja source.
      option_names: variables that it reads besides those that `render` gives it.
      thought_name: what it calls a message's thought; None if it writes none.
      reads_parts_alone: whether it supports contents as lists of parts, but not as texts.

    Raises:
      TemplateError: `source` is no template.
    """

    def __init__(self, source: str, special: Mapping[str, str], spelled: Sequence[str] = ()) -> None:
        """Compiles a template.

        Args:
          source: Jinja source.
          special: named tokens that it may write (`bos_token` ...).
          spelled: special tokens, as text.
        """
        self.source, self._special = source, dict(special)
        self._words = tuple(spelled)
        tree = parse(source)
        # The constant texts in the template's code, including the roles that it knows.
        constants = (each.value for each in tree.find_all(jinja2.nodes.Const))
        names = frozenset(value for value in constants if isinstance(value, str))
        self._roles = ROLES | names
        read = variables_of(tree)
        self._tools_name = next((name for name in _TOOLS if name in read), None)
        self.option_names = read - _OWN - special.keys()
        attributes = {each.attr for each in tree.find_all(jinja2.nodes.Getattr)} | names
        self.thought_name = next((name for name in _THOUGHTS if name in attributes), None)
        # Value of absent tools: some templates loop over them without asking.
        self._no_tools: list[Any] | None = None
        # Texts that the template may look for in messages, except special tokens, which it writes.
        self._looked_for = [name for name in names if name and not any(word in name for word in spelled)]
        # Templates of models with images loop over the parts of a content; some do not support plain texts.
        tests_texts = any(each.name == "string" for each in tree.find_all(jinja2.nodes.Test))
        self.reads_parts_alone = {"image", "text"} <= names and not tests_texts
        known = hashlib.sha256(source.encode(errors="surrogatepass")).hexdigest() in KNOWN_TEMPLATES
        self._program = TemplateProgram(source) if known else ConfinedTemplate(source)

    @property
    def knows_tools(self) -> bool:
        """Whether it writes tools."""
        return self._tools_name is not None

    @functools.cached_property
    def answer_format(self) -> "AnswerFormat":
        """The format of the model's answers, by probing; raises TemplateError."""
        from jaxllm.text.answer_probe import probed

        return probed(self)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool,
        now: datetime.datetime | None,
        options: Mapping[str, Any] | None = None,
    ) -> MarkedText:
        """The prompt (see `Tokenizer.chat_text`)."""
        messages = _plain_objects("messages", messages)
        for index, message in enumerate(messages):
            role = message.get("role")
            if not isinstance(role, str):
                raise ConfigError(f"message {index} must be an object with a 'role', got {message!r:.80}")
            if role not in ROLES and not (_NAME.fullmatch(role) and role in self._roles):
                raise ConfigError(
                    f"message {index} has the role {role!r:.40}, which the model's chat template does not "
                    f"know; roles are {', '.join(sorted(ROLES))}, and those that a template names"
                )
        # Tools are content as messages are.
        given = _plain_objects("tools", list(tools))
        if given or any(each.get("tool_calls") or each["role"] == "tool" for each in messages):
            from jaxllm.text.tool_messages import adapted

            messages, given = adapted(self.answer_format, messages, given)
        for each in messages:
            if (thought := each.pop("reasoning_content", None)) and self.thought_name:
                each[self.thought_name] = thought
        for each in messages if self.reads_parts_alone else ():
            if isinstance(text := each.get("content"), str):
                each["content"] = [{"type": "text", "text": text}]
        switches = self._options(options or {})
        plain = [messages, given]

        def run(variant: Any) -> str:
            return self.plain(
                variant[0],
                tools=variant[1],
                add_generation_prompt=add_generation_prompt,
                now=now,
                options=switches,
            )

        text = run(plain)
        if not self._words:
            return MarkedText.of_template(text)
        marks = Marks.free_in(self.source, *self._special.values(), *_texts(plain))
        if marks is None:
            raise ConfigError(
                "messages use private characters of both of Unicode's planes 15 and 16; drop some"
            )

        # A template that inspects the content of messages may write something else if that is marked. Then
        # less is marked, in three attempts: everything but the texts that the template names; only
        # characters that may form a special token with their neighbours; only whole special tokens, which
        # no template has a reason to inspect.

        def unnamed() -> Callable[[str], str]:
            at_edges = _words_at_edges(self._words, marks)
            named = "".join(name for name in self._looked_for if any(name in each for each in _texts(plain)))

            def change(text: str) -> str:
                text = at_edges(text)
                return marks.put(text, np.array([letter not in named for letter in text], np.bool_))

            return change

        # The first attempt nearly always succeeds: the others are only prepared if it fails.
        for changes in (lambda: marks.put, unnamed, lambda: _words_at_edges(self._words, marks)):
            try:
                marked = marks.take(run(_changed(plain, changes())))
            except TemplateError:
                continue
            if marked.text == text:
                return marked
        return marks.take(run(_changed(plain, _whole_words(self._words, marks))))

    def plain(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = False,
        now: datetime.datetime | None,
        options: Mapping[str, Any] | None = None,
        bounds: RenderBounds | None = None,
    ) -> str:
        """The output for messages and tools as they are, without marks; raises ConfigError, TemplateError."""
        variables: dict[str, Any] = {
            **(options or {}),
            **self._special,
            "messages": messages,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        name = self._tools_name or "tools"
        variables[name] = list(tools) or self._no_tools
        if name == "functions":
            variables |= {name: json.dumps(list(tools), ensure_ascii=False), "datetime": str(now or "")}
        run = self._program.run
        if bounds is not None and isinstance(self._program, ConfinedTemplate):
            run = functools.partial(run, bounds=bounds)
        if tools or self._no_tools is not None or name == "functions":
            return run(variables, now)
        try:
            return run(variables, now)
        except TemplateError as error:
            try:
                found = run({**variables, name: []}, now)
            except TemplateError:
                raise error from None
            self._no_tools = []
            return found

    def _options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options by the template's names for them."""
        if len(options) > _MAX_OPTIONS:
            raise ConfigError(
                f"at most {_MAX_OPTIONS} options of a chat template are read, got {len(options)}"
            )
        found: dict[str, Any] = {}
        for name, value in options.items():
            if (
                not isinstance(name, str)
                or not _OPTION_NAME.fullmatch(name)
                or name in _OWN | self._special.keys()
            ):
                raise ConfigError(f"{name!r:.80} cannot be an option of a chat template; use another name")
            if not _is_option(value):
                raise ConfigError(
                    f"the option {name} of the chat template must be a flag, a number, a short plain text, "
                    f"or a list or map of these; got {value!r:.80}"
                )
            known = name
            if name in THINKING_SWITCHES and name not in self.option_names:
                known = next((each for each in THINKING_SWITCHES if each in self.option_names), name)
            if known not in self.option_names and known not in _USUAL_OPTIONS:
                there = ", ".join(sorted(self.option_names)[:12]) or "none"
                raise ConfigError(f"the model's chat template has no option {name}; it reads {there}")
            found[known] = value
        return found


class ConfinedTemplate:
    """A template that runs in a child process, shared by all such templates."""

    def __init__(self, source: str) -> None:
        self._source = source

    def run(
        self,
        variables: Mapping[str, Any],
        now: datetime.datetime | None,
        bounds: RenderBounds | None = None,
    ) -> str:
        """See `TemplateProgram.run`.

        Raises:
          ConfigError, TemplateError: as there, and for a template that exceeds its time or memory.
        """
        request: dict[str, Any] = {
            "operation": "render",
            "source": self._source,
            "variables": dict(variables),
            "now": None if now is None else now.isoformat(),
        }
        if bounds is not None:
            request["characters"] = bounds.characters
        try:
            limit_s = RENDER_S if bounds is None else min(RENDER_S, bounds.seconds)
            return _templates_process().ask(request, limit_s=limit_s)
        except ChildFailed as error:
            raise TemplateError(
                f"the model's chat template cannot render these messages: {error}; send fewer or shorter "
                "messages, or a plain prompt"
            ) from error


@functools.cache
def _templates_process() -> TextProcess:
    # A render's time limit does not count the start of the process, which a busy machine may delay.
    empty = {"operation": "render", "source": "", "variables": {}, "now": None}
    return TextProcess(memory_bytes=RENDER_BYTES, setup=empty, setup_s=_START_S)


def _is_option(value: Any, depth: int = 0) -> bool:
    match value:
        case bool() | int() | None:
            return True
        case float():
            return math.isfinite(value)
        case str():
            return _OPTION_TEXT.fullmatch(value) is not None
        case list() | tuple():
            return (
                depth < _OPTION_DEPTH
                and len(value) <= _MAX_OPTIONS
                and all(_is_option(each, depth + 1) for each in value)
            )
        case Mapping():
            inner = [*value.keys(), *value.values()]
            return (
                depth < _OPTION_DEPTH
                and len(inner) <= _MAX_OPTIONS
                and all(_is_option(each, depth + 1) for each in inner)
            )
    return False


def _whole_words(words: Sequence[str], marks: Marks) -> Callable[[str], str]:
    """Marks the first letter of each special token in a text."""
    pattern = re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)))

    def change(text: str) -> str:
        # Repeated, because a special token may begin within another.
        while found := [match.start() for match in pattern.finditer(text)]:
            changed = marks.put(text, _at(found, len(text)))
            if changed == text:
                break
            text = changed
        return text

    return change


def _words_at_edges(words: Sequence[str], marks: Marks) -> Callable[[str], str]:
    """Marks the first letter of each special token in a text, and of parts of one at the text's beginning or
    end."""
    whole = _whole_words(words, marks)

    def change(text: str) -> str:
        ends = {
            len(text) - size
            for word in words
            for size in range(1, min(len(word), len(text) + 1))
            if text.endswith(word[:size])
        }
        begins = any(text.startswith(word[size:]) for word in words for size in range(1, len(word)))
        return whole(marks.put(text, _at([*ends, *([0] if begins and text else [])], len(text))))

    return change


def _at(places: Sequence[int], length: int) -> np.ndarray:
    mask = np.zeros(length, np.bool_)
    mask[list(places)] = True
    return mask


def _changed(value: Any, change: Callable[[str], str], key: str = "") -> Any:
    """JSON values with `change` applied to all texts but names."""
    if isinstance(value, dict):
        return {
            name if _NAME.fullmatch(name) else change(name): _changed(each, change, name)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [_changed(each, change) for each in value]
    if not isinstance(value, str) or (key in _NAMING_KEYS and _NAME.fullmatch(value)):
        return value
    return change(value)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield name
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str):
        yield value


def _plain_objects(name: str, values: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A deep copy of messages or tools, of only plain JSON types, which is all that a template may see."""
    try:
        plain = json.loads(json.dumps(values))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} must be plain JSON values: {one_line(error)}") from error
    if not isinstance(plain, list):
        raise ConfigError(f"{name} must be a list of objects, got {type(values).__name__}")
    for index, each in enumerate(plain):
        if not isinstance(each, dict):
            raise ConfigError(f"{name[:-1]} {index} must be an object, got {each!r:.80}")
    return plain
