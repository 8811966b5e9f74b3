"""The architecture page is what the folders and the imports are."""

from collections import Counter

import pytest

from tests.docs.house import (
    Room,
    circles,
    import_graph,
    import_order,
    imports,
    module_files,
    package_of,
    real_rooms,
    room_of,
    stated_packages,
    stated_rooms,
)

FILES = module_files()
GRAPH = import_graph(FILES)
PACKAGES = stated_packages()


def upward(package: str) -> Counter[tuple[str, str]]:
    """Imports of a package's modules from rooms that stand above their own."""
    order = import_order(package)
    found: Counter[tuple[str, str]] = Counter()
    for module, imported in GRAPH.items():
        here = room_of(module)
        if package_of(module) != package or here not in order:
            continue
        rooms = {room_of(each) for each in imported if package_of(each) == package} & set(order)
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
    assert upward(package) == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_between_packages_are_as_stated(package: str) -> None:
    imported = {
        package_of(each)
        for module, modules in GRAPH.items()
        if package_of(module) == package
        for each in modules
    }
    assert imported - {package} <= set(PACKAGES[package])


def test_no_module_imports_itself_by_a_circle() -> None:
    assert circles(GRAPH) == []


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"e"}, "f": {"a"}}
    assert circles(graph) == [["a", "b", "c"], ["e"]]


@pytest.mark.parametrize(
    ("source", "imported"),
    [
        ("import jaxllm.serving.engine", ["jaxllm.serving.engine"]),
        ("def f():\n    from jaxllm.serving import engine", ["jaxllm.serving.engine"]),
        ("from .engine import Engine", ["jaxllm.serving.engine"]),
        ("if TYPE_CHECKING:\n    import jaxllm.serving.engine", ["jaxllm.serving.engine"]),
        ("import os, numpy", []),
    ],
)
def test_imports_are_read(source: str, imported: list[str]) -> None:
    known = ["jaxllm.serving", "jaxllm.serving.engine"]
    assert [*imports(source, "jaxllm.serving.service", False, known)] == imported


def test_modules_are_in_their_packages() -> None:
    assert (package_of("jaxllm.serving.engine"), room_of("jaxllm.serving.engine.run")) == (
        "serving",
        "engine",
    )
    assert (package_of("jaxllm.kv.cache"), room_of("jaxllm.kv.cache")) == ("jaxllm", "kv")
    assert (package_of("jaxllm.cli.main"), room_of("jaxllm.cli")) == ("cli", "")
    assert Room("models/encoder", True) in stated_rooms("jaxllm")
