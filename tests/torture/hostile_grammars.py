"""Makes grammars that are meant to cost: chains, diamonds, long alternations, repetitions and ambiguity;
whole, and mutated."""

import json
import random
from typing import Any

from jaxllm.serving.guided.grammar import MAX_GRAMMAR_BYTES

_LETTERS = ("a", "b", "é", "[a-z]", "[^a]", ".", "\\d", "\\w", "(?i:k)", "\\p{L}", "x{3}", "")
_SCALARS: tuple[Any, ...] = (
    {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}, {},
    {"enum": [1, "b", None]}, {"const": {"a": [1]}}, {"type": "string", "format": "date-time"}, True,
    {"type": "object"}, {"type": "array"}, {"type": "number", "multipleOf": 0.01},
    {"type": "integer", "minimum": -(10**18)},
)  # fmt: skip


def hostile(draw: random.Random) -> tuple[str, str]:
    """A grammar: its kind, and its text, which is not too long."""
    while True:
        kind = draw.choice(("regex", "json_schema", "lark"))
        if kind == "json_schema":
            # A copy, of which no part stands in two places.
            value = json.loads(json.dumps(schema(draw)))
            for _ in range(draw.choice((0, 0, 1, 3))):
                value = _edited(draw, value)
            text = json.dumps(value)
        else:
            text = regex(draw) if kind == "regex" else lark(draw)
        for _ in range(draw.choice((0, 0, 0, 1, 2))):
            text = _mutated(draw, text)
        if len(text.encode()) <= MAX_GRAMMAR_BYTES:
            return kind, text


def regex(draw: random.Random, most: int = 40_000) -> str:
    """An expression."""
    part, count = _part(draw, draw.randrange(1, 4)), _size(draw, most // 4)
    match draw.randrange(7):
        case 0:
            return f"{part}?" * count + part * count
        case 1:
            return "|".join(f"{part}{number}" for number in range(count // 2))
        case 2:
            depth = min(count, 2000)
            return "(" * depth + part + ")" * depth
        case 3:
            return "".join(f"({part}{{{_size(draw, 9999)}}})" for _ in range(min(count, 20)))
        case 4:
            nested = part
            for _ in range(draw.randrange(1, 7)):
                nested = f"(?:{nested}){{0,{_size(draw, 3000)}}}"
            return nested
        case 5:
            return f"(?:{part}|{part}{part})*{part}{{{count}}}(?:{part}|b)*"
        case _:
            return "".join(f"({part}|{_part(draw, 1)})*" for _ in range(min(count, 3000)))


def schema(draw: random.Random, most: int = 1200) -> Any:
    """A schema, as JSON values."""
    count = _size(draw, most)
    match draw.randrange(8):
        case 0 | 1:
            # Definitions that name the next one, once or twice.
            step = draw.choice((_chained, _twice))
            defs = {str(each): step(draw, f"#/$defs/{each + 1}") for each in range(count)}
            return {"$ref": "#/$defs/0", "$defs": {**defs, str(count): draw.choice(_SCALARS)}}
        case 2:
            defs = {
                str(each): _chained(draw, f"#/$defs/{draw.randrange(count + 1)}") for each in range(count + 1)
            }
            return {"anyOf": [{"$ref": f"#/$defs/{each}"} for each in range(count + 1)], "$defs": defs}
        case 3:
            inner: Any = draw.choice(_SCALARS)
            for _ in range(min(count, 400)):
                inner = draw.choice(({"items": inner, "type": "array"}, {"anyOf": [inner, {"type": "null"}]}))
            return inner
        case 4:
            names = {f"p{each}": draw.choice(_SCALARS) for each in range(count)}
            return {"type": "object", "properties": names, "required": draw.choice(([], [*names]))}
        case 5:
            return {"enum": [f"{draw.randrange(10**9)}{'x' * 20}" for _ in range(count)]}
        case 6:
            pattern = regex(draw, 4000)
            return {"type": "array", "items": {"type": "string", "pattern": pattern, "maxLength": count}}
        case _:
            sizes = {"minItems": count * draw.choice((1, 1000)), "maxItems": count * 2000}
            string = {"type": "string", "minLength": count * 100, "maxLength": count * 1000}
            return {"type": "array", "items": draw.choice((string, *_SCALARS)), **sizes}


def lark(draw: random.Random) -> str:
    """A Lark grammar."""
    count = _size(draw, 3500)
    match draw.randrange(8):
        case 0:
            return _rules(f"r{each + 1}" for each in range(count))
        case 1:
            return _rules(f"r{each + 1} r{each + 1}" for each in range(min(count, 400)))
        case 2:
            return _rules(f"r{each + 1} | r{min(each + 2, count)}" for each in range(count))
        case 3:
            return "start: " + " | ".join(f'"{each}{"y" * 9}"' for each in range(count)) + "\n"
        case 4:
            return _rules(f"(r{each + 1}){{{_size(draw, 3000)}}}" for each in range(draw.randrange(1, 6)))
        case 5:
            return f'start: s\ns: s s | s "a" | "a" s | {" | ".join(["s s s"] * min(count, 300))} | "a"\n'
        case 6:
            return f"start: (%json {json.dumps(schema(draw, 600))} | T)+\nT: /{_plain(regex(draw, 9000))}/\n"
        case _:
            terminals = "".join(f"T{each}: T{each + 1} | /{_part(draw, 1)}x/\n" for each in range(count))
            return f'start: T0+\n{terminals}T{count}: "z"\n'


def _rules(bodies: Any) -> str:
    found = [f"r{number}: {body}\n" for number, body in enumerate(bodies)]
    return "start: r0\n" + "".join(found) + f'r{len(found)}: "a"\n'


def _chained(draw: random.Random, reference: str) -> Any:
    following = {"$ref": reference}
    return draw.choice(
        (
            following,
            {"properties": {"a": following}},
            {"items": following},
            {"anyOf": [following, {"type": "null"}]},
            {"allOf": [following]},
            {"additionalProperties": following},
        )
    )


def _twice(draw: random.Random, reference: str) -> Any:
    following = {"$ref": reference}
    return draw.choice(
        (
            {"properties": {"a": following, "b": following}, "required": ["a", "b"]},
            {"anyOf": [{"items": following}, {"prefixItems": [following]}]},
            {"allOf": [following, following]},
            {"oneOf": [following, {"items": following}]},
        )
    )


def _part(draw: random.Random, depth: int) -> str:
    if depth == 0:
        return draw.choice(_LETTERS)
    inner = _part(draw, depth - 1)
    return draw.choice(
        (inner, f"({inner}|{_part(draw, depth - 1)})", f"({inner})*", f"({inner}){{2,9}}", f"{inner}b")
    )


def _plain(expression: str) -> str:
    return expression.replace("/", "")


def _size(draw: random.Random, most: int) -> int:
    """A size from 1 to `most`, small ones more often."""
    return max(1, int(most ** draw.random() ** 1.5))


def _mutated(draw: random.Random, text: str) -> str:
    at, other = draw.randrange(len(text) + 1), draw.randrange(len(text) + 1)
    low, high = sorted((at, min(other, at + 200)))
    if draw.random() < 0.5:
        return text[:low] + text[low:high] * draw.randrange(0, 9) + text[high:]
    return text[:at] + draw.choice([*'(){}[]|"/\\:%*+?&~\0\n', "{0,9999}", "$ref", "r0 "]) + text[at:]


def _edited(draw: random.Random, value: Any) -> Any:
    """A schema of which one part is another's, or another."""
    whole = value
    while isinstance(value, dict | list) and value:
        key = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
        inside = value[key]
        if draw.random() < 0.3 or not isinstance(inside, dict | list):
            other = draw.choice((schema(draw, 60), {"$ref": "#"}, *_SCALARS, 10**30, [], "x"))
            value[key] = json.loads(json.dumps(other))
            break
        value = inside
    return whole
