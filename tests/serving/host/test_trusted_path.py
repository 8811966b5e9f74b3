"""Folders that another user could replace are not trusted, wherever on the way the user could."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxllm.errors import ConfigError
from jaxllm.serving.host.user_cache import (
    cache_folder,
    make_private_folder,
    others_write,
    private_file,
    private_folder,
    trusted_folder,
)

OTHER = 65534


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with an entry."""
    folder = tmp_path / "above" / "cache"
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o755)
    monkeypatch.setenv("JAXLLM_CACHE", str(folder))
    assert cache_folder() == folder
    make_private_folder(folder / "executables")
    (folder / "executables" / "entry").write_bytes(b"")
    return folder


@pytest.fixture
def given_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes a file another user's: really where we may, else as far as this process can tell."""
    real, given = os.lstat, set[str]()

    def lstat(path, **options):
        facts = real(path, **options)
        return os.stat_result((*facts[:4], OTHER, *facts[5:])) if os.fspath(path) in given else facts

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, OTHER, -1, follow_symlinks=False)
        else:
            given.add(str(path))
            monkeypatch.setattr(os, "lstat", lstat)

    return give


def uses(cache: Path) -> list[Callable[[], object]]:
    def used(opened) -> None:
        with opened:
            pass

    folder = cache / "executables"
    return [
        lambda: used(private_folder(folder)),
        lambda: used(private_file(folder / "entry")),
        lambda: make_private_folder(folder / "more"),
    ]


def test_a_cache_that_only_its_user_can_change_is_used(cache):
    for use in uses(cache):
        use()
    assert stat.S_IMODE((cache / "executables" / "more").stat().st_mode) == 0o700
    # The sticky bit lets others make files, and not rename ours.
    cache.parent.chmod(0o1777)
    for use in uses(cache):
        use()


@pytest.mark.parametrize("place", ["cache", "above"])
@pytest.mark.parametrize("mode", [0o777, 0o702])
def test_a_cache_that_others_could_replace_is_not(cache, place, mode):
    (cache if place == "cache" else cache.parent).chmod(mode)
    for use in uses(cache):
        with pytest.raises(ConfigError, match=r"others may write to.*set JAXLLM_CACHE"):
            use()
    assert not (cache / "executables" / "more").exists(), "nothing is made in it"


@pytest.mark.parametrize("place", ["", "..", "executables", "executables/entry"])
def test_nor_is_what_belongs_to_another_user(cache, place, given_away):
    given_away((cache / place).resolve())
    # Of a file alone the others have no need.
    for use in uses(cache)[1:2] if place.endswith("entry") else uses(cache):
        with pytest.raises(ConfigError, match=r"another user|not this user's|others may write"):
            use()


def test_links_above_the_cache_are_followed_where_they_can_be_trusted(
    cache, tmp_path, monkeypatch, given_away
):
    link, relative = tmp_path / "link", tmp_path / "relative"
    link.symlink_to(cache)
    relative.symlink_to(Path("above/../above/cache"))
    for path in (link, relative):
        monkeypatch.setenv("JAXLLM_CACHE", str(path))
        make_private_folder(path / "executables")
        assert trusted_folder(path) == cache.resolve()
    # Where a link leads is checked, too.
    cache.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write to"):
        make_private_folder(link / "executables")
    cache.parent.chmod(0o755)
    given_away(link)
    with pytest.raises(ConfigError, match="a link of another user"):
        make_private_folder(link / "executables")
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    with pytest.raises(OSError, match="Too many levels"):
        trusted_folder(circle / "cache")


def test_links_in_the_cache_are_not_followed(cache, tmp_path):
    (cache / "executables").rename(tmp_path / "elsewhere")
    (cache / "executables").symlink_to(tmp_path / "elsewhere")
    for use in uses(cache):
        with pytest.raises(ConfigError, match="not a regular file or folder"):
            use()


def test_the_group_of_a_user_alone_has_no_others(tmp_path, monkeypatch):
    class Group:
        gr_name, gr_mem = "ann", ["ann"]

    class User:
        pw_name, pw_gid = "ann", tmp_path.stat().st_gid

    monkeypatch.setattr("grp.getgrgid", lambda _: Group)
    monkeypatch.setattr("pwd.getpwuid", lambda _: User)
    tmp_path.chmod(0o770)
    assert not others_write(tmp_path.stat())
    for change in ({"gr_mem": ["ann", "bob"]}, {"gr_name": "staff"}):
        with monkeypatch.context() as patch:
            for name, value in change.items():
                patch.setattr(Group, name, value)
            assert others_write(tmp_path.stat())
    tmp_path.chmod(0o772)
    assert others_write(tmp_path.stat())
    # Where files have no owners nothing is checked.
    monkeypatch.delattr(os, "geteuid")
    assert trusted_folder(tmp_path) == tmp_path
