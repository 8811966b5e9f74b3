"""Packed weights are one file a program and width, whole or not there, and no more than the limit."""

import errno
import os
import threading
from unittest.mock import Mock

import pytest

from jaxllm.export.programs import litert as packed_weights
from jaxllm.export.programs.litert import PackedFolder
from jaxllm.export.programs.litert_library import captured_messages


def packed(folder, program, made_of, content, width="int8", limit=1000):
    """Opens a program's packed weights, and writes them if they are not there; what is in the folder then."""
    with PackedFolder(folder, limit_bytes=limit).opened(program, width, made_of) as file:
        if not file.is_file():
            file.write_bytes(content)
    return {each.read_bytes() for each in folder.iterdir()}


def test_a_file_is_found_again_by_what_it_was_made_of_and_replaced_by_a_new_export_there(tmp_path):
    folder = tmp_path / "packed"
    assert packed(folder, tmp_path / "a", "one", b"1") == {b"1"}
    assert packed(folder, tmp_path / "a", "one", b"2") == {b"1"}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert packed(folder, tmp_path / "b", "one", b"2") == {b"1", b"2"}
    assert packed(folder, tmp_path / "a", "one", b"3", width="f32") == {b"1", b"2", b"3"}
    assert packed(folder, tmp_path / "a", "two", b"4") == {b"2", b"3", b"4"}


def test_those_unused_for_longest_leave(tmp_path):
    folder = tmp_path / "packed"
    packed(folder, tmp_path / "a", "a", b"a" * 400)
    packed(folder, tmp_path / "b", "b", b"b" * 400)
    for each in folder.iterdir():
        time_s = {b"a": 100, b"b": 200}[each.read_bytes()[:1]]
        os.utime(each, (time_s, time_s))
    # Using it makes it the newest.
    packed(folder, tmp_path / "a", "a", b"")
    assert packed(folder, tmp_path / "c", "c", b"c" * 400) == {b"a" * 400, b"c" * 400}


def test_what_is_not_whole_is_not_kept(tmp_path):
    folder = tmp_path / "packed"

    def fail():
        with PackedFolder(folder, limit_bytes=10).opened(tmp_path, "int8", "one") as file:
            file.write_bytes(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(folder.iterdir()) == []
    # Two at once write apart, and the one that ends last stays.
    store = PackedFolder(folder, limit_bytes=10)
    with store.opened(tmp_path, "int8", "one") as first, store.opened(tmp_path, "int8", "one") as second:
        assert first != second
        first.write_bytes(b"1")
        second.write_bytes(b"1")
    (left,) = folder.iterdir()
    assert left.read_bytes() == b"1"
    # Leftovers of a process that was killed go when they are old.
    old, new = folder / "x.bin.1.tmp", folder / "x.bin.2.tmp"
    for each in (old, new):
        each.touch()
    os.utime(old, (0, 0))
    assert packed(folder, tmp_path / "other", "two", b"2") == {b"1", b"2", b""}
    assert not old.exists()
    assert new.exists()


def test_what_was_damaged_or_could_be_anybodys_is_packed_again(tmp_path, caplog):
    folder = tmp_path / "packed"
    for spoil in (
        lambda path: path.write_bytes(b"another's"),
        lambda path: path.chmod(0o602),
        lambda path: (path.rename(folder / "else"), path.symlink_to("else")),
    ):
        assert packed(folder, tmp_path / "a", "one", b"ours") == {b"ours"}
        (file,) = folder.iterdir()
        spoil(file)
        assert b"ours" in packed(folder, tmp_path / "a", "one", b"ours")
        assert "is not used, and made again" in caplog.text
        caplog.clear()
        for each in folder.iterdir():
            each.unlink()
    folder.chmod(0o777)
    with PackedFolder(folder, limit_bytes=10).opened(tmp_path, "int8", "one") as file:
        assert file is None
    assert "others may write to it" in caplog.text
    # Nor is a folder that cannot be made.
    (tmp_path / "file").touch()
    with PackedFolder(tmp_path / "file" / "packed", limit_bytes=10).opened(tmp_path, "int8", "one") as file:
        assert file is None


def test_a_file_that_cannot_be_opened_for_a_moment_stays(tmp_path, monkeypatch):
    folder = tmp_path / "packed"
    assert packed(folder, tmp_path / "a", "one", b"ours") == {b"ours"}
    refused = Mock(side_effect=OSError(errno.EMFILE, "Too many open files"))
    with monkeypatch.context() as patch:
        patch.setattr(packed_weights, "private_file", refused)
        assert PackedFolder(folder, limit_bytes=10)._found("") is None
    assert packed(folder, tmp_path / "a", "one", b"others") == {b"ours"}


# A runtime's own messages are kept from standard error, nobody else's are lost.


OWN = b"""INFO: [accelerator_registry.cc:43] DestroyAccelerator
INFO: Created TensorFlow Lite XNNPACK delegate for CPU.
I0000 00:00:1795368174.097093   24790 port.cc:153] oneDNN custom operations are on.
"""


def test_others_are_heard_when_the_block_ends(capfd):
    with captured_messages() as said:
        os.write(2, OWN)
        os.write(2, b"warning: another thread\n")
        assert capfd.readouterr().err == ""
        assert "DestroyAccelerator" in said()
        assert "another thread" not in said()
        os.write(2, b"and goes on")
    assert capfd.readouterr().err == "warning: another thread\nand goes on"


def test_errors_and_threads_give_standard_error_back(capfd):
    def fail():
        with captured_messages():
            os.write(2, OWN)
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    inside, order = threading.Event(), []

    def second():
        with captured_messages():
            order.append("second")

    with captured_messages(), captured_messages():
        thread = threading.Thread(target=second)
        thread.start()
        inside.wait(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    os.write(2, b"here\n")
    assert capfd.readouterr().err == "here\n"
