"""Finds the modules that a device needs, in a process in which JAX cannot be imported.

python -m jaxllm.export.loop_modules -> {path in an archive: path of the source}, as JSON
"""

import ast
import importlib
import importlib.abc
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ABSENT = ("jax", "jaxlib", "flax", "optax", "orbax", "chex")
# Modules to begin with; the last one runs in a separate process.
ENTRIES = ("jaxllm.cli.device.__main__", "jaxllm.text.child_process")


class NotOnDevice(ImportError):
    """A device does not have the package."""


class Absent(importlib.abc.MetaPathFinder):
    """Blocks the packages that a device does not have."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raises NotOnDevice for those packages; else others may find the module."""
        del path, target
        if name.partition(".")[0] in ABSENT:
            raise NotOnDevice(f"{name} is not on a device")


def main() -> None:
    """Prints the modules."""
    sys.meta_path.insert(0, Absent())
    for name in ENTRIES:
        importlib.import_module(name)
    seen, waiting, found = set[str](ENTRIES), list[str](ENTRIES), dict[str, str]()
    while waiting:
        name = waiting.pop()
        if (path := path_of(name)) is None:
            continue
        inside = Path(*name.split("."))
        found[str(inside / path.name if path.stem == "__init__" else inside.with_suffix(".py"))] = str(path)
        parents = {name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)}
        new = {*parents, *imported(ast.parse(path.read_text(encoding="utf-8")))} - seen
        seen |= new
        waiting += new
    json.dump(found, sys.stdout)


def path_of(name: str) -> Path | None:
    """Returns the source of a module; None if there is no such module, or a device cannot import it."""
    try:
        importlib.import_module(name)
    except NotOnDevice:
        return None
    except ImportError:
        # It may import a package that is missing here, and that a device may have.
        pass
    try:
        spec = importlib.util.find_spec(name)
    except ImportError:
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def imported(node: ast.AST) -> Iterator[str]:
    """Yields the modules of this package that code imports at run time, at any place in it."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.Import):
            yield from (alias.name for alias in each.names if alias.name.startswith("jaxllm"))
        elif isinstance(each, ast.ImportFrom) and (each.module or "").startswith("jaxllm"):
            yield str(each.module)
            # A name may be a module of the package; other names are not found, and left out.
            yield from (f"{each.module}.{alias.name}" for alias in each.names)
        elif not (isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING"):
            yield from imported(each)


if __name__ == "__main__":
    main()
