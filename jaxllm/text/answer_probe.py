"""Finds the format of a model's answers by rendering its chat template with probes.

An answer with a text, with a thought, with one call and with two is rendered as a part of the history. What
differs between these texts is the markers: what comes before, between and after names, keys and values. Two
things cannot be found like this and are described by hand (`known_formats.py`): syntaxes that the template
does not write into the history, and those that the model writes in another way than the template.
"""

import dataclasses
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.errors import ConfigError, TemplateError
from jaxllm.text.answer_arguments import arguments
from jaxllm.text.answer_input import Failed, Input
from jaxllm.text.answer_syntax import (
    ANY,
    GENERIC,
    JSON_OBJECT,
    JSON_TYPES,
    NAME,
    THINKING_SWITCHES,
    AnswerFormat,
    CallSyntax,
    Elements,
    Probed,
)
from jaxllm.text.child_process import ChildFailed
from jaxllm.text.known_formats import adjusted
from jaxllm.text.template_program import RenderBounds

_NOW = datetime.datetime(2026, 1, 2, 3, 4)
_USER = {"role": "user", "content": "QUESTION"}
_TEXT, _THOUGHT, _RESULT = "ANSWER", "REASONS", "RESULT"
_NAMES, _IDS = ("first_tool", "other_tool"), ("aB3dE5fG7", "zY9xW7vU5")
# Templates are programs of strangers: bounds of a probe, and how many may exceed them.
_MOST_EXCEEDED, _BOUNDS = 2, RenderBounds(seconds=1.0, characters=1 << 17)
# One value of every JSON type, in the order of `JSON_TYPES`; no text within another one.
_VALUES: dict[str, Any] = dict(
    alpha="WORDS", beta=1047, gamma=0.5, delta=True, epsilon=None, zeta=[3, None, {"eta": False}],
    theta={"iota": "LETTERS"},
)  # fmt: skip
_TYPES = dict(zip(_VALUES, JSON_TYPES, strict=True))
# Templates may write some types in a way that cannot be read: then without them.
_PLAIN = {"alpha": "string", "beta": "integer"}
_FEWER = {key: _VALUES[key] for key in ("alpha", "beta", "delta")}
_OTHER = {"alpha": "ELSE", "beta": -2}
_TAG = r"(?:<[^<>\s]{1,64}>|\[[A-Z_ /]{2,40}\])"
_THOUGHT_OPENING = re.compile(rf"({_TAG}(?:[a-z_]{{1,16}}{_TAG}?)?)\s*$")
_THOUGHT_CLOSING = re.compile(rf"\s*({_TAG}(?:[a-z_]{{1,16}}{_TAG})?)")
# Ends of turns by their names, where only turns with calls have one.
_ENDS = re.compile(r"<[^<>]*(?:eos|eot|eom|end_of)[^<>]*>\s*$")
# For templates that write no thought into the history: their markers, where a template has them.
_THOUGHTS = (
    ("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"), ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|think|>", "<|end|>"),
)  # fmt: skip


def probed(template: Probed) -> AnswerFormat:
    """The format of the answers of a template's model.

    Raises:
      TemplateError: the template cannot render a question and an answer.
    """
    found = adjusted(template.source, _Probe(template).found())
    if found.calls:
        return found
    # A template that lists tools, of a model whose syntax is unknown: an object, as many models write.
    calls = (JSON_OBJECT, GENERIC) if template.knows_tools else (GENERIC,)
    return dataclasses.replace(found, calls=calls, generic=not template.knows_tools)


class _Probe:
    def __init__(self, template: Probed) -> None:
        self._template = template
        self._parts = template.reads_parts_alone
        self._parameters = {"properties": {key: {"type": kind} for key, kind in _TYPES.items()}}
        # Few and plain, because some templates write well-known types alone.
        properties = {key: {"type": kind, "description": "Value."} for key, kind in _PLAIN.items()}
        parameters = {"type": "object", "properties": properties, "required": ["alpha"]}
        self._tools = [
            {"type": "function", "function": {"name": name, "description": "Tool.", "parameters": parameters}}
            for name in _NAMES
        ]
        self._as_text = False
        self._exceeded = 0

    def render(self, *messages: Mapping[str, Any], gen: bool = False, **options: Any) -> str | None:
        """The text of messages after the question; None if the template refuses them."""
        given = [dict(each) for each in (_USER, *messages)]
        for each in given if self._parts else ():
            if isinstance(each.get("content"), str):
                each["content"] = _part(each["content"], True)
        if self._exceeded > _MOST_EXCEEDED:
            return None
        try:
            return self._template.plain(
                given,
                tools=self._tools,
                add_generation_prompt=gen,
                now=_NOW,
                options=options,
                bounds=_BOUNDS,
            )
        except (TemplateError, ConfigError) as error:
            self._exceeded += isinstance(error.__cause__, ChildFailed)
            return None

    def turn(self, *messages: Mapping[str, Any], gen: bool = False, **options: Any) -> str | None:
        """What messages add to the text of the question."""
        text = self.render(*messages, gen=gen, **options)
        return None if text is None else text[len(_common_start(self.render(**options) or "", text)) :]

    def found(self) -> AnswerFormat:
        template = self._template
        self._tools = self._tools if template.knows_tools else []
        plain, asked = self.turn(_answer()), self.turn(gen=True)
        if plain is None or asked is None or _TEXT not in plain:
            return AnswerFormat(note="the template cannot render a question and an answer")
        before, after = plain.split(_TEXT, 1)
        prompts = [asked, *(self.turn(gen=True, **{name: value}) or "" for name, value in self._switches())]
        # What the prompt writes before every answer.
        head = _beginning([before, *filter(None, prompts)]) if asked else ""
        opening, closing, opened, joint = self._thought(head, before, prompts)
        text_opening = _without_thought(before[len(head) :], opening, closing)
        if text_opening.strip() and asked.rstrip().endswith(text_opening.strip()):
            head, text_opening = head + text_opening, ""
        call = self._call(head, opening, closing, text_opening, after)
        calls, several, end = call or ((), True, "")
        primed = ""
        if calls and calls[0].separator and not calls[0].opening and head.endswith(calls[0].separator):
            # The prompt has the marker of the first call or text.
            primed, syntax = calls[0].separator, calls[0]
            calls = (dataclasses.replace(syntax, opening=primed, separator=""),)
            text_opening = primed + text_opening
        return AnswerFormat(
            thought_opening=opening,
            thought_closing=closing,
            opened=opened,
            joint=joint.removesuffix(text_opening).strip(),
            text_openings=tuple(filter(None, [text_opening.strip()])),
            text_closings=_text_closings(after, end, text_opening, (opening.strip(), closing.strip())),
            calls=calls,
            several=several,
            primed=primed,
            generic=not self._tools,
            writes_calls=bool(calls),
            writes_results=self._writes_results(bool(calls)),
            system=self._writes_system(),
            arguments_text=self._as_text,
        )

    def _writes_results(self, calls: bool) -> bool:
        result = {"role": "tool", "content": _RESULT, "tool_call_id": _IDS[0], "name": _NAMES[0]}
        before = self._calls(_CALL_ONE) if calls else [_answer()]
        return _RESULT in (self.render(*before, result) or "")

    def _writes_system(self) -> bool:
        messages = [{"role": "system", "content": _part(_RESULT, self._parts)}, dict(_USER)]
        messages[1]["content"] = _part("QUESTION", self._parts)
        try:
            return _RESULT in self._template.plain(messages, now=_NOW, bounds=_BOUNDS)
        except (TemplateError, ConfigError):
            return False

    def _switches(self) -> list[tuple[str, bool]]:
        names = [each for each in THINKING_SWITCHES if each in self._template.option_names]
        return [(name, value) for name in names[:1] for value in (True, False)]

    def _thought(self, head: str, before: str, prompts: Sequence[str]) -> tuple[str, str, bool, str]:
        """Opening and closing of a thought, whether the prompt opens it, and what follows before a text."""
        opening = closing = joint = ""
        if (found := self._with_thought()) is not None:
            start, end = found.split(_THOUGHT, 1)
            if match := _THOUGHT_CLOSING.match(end):
                closing = match[1]
                joint = end[match.end() :].split(_TEXT)[0] if _TEXT in end else ""
            inner = start.removeprefix(head)
            match = _THOUGHT_OPENING.search(start)
            opening = inner.strip()
            if match and (not opening or (len(re.findall(_TAG, opening)) > 1 and opening.endswith(match[1]))):
                opening = match[1]
        if closing and not opening:
            opening = next((first for first, last in _THOUGHTS if last == closing), "")
        if not closing:
            source = self._template.source + "".join(prompts)
            known = (pair for pair in _THOUGHTS if pair[0] in source and pair[1] in source)
            opening, closing = next(known, ("", ""))
        if not closing:
            return "", "", False, ""
        asked = prompts[0]
        extra = asked[len(_shared(asked, before)) :]
        if (not opening or opening in before) and extra.strip() and closing not in extra + before:
            opening = extra
        return opening, closing, bool(opening) and asked.rstrip().endswith(opening.strip()), joint

    def _with_thought(self) -> str | None:
        """The turn of an answer with a thought."""
        name = self._template.thought_name
        for options in ({}, *({key: value} for key, value in self._switches() if value)) if name else ():
            assert name is not None
            # Some write the thoughts of answers with calls alone.
            for messages in ([{**_answer(), name: _THOUGHT}], self._calls(_CALL_ONE, **{name: _THOUGHT})):
                found = self.turn(*messages, **options)
                if found is not None and _THOUGHT in found:
                    return found
        return None

    def _call(
        self, head: str, opening: str, closing: str, text_opening: str, after: str
    ) -> tuple[tuple[CallSyntax, ...], bool, str] | None:
        """Syntax of calls, whether there may be several, and the text after all calls; None if the template
        writes none that can be read."""
        for values, as_text in ((_VALUES, False), (_VALUES, True), (_FEWER, False), (_FEWER, True)):
            self._as_text = as_text
            first = (_NAMES[0], values, _IDS[0])
            second = (_NAMES[1], _OTHER, _IDS[1])
            one, two = self.turn(*self._calls(first)), self.turn(*self._calls(first, second))
            if one is None or _NAMES[0] not in one:
                continue
            several = two is not None and _NAMES[1] in two
            rests = (each[len(_common_start(each, head)) :] for each in (one, two or ""))
            one, two = (
                _without_text(_without_thought(each, opening, closing), text_opening) for each in rests
            )
            found = _CallProbe(one, two if several else None, values, self._parameters, after).syntax()
            if found is not None:
                return (found[0],), several, found[1]
        self._as_text = False
        return None

    def _calls(self, *calls: tuple[str, Mapping[str, Any], str], **more: Any) -> list[dict[str, Any]]:
        made = []
        for name, values, id_ in calls:
            given = json.dumps(values) if self._as_text else dict(values)
            made.append({"id": id_, "type": "function", "function": {"name": name, "arguments": given}})
        return [{"role": "assistant", "content": "", **more, "tool_calls": made}]


def _part(text: str, parts: bool) -> Any:
    return [{"type": "text", "text": text}] if parts else text


def _answer() -> dict[str, Any]:
    return {"role": "assistant", "content": _TEXT}


_CALL_ONE = (_NAMES[0], {"alpha": "WORDS"}, _IDS[0])


class _CallProbe:
    """Finds the syntax of calls in the rendering of one call, and that of two."""

    def __init__(
        self, one: str, two: str | None, values: Mapping[str, Any], parameters: Mapping[str, Any], after: str
    ) -> None:
        self._one, self._two, self._values, self._parameters = one, two, values, parameters
        # What ends a turn comes after texts, too.
        self._end = after

    def syntax(self) -> tuple[CallSyntax, str] | None:
        """The syntax and the text that ends the turn; None if it is not understood."""
        found = self._object(self._one, _NAMES[0], self._values)
        if found is not None:
            begin, end, keys, head, middle, tail = found
            two = self._two or ""
            if (second := self._object(two, _NAMES[1], _OTHER, end)) is not None:
                between, last = two[end : second[0]], two[second[1] :]
            else:
                between, last = None, self._one[end:]
            section, opening, closing, separator, rest = self._around(self._one[:begin], between, last)
            return (
                CallSyntax(
                    section=section, separator=separator, opening=opening, closing=closing,
                    keys=keys, head=head, middle=middle, tail=tail,
                ),
                rest,
            )  # fmt: skip
        return self._named()

    def _object(
        self, text: str, name: str, values: Mapping[str, Any], start: int = 0
    ) -> tuple[int, int, tuple[str, str], str, str, str] | None:
        """Begin and end of the JSON object with the name and the arguments, their keys, and its texts."""
        at = text.find(f'"{name}"', start)
        begin = text.rfind("{", start, at) if at >= 0 else -1
        if begin < 0:
            return None
        value, end = _decoded(text, begin)
        if not isinstance(value, dict):
            return None
        key = next((key for key, each in value.items() if each == name), None)
        other = next((key for key, each in value.items() if each in (values, json.dumps(values))), None)
        if key is None or other is None:
            return None
        inner = text.index(":", text.index(f'"{other}"', begin)) + 1
        inner += len(text[inner:]) - len(text[inner:].lstrip())
        head = text[begin : at + 1]
        middle = text[at + 1 + len(name) : inner]
        if list(value).index(other) < list(value).index(key):
            # The arguments come first: calls are forced in the usual order.
            head, middle = f'{{"{key}": "', f'", "{other}": '
        for id_ in _IDS:
            head, middle = head.replace(id_, ANY), middle.replace(id_, ANY)
        head = re.sub(r'("tool_call_id": ")\w+(")', rf"\1{ANY}\2", head)
        closing = re.search(r"\s*\}$", text[begin:end])
        return begin, end, (key, other), head, middle, closing[0] if closing else "}"

    def _around(
        self, before: str, between: str | None, last: str
    ) -> tuple[tuple[str, str], str, str, str, str]:
        """Section, opening, closing and separator of calls, and what ends the turn."""
        before, last = _slots(before), _slots(last)
        turn_end = self._end.strip()
        at = last.find(turn_end) if turn_end else -1
        at = len(last) - len(_common_end(last, self._end)) if at < 0 else at
        turn = last
        last = _ENDS.sub("", last[:at])
        before = before.lstrip()
        if between is None:
            return ("", ""), before, last if last.strip() else "", "", turn[len(last) :]
        between = _slots(between)
        closing = _common_start(between, last)
        middle = between[len(closing) :]
        opening = _common_end(before, middle)
        separator = middle[: len(middle) - len(opening)]
        section = before[: len(before) - len(opening)]
        after = last[len(closing) :] if section.strip() else ""
        return (section, after), opening, closing, separator, turn[len(closing + after) :]

    def _named(self) -> tuple[CallSyntax, str] | None:
        """Calls whose name stands alone."""
        one, two = self._one, self._two
        first = one.find(next(iter(self._values)))
        at = one.rfind(_NAMES[0], 0, first) if first >= 0 else -1
        if at < 0:
            return None
        after = at + len(_NAMES[0])
        read = self._json(one, after) or self._literals(one, after) or self._element(one, after)
        if read is None:
            return None
        begin, end, parts = read
        syntax = CallSyntax(middle=_slots(one[after:begin]), **parts)
        between, last = None, one[end:]
        if two is not None:
            second = two.rfind(_NAMES[1])
            pair = self._end_of(two, second + len(_NAMES[1]), syntax)
            if pair is not None:
                between, last = two[end:second], two[pair:]
        section, opening, closing, separator, rest = self._around(one[:at], between, last)
        fields = dict(section=section, opening=opening, closing=closing, separator=separator)
        return dataclasses.replace(syntax, **fields), rest

    def _json(self, text: str, after: int) -> tuple[int, int, dict[str, Any]] | None:
        begin = text.find("{", after)
        if begin < 0:
            return None
        value, end = _decoded(text, begin)
        return (begin, end, {}) if value == self._values else None

    def _literals(self, text: str, after: int) -> tuple[int, int, dict[str, Any]] | None:
        """Arguments of Python, or with bare keys."""
        if text[after : after + 1] == "(":
            begin = after + 1
            style: dict[str, Any] = {"arguments": "python", "words": ("True", "False", "None")}
        elif text[after : after + 1] == "{":
            begin = after + 1
            quote = text[text.find(":", after) + 1 : max(0, text.find("WORDS", after))]
            null = "None" if "None" in text else "null"
            style = {"arguments": "bare", "quote": quote, "words": ("true", "false", null)}
        else:
            return None
        end = self._end_of(text, begin, CallSyntax(**style), self._values)
        return None if end is None else (begin, end, style)

    def _end_of(
        self, text: str, at: int, syntax: CallSyntax, values: Mapping[str, Any] | None = None
    ) -> int | None:
        """The end of the arguments of a call, after its name (without `values`) or from their beginning."""
        source, pieces = Input(), list[str]()
        source.text, source.ended = text, True
        if values is None:
            middle = syntax.middle
            match = re.match(re.escape(middle).replace(re.escape(ANY), r"[\w.:-]*"), text[at:])
            if match is None:
                return None
            at += match.end()
        source.at = at
        try:
            for _ in arguments(source, syntax, self._parameters, pieces.append):
                return None
            found = json.loads("".join(pieces))
        except (Failed, ValueError):
            return None
        if found != (_OTHER if values is None else values):
            return None
        end = source.at
        if syntax.arguments == "elements":
            # Their last line break belongs to the element.
            assert syntax.elements is not None
            after = syntax.elements.after
            end = text.rfind(after.strip(), 0, end) + len(after.strip())
            trailing = after[len(after.rstrip()) :]
            end += len(trailing) if text.startswith(trailing, end) else 0
        return end

    def _element(self, text: str, after: int) -> tuple[int, int, dict[str, Any]] | None:
        """Arguments as elements."""
        keys, places = list(self._values), []
        at = after
        for key in keys:
            found = re.compile(rf"\b{key}\b").search(text, at)
            if found is None:
                return None
            places.append((found.start(), found.end()))
            at = found.end()
        shown: list[tuple[int, int, bool]] = []
        nexts = [*(begin for begin, _ in places[1:]), len(text)]
        for key, (_, end), following in zip(keys, places, nexts, strict=True):
            spot = self._shown(text, end, following, self._values[key])
            if spot is None:
                return None
            shown.append(spot)
        betweens = {
            _TYPES[key]: text[place[1] : spot[0]]
            for key, place, spot in zip(keys, places, shown, strict=True)
        }
        other = betweens.get("integer", betweens["string"])
        between = tuple(betweens.get(kind, other) for kind in JSON_TYPES)
        gaps = {text[spot[1] : place[0]] for spot, place in zip(shown, places[1:], strict=False)}
        if len(gaps) != 1:
            return None
        (gap,) = gaps
        rest = text[shown[-1][1] :]
        value_end = _common_start(gap, rest)
        start = text[after : places[0][0]]
        before = _common_end(start, gap[len(value_end) :])
        if not before.strip() or not value_end.strip() or before + value_end == "":
            return None
        # What is between two elements belongs to the end of the first.
        value_end = gap[: len(gap) - len(before)]
        quoted = text[shown[0][0]] == '"'
        python = tuple(_TYPES[key] for key, (*_, flag) in zip(keys, shown, strict=True) if flag)
        begin = after + len(start) - len(before)
        elements = Elements(before=before, between=between, after=value_end, quoted=quoted, python=python)
        end = shown[-1][1] + len(_common_start(value_end, rest))
        return begin, end, {"arguments": "elements", "elements": elements}

    def _shown(self, text: str, begin: int, end: int, value: Any) -> tuple[int, int, bool] | None:
        """Where a value is written, and whether as Python writes it."""
        if isinstance(value, str):
            for form in (json.dumps(value), value):
                at = text.find(form, begin, end)
                if at >= 0:
                    return at, at + len(form), False
            return None
        spaced, python = json.dumps(value), repr(value)
        for form in (spaced, json.dumps(value, separators=(",", ":")), python):
            # The last one: a type's name may be before it. Lists and objects may have other keys inside.
            nested = isinstance(value, list | dict)
            at = text.find(form, begin) if nested else text.rfind(form, begin, end)
            if at >= 0:
                return at, at + len(form), form == python != spaced
        return None


def _decoded(text: str, begin: int) -> tuple[Any, int]:
    """The JSON value that begins at a place, and its end; None for text that is none."""
    try:
        return json.JSONDecoder().raw_decode(text, begin)
    except ValueError:
        return None, begin


def _slots(text: str) -> str:
    """A marker with slots for names and ids."""
    for name in _NAMES:
        text = text.replace(name, NAME)
    for id_ in _IDS:
        text = text.replace(id_, ANY)
    # Numbers of calls: Kimi's `:0`, and `index="1"`.
    return re.sub(r'(?<=:)\d+(?=<)|(?<=index=")\d+(?=")', ANY, text)


def _beginning(texts: Sequence[str]) -> str:
    """The common beginning of texts, up to a marker that only some have."""
    first = texts[0]
    for each in texts[1:]:
        first = _common_start(first, each)
    return first


def _shared(one: str, other: str) -> str:
    """The longest common beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))]


def _common_start(one: str, other: str) -> str:
    """The longest common beginning that does not end within a marker."""
    found = _shared(one, other)
    if found in (one, other) and one != other:
        following = {(one[len(found) :] + other[len(found) :])[0]}
    else:
        following = {text[len(found) : len(found) + 1] for text in (one, other)} - {""}
    if following and found.rfind("<") > found.rfind(">"):
        found = found[: found.rfind("<")]
    elif following and (match := re.search(r"\[[A-Z_]*$", found)):
        if all(letter.isupper() or letter in "_]" for letter in following) or len(match[0]) > 1:
            found = found[: match.start()]
    elif following and all(letter.islower() for letter in following):
        # A word follows that belongs to the marker: `<|open|>think<|sep|>`.
        found = re.sub(rf"{_TAG}$", "", found)
    return found


def _common_end(one: str, other: str) -> str:
    """The longest common end that does not begin within a marker."""
    size = len(_shared(one[::-1], other[::-1]))
    for text in (one, other):
        before, end = text[: len(text) - size], text[len(text) - size :]
        if not before:
            continue
        if before.rfind("<") > before.rfind(">") and ">" in end:
            size -= end.index(">") + 1
        elif (
            (match := re.match(_TAG, end)) and before[-1:].islower() and re.search(rf"{_TAG}[a-z_]+$", before)
        ):
            size -= match.end()
    return one[len(one) - size :]


def _without_thought(text: str, opening: str, closing: str) -> str:
    """A text without an empty thought at its beginning."""
    if not closing:
        return text
    pattern = rf"\s*(?:{re.escape(opening.strip())})?\s*{re.escape(closing.strip())}\s*"
    match = re.match(pattern, text)
    return text[match.end() :] if match else text


def _without_text(text: str, opening: str) -> str:
    """A text without an empty answer at its beginning."""
    if opening.strip() and text.lstrip().startswith(opening.strip()):
        rest = text.lstrip()[len(opening.strip()) :]
        tag = re.match(rf"\s*{_TAG}(?:\w{{1,16}}{_TAG})?", rest)
        if tag and ("/" in tag[0] or "close" in tag[0].lower() or "END" in tag[0]):
            return rest[tag.end() :]
    return text


def _text_closings(after: str, end: str, opening: str, thought: Sequence[str]) -> tuple[str, ...]:
    """The marker after a text, if there is one before it, and those of the turn's end."""
    common = _common_end(after, end) if end.strip() else ""
    closing = after[: len(after) - len(common)] if opening.strip() and common else ""
    tags = [
        tag for text in (end, after[len(closing) :]) for tag in re.findall(rf"{_TAG}(?:[a-z_]+{_TAG})?", text)
    ]
    end = after[len(closing) :].strip()  # MiniMax's `[e~[`
    tags = tags or [end] * (len(end.split()) == 1 and not end.isalnum())
    found = dict.fromkeys([closing.strip(), *tags])
    return tuple(each for each in found if each and each != thought[0])
