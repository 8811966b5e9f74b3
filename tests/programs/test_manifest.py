"""What a folder of programs says of itself, and folders that must not be believed."""

import dataclasses
import json

import numpy as np
import pytest

from jaxllm.errors import ProgramError
from jaxllm.programs.manifest import (
    MANIFEST,
    TOKENIZER,
    Argument,
    Manifest,
    ProgramLevel,
    Signature,
    StoredFile,
    cache_shapes,
    read_tokenizer,
    write_tokenizer,
)
from jaxllm.programs.weights import read_weights, write_weights
from tests.tiny import TINY, tiny_tokenizer

ARRAYS = {"a": np.arange(32, dtype=np.float32).reshape(4, 8), "b": np.ones(3, np.int8)}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"programs")
    write_tokenizer(tmp_path, tiny_tokenizer())
    levels = {100: ProgramLevel(cfg=TINY, weights={"a": Argument(stored="a", shape=(2, 8))})}
    sizes = [("prefill", 64), ("prefill", 16), ("decode", 1), ("verify", 8)]
    manifest = Manifest(
        format="stablehlo",
        name="tiny",
        model="f00d",
        context_tokens=64,
        precision="f32",
        cache_dtype="float32",
        platforms=("cpu",),
        levels=levels,
        signatures=tuple(
            Signature(kind=kind, tokens=tokens, level=100, file="x.bin") for kind, tokens in sizes
        ),
        files={name: StoredFile.of(tmp_path / name) for name in ("x.bin", TOKENIZER)},
        made_with={"jax": "1"},
    )
    manifest.write(tmp_path)
    return tmp_path


def edited(folder, **change):
    data = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**data, **change}))


def test_what_is_written_is_read(folder):
    manifest = Manifest.read(folder)
    assert manifest.levels[100].cfg == TINY
    assert manifest.levels[100].weights["a"] == Argument(stored="a", shape=(2, 8))
    assert manifest.chunk_tokens(100) == (16, 64)
    assert manifest.verify_tokens(100) == (8,)
    assert manifest.signature("verify", 8, 100).name == "verify_8"
    assert read_tokenizer(folder) == tiny_tokenizer()
    assert manifest.require_intact(folder, "x.bin") == folder / "x.bin"
    assert manifest.cache_shapes(100) == cache_shapes(TINY, 64)
    assert manifest.cache_shapes(100)["kv_cache_v_1"] == (1, TINY.kv_heads, 64, TINY.head_dim)


def test_names_of_signatures():
    """LiteRT-LM takes every signature whose name begins with `prefill` for the model's own."""
    one = Signature(kind="prefill", tokens=16, level=100, file="")
    assert one.name == "prefill_16"
    assert dataclasses.replace(one, level=30).name == "level_30_prefill_16"
    assert Signature(kind="decode", tokens=1, level=100, file="").name == "decode"


def test_a_program_that_is_not_there(folder):
    with pytest.raises(ProgramError, match=r"no prefill program of 32 tokens .* prefill_64, prefill_16"):
        Manifest.read(folder).signature("prefill", 32, 100)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"version": 99}, "version 99"),
        ({"format": "live"}, "format 'live'"),
        ({"precision": "int3"}, "precision 'int3'"),
        ({"levels": {}}, "without a file or level"),
        (
            {"files": {"../x": {"size_bytes": 1, "xxh3_128": ""}}, "signatures": []},
            "not a file of its",
        ),
        ({"extra": 1}, "malformed"),
        ({"signatures": [{"kind": "decode", "tokens": 1, "level": 100, "file": "y"}]}, "without a file"),
    ],
)
def test_a_malformed_manifest_is_refused(folder, change, part):
    edited(folder, **change)
    with pytest.raises(ProgramError, match=part):
        Manifest.read(folder)


def test_a_folder_that_is_none_or_incomplete(folder, tmp_path_factory):
    with pytest.raises(ProgramError, match="jaxllm export"):
        Manifest.read(tmp_path_factory.mktemp("nothing"))
    (folder / "x.bin").write_bytes(b"short")
    with pytest.raises(ProgramError, match=r"x\.bin: missing or truncated"):
        Manifest.read(folder)
    (folder / "x.bin").write_bytes(b"PROGRAMS")
    with pytest.raises(ProgramError, match="checksum"):
        Manifest.read(folder).require_intact(folder, "x.bin")
    (folder / MANIFEST).write_text("{")
    with pytest.raises(ProgramError, match="malformed"):
        Manifest.read(folder)


def test_weights_come_back_at_places_that_a_processor_reads(tmp_path):
    path = tmp_path / "w.safetensors"
    write_weights(path, ARRAYS, model="f00d")
    back = read_weights(path, model="f00d")
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(back[name], array)
        assert back[name].dtype == array.dtype
    assert back["a"].ctypes.data % 64 == 0


def test_weights_are_safetensors(tmp_path):
    from safetensors.numpy import load_file

    write_weights(tmp_path / "w.safetensors", ARRAYS, model="f00d")
    np.testing.assert_array_equal(load_file(tmp_path / "w.safetensors")["a"], ARRAYS["a"])


def test_weights_of_another_bundle_or_none(tmp_path):
    path = tmp_path / "w.safetensors"
    write_weights(path, ARRAYS, model="f00d")
    with pytest.raises(ProgramError, match=r"another bundle \(f00d\) than the programs beside them \(beef\)"):
        read_weights(path, model="beef")
    raw = path.read_bytes()
    for broken in (raw[:20], raw[:-5], b"\xff" * 64):
        path.write_bytes(broken)
        with pytest.raises(ProgramError, match="malformed"):
            read_weights(path, model="f00d")
