"""Reads bodies by the fields that a format declares.

A field is done, or a synonym of one that is; a hint, which is accepted and has no effect on what an answer
means; or refused, because ignoring it would change the answer. Hints are named in the header
`x-jaxllm-ignored` and in the log. Fields that nobody declared are hints, too; with strict fields they are
refused. A field that is null counts as absent, as OpenAI's clients send it.
"""

import contextvars
import dataclasses
import functools
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import inspect

from jaxllm.serving.server.api.errors import ApiError
from jaxllm.serving.server.logs import CURRENT

Body = TypeVar("Body", bound=msgspec.Struct)
# Values of synonyms and odd values -> those of the field.
Values = Mapping[str, Mapping[Any, Any]]
_PATH = re.compile(r" - at `\$\.?(.*)`$")
_INDEX = re.compile(r"\[\d+\]")
_UNPRINTABLE = re.compile(r"[^\w.\[\]-]", re.ASCII)
_MOST_NAMES, _MOST_CHARACTERS = 32, 80


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dialect(Generic[Body]):
    """The fields of a format. Names of fields within others are paths without indices (`options.num_gpu`).

    Attributes:
      name: name in the documentation.
      body: the fields that are done, with their types.
      synonyms: other names of fields: of one that is done, or of an entry of one (`grammar.regex`).
      hints: fields that have no effect, and need none.
      refused: fields that would change the answer -> their values that would not.
      values: values that other servers give a meaning of their own -> the values of this service's for it,
        by field.
    """

    name: str
    body: type[Body]
    synonyms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    hints: frozenset[str] = frozenset()
    refused: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    values: Values = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """All that is declared, in order: fields that are done, synonyms, hints, refused fields."""
        return [*fields_of(self.body), *self.synonyms, *sorted(self.hints), *self.refused]

    def read(self, values: Mapping[str, Any], *, strict: bool) -> Body:
        """A body as its struct. Raises ApiError if a field is refused, missing, given twice, or of a wrong
        type. `strict`: whether fields that are not declared are refused."""
        _CURRENT.set((self, strict))
        return convert(self._resolved(values), self.body)

    def _resolved(self, values: Mapping[str, Any], at: str = "") -> dict[str, Any]:
        """Fields by their own names, without those that are refused."""
        found: dict[str, Any] = {}
        for name, value in values.items():
            path = f"{at}{name}"
            if value is None:
                continue
            if path in self.refused:
                self._require_neutral(path, value)
                continue
            own = name
            value = self._meant(self.synonyms.get(path, path), value)
            if (synonym := self.synonyms.get(path)) is not None:
                own, _, entry = synonym.removeprefix(at).partition(".")
                value = {entry: value} if entry else value
            if isinstance(value, dict) and f"{path}." in self._parents:
                value = self._resolved(value, f"{path}.")
            other = found.get(own, value)
            if isinstance(value, dict) and isinstance(other, dict):
                # Entries of one field that came by several names.
                agree = all(value.get(entry, each) == each for entry, each in other.items())
                value, other = (value | other,) * 2 if agree else (value, other)
            if other != value:
                raise ApiError(f"{path} and another name of {own} differ; send one", param=path[:80])
            found[own] = value
        return found

    @functools.cached_property
    def _parents(self) -> frozenset[str]:
        """Prefixes of the paths that are declared within other fields."""
        paths = (*self.synonyms, *self.refused, *self.values)
        return frozenset(f"{path.rpartition('.')[0]}." for path in paths if "." in path)

    def _meant(self, path: str, value: Any) -> Any:
        meant = self.values.get(path)
        if meant is None or not isinstance(value, int | float | str | list) or isinstance(value, bool):
            return value
        if isinstance(value, list):
            # One of several, such as a stop string.
            return [each for each in value if not isinstance(each, str) or each not in meant]
        return meant.get(value, value)

    def _require_neutral(self, name: str, value: Any) -> None:
        neutral = self.refused[name]
        if not any(value == each and isinstance(value, bool) is isinstance(each, bool) for each in neutral):
            texts = " or ".join(msgspec.json.encode(each).decode() for each in neutral)
            message = f"the field {name!r} is not supported{texts and f' but for {texts}'}; leave it out"
            raise ApiError(message, code="unsupported_field", param=name)


# The format of the body that is read, and whether its fields are strict.
_CURRENT: contextvars.ContextVar[tuple[Dialect[Any] | None, bool]] = contextvars.ContextVar(
    "dialect", default=(None, False)
)


def ignore(path: str) -> None:
    """Notes that a field has no effect, for the header and the log. Raises ApiError if fields are strict, and
    the format does not declare it."""
    dialect, strict = _CURRENT.get()
    if strict and (dialect is None or _INDEX.sub("", path) not in dialect.hints):
        message = f"the field {path!r:.80} is not known; the guide lists the fields that are"
        raise ApiError(message, code="unknown_field", param=path[:80])
    served = CURRENT.get()
    if served is not None and len(served.ignored) < _MOST_NAMES:
        served.ignored[_UNPRINTABLE.sub("?", path[:_MOST_CHARACTERS])] = None


def convert(value: Any, kind: type[Body], at: str = "") -> Body:
    """Converts plain JSON values to a struct; `at` is the path of the values in the body. Fields that it does
    not have are ignored (see `ignore`). Raises ApiError if a field is missing or of a wrong type."""
    try:
        return msgspec.convert(_known(value, _shape(kind), at), kind)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _PATH.search(text)
        inner = found[1] if found else ""
        param = ".".join(part for part in (at, inner) if part)
        plain = text[: found.start()] if found else text
        message = f"{plain[:300]}{f' at {param}' if param else ''}".replace("`", "'")
        raise ApiError(message, code="invalid_type", param=param[:80]) from None
    except (RecursionError, OverflowError):
        raise ApiError("a value is nested too deep or too large", param=at) from None


@functools.cache
def _shape(kind: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(kind)


def _known(value: Any, kind: inspect.Type, at: str) -> Any:
    """A value without nulls and without the fields that its type does not have, which are ignored."""
    if isinstance(value, dict) and (struct := _struct_in(kind)) is not None:
        types, found = {each.encode_name: each.type for each in struct.fields}, {}
        for name, each in value.items():
            path = f"{at}.{name}" if at else name
            if each is None:
                continue
            if name in types:
                found[name] = _known(each, types[name], path)
            else:
                ignore(path)
        return found
    if isinstance(kind, inspect.UnionType):
        kind = next((each for each in kind.types if isinstance(each, inspect.ListType)), kind)
    if isinstance(value, list) and isinstance(kind, inspect.ListType) and _struct_in(kind.item_type):
        return [_known(each, kind.item_type, f"{at}[{index}]") for index, each in enumerate(value)]
    return value


def _struct_in(kind: inspect.Type) -> inspect.StructType | None:
    kinds: Collection[inspect.Type] = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return next((each for each in kinds if isinstance(each, inspect.StructType)), None)


def fields_of(kind: type[msgspec.Struct]) -> Iterator[str]:
    """The names of a body's fields, and the paths of the fields within them."""

    def paths(struct: inspect.StructType, at: str) -> Iterator[str]:
        for each in struct.fields:
            inner = _struct_in(each.type)
            if inner is None:
                yield at + each.encode_name
            else:
                yield from paths(inner, f"{at}{each.encode_name}.")

    shape = _shape(kind)
    assert isinstance(shape, inspect.StructType)
    return paths(shape, "")
