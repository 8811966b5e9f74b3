"""A store's folder: what is not the store's own is not read, followed or removed, whatever is done."""

import os
from pathlib import Path

import pytest

from jaxllm.errors import ConfigError
from jaxllm.serving.contexts.layout import CATALOG, delete_quarantined
from jaxllm.serving.contexts.store import ContextStore
from tests.serving.contexts.mutations import change_record
from tests.serving.contexts.test_store import ORIGIN, grown, holds


def contents(folder):
    """All files and links in a folder, by name."""
    found = sorted(folder.rglob("*"))
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in found
        if path.is_symlink() or path.is_file()
    } | {str(path.relative_to(folder)): None for path in found if path.is_dir() and not path.is_symlink()}


def written(path, content=b"mine"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_a_folder_of_other_things_is_no_store_and_stays_as_it_is(tmp_path):
    home = tmp_path / "home"
    written(home / "Documents" / "thesis" / "ch1.tex")
    written(home / "Pictures" / "2024" / "may" / "a.jpg")
    before = contents(home)
    with pytest.raises(ConfigError, match=r"not a store of contexts, and not empty.*use an empty folder"):
        ContextStore(home)
    assert contents(home) == before


def test_what_others_keep_in_a_store_stays_as_it_is(tmp_path):
    """Beside its contexts, and in their folders."""
    with ContextStore(tmp_path) as store:
        record = store.commit(*grown(store.create("mail", ORIGIN), [8]))
        own = tmp_path / "app-mail" / record.name
        gone = store.create("gone", ORIGIN)
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    written(outside / "0.kv")
    (tmp_path / "app-mail" / ("a" * 16)).symlink_to(outside)
    (tmp_path / "app-linked").symlink_to(outside)
    others = [
        "notes/today/list.txt", "app-mail/notes/list.txt", "app-mail/0123456789ABCDEF/record.txt",
        f"app-mail/{record.name}/notes.txt", f"app-mail/{record.name}/7.kv",
        f"app-gone/{gone.name}/notes.txt",
        "app-%61/0123456789abcdef/x", "quarantine/app-x/y/mine.txt",
    ]  # fmt: skip
    for name in others:
        written(tmp_path / name)
    with ContextStore(tmp_path) as store:
        store.commit(*grown(holds(store, record.name), [8, 4]))
        store.verify(repair=True)
        holds(store, record.name)
        store.delete(gone.name)
        store.delete(record.name)
        store.verify(repair=True)
        assert store.records() == []
        delete_quarantined(tmp_path)
    assert (outside / "0.kv").read_bytes() == b"mine"
    for name in others:
        assert (tmp_path / name).read_bytes() == b"mine"
    # Of a context whose folder somebody uses, the store's own files are gone.
    assert {each.name for each in own.iterdir()} == {"notes.txt", "7.kv"}


def test_links_are_listed_and_never_followed(tmp_path):
    """Where a folder of an app or of a context should be, and where files should."""
    store_folder, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    with ContextStore(store_folder) as store:
        moved = store.commit(*grown(store.create("moved", ORIGIN), [8]))
        linked = store.commit(*grown(store.create("linked", ORIGIN), [8]))
    elsewhere.mkdir()
    (store_folder / "app-moved").rename(elsewhere / "app")
    (store_folder / "app-moved").symlink_to(elsewhere / "app")
    segment = store_folder / "app-linked" / linked.name / "0.kv"
    segment.rename(elsewhere / "0.kv")
    segment.symlink_to(elsewhere / "0.kv")
    before = contents(elsewhere)
    with ContextStore(store_folder) as store:
        (damage,) = store.damage()
        assert (damage.app, damage.proved) == ("moved", False)
        assert "is a link" in damage.reason
        assert [each.name for each in store.records()] == [linked.name]
        found = store.verify(repair=True)
        assert [(each.app, each.chunks) for each in found] == [("linked", (0,)), ("moved", ())]
        assert segment.is_symlink()
        # The next segment takes another name.
        assert holds(store, store.commit(*grown(store.record(linked.name), [8])).name).files == ("1.kv",)
        store.delete(linked.name)
    assert contents(elsewhere) == before
    assert f"app/{moved.name}/0.kv" in before


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff" * 200, b"SQLite format 3\0" + b"\0" * 84])
def test_a_catalog_that_is_lost_or_damaged_as_a_whole_is_refused_by_name(tmp_path, content):
    """And no chunk is removed."""
    with ContextStore(tmp_path) as store:
        store.commit(*grown(store.create("a", ORIGIN), [8]))
    whole = (tmp_path / CATALOG).read_bytes()
    (tmp_path / CATALOG).unlink()
    if content is not None:
        (tmp_path / CATALOG).write_bytes(content)
    before = contents(tmp_path)
    match = (
        "is missing: restore it from a copy" if content is None else "is damaged, or another program's file"
    )
    with pytest.raises(ConfigError, match=f"catalog.sqlite,? {match}"):
        ContextStore(tmp_path)
    assert contents(tmp_path) == before
    (tmp_path / CATALOG).write_bytes(whole)
    with ContextStore(tmp_path) as store:
        assert store.verify() == []


@pytest.mark.parametrize("version", [0, 2, 1 << 30])
def test_a_store_of_another_version_is_refused_by_name(tmp_path, version):
    ContextStore(tmp_path).close()
    raw = (tmp_path / CATALOG).read_bytes()
    (tmp_path / CATALOG).write_bytes(raw[:60] + version.to_bytes(4, "big") + raw[64:])
    with pytest.raises(ConfigError, match=f"is of version {version}, this jaxllm uses 1; use the"):
        ContextStore(tmp_path)


def test_catalogs_are_no_pipes_and_not_followed(tmp_path):
    ContextStore(tmp_path / "real").close()
    folder = tmp_path / "store"
    for name in (CATALOG, f"{CATALOG}-wal"):
        for make in (os.mkfifo, lambda path: Path(path).symlink_to(tmp_path / "real" / CATALOG), Path.mkdir):
            if name == CATALOG:
                folder.mkdir(exist_ok=True)
            else:
                ContextStore(folder).close()
            make(folder / name)
            with pytest.raises(ConfigError, match="is not a regular file"):
                ContextStore(folder)
            (folder / name).rmdir() if (folder / name).is_dir() else (folder / name).unlink()


def test_what_a_killed_first_opening_leaves_is_no_content(tmp_path):
    written(tmp_path / "lock", b"")
    written(tmp_path / ".catalog.sqlite.jaxllm-0123456789ab.tmp", b"SQL")
    with ContextStore(tmp_path) as store:
        assert store.records() == []
        assert not list(tmp_path.glob("*.tmp"))


def test_opening_removes_nothing(tmp_path):
    """A store that is there: whatever a kill left in it, and whatever is damaged."""
    with ContextStore(tmp_path) as store:
        record = store.commit(*grown(store.create("a", ORIGIN), [8]))
        other = store.commit(*grown(store.create("a", ORIGIN), [8]))
    folder = tmp_path / "app-a" / record.name
    written(folder / "9.kv", (folder / "0.kv").read_bytes())
    written(folder / ".9.kv.0123456789ab.tmp", b"JXLK")
    change_record(folder.with_name(other.name), tokens=None)
    (tmp_path / "app-a" / "0123456789abcdef").mkdir()
    written(tmp_path / "app-a" / "fedcba9876543210" / "0.kv", (folder / "0.kv").read_bytes())
    before = contents(tmp_path)
    with ContextStore(tmp_path) as store:
        assert [each.name for each in store.records()] == [record.name]
        assert {each.name for each in store.damage()} == {other.name, "fedcba9876543210"}
    assert contents(tmp_path) == before
    with ContextStore(tmp_path) as store:
        store.create("a", ORIGIN)
        # A context that was being made when a process ended has an empty folder.
        assert not (tmp_path / "app-a" / "0123456789abcdef").exists()
        store.sweep()
        store.verify(repair=True)
        assert {each.name for each in folder.iterdir()} == {"0.kv"}
        # Whose files those are nobody knows: they are listed, and stay.
        (left,) = store.verify()
        assert (left.name, left.proved, left.lost) == ("fedcba9876543210", False, True)
        assert "the catalog does not know" in left.reason
    assert (tmp_path / "app-a" / "fedcba9876543210" / "0.kv").exists()
