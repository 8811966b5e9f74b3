"""The house as docs/architecture.md states it, and as its folders and imports are."""

import ast
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.docs.pages import ROOT, text_of

PAGE = "docs/architecture.md"
FRONT_DOOR = "jaxllm"
_BLOCK = re.compile(r"<!-- house: (?P<name>\w+) -->\n```text\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
_ROOM = re.compile(r"(?P<indent> *)(?P<name>\w+)(?P<folder>/?) +(?P<line>\S.*)")
_PACKAGE = re.compile(r"(?P<name>\w+)/ +(?P<line>\S.*?) \[(?P<imports>[\w ]*)\]")
# Where a package lies that is not a folder of its own name at the top.
_FOLDERS = {"cli": "jaxllm/cli"}
# Packages that are imported under the name of the first.
_FLOORS = ("serving", "training", "export", "cli")


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


def folder_of(package: str) -> Path:
    """Where a package lies."""
    return ROOT / _FOLDERS.get(package, package)


def sources_of(package: str) -> list[Path]:
    """A package's modules: of the core without the other floors, which it links to or holds."""
    others = {folder_of(floor) for floor in _FLOORS} if package == "jaxllm" else set()
    return [path for path in sorted(folder_of(package).rglob("*.py")) if not others & {*path.parents}]


def real_rooms(package: str) -> set[Room]:
    """Folders that hold files, and modules of the package itself."""
    top = folder_of(package)
    floors = {*_FLOORS} if package == "jaxllm" else set()
    modules = {
        Room(path.stem, False) for path in top.glob("*.py") if path.stem not in ("__init__", "__main__")
    }
    folders = {
        Room(path.relative_to(top).as_posix(), True)
        for path in top.rglob("*")
        if path.is_dir() and path.name != "__pycache__" and any(each.is_file() for each in path.iterdir())
    }
    return modules | {room for room in folders if room.name.partition("/")[0] not in floors}


def module_name(file: Path) -> str:
    """The dotted name that a file of the house is imported by."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    dotted = ".".join(("jaxllm", *parts) if parts[0] in _FLOORS else parts)
    return dotted.removesuffix(".__init__")


def module_files() -> dict[str, Path]:
    """Dotted module -> its file, of all packages."""
    return {module_name(path): path for package in stated_packages() for path in sources_of(package)}


def package_of(module: str) -> str:
    """The package of a dotted module."""
    first, _, rest = module.partition(".")
    second = rest.partition(".")[0]
    return second if first == "jaxllm" and second in _FLOORS else first


def room_of(module: str) -> str:
    """The room of a dotted module in its package; empty for the package itself."""
    depth = 2 if package_of(module) in _FLOORS else 1
    return [*module.split("."), "", ""][depth]


def import_graph(files: dict[str, Path]) -> dict[str, set[str]]:
    """Module -> the modules of the house that it imports, wherever in it the statement stands, for type
    checkers too; without the front door, which names all that is public."""
    return {
        module: set(imports(path.read_text(encoding="utf-8"), module, path.name == "__init__.py", files))
        for module, path in files.items()
        if module != FRONT_DOOR
    }


def imports(source: str, module: str, package: bool, known: Iterable[str]) -> Iterator[str]:
    """The known modules that a source imports."""
    known = set(known)
    above = module.split(".") if package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
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
