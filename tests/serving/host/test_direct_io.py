"""Reading by pieces: the bytes that were asked for, however pages lie, and what a file too short says."""

import errno
import os
import time
from pathlib import Path

import numpy as np
import pytest

from jaxllm.errors import CheckpointError, ConfigError, Unreadable
from jaxllm.serving.host.direct_io import PAGE, PieceReader
from jaxllm.serving.host.storage import Storage


@pytest.fixture
def file(tmp_path):
    content = np.random.default_rng(0).integers(0, 256, 3 * PAGE + 100, dtype=np.uint8)
    path = tmp_path / "data"
    path.write_bytes(content.tobytes())
    return path, content


@pytest.mark.parametrize("caching", ["direct", "buffered"])
@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, 1), (PAGE, PAGE), (PAGE - 1, 2), (3 * PAGE, 100), (10, 3 * PAGE + 90), (7, 0)],
)
def test_pieces_are_what_the_file_holds(file, caching, offset, size):
    path, content = file
    with PieceReader(path, Storage(caching=caching)) as reader:
        np.testing.assert_array_equal(reader.read(offset, size), content[offset : offset + size])
        assert reader.size_bytes == len(content)


def test_an_emulated_device_is_no_faster_than_it_says(file):
    with PieceReader(file[0], Storage(bytes_per_s=PAGE / 0.02, latency_ms=5)) as reader:
        began = time.perf_counter()
        reader.read(0, PAGE)
        reader.read(PAGE, 2 * PAGE)
        assert time.perf_counter() - began >= 0.07


@pytest.mark.parametrize("caching", ["direct", "buffered"])
@pytest.mark.parametrize("left", [10, PAGE + 10, 2 * PAGE])
def test_a_read_of_a_file_that_shrinks_ends(file, left, caching):
    """Also where it is cut within a page, at whose beginning a direct read goes on."""
    path, _ = file
    with PieceReader(path, Storage(caching=caching)) as reader:
        for offset, size in ((0, 3 * PAGE + 101), (4 * PAGE, 1), (-1, 5)):
            with pytest.raises(CheckpointError, match="truncated"):
                reader.read(offset, size)
        os.truncate(path, left)
        with pytest.raises(CheckpointError, match="shorter while it was read"):
            reader.read(0, 3 * PAGE)


def test_where_direct_reads_are_refused_the_cache_is_used(file, monkeypatch):
    """As on file systems that open for them and then have none; and for the file that was opened, although
    another one has its name by then."""
    path, content = file
    real = os.preadv
    with PieceReader(path) as reader:
        reader.caching = "direct"
        path.rename(path.with_suffix(".old"))
        path.write_bytes(bytes(len(content)))

        def preadv(descriptor, buffers, offset):
            if reader.caching == "direct":
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(descriptor, buffers, offset)

        monkeypatch.setattr(os, "preadv", preadv)
        np.testing.assert_array_equal(reader.read(100, 5000), content[100:5100])
        assert reader.caching == "buffered"


@pytest.mark.parametrize("error", [errno.EIO, errno.EMFILE])
def test_what_storage_refuses_is_told_from_what_is_not_there(file, monkeypatch, error):
    def refused(*_):
        raise OSError(error, os.strerror(error))

    with PieceReader(file[0]) as reader:
        monkeypatch.setattr(os, "preadv", refused)
        with pytest.raises(Unreadable, match=os.strerror(error)):
            reader.read(0, 10)
    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(Unreadable, match=os.strerror(error)):
        PieceReader(file[0])


def test_what_may_not_be_opened_is_told(file, tmp_path):
    """And a pipe is not waited for."""
    path, content = file
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(CheckpointError, match=r"not a regular file|cannot be read") as told:
            PieceReader(other)
        assert not isinstance(told.value, Unreadable)
    # Links are followed only where they may be.
    (tmp_path / "link").symlink_to(path)
    with PieceReader(tmp_path / "link") as reader:
        np.testing.assert_array_equal(reader.read(0, 10), content[:10])
    with pytest.raises(CheckpointError, match="cannot be read"):
        PieceReader(tmp_path / "link", follow_links=False)
    with pytest.raises(CheckpointError, match="No such file"):
        PieceReader(tmp_path / "missing")
    for wrong, message in (
        ({"caching": "mapped"}, "one of direct, buffered"),
        ({"bytes_per_s": -1}, "bytes_per_s must be a number at least 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            Storage(**wrong)
