"""Writing a bundle is all or nothing, whatever fails."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.bundle import Bundle, write_bundle, writer
from jaxllm.errors import BundleError, ConfigError
from jaxllm.files.atomic import atomic_file
from tests.bundle.forging import manifest_at, params_of, refused, use, write
from tests.tiny import TINY, tiny_tokenizer


class Interrupted(Exception):
    """What a source of parameters may raise."""


def failing(after: int, error: BaseException) -> Iterator[tuple[str, np.ndarray]]:
    for count, item in enumerate(params_of(TINY).items()):
        if count == after:
            raise error
        yield item


def write_stream(path: Path, params: Any, weights: Any = "f32") -> None:
    write_bundle(path, cfg=TINY, params=params, weights=weights, tokenizer=tiny_tokenizer(), name="tiny")


def altered(name: str, change: Callable[[np.ndarray], np.ndarray]) -> list[tuple[str, np.ndarray]]:
    return [(key, change(value) if key == name else value) for key, value in params_of(TINY).items()]


def not_finite(value: np.ndarray) -> np.ndarray:
    value = value.copy()
    value[0, 0] = np.nan
    return value


ITEMS = list(params_of(TINY).items())
FAILURES: dict[str, tuple[type[BaseException], str, Callable[[], Any]]] = {
    "source fails at once": (Interrupted, "", lambda: failing(0, Interrupted())),
    "source fails midway": (Interrupted, "", lambda: failing(9, Interrupted())),
    "interrupted": (KeyboardInterrupt, "", lambda: failing(9, KeyboardInterrupt())),
    "source cannot be read": (BundleError, "cannot be written", lambda: failing(9, OSError(5, "error"))),
    "nothing": (ConfigError, "parameter embed.tokens is missing", lambda: []),
    "last missing": (ConfigError, "parameter head is missing", lambda: ITEMS[:-1]),
    "first missing": (ConfigError, "expected parameter embed.tokens", lambda: ITEMS[1:]),
    "one more": (ConfigError, "parameter more is not part", lambda: [*ITEMS, ("more", ITEMS[0][1])]),
    "one twice": (ConfigError, "expected parameter layers.0.attn_norm.scale", lambda: [ITEMS[0], *ITEMS]),
    "out of order": (ConfigError, "expected parameter embed.tokens", lambda: ITEMS[::-1]),
    "misshapen": (
        ConfigError,
        "head of shape (265, 64), got head of shape (64, 265)",
        lambda: altered("head", np.transpose),
    ),
    "flat": (ConfigError, "layers.1.ffn.down", lambda: altered("layers.1.ffn.down", np.ravel)),
}  # fmt: skip


@contextlib.contextmanager
def nothing_changes(folder: Path) -> Iterator[None]:
    """Names and contents of all files of `folder` are the same afterwards."""

    def state() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before = state()
    yield
    assert state() == before


@pytest.mark.parametrize(("kind", "part", "params"), FAILURES.values(), ids=FAILURES)
def test_a_failed_write_leaves_no_trace(
    tmp_path: Path, kind: type[BaseException], part: str, params: Callable[[], Any]
) -> None:
    """Neither a new file, nor a change of the one that is there."""
    there = write(tmp_path / "there.jaxllm", "int8")
    for path in (tmp_path / "new.jaxllm", there):
        with nothing_changes(tmp_path), pytest.raises(kind) as caught:
            write_stream(path, params())
        assert part in str(caught.value)
    use(there)


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        ("int8", "NaN"), ("int4", "NaN"),
        ("f16", "f32, bf16, int8, int8-nested, int4-min, int4, int4-all, got 'f16'"),
    ],
)  # fmt: skip
def test_weights_that_cannot_be_had(tmp_path: Path, weights: str, match: str) -> None:
    with nothing_changes(tmp_path), pytest.raises(ConfigError, match=match):
        write_stream(tmp_path / "m", altered("layers.1.ffn.up", not_finite), weights)


def test_a_rewrite_replaces(tmp_path: Path) -> None:
    path = write(tmp_path / "m", "int8")
    write(path, "f32", name="second")
    assert [each.name for each in tmp_path.iterdir()] == ["m"]
    with Bundle.open(path) as bundle:
        assert (bundle.layout.name, bundle.layout.weights) == ("second", "f32")


class FullDisk:
    """A file on a disk with room for so many bytes more."""

    def __init__(self, file: Any, room_bytes: int) -> None:
        self._file, self._room_bytes = file, room_bytes

    def write(self, data: Any) -> int:
        self._room_bytes -= len(data)
        if self._room_bytes < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.parametrize("room_bytes", [0, 63, 64, 5000, 100_000, "manifest"])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room_bytes: int | str) -> None:
    path = write(tmp_path / "m", "int8")
    scratch = write(tmp_path / "scratch")
    room = manifest_at(scratch.read_bytes()) if room_bytes == "manifest" else room_bytes

    @contextlib.contextmanager
    def full(path: Path) -> Iterator[Any]:
        with atomic_file(path) as file:
            yield FullDisk(file, int(room))

    monkeypatch.setattr(writer, "atomic_file", full)
    with nothing_changes(tmp_path):
        message = refused(path, "cannot be written (No space left on device)", when=write)
    assert "free space" in message
    use(path)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failures_after_the_last_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = write(tmp_path / "m", "int8")

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch, nothing_changes(tmp_path):
        patch.setattr(os, "fsync", fail) if call == "fsync" else patch.setattr(Path, "replace", fail)
        refused(path, "cannot be written (Input/output error)", when=write)
    use(path)


def test_places_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    (tmp_path / "folder").mkdir()
    with nothing_changes(tmp_path):
        refused(tmp_path / "absent" / "m", "No such file", "check the folder", when=write)
        refused(tmp_path / "file" / "m", "Not a directory", when=write)
        refused(tmp_path / "folder", "it is a folder, which is never replaced", when=write)
        refused(tmp_path / ("n" * 300), "File name too long", when=write)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    refused(folder / "m", "Permission denied", when=write)
