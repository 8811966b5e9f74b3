"""Executables on disk: what comes back, whose files are trusted, and how much is kept."""

import concurrent.futures
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xxhash

from jaxllm.files.atomic import atomic_file
from jaxllm.serving.buckets import bucket_table
from jaxllm.serving.buckets.bucket_table import SUFFIX, CompiledBucketFolder

pytestmark = pytest.mark.usefixtures("own_compilations")

KEY, OTHER_KEY = "ab" * 32, "cd" * 32
LIMIT_BYTES = 1 << 24
ROWS = np.arange(256, dtype=np.float32)


def compiled(factor: float = 3.0) -> jax.stages.Compiled:
    """A graph with a donated argument, one that it does not use, and results in a tree."""

    def graph(rows, unused, cache):
        del unused
        return {"out": jnp.sin(rows) * np.float32(factor), "cache": (cache["held"] + np.float32(1),)}

    shape = jax.ShapeDtypeStruct(ROWS.shape, jnp.float32)
    return jax.jit(graph, donate_argnums=2).lower(shape, shape, {"held": shape}).compile()


@pytest.fixture(scope="module")
def graph() -> jax.stages.Compiled:
    return compiled()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "executables"


@pytest.fixture
def folder(place: Path) -> CompiledBucketFolder:
    return CompiledBucketFolder(place, limit_bytes=LIMIT_BYTES)


@pytest.fixture
def entry(folder: CompiledBucketFolder, place: Path, graph: jax.stages.Compiled) -> Path:
    """The file of one stored graph."""
    folder.store(KEY, graph)
    return place / f"{KEY}{SUFFIX}"


@pytest.fixture
def notices(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What users are told."""
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


def load(folder: CompiledBucketFolder, key: str) -> Any:
    """The graph of a key; None if it cannot be used."""
    unpack = folder.read(key)
    return None if unpack is None else unpack()


def run(graph: Any) -> dict[str, Any]:
    return jax.tree.map(np.asarray, graph(ROWS, ROWS, {"held": jnp.asarray(ROWS)}))


# What comes back.


def test_a_graph_that_comes_back_gives_the_same_bits(folder, entry, graph, compiles):
    with compiles() as count:
        again = load(folder, KEY)
    assert count() == 0
    got, expected = run(again), run(graph)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.tobytes() == b.tobytes()
    # It works in the donated memory, and refuses other shapes.
    held = jnp.asarray(ROWS)
    where = held.unsafe_buffer_pointer()
    result = again(ROWS, ROWS, {"held": held})
    assert held.is_deleted()
    assert result["cache"][0].unsafe_buffer_pointer() == where
    with pytest.raises(TypeError, match="compiled"):
        again(ROWS[:7], ROWS, {"held": ROWS})
    # A key has one graph, the last, and folder and file are closed to others.
    folder.store(KEY, compiled(5.0))
    assert run(load(folder, KEY))["out"][1] == pytest.approx(5 * np.sin(1.0))
    assert os.listdir(entry.parent) == [entry.name]
    assert [each.stat().st_mode & 0o777 for each in (entry.parent, entry)] == [0o700, 0o600]


def test_what_is_not_kept(folder, place, graph, notices, monkeypatch):
    assert load(folder, KEY) is None
    # XLA:CPU serializes an executable that it has read from JAX's own cache without its code.
    jax.config.update("jax_enable_compilation_cache", True)
    try:
        folder.store(KEY, graph)
    finally:
        jax.config.update("jax_enable_compilation_cache", False)
    # It is above the limit.
    CompiledBucketFolder(place, limit_bytes=100).store(KEY, graph)
    # It has no serialized form.
    refuse = Mock(side_effect=NotImplementedError("const_args"))
    monkeypatch.setattr(bucket_table.serialize_executable, "serialize", refuse)
    folder.store(KEY, compiled())
    assert load(folder, KEY) is None
    assert not place.exists()
    assert notices() == []


# Damage.


def rewritten(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": rewritten(lambda raw: b""),
    "cut in its header": rewritten(lambda raw: raw[:20]),
    "cut by a byte": rewritten(lambda raw: raw[:-1]),
    "with a byte more": rewritten(lambda raw: raw + b"\0"),
    "with another magic": rewritten(lambda raw: b"GGUF" + raw[4:]),
    "of another version": rewritten(lambda raw: raw[:8] + b"\2" + raw[9:]),
    "of another key": rewritten(lambda raw: raw[:12] + b"\1" + raw[13:]),
    "with another length": rewritten(lambda raw: raw[:44] + b"\1" + raw[45:]),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe that nobody writes to": lambda path: (path.unlink(), os.mkfifo(path)),
    "a link": lambda path: (path.rename(path.with_name("else")), path.symlink_to("else")),
    "another's to write": lambda path: path.chmod(0o620),
    "anybody's to write": lambda path: path.chmod(0o602),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_an_entry_is_ignored_and_replaced(folder, entry, graph, damage, notices):
    damage(entry)
    assert load(folder, KEY) is None
    if not entry.is_dir():
        folder.store(KEY, graph)
        assert run(load(folder, KEY))["out"].any()
        assert notices() == []


def test_no_flipped_bit_is_overlooked(folder, entry, graph, monkeypatch):
    """Also where it would load, and compute something else."""
    whole = entry.read_bytes()
    for at in range(68, len(whole), len(whole) // 50):
        entry.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert load(folder, KEY) is None, at
    entry.write_bytes(whole)
    assert load(folder, KEY) is not None
    # A file too large to be an entry is not read.
    with monkeypatch.context() as patch:
        patch.setattr(bucket_table, "MAX_ENTRY_BYTES", len(whole) - 1)
        assert load(folder, KEY) is None
    # Damage that no checksum tells: an entry as some other build would have written it.
    library = bucket_table.serialize_executable
    monkeypatch.setattr(library, "serialize", lambda _: (b"x", None, None))
    folder.store(KEY, graph)
    assert load(folder, KEY) is None


# Whose folder it is.


class Attack:
    """Unpickled it makes a folder."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self):
        return os.mkdir, (str(self.made),)


@pytest.mark.parametrize("hole", ["the cache is open", "a link of the user"])
def test_code_of_another_user_is_never_run(tmp_path, monkeypatch, hole):
    """Who may write to a folder puts a link there, to a folder of the user's with a file of theirs."""
    cache, theirs, made = tmp_path / "above" / "cache", tmp_path / "clone", tmp_path / "made"
    payload = pickle.dumps(Attack(made))
    header = bucket_table._HEADER.pack(
        b"jaxllmGX", 1, bytes.fromhex(KEY), len(payload), xxhash.xxh3_128_digest(payload)
    )
    for folder in (theirs, cache):
        folder.mkdir(parents=True, mode=0o700)
    (theirs / f"{KEY}{SUFFIX}").write_bytes(header + payload)
    (theirs / f"{KEY}{SUFFIX}").chmod(0o600)
    if hole == "the cache is open":
        cache.chmod(0o777)
    (cache / "executables").symlink_to(theirs)
    monkeypatch.setenv("JAXLLM_CACHE", str(cache))
    kept = CompiledBucketFolder.of_user(limit_bytes=LIMIT_BYTES)
    assert kept is not None
    assert load(kept, KEY) is None
    assert not made.exists()
    # What it would have done.
    load(CompiledBucketFolder(theirs, limit_bytes=LIMIT_BYTES), KEY)
    assert made.exists()


@pytest.mark.parametrize("reason", ["others may write to it", "No space left on device"])
def test_what_hinders_a_folder_is_told_once_and_leaves_nothing(
    folder, place, graph, notices, monkeypatch, reason
):
    """In which ways others may write to it, `tests/serving/host/test_trusted_path.py` tells."""
    if reason.startswith("others"):
        place.mkdir(parents=True)
        place.chmod(0o702)
    else:
        monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, reason)))
    for key in (KEY, OTHER_KEY):
        assert load(folder, key) is None
        folder.store(key, graph)
    assert os.listdir(place) == []
    (notice,) = notices()
    for part in (str(place), reason, "JAXLLM_CACHE"):
        assert part in notice


# How much is kept.


def keys(place: Path) -> set[str]:
    return {path.name.removesuffix(SUFFIX) for path in place.glob(f"*{SUFFIX}")}


def test_what_was_unused_for_longest_makes_room(place, graph):
    unlimited = CompiledBucketFolder(place, limit_bytes=LIMIT_BYTES)
    names = [f"{n:02x}" * 32 for n in range(4)]
    for age, key in enumerate(names[:3]):
        unlimited.store(key, graph)
        path = place / f"{key}{SUFFIX}"
        os.utime(path, ns=(10**18 + age, 10**18 + age))
    size = path.stat().st_size
    # Its use makes the oldest the newest.
    assert load(unlimited, names[0]) is not None
    CompiledBucketFolder(place, limit_bytes=3 * size).store(names[3], graph)
    assert keys(place) == {names[0], names[2], names[3]}
    # The newest stays though others claim to be newer.
    os.utime(place / f"{names[0]}{SUFFIX}", ns=(2**62, 2**62))
    CompiledBucketFolder(place, limit_bytes=size).store(names[1], graph)
    assert keys(place) == {names[1]}


def test_leftovers_of_killed_processes_go_and_other_files_stay(folder, place, entry, graph):
    killed, foreign = place / f".{KEY}{SUFFIX}.jaxllm-0123456789ab.tmp", place / "notes.txt"
    for path in (killed, foreign):
        path.write_text("")
    with atomic_file(place / f"{KEY}{SUFFIX}"):
        living = [path.name for path in place.iterdir() if path.suffix == ".tmp" and path != killed]
        CompiledBucketFolder(place, limit_bytes=entry.stat().st_size).store(OTHER_KEY, graph)
        left = sorted(path.name for path in place.iterdir())
    assert left == sorted([f"{OTHER_KEY}{SUFFIX}", *living, "notes.txt"])


def test_many_may_store_and_load_at_once(place, graph):
    """Two folders' worth of threads, as two processes would: every load sees a whole graph or none."""
    faults: list[object] = []
    size = len(jax.experimental.serialize_executable.serialize(graph)[0])

    def work(seed: int) -> None:
        mine = CompiledBucketFolder(place, limit_bytes=3 * size)
        for step in range(6):
            key = f"{(seed + step) % 4:02x}" * 32
            mine.store(key, graph)
            again = load(mine, key)
            if again is not None and not run(again)["out"].any():
                faults.append(key)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert faults == []
    assert not list(place.glob("*.tmp"))
