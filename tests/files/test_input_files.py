"""Files that others made: only regular ones are opened, and a limit holds whatever their size says."""

import os
import tracemalloc
from pathlib import Path

import pytest

from jaxllm.errors import CheckpointError
from jaxllm.files.input_files import open_regular, read_bytes, read_json

PIPES = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")


def test_a_file_is_read_whole_also_through_a_link(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert read_bytes(tmp_path / "a", 7) == read_bytes(tmp_path / "link", 7) == b"content"


def test_a_file_beyond_its_limit_is_refused_unread(tmp_path: Path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="larger than 100 bytes"):
        read_bytes(tmp_path / "sparse", 100)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_the_limit_holds_where_the_file_system_says_that_a_file_is_empty():
    assert Path("/proc/self/status").stat().st_size == 0
    with pytest.raises(OSError, match="larger than 10 bytes"):
        read_bytes(Path("/proc/self/status"), 10)


def test_a_limit_takes_no_memory(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"content")
    tracemalloc.start()
    try:
        assert read_bytes(tmp_path / "a", 1 << 24) == b"content"
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()


@PIPES
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path(os.devnull)):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(path)
    with pytest.raises(CheckpointError, match=r"pipe cannot be read \(a pipe or device.*; fetch it"):
        read_json(tmp_path / "pipe", "fetch it")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[" * 200_000, "cannot be read as JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "cannot be read as JSON"),
        (b"\xff", "cannot be read as JSON"),
        (b"[1]", "holds a list, not a JSON object"),
        (b'{"a": 1}' + b" " * 100_000, "larger than 100000 bytes"),
    ],
    ids=["deep", "long number", "no text", "list", "large"],
)
def test_json_that_is_no_object_is_refused_in_one_line(tmp_path: Path, content: bytes, reason: str):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_json(path, "write it again", limit_bytes=100_000 if "larger" in reason else 1 << 20)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("; write it again")


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path):
    with pytest.raises(CheckpointError, match="is missing; download it"):
        read_json(tmp_path / "absent.json", "download it")
