"""Splits a growing answer into its thoughts, texts and calls, by the format of its model.

Takes linear time for any text and any cut of it: what may begin a marker is withheld, and looked at once more
at most if it is none.
"""

import dataclasses
import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxllm.text.answer_arguments import arguments, json_string, json_value, no_constant
from jaxllm.text.answer_input import Failed, Input, Parsing
from jaxllm.text.answer_parts import CallArguments, CallBegins, CallEnds, Part, Text, Thinking
from jaxllm.text.answer_syntax import ANY, NAME, AnswerFormat, CallSyntax

# Mistral's templates require ids of this form.
_LETTERS, _LENGTH = string.ascii_letters + string.digits, 9
# Markers are compared by these pieces, with any white space between them.
_PIECES = re.compile(
    rf"<[^<>\s{ANY}{NAME}]+>(?:[a-z_]+<[^<>\s{ANY}{NAME}]+>)?|\[[A-Z_]+\]|[{ANY}{NAME}]|[^\s<\[{ANY}{NAME}]+|[<\[]"
)
_ID = re.compile(r"[A-Za-z0-9_.:-]*")
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_MOST_NAME = 64
# What a call without a marker may be preceded by: Llama 3.1's mark of code, and a list.
_SKIPPED = ("<|python_tag|>",)
_BETWEEN_CALLS = (",", ";", "]")
_NAME_KEYS, _ARGUMENT_KEYS = ("name",), ("arguments", "parameters")


class FormatScanner:
    """See `jaxllm.text.answer_parts.AnswerScanner`.

    Attributes:
      cut_call: whether the answer was cut inside of a call, or of what may be one.
    """

    def __init__(self, found: AnswerFormat, tools: Sequence[Mapping[str, Any]], *, thinking: bool) -> None:
        """Begins one answer.

        Args:
          tools: tools that may be called, in OpenAI's format; calls of others are text.
          thinking: whether the prompt ends inside of an opened thought.
        """
        self.cut_call = False
        functions = [tool.get("function", tool) for tool in tools]
        self._schemas = {each["name"]: each.get("parameters") for each in functions}
        self._format, self._input = found, Input()
        self._parts: list[Part] = []
        self._cut, self._index, self._shown = False, 0, _Trimmed()
        # Whether the calls are in a list.
        self._listed = False
        # Whether there was any text or call so far, and whether a call without a marker may begin here.
        self._begun, self._bare_may_begin = False, True
        self._attempts: dict[str, list[tuple[CallSyntax, list[str]]]] = {}
        self._bare: list[tuple[CallSyntax, list[str]]] = []
        for syntax in found.calls if self._schemas else ():
            for marker in dict.fromkeys((syntax.section[0] + syntax.opening, syntax.opening)):
                pieces = _PIECES.findall(marker)
                if pieces and pieces[0] not in (NAME, ANY) and not re.fullmatch(r'[\[{"]+', pieces[0]):
                    self._attempts.setdefault(pieces[0], []).append((syntax, pieces[1:]))
                elif not syntax.section[0].strip(" [{\n"):
                    self._bare.append((syntax, pieces))
        special = tuple(text for text, _ in found.special)
        around = *found.text_openings, *found.text_closings
        self._dropped = {found.joint, *around, *special, *found.ends} - {""}
        thoughts = {found.thought_opening.strip(), found.thought_closing.strip()} - {""}
        self._marks = _one_of({*self._attempts, *self._dropped, *thoughts})
        self._thought_marks = _one_of({found.thought_closing.strip(), *special} - {""})
        self._program = self._answer(thinking=thinking)
        if found.primed and not thinking:
            self._input.add(found.primed)

    def feed(self, text: str) -> Sequence[Part]:
        """See `AnswerScanner`."""
        self._input.add(text)
        return self._run()

    def finish(self, *, cut: bool) -> Sequence[Part]:
        """See `AnswerScanner`."""
        self._cut, self._input.ended = cut, True
        return self._run()

    def _run(self) -> Sequence[Part]:
        next(self._program, None)
        parts, self._parts = self._parts, []
        return tuple(_joined(parts))

    def _answer(self, *, thinking: bool) -> Parsing[None]:
        text, found = self._input, self._format
        if thinking:
            yield from self._thought()
        while not (text.ended and text.empty):
            if self._bare_may_begin and self._bare and (yield from self._bare_call()):
                continue
            mark = yield from self._text_before_mark()
            if mark == "":
                continue
            attempts = self._attempts.get(mark)
            if mark == found.thought_opening.strip() and self._may_think():
                self._shown.drop()
                yield from self._thought()
            elif (attempts and (yield from self._attempt(attempts, mark))) or mark in self._dropped:
                pass
            elif mark == found.thought_closing.strip() and not self._begun:
                self._shown.drop()
                self._bare_may_begin = True
            elif not attempts:
                self._show(mark)
        if not (self.cut_call and self._cut):
            self._parts.append(Text(self._shown.rest()))

    def _may_think(self) -> bool:
        """Whether a thought may begin here: in the middle of a text its opening must be a special token."""
        special = {text for text, _ in self._format.special}
        opening = self._format.thought_opening
        return (
            not self._begun
            or self._shown.fresh
            or bool(self._format.text_openings)
            or any(each in opening for each in special)
        )

    def _thought(self) -> Parsing[None]:
        """The rest of a thought, up to its closing, which is read."""
        text, closing, shown = self._input, self._format.thought_closing.strip(), _Trimmed(fresh=True)
        while True:
            part, mark = yield from self._before(self._thought_marks)
            self._parts.append(Thinking(shown.add(part)))
            if mark == closing:
                self._shown.drop()
                self._bare_may_begin = not self._begun
                return
            if text.ended and text.empty:
                return

    def _text_before_mark(self) -> Parsing[str]:
        part, mark = yield from self._before(self._marks)
        self._show(part)
        return mark

    def _before(self, marks: "_Marks") -> Parsing[tuple[str, str]]:
        """Reads text that certainly is none of the marks, and one that follows it; empty for none."""
        text = self._input
        while True:
            if found := marks.pattern.search(text.text, text.at):
                part, text.at = text.text[text.at : found.start()], found.start()
                if text.ended or text.text[text.at :] not in marks.beginnings:
                    text.at = found.end()
                    return part, found[0]
                # A longer mark may come.
                if part:
                    return part, ""
                yield
                continue
            size = marks.partial(text.text, text.at)
            end = len(text.text) if text.ended else len(text.text) - size
            if end > text.at or text.ended:
                # Of an answer that was cut, what may be the beginning of a mark is dropped.
                stop = len(text.text) - size if text.ended and self._cut else end
                part, text.at = text.text[text.at : stop], end
                self.cut_call = self.cut_call or stop < end
                return part, ""
            yield

    def _show(self, part: str) -> None:
        """Adds text; its last white space is withheld, because none belongs to a text before a call."""
        if shown := self._shown.add(part):
            self._parts.append(Text(shown))
            self._begun = True

    def _bare_call(self) -> Parsing[bool]:
        """Whether calls without a marker come at the beginning of the answer; else what was read is text."""
        text = self._input
        spaces = yield from text.spaces()
        skipped = yield from text.one_of(_SKIPPED)
        yield from text.spaces()
        if not (yield from text.char()):
            if not (skipped and self._cut):
                self._show(spaces + skipped)
            return True
        if (yield from self._attempt(self._bare, spaces + skipped)):
            return True
        self._bare_may_begin = False
        return False

    def _attempt(self, attempts: Sequence[tuple[CallSyntax, Sequence[str]]], before: str) -> Parsing[bool]:
        """Whether calls begin here, after a mark or none; else that was text."""
        text = self._input
        text.mark()
        for syntax, pieces in attempts:
            text.back()
            if (yield from self._pattern(pieces)):
                if syntax.keys is not None:
                    # Some models leave the list out, or write one where the template has none.
                    yield from text.spaces()
                    self._listed = yield from text.literal("[")
                    yield from text.spaces()
                    if (yield from text.char()) == "{":
                        yield from self._calls(syntax, before)
                        return True
                elif (name := (yield from self._named(syntax))) is not None:
                    text.release()
                    yield from self._calls(syntax, before, name)
                    return True
        # The text ended within a possible call.
        ended = text.ended and text.empty
        text.back()
        text.release()
        if ended and self._cut:
            self.cut_call = True
            text.at = len(text.text)
            return True
        self._fail(before)
        return False

    def _fail(self, shown: str) -> None:
        if shown.strip() not in self._dropped:
            self._show(shown)

    def _pattern(self, pieces: Sequence[str]) -> Parsing[bool]:
        """Whether the pieces of a marker come next, which are then read."""
        text = self._input
        for piece in pieces:
            yield from text.spaces()
            if piece in (ANY, NAME):
                yield from text.run(_ID, _MOST_NAME)
            elif not (yield from text.literal(piece)) and piece != "[":
                return False
        return True

    def _named(self, syntax: CallSyntax) -> Parsing[str | None]:
        """The name of a tool and what follows it; None if they do not come next."""
        text = self._input
        yield from text.spaces()
        name = yield from text.run(_TOOL_NAME, _MOST_NAME + 1)
        if name not in self._schemas:
            return None
        pieces = _PIECES.findall(syntax.middle)
        return name if (yield from self._pattern(pieces)) else None

    def _calls(self, syntax: CallSyntax, before: str, name: str | None = None) -> Parsing[None]:
        """Calls one after another; the first one's marker was read, and its name if it stands alone."""
        text, item = self._input, _PIECES.findall(syntax.opening)
        skips = {*_pieces(syntax.closing), *_pieces(syntax.separator), *_pieces(syntax.section[1])}
        if self._listed or syntax.section[0].rstrip().endswith("[") or not syntax.opening.strip():
            skips |= {*_BETWEEN_CALLS}
        skips -= {"{", "[", ""}
        ordered = sorted(skips, key=len, reverse=True)
        marked = bool(item) and item[0] in self._attempts
        while True:
            if name is None:
                if not (yield from self._object(syntax, before)):
                    return
            elif not (yield from self._arguments(syntax, name)):
                return
            self._shown.drop()
            before, name = "", None
            while True:
                yield from text.spaces()
                if not (yield from text.one_of(ordered)):
                    break
            if marked or not (yield from text.char()):
                return
            text.mark()
            if not (yield from self._pattern(item)):
                text.back()
                text.release()
                return
            if syntax.keys is not None:
                if (yield from text.char()) != "{":
                    text.back()
                    text.release()
                    return
            elif (name := (yield from self._named(syntax))) is None:
                cut = self._cut and text.ended and text.empty
                if not cut:
                    text.back()
                text.release()
                self.cut_call = self.cut_call or cut
                return
            else:
                text.release()

    def _begin(self, name: str) -> int:
        index, self._index = self._index, self._index + 1
        number = "".join(secrets.choice(_LETTERS) for _ in range(_LENGTH))
        self._parts.append(CallBegins(index, name, number))
        self._shown.drop()
        self._begun = True
        return index

    def _arguments(self, syntax: CallSyntax, name: str) -> Parsing[bool]:
        """The arguments of a call whose name was read; whether the call is complete."""
        index, pieces = self._begin(name), list[str]()
        try:
            yield from arguments(self._input, syntax, self._schemas[name], self._sink(index, pieces))
            if syntax.arguments == "elements":
                yield from self._input.spaces()
                closing = _pieces(syntax.closing)
                if closing and not (yield from self._input.literal(closing[0])):
                    raise Failed
        except Failed:
            self.cut_call = True
            return False
        return self._end(index, pieces)

    def _sink(self, index: int, pieces: list[str]) -> Any:
        def sink(text: str) -> None:
            if text:
                pieces.append(text)
                self._parts.append(CallArguments(index, text))

        return sink

    def _end(self, index: int, pieces: Sequence[str]) -> bool:
        """Ends a call if its arguments are a JSON object."""
        try:
            value = json.loads("".join(pieces), parse_constant=no_constant)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            self.cut_call = True
            return False
        self._parts.append(CallEnds(index))
        return True

    def _object(self, syntax: CallSyntax, before: str) -> Parsing[bool]:
        """A call that is a JSON object, at its brace; whether it is complete. What is none becomes text."""
        text, index, pieces, name = self._input, -1, list[str](), None
        assert syntax.keys is not None
        # What was read of a possible call so far.
        taken, early = [before + text.release()], list[str]()
        sink: Any = taken.append
        try:
            yield from text.literal("{")
            taken.append("{")
            while True:
                taken.append((yield from text.spaces()))
                if (yield from text.literal("}")):
                    break
                if (yield from text.literal(",")):
                    taken.append(",")
                    continue
                key = yield from self._key(taken)
                if key in (syntax.keys[0], *_NAME_KEYS) and name is None:
                    name = yield from self._string(taken)
                    if name not in self._schemas:
                        raise Failed
                elif key in (syntax.keys[1], *_ARGUMENT_KEYS) and index < 0 and not early:
                    if name is None:
                        yield from self._object_value(_both(early, taken))
                    else:
                        first = yield from text.char()
                        if first not in ("{", '"'):
                            raise Failed
                        index = self._begin(name)
                        sink = _nothing
                        yield from self._object_value(self._sink(index, pieces))
                else:
                    yield from json_value(text, sink if index < 0 else _nothing)
            if index < 0:
                if name is None:
                    taken.append("}")
                    raise Failed
                index = self._begin(name)
                self._sink(index, pieces)("".join(early) or "{}")
        except Failed:
            if index >= 0 or (text.ended and text.empty and self._cut):
                self.cut_call = True
            else:
                self._fail("".join(taken))
                self._begun = True
            return False
        return self._end(index, pieces)

    def _key(self, taken: list[str]) -> Parsing[str]:
        """A key of an object and its colon."""
        text, key = self._input, (yield from self._string(taken))
        taken.append((yield from text.spaces()))
        if not (yield from text.literal(":")):
            raise Failed
        taken.append(":")
        taken.append((yield from text.spaces()))
        return key

    def _string(self, taken: list[str]) -> Parsing[str]:
        text, pieces = self._input, list[str]()
        if (yield from text.char()) != '"':
            raise Failed
        yield from json_string(text, _both(pieces, taken))
        return _decoded("".join(pieces))

    def _object_value(self, sink: Any) -> Parsing[None]:
        """Arguments: an object, or the text of one."""
        text = self._input
        first = yield from text.char()
        if first == '"':
            pieces: list[str] = []
            yield from json_string(text, pieces.append)
            sink(_decoded("".join(pieces)) or "{}")
        elif first == "{":
            yield from json_value(text, sink)
        else:
            raise Failed


class _Trimmed:
    """Withholds the last white space of a growing text, and drops that at its beginning if it is `fresh`."""

    def __init__(self, *, fresh: bool = False) -> None:
        self.fresh, self._spaces = fresh, list[str]()

    def add(self, part: str) -> str:
        """The text that certainly belongs to it now."""
        if self.fresh:
            part = part.lstrip()
        shown = part.rstrip()
        if not shown:
            self._spaces.append(part)
            return ""
        found = "".join([*self._spaces, shown])
        self._spaces, self.fresh = [part[len(shown) :]], False
        return found

    def drop(self) -> None:
        """Drops the white space at this place."""
        self._spaces, self.fresh = [], True

    def rest(self) -> str:
        """The withheld white space."""
        return "" if self.fresh else "".join(self._spaces)


class _Marks:
    """Finds the first of some texts, and what may begin one."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self.beginnings = {text[:size] for text in texts for size in range(1, len(text))}
        self._most = max(map(len, self.beginnings), default=0)

    def partial(self, text: str, begin: int) -> int:
        """Number of the last characters that may begin one of the texts."""
        most = min(self._most, len(text) - begin)
        return next((size for size in range(most, 0, -1) if text[-size:] in self.beginnings), 0)


def _one_of(texts: set[str]) -> _Marks:
    return _Marks(sorted(texts, key=lambda each: (-len(each), each)))


def _pieces(marker: str) -> list[str]:
    return [each for each in _PIECES.findall(marker) if each not in (ANY, NAME)]


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Parts with neighbouring pieces joined, without empty ones."""
    found: list[list[Any]] = []
    for part in parts:
        texts = [part.text] if isinstance(part, Text | Thinking | CallArguments) else []
        if texts == [""]:
            continue
        last = found[-1][0] if found else None
        if (
            texts
            and type(last) is type(part)
            and getattr(last, "index", None) == getattr(part, "index", None)
        ):
            found[-1] += texts
        else:
            found.append([part, *texts])
    return [dataclasses.replace(part, text="".join(texts)) if texts else part for part, *texts in found]


def _decoded(text: str) -> str:
    try:
        return json.loads(text)
    except ValueError:
        raise Failed from None


def _both(one: list[str], other: list[str]) -> Callable[[str], None]:
    def sink(text: str) -> None:
        one.append(text)
        other.append(text)

    return sink


def _nothing(text: str) -> None:
    del text
