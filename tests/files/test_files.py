"""Files and folders that are whole or absent; files that others made, of which only regular ones are read."""

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxllm.errors import CheckpointError
from jaxllm.files import atomic
from jaxllm.files.atomic import atomic_file, atomic_folder
from jaxllm.files.input_files import open_regular, read_bytes, read_json
from tests.interrupting import Interrupt


def link_to_file(path: Path) -> None:
    path.with_name("meant").write_text("kept")
    path.symlink_to("meant")


def unix_socket(path: Path) -> None:
    # By a short relative name: addresses of sockets have a hundred bytes.
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(here)


def device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes devices")


NO_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "a pipe"),
    "folder": (Path.mkdir, "a folder"),
    "socket": (unix_socket, "a socket"),
    "device": (device, "a device"),
    "link": (link_to_file, "a symbolic link, which is never replaced; name .*meant"),
    "link to nothing": (lambda path: path.symlink_to("nothing"), "a symbolic link"),
}


@pytest.mark.parametrize(("make", "said"), NO_FILES.values(), ids=NO_FILES)
def test_what_is_no_regular_file_is_never_replaced(
    tmp_path: Path, make: Callable[[Path], object], said: str
) -> None:
    path = tmp_path / "out"
    make(path)
    before = {each.name: each.lstat() for each in tmp_path.iterdir()}
    with pytest.raises(FileExistsError, match=said), atomic_file(path):
        pytest.fail("nothing is written where nothing may be replaced")
    assert {each.name: each.lstat() for each in tmp_path.iterdir()} == before
    with pytest.raises(FileExistsError, match="name a file"), atomic_file(Path("-")):
        pass
    # Nor what became so meanwhile; a folder may be a link.
    late = tmp_path / "late"
    with pytest.raises(FileExistsError, match=said), atomic_file(late):
        make(late)
    (tmp_path / "folder").symlink_to(tmp_path)
    with atomic_file(tmp_path / "folder" / "file") as file:
        file.write(b"x")
    assert (tmp_path / "file").read_bytes() == b"x"


WRITER = """
import sys
from pathlib import Path
from jaxllm.files.atomic import atomic_file, atomic_folder
from tests.interrupting import Interrupt
with (atomic_folder if sys.argv[2] == "folder" else atomic_file)(Path(sys.argv[1])) as made:
    (made / "part").write_bytes(b"half") if sys.argv[2] == "folder" else made.write(b"half")
    print("writing", flush=True)
    sys.stdin.read()
"""


def writer(path: Path, kind: str) -> subprocess.Popen:
    """A process that is in the middle of writing `path`."""
    started = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), kind],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert started.stdout is not None
    assert started.stdout.readline() == b"writing\n"
    return started


def write(path: Path, kind: str) -> None:
    if kind == "file":
        with atomic_file(path) as file:
            file.write(b"whole")
    else:
        with atomic_folder(path) as folder:
            (folder / "part").write_bytes(b"whole")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_the_next_writer_removes_what_a_killed_one_left_and_nothing_else(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m.jaxllm"
    others = [".m.jaxllm.0123456789ab.tmp", ".m.jaxllm.jaxllm-mine.tmp", ".other.jaxllm-0123456789ab.tmp"]
    for name in others:
        (tmp_path / name).write_text("a user's")
    killed, living = writer(path, kind), writer(path, kind)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    try:
        assert len(os.listdir(tmp_path)) == len(others) + 2
        write(path, kind)
        assert len(os.listdir(tmp_path)) == len(others) + 2  # its own, and the living one's
        assert set(others) < set(os.listdir(tmp_path))
    finally:
        living.communicate()
    if kind == "file":
        # The one that was still writing ended well, and later.
        assert path.read_bytes() == b"half"
        assert sorted(os.listdir(tmp_path)) == sorted([*others, path.name])


def test_many_writers_of_one_name_remove_nothing_of_one_another(tmp_path: Path) -> None:
    path, failed = tmp_path / "out", []

    def write_often(value: int) -> None:
        try:
            for _ in range(50):
                with atomic_file(path) as file:
                    file.write(bytes([value]) * 100)
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=write_often, args=(value,)) for value in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert failed == []
    assert os.listdir(tmp_path) == ["out"]
    assert len(set(path.read_bytes())) == 1


def test_files_are_written_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "fcntl", None)
    for _ in range(2):
        write(tmp_path / "out", "file")
    assert os.listdir(tmp_path) == ["out"]


# Where an interrupt hits the very end of a `with`, the file is closed when it is collected, which warns.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_an_interrupt_at_any_line_leaves_the_old_or_the_new_and_nothing_beside_it(
    tmp_path: Path, kind: str
) -> None:
    def fresh(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name / "out"

    with Interrupt(("/jaxllm/files/atomic.py",), None) as whole:
        write(fresh("whole"), kind)
    assert whole.lines > 20
    # What was there before is not looked at for garbage, which would take most of the time.
    gc.freeze()
    for at in range(1, whole.lines + 1):
        path = fresh(str(at))
        with Interrupt(("/jaxllm/files/atomic.py",), at), pytest.raises(KeyboardInterrupt):
            write(path, kind)
        gc.collect()
        assert os.listdir(path.parent) in ([], ["out"]), at
    gc.unfreeze()


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
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "a").symlink_to(tmp_path / "file")
    tracemalloc.start()
    try:
        assert read_bytes(tmp_path / "a", 1 << 24) == b"content"
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path(os.devnull)):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(path)
    with pytest.raises(CheckpointError, match=r"pipe cannot be read \(a pipe or device.*; fetch it"):
        read_json(tmp_path / "pipe", "fetch it")
    with pytest.raises(CheckpointError, match="is missing; download it"):
        read_json(tmp_path / "absent.json", "download it")


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
