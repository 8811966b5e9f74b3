"""Writing a bundle is all or nothing, whatever fails."""

import contextlib
import dataclasses
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.bundle import Bundle, expert_widths, lay_experts_apart, write_bundle, writer
from jaxllm.errors import BundleError, CheckpointError, ConfigError
from jaxllm.files.atomic import atomic_file
from jaxllm.prepare import prepare
from tests.bundle.forging import manifest_at, params_of, refused, use, write
from tests.tiny import TINY, tiny_tokenizer, write_tiny_bundle


def failing(after: int, error: BaseException) -> Iterator[tuple[str, np.ndarray]]:
    for count, item in enumerate(params_of(TINY).items()):
        if count == after:
            raise error
        yield item


def write_stream(path: Path, params: Any, weights: Any = "f32") -> None:
    write_bundle(path, cfg=TINY, params=params, weights=weights, tokenizer=tiny_tokenizer(), name="tiny")


def altered(name: str, change: Callable[[np.ndarray], np.ndarray]) -> list[tuple[str, np.ndarray]]:
    return [(key, change(value) if key == name else value) for key, value in params_of(TINY).items()]


ITEMS = list(params_of(TINY).items())
FAILURES: dict[str, tuple[type[BaseException], str, Callable[[], Any]]] = {
    "interrupted": (KeyboardInterrupt, "", lambda: failing(9, KeyboardInterrupt())),
    "source cannot be read": (BundleError, "cannot be written", lambda: failing(9, OSError(5, "error"))),
    "nothing": (ConfigError, "parameter embed.tokens is missing", lambda: []),
    "last missing": (ConfigError, "parameter head is missing", lambda: ITEMS[:-1]),
    "one more": (ConfigError, "parameter more is not part", lambda: [*ITEMS, ("more", ITEMS[0][1])]),
    "out of order": (ConfigError, "expected parameter embed.tokens", lambda: ITEMS[::-1]),
    "misshapen": (
        ConfigError,
        "head of shape (265, 64), got head of shape (64, 265)",
        lambda: altered("head", np.transpose),
    ),
}  # fmt: skip


@contextlib.contextmanager
def nothing_changes(folder: Path) -> Iterator[None]:
    """Names and contents of all files of `folder` are the same afterwards."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    yield
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


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
    ("weights", "match"), [("int8", "NaN"), ("f32", "NaN"), ("f16", "int4-all, got 'f16'")]
)
def test_weights_that_cannot_be_had(tmp_path: Path, weights: str, match: str) -> None:
    with nothing_changes(tmp_path), pytest.raises(ConfigError, match=match):
        write_stream(tmp_path / "m", altered("layers.1.ffn.up", lambda value: value + np.nan), weights)


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


@pytest.mark.parametrize("room_bytes", [0, 64, 100_000, "manifest"])
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


# Experts laid apart: the same model at their own widths, narrower ones beside what stays

# Neurons that fill panels of 16, and that do not.
CFGS = [
    dataclasses.replace(
        TINY, model_type="qwen3_moe", qk_norm=True, attention_windows=(), experts=3, experts_per_token=2,
        expert_ffn_size=neurons, sparse_layers=(False, True),
    )
    for neurons in (32, 24)
]  # fmt: skip
WIDTHS = {"int8": 8, "int8-nested": 8, "int4": 4, "f32": 32, "bf16": 16}


def bytes_of(bundle, name):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(bundle.stored(name))]


@pytest.mark.parametrize(
    ("weights", "cfg"), [*((weights, CFGS[at % 2]) for at, weights in enumerate(WIDTHS)), ("int8", CFGS[1])]
)
def test_of_their_own_width_experts_are_what_they_are(tmp_path, weights, cfg):
    """The same bytes as of a bundle that was made apart, whether they were together before or not."""
    bits = np.full((1, 3), WIDTHS[weights])
    together = write_tiny_bundle(tmp_path / "together.jaxllm", weights, cfg=cfg)
    wanted = write_tiny_bundle(tmp_path / "wanted.jaxllm", weights, cfg=cfg, expert_bits=bits)
    for source in (together, wanted):
        with Bundle.open(source) as bundle:
            np.testing.assert_array_equal(expert_widths(bundle), bits)
            lay_experts_apart(tmp_path / "apart.jaxllm", bundle, bits)
        with Bundle.open(tmp_path / "apart.jaxllm") as got, Bundle.open(wanted) as expected:
            assert got.layout.experts_apart
            assert list(got.layout.tensors) == list(expected.layout.tensors)
            for name in expected.layout.tensors:
                assert bytes_of(got, name) == bytes_of(expected, name)


def test_what_cannot_be_laid_apart_says_why(tmp_path):
    cfg, out = CFGS[0], tmp_path / "out.jaxllm"
    mixture = write_tiny_bundle(tmp_path / "mixture.jaxllm", "int4", cfg=cfg)
    dense = write_tiny_bundle(tmp_path / "dense.jaxllm")
    with pytest.raises(ConfigError, match="has experts of 4 bits: wider ones would be larger, not better"):
        prepare(mixture, out, expert_bits=8)
    with pytest.raises(ConfigError, match="is no mixture of experts"):
        prepare(dense, out, expert_bits=8)
    with pytest.raises(CheckpointError, match="name --expert-bits"):
        prepare(mixture, out)
    with pytest.raises(CheckpointError, match="int4 weights, which stay as they are"):
        prepare(mixture, out, weights="int8", expert_bits=4)
    assert not out.exists()
