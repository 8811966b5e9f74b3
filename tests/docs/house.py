"""The house as docs/architecture.md states it, and as its folders and imports are."""

import ast
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.docs.pages import ROOT, text_of

PAGE = "docs/architecture.md"
_BLOCK = re.compile(r"<!-- house: (?P<name>\w+) -->\n```text\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
_ROOM = re.compile(r"(?P<indent> *)(?P<name>\w+)(?P<folder>/?) +(?P<line>\S.*)")
_PACKAGE = re.compile(r"(?P<name>\w+)/ +(?P<line>\S.*?) \[(?P<imports>[\w ]*)\]")
_OPTIONS = "options"


@dataclasses.dataclass(frozen=True)
class Room:
    """A line of the page.

    Attributes:
      name: of the room, or of a folder inside of one: "models/encoder".
      folder: whether it is a folder, else a module.
    """

    name: str
    folder: bool


def stated_blocks() -> dict[str, str]:
    """Name -> lines of each of the page's lists."""
    return {block["name"]: block["body"] for block in _BLOCK.finditer(text_of(PAGE))}


def stated_packages() -> dict[str, tuple[str, ...]]:
    """Package -> those that it may import."""
    lines = stated_blocks()["packages"].splitlines()
    return {match["name"]: tuple(match["imports"].split()) for match in map(_read(_PACKAGE), lines)}


def stated_rooms(package: str) -> list[Room]:
    """Rooms in the order of their imports, with the folders inside of each behind it."""
    rooms: list[Room] = []
    above: list[str] = []
    for match in map(_read(_ROOM), stated_blocks()[package].splitlines()):
        above = [*above[: len(match["indent"]) // 2], match["name"]]
        rooms.append(Room("/".join(above), bool(match["folder"])))
    return rooms


def import_order(package: str) -> list[str]:
    """The names of a package's rooms from the ground up."""
    return [room.name for room in stated_rooms(package) if "/" not in room.name]


def _read(pattern: re.Pattern[str]) -> Callable[[str], re.Match[str]]:
    def read(line: str) -> re.Match[str]:
        match = pattern.fullmatch(line)
        assert match, f"{PAGE}: cannot read the line {line!r}"
        return match

    return read


def real_rooms(package: str) -> set[Room]:
    """Folders that hold files, and modules of the package itself."""
    top = ROOT / package
    modules = {Room(path.stem, False) for path in top.glob("*.py") if path.stem != "__init__"}
    folders = {
        Room(path.relative_to(top).as_posix(), True)
        for path in top.rglob("*")
        if path.is_dir() and path.name != "__pycache__" and any(each.is_file() for each in path.iterdir())
    }
    return modules | folders


def module_files() -> dict[str, Path]:
    """Dotted module -> its file, of all packages."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in stated_packages()
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def room_of(module: str) -> str:
    """The room of a dotted module in its package; empty for the package itself."""
    parts = module.split(".")
    if parts[0] == "serving" and parts[-1] == _OPTIONS:
        return _OPTIONS
    return [*parts, ""][1]


def import_graph(files: dict[str, Path]) -> dict[str, set[str]]:
    """Module -> the modules of the house that it imports at run time, wherever in it the statement stands."""
    return {
        module: set(
            run_time_imports(path.read_text(encoding="utf-8"), module, path.name == "__init__.py", files)
        )
        for module, path in files.items()
    }


def run_time_imports(source: str, module: str, package: bool, known: Iterable[str]) -> Iterator[str]:
    """The known modules that a source imports, but for those that only type checkers see."""
    known = set(known)
    above = module.split(".") if package else module.split(".")[:-1]
    for node in _run_time_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in known)
            continue
        base = (
            ".".join([*above[: len(above) - node.level + 1], *filter(None, [node.module])])
            if node.level
            else node.module
        )
        for name in node.names:
            dotted = f"{base}.{name.name}"
            if dotted in known or base in known:
                yield dotted if dotted in known else str(base)


def _run_time_nodes(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for each in node.orelse:
                yield from _run_time_nodes(ast.Module([each], []))
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        yield from _run_time_nodes(node)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or by way of others (Tarjan 1972)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        path.append(module)
        for other in sorted(graph.get(module, ())):
            if other not in number:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in path:
                lowest[module] = min(lowest[module], number[other])
        if lowest[module] == number[module]:
            at = path.index(module)
            group = path[at:]
            del path[at:]
            if len(group) > 1 or module in graph.get(module, ()):
                found.append(sorted(group))

    for module in sorted(graph):
        if module not in number:
            visit(module)
    return found
