"""Reads request bodies: bounded in bytes, time and depth, and every field known, refused or wrong by name.

A field that is null counts as absent, as OpenAI's clients send it.
"""

import asyncio
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from serving.server.api.errors import ApiError
from serving.server.api.options import ApiOptions

Body = TypeVar("Body", bound=msgspec.Struct)
# Known fields that are not supported -> their neutral values, which change nothing and are accepted.
Neutral = Mapping[str, tuple[Any, ...]]
_PATH = re.compile(r" - at `\$\.?(.*)`$")


async def read_raw(request: Request, options: ApiOptions, most: int = 0) -> bytes:
    """The bytes of a request's body, at most `most`, or what the options say.

    Raises:
      ApiError: there are too many (413), or they take too long (408).
    """
    most = most or options.body_bytes
    too_long = ApiError(f"the body has more than {most} bytes; send less", status=413)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 18 or int(length) > most):
        raise too_long
    raw = bytearray()
    try:
        async with asyncio.timeout(options.body_s):
            async for part in request.stream():
                raw += part
                if len(raw) > most:
                    raise too_long
    except TimeoutError:
        message = f"the body did not arrive within {options.body_s:g} s; send it faster"
        raise ApiError(message, status=408) from None
    return bytes(raw)


def read_body(raw: bytes, kind: type[Body], options: ApiOptions, neutral: Neutral | None = None) -> Body:
    """A body as a struct.

    Args:
      raw: JSON.
      kind: the struct, whose fields are those that are supported.
      options: limits.
      neutral: fields that are known and not supported.

    Raises:
      ApiError: the body is not JSON, or a field is unknown, unsupported or of a wrong type.
    """
    values = _object(raw, options)
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    taken = {}
    for name, value in values.items():
        if value is None:
            continue
        if name in known:
            taken[name] = value
        elif neutral is None or name not in neutral:
            message = f"the field {name!r:.80} is not known; the guide lists the fields that are"
            raise ApiError(message, code="unknown_field", param=name[:80])
        elif not any(value == each and type(value) is type(each) for each in neutral[name]):
            raise ApiError(
                f"the field {name!r} is not supported{_allowed(neutral[name])}; leave it out",
                code="unsupported_field",
                param=name,
            )
    return convert(taken, kind)


def convert(value: Any, kind: type[Body], at: str = "") -> Body:
    """Plain JSON values as a struct; `at` is the path of the values in the body.

    Raises:
      ApiError: a field is unknown, missing or of a wrong type.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _PATH.search(text)
        inner = found[1] if found else ""
        param = ".".join(part for part in (at, inner) if part)
        plain = text[: found.start()] if found else text
        raise ApiError(
            f"{plain[:300]}{f' at {param}' if param else ''}".replace("`", "'"),
            code="invalid_type",
            param=param[:80],
        ) from None
    except (RecursionError, OverflowError):
        raise ApiError("a value is nested too deep or too large", param=at) from None


def _object(raw: bytes, options: ApiOptions) -> dict[str, Any]:
    try:
        values = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ApiError(f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from None
    except RecursionError:
        values = None
        too_deep = True
    else:
        too_deep = _depth_exceeds(values, options.body_depth)
    if too_deep:
        message = f"the body nests lists and objects more than {options.body_depth} deep"
        raise ApiError(message, code="invalid_json")
    if not isinstance(values, dict):
        raise ApiError(f"the body must be a JSON object, got {type(values).__name__}", code="invalid_json")
    return values


def _depth_exceeds(value: Any, most: int) -> bool:
    layer = [value]
    for _ in range(most + 1):
        layer = [each for each in layer if isinstance(each, dict | list)]
        if not layer:
            return False
        layer = [each for outer in layer for each in (outer.values() if isinstance(outer, dict) else outer)]
    return True


def _allowed(values: tuple[Any, ...]) -> str:
    texts = [msgspec.json.encode(each).decode() for each in values]
    return f" but for {' or '.join(texts)}" if texts else ""
