"""The architecture page is what the folders and the imports are."""

from collections import Counter

import pytest

from tests.docs.house import (
    circles,
    import_graph,
    import_order,
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
def test_folders_and_imports_are_as_the_page_states(package: str) -> None:
    stated = stated_rooms(package)
    assert len(set(stated)) == len(stated)
    assert real_rooms(package) - set(stated) == set(), "the page lacks these"
    assert set(stated) - real_rooms(package) == set(), "these are on the page alone"
    assert upward(package) == {}, "imports between rooms go down"
    imported = {
        package_of(each)
        for module, modules in GRAPH.items()
        if package_of(module) == package
        for each in modules
    }
    assert imported - {package} <= set(PACKAGES[package])


def test_no_module_imports_itself_by_a_circle() -> None:
    assert circles(GRAPH) == []
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"e"}, "f": {"a"}}
    assert circles(graph) == [["a", "b", "c"], ["e"]]
