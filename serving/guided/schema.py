"""Rewrites JSON schemas for the compiler of grammars, which knows only a part of their language.

References, also those by `$id` and anchors, become references to `$defs` of one root. Conditions, negations
and dependencies become alternatives where these exist. Objects that name their properties are closed, numbers
bounded, and recursive definitions nest six deep: a small model otherwise adds keys, digits and levels until
its answer is cut. What cannot be expressed is left out, and checked after the answer (see `validation`).

Schemas are hostile: this module runs in processes with limits of time and memory (see `worker`).
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxllm.serving.guided.limits import DEPTH, KINDS, bounded, kinds_of, unrolled

_NEWEST = "https://json-schema.org/draft/2020-12/schema"
# Formats that the compiler enforces; others are annotations.
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
# Keywords that are passed on as they are.
_PLAIN = (
    "type", "enum", "const", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf", "minItems", "maxItems", "minProperties", "maxProperties", "required",
    "x-guidance",
)  # fmt: skip
_COUNTS = frozenset(each for each in _PLAIN if each[3:] in ("Length", "Items", "Properties"))
# Without these the compiler needs fewer states.
_COSTLY = ("maxLength", "minProperties", "maxProperties")
_REFERENCES, _BRANCHES = ("$ref", "$dynamicRef", "$recursiveRef"), ("anyOf", "oneOf")
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties")
# Keywords without effect on matches.
_NOTES = frozenset(
    {
        "title", "description", "examples", "default", "$comment", "$schema", "$id", "id", "$anchor", "$defs",
        "definitions", "$vocabulary", "$dynamicAnchor", "$recursiveAnchor", "deprecated", "readOnly",
        "writeOnly",
    }
)  # fmt: skip
_NUMBERS = {each: {"type": each} for each in ("integer", "number")}
# Keywords that stay as they are, beside a type and the schema of items: most schemas have no others.
_UNCHANGED = _NOTES | {
    "type", "items", "properties", "additionalProperties", "patternProperties", "required", "enum", "const",
    "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "anyOf",
    *_REFERENCES,
}  # fmt: skip
# Sets of so many values are written out as their subsets, and so many alternatives exclude each other.
_MOST_UNIQUE, _MOST_EXCLUSIVE = 6, 8


def prepared(schema: Any, supported: Callable[[str], bool], *, simple: bool = False) -> Any:
    """The schema that the compiler reads instead of a caller's.

    Args:
      schema: a JSON schema.
      supported: whether the compiler reads a regular expression.
      simple: whether to leave out what the compiler may not be able to combine, and to leave recursion
        unlimited.

    Raises:
      ValueError: a reference leads out of the schema, or something is no schema.
    """
    found = _Preparation(schema, supported, simple=simple).root()
    return found if simple else unrolled(found)


def dialect(schema: Any) -> str:
    """The dialect that a schema is written in: the one it names, else the newest, or draft 7 if it has lists
    of items, which later drafts name otherwise."""
    about = schema.get("$schema") if isinstance(schema, dict) else None
    if isinstance(about, str):
        return about
    lists = any(isinstance(each.get("items"), list) for each in _dicts(schema))
    return "http://json-schema.org/draft-07/schema" if lists else _NEWEST


class _Preparation:
    """Rewrites one schema. A definition is written closed where it stands alone, and open where it is a part
    of a composed object, which is closed as a whole: each part would forbid the others' properties."""

    def __init__(self, schema: Any, supported: Callable[[str], bool], *, simple: bool) -> None:
        from jsonschema_specifications import REGISTRY
        from referencing import Resource
        from referencing.jsonschema import DRAFT202012, specification_with

        self._schema, self._supported = schema, supported
        self._draft = specification_with(dialect(schema), default=DRAFT202012)
        self._simple, self._depth = simple, 0
        resource = Resource(schema, self._draft)
        base = (resource.id() if isinstance(schema, dict) else None) or ""
        self._resolver: Any = REGISTRY.with_resource(base, resource).resolver(base)
        # Names of definitions by their identities and whether they are open; those that are not written yet.
        self._names: dict[tuple[int, bool], str] = {}
        self._waiting: list[tuple[str, Any, Any, bool]] = []
        # Numbers without limits of their own.
        self._used = set[str]()
        # Results of `_plainer` by identities, with the schemas, whose identities would be reused otherwise.
        self._plain: dict[int, tuple[Any, Any]] = {}
        # Results of `_property_names` by identities of plain schemas; the number of circles met so far.
        self._property_names_of: dict[int, list[str] | None] = {}
        self._circles = 0

    def root(self) -> Any:
        """The whole schema, rewritten."""
        found, definitions = self._rewritten(self._schema, self._resolver, ()), dict[str, Any]()
        while self._waiting:
            name, schema, resolver, is_open = self._waiting.pop()
            definitions[name] = self._rewritten(schema, resolver, None if is_open else ())
        definitions |= {each: bounded(_NUMBERS[each]) for each in sorted(self._used)}
        return found | {"$defs": definitions} if isinstance(found, dict) and definitions else found

    def _rewritten(self, schema: Any, resolver: Any, beside: Sequence[str] | None) -> Any:
        """A schema, rewritten.

        Args:
          schema: the schema.
          resolver: resolves its references.
          beside: names of properties that other parts of the same object define; None if another part closes
            the object.
        """
        schema, resolver = self._plainer(schema, resolver)
        if isinstance(schema, bool):
            return schema
        branches = [each for each in _BRANCHES if each in schema]
        alone = branches[0] if len(branches) == 1 else None
        # Without alternatives, which are closed one by one.
        own = schema if alone is None else {key: schema[key] for key in schema if key != alone}
        names = self._property_names(own, resolver, set())
        known = None if beside is None or names is None else [*dict.fromkeys([*names, *beside])]
        names_some = known or (known is not None and "properties" in schema)
        closes = bool(names_some) and alone is None and _may_be(schema, "object")
        found = {key: schema[key] for key in _PLAIN if key in schema}
        references = [each for each in _REFERENCES if each in schema]
        if references and not beside and not found and schema.keys() <= {*references, *_NOTES}:
            # A definition that stands alone closes itself.
            return self._reference(schema, references[0], resolver, is_open=beside is None)
        parts = [self._reference(schema, each, resolver, is_open=True) for each in references]
        parts += [self._rewritten(each, resolver, None) for each in _list(schema, "allOf")]
        if False in parts:
            return False
        parts = [each for each in parts if each is not True]
        self._add_object(schema, resolver, found)
        self._add_array(schema, resolver, found)
        pattern, form = schema.get("pattern"), schema.get("format")
        if self._simple:
            # Parts that it cannot combine, and lengths and patterns that take too many states.
            if parts and not found.keys() & {"properties", "items"} and not branches:
                return parts[0]
            parts, pattern = [], None
            found = {key: each for key, each in found.items() if key not in _COSTLY}
        if isinstance(pattern, str) and self._supported(pattern):
            found["pattern"] = pattern
        if isinstance(form, str) and form in _FORMATS:
            found["format"] = form
        for key in branches:
            inside = known if key == alone else None
            kept = [self._rewritten(each, resolver, inside) for each in _list(schema, key)]
            kept = [each for each in kept if each is not False]
            if not kept:
                return False
            if True not in kept:
                found[key] = kept
        if closes and known is not None:
            own = found.get("properties", {})
            found["properties"] = own | {each: True for each in known if each not in own}
            found["additionalProperties"] = False
        if found in _NUMBERS.values():
            # Written once: the expression of a range has thousands of states.
            self._used.add(found["type"])
            return {"$ref": f"#/$defs/{found['type']}"}
        return bounded(found | {"allOf": parts} if parts else found)

    def _add_object(self, schema: dict[str, Any], resolver: Any, found: dict[str, Any]) -> None:
        """Adds the keywords of objects to `found`."""
        if isinstance(properties := schema.get("properties"), dict):
            found["properties"] = {key: self._rewritten(properties[key], resolver, ()) for key in properties}
        if isinstance(patterns := schema.get("patternProperties"), dict):
            kept = [each for each in patterns if self._supported(each)]
            if self._simple:
                # The compiler has no intersections of them. Where others may be, too, some say nothing.
                free = schema.get("additionalProperties", True) is True
                kept = [each for each in kept if not free or patterns[each] is not True][:1]
            found["patternProperties"] = {
                each: self._rewritten(patterns[each], resolver, ()) for each in kept
            }
        if "additionalProperties" in schema:
            found["additionalProperties"] = self._rewritten(schema["additionalProperties"], resolver, ())
        if not isinstance(found.get("required", []), list):
            # A flag of draft 3.
            del found["required"]

    def _add_array(self, schema: dict[str, Any], resolver: Any, found: dict[str, Any]) -> None:
        """Adds the keywords of arrays to `found`."""
        items, first = schema.get("items"), schema.get("prefixItems")
        if isinstance(items, list):
            first, items = items, schema.get("additionalItems")
        if isinstance(first, list):
            found["prefixItems"] = [self._rewritten(each, resolver, ()) for each in first]
        if items is not None:
            found["items"] = self._rewritten(items, resolver, ())

    # -- references -------------------------------------------------------------------------------

    def _reference(self, schema: dict[str, Any], key: str, resolver: Any, *, is_open: bool) -> Any:
        """A reference to a definition, which will be written."""
        target, resolver = self._target(schema, key, resolver)
        if isinstance(target, bool):
            return target
        known = id(target), is_open
        if known not in self._names:
            name = self._names[known] = str(len(self._names))
            self._waiting.append((name, target, resolver, is_open))
        return {"$ref": f"#/$defs/{self._names[known]}"}

    def _target(self, schema: dict[str, Any], key: str, resolver: Any) -> tuple[Any, Any]:
        """What a reference refers to, and what resolves the references there."""
        from referencing.exceptions import Unresolvable
        from referencing.jsonschema import lookup_recursive_ref

        reference = schema[key]
        if not isinstance(reference, str):
            raise ValueError(f"{key} must be text, got {_shown(reference)}")
        try:
            recursive = key == "$recursiveRef"
            found = lookup_recursive_ref(resolver) if recursive else resolver.lookup(reference)
        except (Unresolvable, ValueError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{key} {reference!r:.200} leads out of the schema: put what it refers to into "
                "$defs, with its $id"
            ) from error
        return found.contents, found.resolver

    def _inside(self, schema: dict[str, Any], resolver: Any) -> Any:
        """What resolves the references within a schema, which may have an identifier of its own."""
        identifier = schema.get("$id", schema.get("id"))
        if schema is self._schema or not isinstance(identifier, str):
            return resolver
        return resolver.in_subresource(self._draft.create_resource(schema))

    def _property_names(self, schema: Any, resolver: Any, seen: set[int]) -> list[str] | None:
        """Names of an object's properties in all of its parts, in their order; None if it may have others."""
        schema, resolver = self._plainer(schema, resolver)
        if isinstance(schema, bool) or not _may_be(schema, "object"):
            return []
        if any(each in schema for each in _OPEN):
            return None
        if id(schema) not in self._property_names_of:
            circles = self._circles
            found = self._names_in_parts(schema, resolver, seen)
            if seen and circles != self._circles:
                # Without the names of a part that is being read.
                return found
            self._property_names_of[id(schema)] = found
        return self._property_names_of[id(schema)]

    def _names_in_parts(self, schema: dict[str, Any], resolver: Any, seen: set[int]) -> list[str] | None:
        """See `_property_names`, of a plain schema."""
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        found = [each for each in properties if properties[each] is not False]
        found += [each for each in _list(schema, "required") if isinstance(each, str)]
        parts = [(each, resolver) for key in ("allOf", *_BRANCHES) for each in _list(schema, key)]
        parts += [self._target(schema, each, resolver) for each in _REFERENCES if each in schema]
        for part, own in parts:
            if id(part) in seen:
                self._circles += 1
                continue
            names = self._property_names(part, own, seen | {id(part)})
            if names is None:
                return None
            found += names
        return [*dict.fromkeys(found)]

    # -- conditions, negations, dependencies ------------------------------------------------------

    def _plainer(self, schema: Any, resolver: Any) -> tuple[Any, Any]:
        """A schema without the keywords that the compiler lacks, and what resolves its references."""
        if isinstance(schema, bool):
            return schema, resolver
        if not isinstance(schema, dict):
            raise ValueError(f"a schema must be an object, true or false, got {_shown(schema)}")
        resolver = self._inside(schema, resolver)
        if id(schema) not in self._plain and schema.keys() <= _UNCHANGED:
            kinds, items = schema.get("type", "object"), schema.get("items")
            if isinstance(kinds, str) and kinds != "any" and not isinstance(items, list):
                self._plain[id(schema)] = schema, schema
        if id(schema) not in self._plain:
            found = {key: _counted(key, schema[key]) for key in schema}
            more = [*self._conditions(found, resolver), *_dependencies(found)]
            more = [each for each in (*more, *self._exclusive(found, resolver)) if each is not True]
            self._set_array(found, resolver)
            unevaluated = found.pop("unevaluatedProperties", None)
            composed = found.keys() & {"allOf", *_BRANCHES, *_REFERENCES}
            if unevaluated is not None and (unevaluated is not False or not (composed or more)):
                found.setdefault("additionalProperties", unevaluated)
            _set_names(found)
            if more:
                found["allOf"] = [*_list(found, "allOf"), *more]
            kinds = found.get("type")
            if kinds == "any" or (
                isinstance(kinds, list) and not all(isinstance(each, str) for each in kinds)
            ):
                # Of draft 3.
                del found["type"]
            only = _list(found, "allOf")
            plain = False if False in more else found
            if len(only) == 1 and found.keys() <= {"allOf", *_NOTES}:
                plain, _ = self._plainer(only[0], resolver) if isinstance(only[0], dict) else (only[0], None)
            self._plain[id(schema)] = schema, plain
            # Plain already.
            self._plain[id(plain)] = plain, plain
        return self._plain[id(schema)][1], resolver

    def _conditions(self, found: dict[str, Any], resolver: Any) -> Iterator[Any]:
        """Takes conditions and negations out of a schema, and yields schemas instead of them."""
        given, then, other = "if" in found, found.pop("then", True), found.pop("else", True)
        condition = found.pop("if", True)
        if self._simple:
            found.pop("not", None)
            return
        if given and (then is not True or other is not True):
            without = self._negated(condition, found, resolver)
            rest = other if without is None else _both(without, other)
            yield {"anyOf": [each for each in (_both(condition, then), rest) if each is not False]}
        if "not" in found and (without := self._negated(found.pop("not"), found, resolver)) is not None:
            yield without

    def _negated(self, schema: Any, base: dict[str, Any], resolver: Any) -> Any:
        """A schema that matches what another does not; None if there is none.

        Args:
          schema: the other schema.
          base: the schema that both are parts of, whose values they select.
          resolver: resolves references.
        """
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict) or self._depth >= DEPTH:
            return None
        self._depth += 1
        try:
            return self._negated_keys(schema, base, resolver)
        finally:
            self._depth -= 1

    def _negated_keys(self, schema: dict[str, Any], base: dict[str, Any], resolver: Any) -> Any:
        """See `_negated`."""
        keys = schema.keys() - _NOTES
        found = []
        for key in sorted(keys):
            value, without = schema[key], None
            match key:
                case "$ref":
                    without = self._negated(self._target(schema, key, resolver)[0], base, resolver)
                case "not":
                    without = value
                case "type":
                    kinds = {*kinds_of(schema)}
                    kinds |= {"integer"} if "number" in kinds else set()
                    kinds |= {"number"} if "integer" in kinds else set()
                    without = {"type": [each for each in KINDS if each not in kinds]}
                    if keys & {"properties", "required"}:
                        # The others of these kinds are negated below.
                        continue
                case "required":
                    names = _list(schema, key)
                    without = {"type": "object", "anyOf": [{"properties": {each: False}} for each in names]}
                case "const" | "enum":
                    values = [value] if key == "const" else value
                    known = self._values(base, resolver)
                    if known is not None:
                        without = {"enum": [each for each in known if not _among(each, values)]}
                case "anyOf":
                    parts = [self._negated(each, base, resolver) for each in _list(schema, key)]
                    without = None if None in parts else {"allOf": parts}
                case "allOf":
                    parts = [self._negated(each, base, resolver) for each in _list(schema, key)]
                    parts = [each for each in parts if each is not None]
                    without = {"anyOf": parts} if parts else None
                case "properties" if isinstance(value, dict):
                    parts = []
                    for name, each in value.items():
                        own = self._property(base, name, resolver)
                        part = self._negated(each, own, resolver)
                        if part is not None:
                            parts.append({"type": "object", "properties": {name: part}, "required": [name]})
                    without = {"anyOf": parts} if parts else None
                case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" if _is_number(value):
                    opposite = "maximum" if "min" in key.lower() else "minimum"
                    opposite = opposite if key[0] == "e" else f"exclusive{opposite.capitalize()}"
                    without = {"type": "number", opposite: value}
                case "minLength" | "minItems" | "minProperties" if isinstance(value, int) and value > 0:
                    kind = {"L": "string", "I": "array", "P": "object"}[key[3]]
                    without = {"type": kind, key.replace("min", "max"): value - 1}
                case _:
                    pass
            if without is not None:
                found.append(without)
        if not keys:
            return False
        return None if not found else found[0] if len(found) == 1 else {"anyOf": found}

    def _property(self, base: Any, name: str, resolver: Any) -> dict[str, Any]:
        """The schema of a property in a base, without its reference."""
        properties = base.get("properties") if isinstance(base, dict) else None
        found = properties.get(name) if isinstance(properties, dict) else None
        return found if isinstance(found, dict) else {}

    def _values(self, schema: dict[str, Any], resolver: Any) -> list[Any] | None:
        """The values of a schema that enumerates them; None for others."""
        for _ in range(DEPTH):
            if "$ref" not in schema:
                break
            schema, resolver = self._target(schema, "$ref", resolver)
            if not isinstance(schema, dict):
                return None
        if isinstance(schema.get("enum"), list):
            return schema["enum"]
        if "const" in schema:
            return [schema["const"]]
        return [True, False] if schema.get("type") == "boolean" else None

    def _exclusive(self, found: dict[str, Any], resolver: Any) -> Iterator[Any]:
        """Excludes overlaps of alternatives of which exactly one must match, where it can be expressed."""
        branches = _list(found, "oneOf")
        if self._simple or not 1 < len(branches) <= _MOST_EXCLUSIVE:
            return
        parts = []
        for own, branch in enumerate(branches):
            others = [each for at, each in enumerate(branches) if at != own]
            without = [self._negated(each, found, resolver) for each in others if not _disjoint(branch, each)]
            parts.append(_both(branch, *(each for each in without if each is not None)))
        given = found.get("anyOf")
        found["anyOf"] = parts
        del found["oneOf"]
        if given is not None:
            yield {"anyOf": given}

    def _set_array(self, found: dict[str, Any], resolver: Any) -> None:
        """Replaces the keywords of arrays that the compiler lacks."""
        first = found.get("prefixItems")
        if isinstance(found.get("items"), list):
            first = found["items"]
            found["prefixItems"], found["items"] = first, found.pop("additionalItems", True)
        first = first if isinstance(first, list) else []
        unevaluated = found.pop("unevaluatedItems", None)
        if unevaluated is not None and not any(
            each in found for each in ("items", *_BRANCHES, "allOf", "$ref")
        ):
            found["items"] = unevaluated
        wanted, needed = found.pop("contains", None), found.pop("minContains", 1)
        most, rest = found.pop("maxContains", None), found.get("items", True)
        if wanted is not None and isinstance(needed, int) and 0 < needed <= 64:
            room = found.get("maxItems", len(first) + needed)
            after = len(first) if rest is not False and room >= len(first) + needed else 0
            places = [*first, *[rest] * (after + needed - len(first))]
            for at in range(after, after + needed):
                places[at] = _both(places[at], wanted)
            found["prefixItems"] = places
            found["minItems"] = max(found.get("minItems", 0), after + needed)
            base = rest if isinstance(rest, dict) else {}
            without = None if most is None else self._negated(wanted, base, resolver)
            if without is not None:
                found["items"] = _both(rest, without)
        if found.pop("uniqueItems", False) is True and isinstance(rest, dict) and not first:
            self._set_unique(found, rest, resolver)

    def _set_unique(self, found: dict[str, Any], items: dict[str, Any], resolver: Any) -> None:
        """Bounds a set by its number of values, and writes few values out as their subsets in order."""
        values = self._values(items, resolver)
        if values is None:
            return
        values = [each for at, each in enumerate(values) if not _among(each, values[:at])]
        least, most = found.get("minItems", 0), min(found.get("maxItems", len(values)), len(values))
        found["maxItems"] = most
        few = len(values) <= _MOST_UNIQUE and not found.keys() & {"allOf", "anyOf"}
        if few and kinds_of(found) == ["array"]:
            constants, sizes = [{"const": each} for each in values], range(max(least, 0), most + 1)
            subsets = [[*each] for size in sizes for each in itertools.combinations(constants, size)]
            form = {"type": "array", "items": False}
            found["anyOf"] = [form | {"prefixItems": each, "minItems": len(each)} for each in subsets]
            del found["items"]


def _dependencies(found: dict[str, Any]) -> Iterator[Any]:
    """Takes dependencies out of a schema, and yields alternatives instead of them."""
    for key in ("dependencies", "dependentRequired", "dependentSchemas"):
        given = found.pop(key, None)
        for name, needed in given.items() if isinstance(given, dict) else ():
            needed = [needed] if isinstance(needed, str) else needed
            then = {"required": needed} if isinstance(needed, list) else needed
            if then in (True, {}) or then == {"required": []}:
                continue
            yield (
                then if name in _list(found, "required") else {"anyOf": [{"properties": {name: False}}, then]}
            )


def _set_names(found: dict[str, Any]) -> None:
    """Replaces the rule of an object's names by their patterns, if it has neither names nor patterns."""
    rule = found.pop("propertyNames", True)
    if rule is False:
        found["maxProperties"] = 0
    if not isinstance(rule, dict) or "properties" in found or "patternProperties" in found:
        return
    value = found.get("additionalProperties", True)
    names = rule.get("enum", [rule["const"]] if "const" in rule else None)
    if isinstance(names, list):
        found["properties"] = {each: value for each in names if isinstance(each, str)}
    elif isinstance(rule.get("pattern"), str):
        found["patternProperties"] = {rule["pattern"]: value}
    elif (
        isinstance(rule.get("minLength", 0), int)
        and isinstance(rule.get("maxLength", 0), int)
        and ("minLength" in rule or "maxLength" in rule)
    ):
        found["patternProperties"] = {
            f'^[^"\\\\]{{{rule.get("minLength", 0)},{rule.get("maxLength", "")}}}$': value
        }
    else:
        return
    found["additionalProperties"] = False


def _counted(key: str, value: Any) -> Any:
    """A keyword's value; counts may be written with a point."""
    whole = (
        isinstance(value, float) and value.is_integer() and key in (*_COUNTS, "minContains", "maxContains")
    )
    return int(value) if whole else value


def _both(*schemas: Any) -> Any:
    """What matches all of some schemas."""
    if False in schemas:
        return False
    some = [each for each in schemas if each is not True and each != {}]
    return True if not some else some[0] if len(some) == 1 else {"allOf": some}


def _disjoint(first: Any, second: Any) -> bool:
    """Whether no value matches two schemas, by their types or the values of a required property."""
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return False
    kinds = {*kinds_of(first)}, {*kinds_of(second)}
    kinds = [each | {"integer", "number"} if each & {"integer", "number"} else each for each in kinds]
    if not kinds[0] & kinds[1]:
        return True
    needed = [each for each in _list(first, "required") if each in _list(second, "required")]
    for name in needed if kinds[0] & kinds[1] == {"object"} else ():
        values = [_own_values(each, name) for each in (first, second)]
        if None not in values and not any(_among(each, values[1] or []) for each in values[0] or []):
            return True
    return False


def _own_values(schema: dict[str, Any], name: str) -> list[Any] | None:
    """The values of a property that a schema enumerates; None for others."""
    properties = schema.get("properties")
    own = properties.get(name) if isinstance(properties, dict) else None
    if not isinstance(own, dict):
        return None
    return own["enum"] if isinstance(own.get("enum"), list) else [own["const"]] if "const" in own else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _may_be(schema: Mapping[str, Any], kind: str) -> bool:
    return kind in kinds_of(schema)


def _among(value: Any, values: Sequence[Any]) -> bool:
    """Whether JSON has a value among others: true is not 1, but 1.0 is."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)


def _list(value: Mapping[str, Any], key: str) -> list[Any]:
    """A list in a schema; empty for other values."""
    found = value.get(key)
    return found if isinstance(found, list) else []


def _shown(value: Any) -> str:
    return f"{json.dumps(value):.80}"


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    """All objects within a value, and itself."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
