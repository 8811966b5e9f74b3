"""Bundles that were cut, flipped, mixed up with other files: caught, and named."""

import os
import tracemalloc
from pathlib import Path

import pytest

from jaxllm.bundle import Bundle, WeightFormat
from jaxllm.bundle.layout import HEADER, MAGIC, MAX_MANIFEST_BYTES, PAGE, VERSION
from jaxllm.errors import BundleError
from tests.bundle.forging import every_format, manifest_at, open_only, refused, use, write


def test_missing(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "No such file", when=open_only)
    refused(tmp_path, "a folder, not a regular file", when=open_only)
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "a pipe or device, not a regular file", when=open_only)
    refused(Path("/dev/zero"), "a pipe or device, not a regular file", when=open_only)


def test_every_length_that_is_not_the_whole_is_caught_at_opening(tmp_path: Path, tiny_file: Path) -> None:
    raw = tiny_file.read_bytes()
    with Bundle.open(tiny_file) as bundle:
        middles = [s.offset + s.size_bytes // 2 for s in bundle.layout.segments.values()]
    manifest = manifest_at(raw)
    lengths = [0, 1, 3, 8, 63, 64, 65, PAGE, *middles, manifest - 1, manifest, manifest + 1, len(raw) - 1]
    path = tmp_path / "cut"
    for length in lengths:
        path.write_bytes(raw[:length])
        part = "not a jaxllm bundle" if length < HEADER.size else "truncated"
        refused(path, part, "prepare", when=open_only)
    for junk in (b"\0", b"\n", raw, bytes(PAGE)):
        path.write_bytes(raw + junk)
        refused(path, "damaged", "prepare", when=open_only)


def test_every_flip_in_header_and_manifest_is_caught_at_opening(tmp_path: Path, micro_file: Path) -> None:
    raw = bytearray(micro_file.read_bytes())
    manifest = manifest_at(raw)
    path = tmp_path / "flipped"
    for place in [*range(HEADER.size), *range(manifest, len(raw), 13), len(raw) - 1]:
        for mask in (0x01, 0x80):
            raw[place] ^= mask
            path.write_bytes(raw)
            raw[place] ^= mask
            refused(path, when=open_only)


@every_format
def test_flips_in_a_segment_are_caught_when_it_is_read(tmp_path: Path, weights: WeightFormat) -> None:
    path = write(tmp_path / "m", weights)
    raw = bytearray(path.read_bytes())
    with Bundle.open(path) as bundle:
        segments = bundle.layout.segments
    for name, segment in segments.items():
        last = segment.offset + segment.size_bytes - 1
        for place in (segment.offset, segment.offset + segment.size_bytes // 3, last):
            raw[place] ^= 0x10
            path.write_bytes(raw)
            raw[place] ^= 0x10
            with Bundle.open(path) as bundle:
                for whole in segments.keys() - {name}:
                    bundle.verify_segment(whole)
            refused(path, f"segment {name!r} is corrupt", "again", when=lambda p: Bundle.open(p).verify())
            if name == "tokenizer":
                refused(path, repr(name), when=lambda p: Bundle.open(p).tokenizer_files())
                Bundle.open(path).load()
            else:
                refused(path, repr(name), when=lambda p: Bundle.open(p).load())
                Bundle.open(path).tokenizer_files()
    path.write_bytes(raw)
    use(path)


def test_verify_reads_again_what_was_loaded(tmp_path: Path, micro_file: Path) -> None:
    """Load checks a segment once; verify always looks at the disk, also where the time is as it was."""
    times = micro_file.stat()
    with Bundle.open(micro_file) as bundle:
        bundle.load()
        segment = bundle.layout.segments["final"]
        with micro_file.open("r+b") as file:
            file.seek(segment.offset)
            file.write(b"\xff")
        with pytest.raises(BundleError, match="changed in place"):
            bundle.verify()
        os.utime(micro_file, ns=(times.st_atime_ns, times.st_mtime_ns))
        bundle.load()
        with pytest.raises(BundleError, match="'final' is corrupt"):
            bundle.verify()


def test_other_versions_and_other_files_are_named(micro_file: Path) -> None:
    """Also copies in text mode."""
    raw = micro_file.read_bytes()
    for version in (0, VERSION + 1, 2**32 - 1):
        micro_file.write_bytes(raw[:8] + version.to_bytes(4, "little") + raw[12:])
        said = f"version {version}", f"version {VERSION}", "prepare it again"
        refused(micro_file, *said, when=open_only)
    copies = raw.replace(b"\r\n", b"\n"), raw.replace(b"\n", b"\r\n"), raw.replace(b"\r", b"")
    others = b"GGUF" + bytes(200), b"PK\x03\x04" * 50, MAGIC.lower() + bytes(100), b"\0" * 5000
    for content in (*copies, *others):
        micro_file.write_bytes(content)
        refused(micro_file, "not a jaxllm bundle", "jaxllm prepare", when=open_only)


def test_no_length_in_a_header_is_allocated(tmp_path: Path, micro_file: Path) -> None:
    raw = micro_file.read_bytes()
    offset = manifest_at(raw)
    claims = [(0, len(raw)), (8, len(raw) - 8), (offset, 2**63), (2**64 - 8, len(raw) + 8), (2**63, 2**63)]
    claims += [(len(raw), 0), (offset, MAX_MANIFEST_BYTES + 1), (HEADER.size, MAX_MANIFEST_BYTES + 1)]
    path = tmp_path / "huge"
    tracemalloc.start()
    try:
        for place, length in claims:
            with path.open("wb") as file:
                file.write(HEADER.pack(MAGIC, VERSION, 0, place, length, bytes(32)))
                if length == MAX_MANIFEST_BYTES + 1:
                    file.truncate(place + length)  # As long as it says; sparse, so that it costs nothing.
            refused(path, "damaged", when=open_only)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
