"""Tests the names that a user may give a model, and the cache of prepared folders."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxllm
from jaxllm.bundle.levels import elastic_parts
from jaxllm.elastic.ladder import Ladder
from jaxllm.errors import BundleError, CheckpointError
from jaxllm.prepare import prepare
from jaxllm.serving.ground import bundles
from jaxllm.serving.ground.bundles import (
    default_bundle,
    levels_of,
    open_model,
    open_tokenizer,
    packaged_models,
)
from jaxllm.text import tokenizer_bounds
from tests.tiny import TINY, random_params, tiny_tokenizer, write_tiny_bundle, write_tiny_folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("JAXLLM_CACHE", str(folder))
    return folder


@pytest.fixture
def folder(tmp_path: Path, cache: Path) -> Path:
    return write_tiny_folder(tmp_path / "model", params=random_params(TINY))


def entries(cache: Path) -> dict[Path, tuple[int, int]]:
    """Every file in the cache, with what changes when it is written again."""
    return {
        path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in cache.rglob("*") if path.is_file()
    }


def later(path: Path, seconds: int = 5) -> None:
    """Moves a file's time, as a change within the clock's resolution would not."""
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + seconds * 10**9))


# The three kinds.


def test_packaged_models_go_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "_assets", lambda: tmp_path / "assets")
    (tmp_path / "assets").mkdir()
    for name in ("default", "draft"):
        write_tiny_bundle(tmp_path / "assets" / f"{name}.jaxllm", name=name)
    assert packaged_models() == ["default", "draft"]
    assert open_model("draft").layout.name == "draft"
    assert open_model(None).layout.name == "default"
    # What is there under that name is meant.
    monkeypatch.chdir(tmp_path)
    write_tiny_bundle(tmp_path / "draft", name="mine")
    assert open_model("draft").layout.name == "mine"
    with pytest.raises(CheckpointError, match="one of the packaged models: default, draft"):
        open_model("drafts")


def test_none_is_the_model_in_the_package() -> None:
    path = default_bundle()
    assert path.parent == Path(jaxllm.__file__).parent / "assets"
    with open_model(None) as bundle:
        bundle.verify()
        assert bundle.path == path


def test_a_bundle_is_opened_where_it_is(tmp_path: Path, cache: Path) -> None:
    path = write_tiny_bundle(tmp_path / "any name", "int8", params=random_params(TINY))
    for name, weights in ((path, None), (str(path), "int8")):
        with open_model(name, weights=weights) as bundle:
            assert bundle.path == path
            assert bundle.cfg == TINY
    # It is not converted.
    with pytest.raises(CheckpointError, match=r"any name holds int8 weights, not f32; .* --weights f32"):
        open_model(path, weights="f32")
    assert not cache.exists()
    assert levels_of(path) == ()
    parts = elastic_parts(Ladder(levels=(40, 70, 100)))
    assert levels_of(write_tiny_bundle(tmp_path / "elastic.jaxllm", parts=parts)) == (40, 70)


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("absent", None, CheckpointError, "absent: no such file or folder; .*jaxllm prepare"),
        ("file/below", None, CheckpointError, "file/below: no such file or folder"),
        ("model.gguf", b"GGML" + bytes(500), BundleError, "not a jaxllm bundle"),
        ("model.gguf", b"GGUF" + bytes(500), CheckpointError, "has version 0"),
    ],
)
def test_what_is_no_model(tmp_path: Path, cache: Path, name, content, error, message) -> None:
    (tmp_path / "file").write_text("")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message):
        open_model(tmp_path / name)
    assert not list(cache.rglob("*.jaxllm"))


# The cache.


def test_a_folder_is_prepared_once(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int, int]] = []
    umask = os.umask(0o002)
    try:
        with open_model(folder, progress=lambda *call: calls.append(call)) as bundle:
            first = bundle.fingerprint
            assert bundle.layout.weights == "f32"
            assert bundle.cfg == TINY
            for name, value in bundle.load().items():
                np.testing.assert_array_equal(value, random_params(TINY)[name], strict=True)
    finally:
        os.umask(umask)
    assert calls
    before = entries(cache)
    (path,) = before
    # What is kept is closed to others.
    assert path.stat().st_mode & 0o777 == 0o600
    for each in (cache, *(place for place in path.parents if cache in place.parents)):
        assert each.stat().st_mode & 0o777 == 0o700
    calls.clear()
    with open_model(folder, progress=lambda *call: calls.append(call)) as bundle:
        assert (bundle.fingerprint, bundle.path) == (first, path)
    # Other spellings share its entry, and files that make no model change nothing.
    (folder.parent / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    for name in ("README.md", "pytorch_model.bin", ".gitattributes", "modeling.py"):
        (folder / name).write_text("new")
    for spelling in (".", str(folder) + "/", folder.parent / "link", folder / ".." / "model"):
        open_model(spelling, progress=lambda *call: calls.append(call))
    assert calls == []
    # A folder that went bad leaves the cache alone.
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        open_model(folder)
    for missing in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / missing).rename(folder / "away")
        with pytest.raises(CheckpointError):
            open_model(folder)
        (folder / "away").rename(folder / missing)
    assert entries(cache) == before
    (folder / "model.safetensors").write_bytes(whole)
    # A name may be no UTF-8.
    with open_model(folder.rename(os.fsdecode(os.fsencode(folder) + b"\xff"))) as bundle:
        assert bundle.cfg.layers


def test_widths_and_folders_have_entries_of_their_own(tmp_path: Path, folder: Path, cache: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    models = [open_model(each, weights=weights) for each in (folder, other) for weights in (None, "int4")]
    paths = [model.path for model in models]
    assert set(entries(cache)) == set(paths)
    assert len(set(paths)) == 4
    assert [model.layout.weights for model in models] == ["f32", "int4"] * 2
    # Naming the checkpoint's own width is naming none.
    assert open_model(folder, weights="f32").path == paths[0]


def flip_unseen(path: Path) -> None:
    """Behind the back of size and time."""
    times, size = path.stat(), path.stat().st_size
    flip(path, size - 3)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (size, times.st_mtime_ns)


CHANGES: dict[str, Callable[[Path], Any]] = {
    "some weights": lambda folder: flip_unseen(folder / "model.safetensors"),
    "weights": lambda folder: write_tiny_folder(folder, params=random_params(TINY, seed=1)),
    "weights of the same size": lambda folder: later(folder / "model.safetensors"),
    "tokenizer": lambda folder: later(folder / "tokenizer.json"),
    "config": lambda folder: later(folder / "config.json"),
    "chat template": lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"),
    "file removed": lambda folder: (folder / "chat_template.jinja").unlink(),
    "file added": lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": 5}'),
    "older vocabulary": lambda folder: (folder / "spiece.model").write_text(""),
    "SentencePiece": lambda folder: (folder / "source.spm").write_text(""),
    "tiktoken": lambda folder: (folder / "qwen.tiktoken").write_text(""),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_folder_is_prepared_again(folder: Path, cache: Path, change: Callable[[Path], Any]) -> None:
    """And what it held before makes room, while those who have it open keep it."""
    with open_model(folder) as old:
        loaded = old.load()
        other_width = open_model(folder, weights="int8").path
        change(folder)
        with open_model(folder) as new:
            assert set(entries(cache)) == {new.path, other_width}
            assert new.path != old.path
            direct = cache / "direct"
            prepare(folder, direct)
            assert new.path.read_bytes() == direct.read_bytes()
    for name, value in loaded.items():
        np.testing.assert_array_equal(value, random_params(TINY)[name], strict=True)


def flip(path: Path, place: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)


def test_an_entry_that_went_bad_is_made_again(folder: Path, cache: Path) -> None:
    open_model(folder)
    (path,) = entries(cache)
    whole = path.read_bytes()
    for rot in (
        lambda: path.write_bytes(whole[:-7]),
        lambda: flip(path, 8),
        lambda: flip(path, -5),
        lambda: flip(path, 100_000),
    ):
        rot()
        assert path.read_bytes() != whole
        with open_model(folder) as bundle:
            bundle.verify()
            assert bundle.path == path
        assert list(entries(cache)) == [path]
        assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "plant",
    [
        lambda path: path.chmod(0o666),
        lambda path: (path.rename(path.parents[3] / "planted"), path.symlink_to(path.parents[3] / "planted")),
        lambda path: (path.unlink(), os.mkfifo(path)),
    ],
    ids=["writable", "link", "pipe"],
)
def test_an_entry_that_others_could_have_written_is_made_again(
    folder: Path, cache: Path, plant: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    open_model(folder)
    (path,) = entries(cache)
    write_tiny_bundle(path, name="planted")
    plant(path)
    with open_model(folder) as bundle:
        assert (bundle.path, bundle.layout.name) == (path, "model")
    assert path.is_file()
    assert not path.is_symlink()
    assert "is not used, and made again" in caplog.text
    # Nor is a folder that others may write to, and a cache that is no folder is named.
    path.parent.chmod(0o777)
    with pytest.raises(CheckpointError, match=r"others may write to it.*set JAXLLM_CACHE"):
        open_model(folder)
    shutil.rmtree(cache)
    cache.write_text("kept")
    with pytest.raises(CheckpointError, match=r"cannot be created .*set JAXLLM_CACHE to a writable folder"):
        open_model(folder)
    assert cache.read_text() == "kept"


def test_large_files_are_told_apart_by_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "_SAMPLES", 4)
    monkeypatch.setattr(bundles, "_SAMPLE_BYTES", 10)
    path = tmp_path / "large"
    for size in (1, 10, 39, 40, 41, 1000):
        path.write_bytes(bytes(size))
        before = bundles._sampled_digest(path, size)
        read = 0
        for place in range(size):
            flip(path, place)
            read += bundles._sampled_digest(path, size) != before
            flip(path, place)
        assert read == min(size, 40)


def test_a_gguf_file_is_prepared_once(tmp_path: Path, cache: Path) -> None:
    pytest.importorskip("gguf")
    from tests.checkpoints.gguf_files import config_keys, gguf_tensors, tokenizer_keys, write_file

    keys = {**config_keys(TINY), **tokenizer_keys(tmp_path, TINY.vocab_size)}
    path, tensors = tmp_path / "m.gguf", gguf_tensors(TINY, random_params(TINY))
    write_file(path, "llama", keys, tensors, "Q8_0")
    with open_model(path) as bundle:
        assert (bundle.layout.name, bundle.layout.weights) == ("m", "int8")
    before = entries(cache)
    open_model(path).close()
    assert entries(cache) == before
    with open_model(path, weights="f32") as bundle:
        assert bundle.layout.weights == "f32"
    write_file(path, "llama", keys, tensors, "Q4_0")
    with open_model(path) as bundle:
        assert bundle.layout.weights == "int4"


# Kept verdicts about tokenizers: asked for once per text, never trusted from others, never needed.


def test_a_tokenizer_is_checked_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "_MIN_TEXT_BYTES", 0)
    files, checks, check = tiny_tokenizer(), [], tokenizer_bounds.is_ordinary
    monkeypatch.setattr(tokenizer_bounds, "is_ordinary", lambda text: (checks.append(text), check(text))[1])
    first, again = open_tokenizer(files), open_tokenizer(files)
    assert len(checks) == 1
    assert again.same_tokens(first)
    (path,) = (cache / "tokenizers").iterdir()
    assert path.read_bytes() == b"ordinary"
    # What others may have written is not trusted.
    harms: list[Callable[[], Any]] = [
        lambda: path.chmod(0o666),
        lambda: path.write_bytes(b"ordinaryordinaryordinary"),
        lambda: (path.unlink(), path.symlink_to("/dev/zero")),
    ]
    for count, harm in enumerate(harms, start=2):
        harm()
        open_tokenizer(files)
        assert len(checks) == count
    # Other code has other verdicts.
    (tmp_path / "bounds.py").write_text("# Another check.\n")
    monkeypatch.setattr(tokenizer_bounds, "__file__", str(tmp_path / "bounds.py"))
    open_tokenizer(files)
    assert len(checks) == 5
    # Nothing is kept where the cache is a file.
    shutil.rmtree(cache)
    cache.write_text("")
    assert open_tokenizer(files).same_tokens(first)


def test_weights_are_chosen_for_the_bytes_that_are_left(folder: Path) -> None:
    """The smallest if none fit, to be read from storage; each number of bytes has a bundle of its own."""
    made = []
    for room in (lambda cfg: -5, lambda cfg: 1 << 30, None, None):
        with open_model(folder, weights="auto", room=room) as bundle:
            assert bundle.load_part("chosen_weights") is not None
            made.append((bundle.layout.weights, bundle.path))
    assert [weights for weights, _ in made[:2]] == ["int4-all", "int8"]
    assert len({path for _, path in made}) == 3
    assert made[2] == made[3]
