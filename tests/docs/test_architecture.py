"""The architecture page is what the folders and the imports are."""

from collections import Counter

import pytest

from tests.docs.house import (
    Room,
    circles,
    import_graph,
    import_order,
    module_files,
    real_rooms,
    room_of,
    run_time_imports,
    stated_packages,
    stated_rooms,
)

FILES = module_files()
GRAPH = import_graph(FILES)
PACKAGES = stated_packages()

# Imports between rooms that go up: (room, room above) -> modules that do so. They become fewer, never more.
UPWARD: dict[str, dict[tuple[str, str], int]] = {}
# Modules that import each other by a circle.
CIRCLES: list[list[str]] = []


def upward(package: str) -> Counter[tuple[str, str]]:
    """Imports of a package's modules from rooms that stand above their own."""
    order = import_order(package)
    found: Counter[tuple[str, str]] = Counter()
    for module, imported in GRAPH.items():
        here = room_of(module)
        if module.split(".")[0] != package or here not in order:
            continue
        rooms = {room_of(each) for each in imported if each.split(".")[0] == package} & set(order)
        found.update((here, there) for there in rooms if order.index(there) > order.index(here))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_is_on_the_page(package: str) -> None:
    stated = stated_rooms(package)
    assert len(set(stated)) == len(stated)
    assert real_rooms(package) - set(stated) == set(), "the page lacks these"
    assert set(stated) - real_rooms(package) == set(), "these are on the page alone"


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_between_rooms_go_down(package: str) -> None:
    allowed = UPWARD.get(package, {})
    assert {rooms: count for rooms, count in upward(package).items() if count > allowed.get(rooms, 0)} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_between_packages_are_as_stated(package: str) -> None:
    imported = {
        each.split(".")[0]
        for module, modules in GRAPH.items()
        if module.split(".")[0] == package
        for each in modules
    }
    assert imported - {package} <= set(PACKAGES[package])


def test_no_module_imports_itself_by_a_circle() -> None:
    assert [group for group in circles(GRAPH) if group not in CIRCLES] == []


def test_exceptions_are_needed() -> None:
    """What is mended leaves the lists."""
    assert {package: dict(upward(package)) for package in PACKAGES if upward(package)} == UPWARD
    assert [group for group in CIRCLES if group not in circles(GRAPH)] == []


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"e"}, "f": {"a"}}
    assert circles(graph) == [["a", "b", "c"], ["e"]]


@pytest.mark.parametrize(
    ("source", "imported"),
    [
        ("import serving.engine", ["serving.engine"]),
        ("def f():\n    from serving import engine", ["serving.engine"]),
        ("from .engine import Engine", ["serving.engine"]),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import serving.engine", []),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    import serving.engine", ["serving.engine"]),
        ("import os, numpy", []),
    ],
)
def test_imports_at_run_time_are_read(source: str, imported: list[str]) -> None:
    assert list(run_time_imports(source, "serving.service", False, ["serving", "serving.engine"])) == imported


def test_options_of_rooms_stand_together() -> None:
    assert room_of("serving.contexts.options") == room_of("serving.options") == "options"
    assert room_of("serving") == ""
    assert Room("models/encoder", True) in stated_rooms("jaxllm")
