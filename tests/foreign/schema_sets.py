"""Sets of other people's JSON schemas, from source distributions of the package index.

- functions: parameters of the functions of the Berkeley Function Calling Leaderboard.
- kubernetes: the objects of Kubernetes, with the definitions that they refer to.
- schemastore: what its package has cached of schemastore.org.
- suite-2020-12, suite-7: the JSON Schema Test Suite.
"""

import json
import pickletools
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.foreign.sources import BFCL, JSONSCHEMA, KUBERNETES, SCHEMASTORE, fetch

_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}
SOURCES = "sources"
_DEFINED = "/api/_definitions.json#/$defs/"
_WORDS = ("$schema", "properties", "$ref", "type", "allOf", "anyOf")


def fetch_sets(folder: Path) -> None:
    """Fetches the sets that a folder does not have yet, each into a folder of its own."""
    for drafts, name in (("2020-12", "suite-2020-12"), ("7", "suite-7")):
        _fetched(JSONSCHEMA, rf"json/tests/draft{drafts}/(.*\.json)", folder / name)
    for name, (source, members, schemas) in _SETS.items():
        if (to := folder / name).exists():
            continue
        sources = folder / SOURCES / name
        _fetched(source, members, sources)
        to.mkdir()
        for each, schema in schemas(sources):
            file = re.sub(r"[^\w.-]", "_", each)
            (to / f"{file}.json").write_text(json.dumps(schema))


def _fetched(source: str, members: str, folder: Path) -> None:
    if not folder.exists():
        fetch(source, folder, members)


def _functions(folder: Path) -> Iterator[tuple[str, Any]]:
    for path in sorted(folder.iterdir()):
        for line in path.read_text(encoding="utf-8").splitlines():
            asked = json.loads(line)
            for at, function in enumerate(asked["function"]):
                yield f"{asked['id']}-{at}", _typed(function["parameters"])


def _typed(schema: Any) -> Any:
    """With JSON Schema's names of types."""
    if isinstance(schema, list):
        return [_typed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _typed(value) for name, value in schema.items()}
    if isinstance(kind := found.get("type"), str):
        found["type"] = _TYPES.get(kind, kind)
    return {name: value for name, value in found.items() if (name, value) != ("type", None)}


def _kubernetes(folder: Path) -> Iterator[tuple[str, Any]]:
    defined = json.loads((folder / "_definitions.json").read_bytes())["$defs"]
    for path in sorted(folder.glob("[!_]*.json")):
        text = path.read_text(encoding="utf-8")
        needed, asked = dict[str, Any](), [text]
        while asked:
            for name in re.findall(rf'{re.escape(_DEFINED)}([^"]*)|"#/\$defs/([^"]*)', asked.pop()):
                name = "".join(name)
                if name not in needed:
                    needed[name] = defined[name]
                    asked.append(json.dumps(defined[name]))
        whole = json.dumps({**json.loads(text), "$defs": needed})
        yield path.stem, json.loads(whole.replace(_DEFINED, "#/$defs/"))


def _schemastore(folder: Path) -> Iterator[tuple[str, Any]]:
    with sqlite3.connect(folder / "cache.sqlite") as cache:
        for key, value in cache.execute("select key, value from responses order by key"):
            # Read without being run: the bytes after the name of a response's content.
            operations = [argument for _, argument, _ in pickletools.genops(value)]
            content = next(each for each in operations if isinstance(each, bytes))
            try:
                schema = json.loads(content)
            except ValueError:
                continue
            if isinstance(schema, dict) and any(each in schema for each in _WORDS):
                yield key, schema


_SETS = {
    "functions": (BFCL, r"bfcl_eval/data/(BFCL_v4_(?:simple_python|multiple)\.json)", _functions),
    "kubernetes": (KUBERNETES, r".*/v1\.37\.0-local/(.*\.json)", _kubernetes),
    "schemastore": (SCHEMASTORE, r"schemastore/(cache\.sqlite)", _schemastore),
}
