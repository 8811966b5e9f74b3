"""Describes the API: an OpenAPI document of all routes, the page that shows it, and hints for unknown paths.

The schemas are those of the structs that bodies are read into, so that the document cannot differ from what
is accepted.
"""

import difflib
import functools
import html
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxllm.serving.server.pages import DOCS, DOCUMENT, PAGE_HEADERS
from jaxllm.version import __version__

# Routes' methods, paths, functions, whose docstrings describe them, and types of bodies; None for any.
Operations = Iterable[tuple[str, str, Callable[..., Any], type[msgspec.Struct] | None]]

_OPEN = ("/health", "/ready")
_REFERENCE = "#/components/schemas/{name}"
_MOST_PATH = 200


def document(operations: Operations) -> dict[str, Any]:
    """The OpenAPI document (3.1) of routes."""
    bodies = list(dict.fromkeys(kind for *_, kind in operations if kind is not None))
    schemas, components = msgspec.json.schema_components(bodies, ref_template=_REFERENCE)
    of_bodies = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, path, handler, kind in operations:
        operation: dict[str, Any] = {
            "operationId": method.lower() + re.sub(r"[^a-z0-9]+", "_", path).rstrip("_"),
            "summary": (handler.__doc__ or "").strip().partition("\n")[0],
            "responses": {
                "200": {"description": "success", "content": {"application/json": {"schema": {}}}},
                "default": {"description": "an error, in the form of the path's format"},
            },
        }
        names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        if names:
            operation["parameters"] = [
                {"name": each, "in": "path", "required": True, "schema": {"type": "string"}} for each in names
            ]
        if method == "POST":
            schema = {"type": "object"} if kind is None else of_bodies[kind]
            operation["requestBody"] = {
                "required": kind is not None, "content": {"application/json": {"schema": schema}}
            }  # fmt: skip
        if path in _OPEN:
            operation["security"] = []
        paths.setdefault(path, {})[method.lower()] = operation
    # Keys are required if the service has any.
    security = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0", "info": {"title": "jaxllm", "version": __version__}, "paths": paths,
        "components": {"schemas": components, "securitySchemes": security}, "security": [{}, {"key": []}],
    }  # fmt: skip


def page(found: Mapping[str, Any]) -> str:
    """The document as a page of HTML, without scripts."""
    parts = []
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
            title = f"<code>{method.upper()} {html.escape(path)}</code> {html.escape(operation['summary'])}"
            fields = _fields(found["components"]["schemas"].get(name, {}))
            parts.append(f"<details><summary>{title}</summary>{fields}</details>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>jaxllm: API</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<link rel="stylesheet" href="/dashboard/style.css"></head><body><h1>jaxllm: API</h1>'
        f'<p>Version {__version__}. The same as <a href="{DOCUMENT}">an OpenAPI document</a>; '
        'the <a href="/">dashboard</a>. OpenAI\'s clients have a base URL that ends in <code>/v1</code>, '
        "Anthropic's and Ollama's one without a path.</p>" + "".join(parts) + "</body></html>\n"
    )


def _fields(schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        f"<dt>{html.escape(name)}{' (required)' * (name in required)}</dt>"
        f"<dd>{html.escape(_type_of(each))}</dd>"
        for name, each in schema.get("properties", {}).items()
    ]
    return f"<dl>{''.join(rows)}</dl>" if rows else "<p>No fields.</p>"


def _type_of(schema: Mapping[str, Any]) -> str:
    """A field's type, for people."""
    if "anyOf" in schema:
        return " or ".join(_type_of(each) for each in schema["anyOf"] if each.get("type") != "null")
    if "enum" in schema:
        return ", ".join(json.dumps(each) for each in schema["enum"])
    limits = [
        f"{word} {schema[name]}" for name, word in (("minimum", "from"), ("maximum", "to")) if name in schema
    ]
    kind = str(schema.get("type", schema.get("$ref", "any").rpartition("/")[2]))
    inner = _type_of(schema["items"]) if isinstance(schema.get("items"), Mapping) else "any"
    return " ".join([f"list of {inner}" if kind == "array" else kind, *limits])


def docs_routes(operations: Operations) -> list[Route]:
    """The routes of the document and its page."""
    made = functools.cache(lambda: document(operations))

    async def read(request: Request) -> Response:
        if request.url.path == DOCUMENT:
            return Response(msgspec.json.encode(made()), media_type="application/json", headers=PAGE_HEADERS)
        return Response(page(made()), media_type="text/html", headers=PAGE_HEADERS)

    return [Route(path, read, methods=["GET"]) for path in (DOCUMENT, DOCS)]


def hint(path: str, known: Iterable[str]) -> str:
    """What a client probably meant by an unknown path."""
    paths = {each for each in known if "{" not in each}
    parts = [part for part in path[:_MOST_PATH].split("/") if part]
    # With or without the beginnings that belong to base URLs: /v1/v1/models, /openai/v1/models, //v1/models.
    tries = [parts[first:] for first in range(min(3, len(parts)))]
    for each in [*tries, *(["v1", *each] for each in tries)]:
        if (meant := "/" + "/".join(each)) in paths:
            base = " (the base URL of OpenAI's clients ends in /v1)" if meant == f"/v1{path}" else ""
            return f"there is {meant}{base}"
    if parts in (["v1"], ["api"]):
        return f"/{parts[0]} is the beginning of paths; {DOCS} lists them"
    if close := difflib.get_close_matches("/" + "/".join(parts), sorted(paths), n=1, cutoff=0.8):
        return f"there is {close[0]}"
    return f"{DOCS} lists the paths that there are"
