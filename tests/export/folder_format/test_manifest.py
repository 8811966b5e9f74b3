"""Tests the manifest of a folder of programs, and refuses folders that must not be believed."""

import dataclasses
import json
import struct

import numpy as np
import pytest

from jaxllm.errors import ProgramError
from jaxllm.export.folder_format.manifest import MANIFEST, TOKENIZER, Manifest, StoredFile, write_tokenizer
from jaxllm.export.folder_format.parts import Argument, ProgramLevel
from jaxllm.export.folder_format.signature import Signature, level_signatures
from jaxllm.export.folder_format.weights import read_weights, write_weights
from tests.tiny import TINY, tiny_tokenizer

ARRAYS = {"a": np.arange(32, dtype=np.float32).reshape(4, 8), "b": np.ones(3, np.int8)}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"programs")
    write_tokenizer(tmp_path / TOKENIZER, tiny_tokenizer())
    levels = {100: ProgramLevel(cfg=TINY, weights={"a": Argument(stored="a", shape=(2, 8))})}
    sizes = [("prefill", 64), ("prefill", 16), ("decode", 1), ("verify", 8)]
    signatures = [Signature(kind=kind, tokens=tokens, level=100, file="x.bin") for kind, tokens in sizes]
    manifest = Manifest(
        format="stablehlo", name="tiny", model="f00d", context_tokens=64, precision="f32",
        cache_dtype="float32", platforms=("cpu",), levels=levels, signatures=tuple(signatures),
        files={name: StoredFile.of(tmp_path / name) for name in ("x.bin", TOKENIZER)}, made_with={"jax": "1"},
    )  # fmt: skip
    manifest.write(tmp_path)
    return tmp_path


SIGNATURES = [
    {"kind": kind, "tokens": tokens, "level": 100, "file": "x.bin"}
    for kind, tokens in (("prefill", 16), ("decode", 1))
]


def test_what_is_written_is_read(folder):
    manifest = Manifest.read(folder)
    assert manifest.levels[100].cfg == TINY
    assert manifest.levels[100].weights["a"] == Argument(stored="a", shape=(2, 8))
    assert (manifest.sizes("prefill"), manifest.sizes("verify", 100, 64)) == ((16, 64), (8,))
    assert manifest.signature("verify", 8, 100, 64).name == "verify_8"
    with pytest.raises(ProgramError, match=r"no prefill program of 32 tokens .* prefill_64, prefill_16"):
        manifest.signature("prefill", 32, 100, 64)
    assert manifest.read_tokenizer(folder) == tiny_tokenizer()
    assert manifest.require_intact(folder, "x.bin") == folder / "x.bin"
    assert manifest.cache_shapes(100, 64)["kv_cache_v_1"] == (1, TINY.kv_heads, 64, TINY.head_dim)


def test_signatures_of_short_caches_are_those_that_they_hold():
    found = level_signatures(
        30, chunk_tokens=(16, 64), verify_tokens=(8,), cache_tokens=(32,), file=str.upper
    )
    sizes = [(each.kind, each.tokens, each.cache_tokens) for each in found]
    short = [("prefill", 16, 32), ("decode", 1, 32), ("verify", 8, 32)]
    assert sizes == [*short, ("prefill", 16, 0), ("prefill", 64, 0), ("decode", 1, 0), ("verify", 8, 0)]
    assert [each.file for each in found] == [each.name.upper() for each in found]
    # LiteRT-LM takes every signature whose name begins with `prefill` for the model's own.
    assert (found[0].name, found[-2].name) == ("level_30_cache_32_prefill_16", "level_30_decode")


def test_a_level_takes_the_beginnings_of_arrays():
    arguments = {"part": Argument(stored="a", shape=(2, 8)), "whole": Argument(stored="b", shape=(3,))}
    views = ProgramLevel(cfg=TINY, weights=arguments).views(ARRAYS)
    assert views["part"].ctypes.data == ARRAYS["a"].ctypes.data
    np.testing.assert_array_equal(views["part"], ARRAYS["a"][:2])
    for stored, shape in (("a", (2, 9)), ("a", (5, 8)), ("c", (1,)), ("a", (2,))):
        level = ProgramLevel(cfg=TINY, weights={"x": Argument(stored=stored, shape=shape)})
        with pytest.raises(ProgramError, match=f"beginning .* of {stored}, which is missing or another"):
            level.views(ARRAYS)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"version": 99}, "version 99"),
        ({"format": "live"}, "format 'live'"),
        ({"context_tokens": 1 << 20}, "context_tokens 1048576 is more than the window"),
        (
            {"files": {name: {"size_bytes": 1, "xxh3_128": ""} for name in ("../x", "x.bin", TOKENIZER)}},
            "not a file of",
        ),
        ({"extra": 1}, "malformed"),
        ({"signatures": [{"kind": "decode", "tokens": 1, "level": 100, "file": "x.bin"}]}, "cannot read"),
        ({"signatures": [*SIGNATURES, {**SIGNATURES[0], "tokens": 8, "file": "y"}]}, "no file y"),
        ({"signatures": [*SIGNATURES, {**SIGNATURES[0], "tokens": "8"}]}, "whole number in .* got '8'"),
        ({"signatures": [*SIGNATURES, {**SIGNATURES[0], "tokens": 65}]}, "does not fit"),
        ({"signatures": [*SIGNATURES, {**SIGNATURES[0], "cache_tokens": 32}]}, "in 32 tokens"),
    ],
)
def test_a_malformed_manifest_is_refused(folder, change, part):
    data = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**data, **change}))
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


def test_a_corrupt_tokenizer(folder):
    manifest = Manifest.read(folder)
    for text in ("{", "[]", '{"tokenizer_json": 7}', '{"strange": 1}'):
        (folder / TOKENIZER).write_text(text)
        files = {**manifest.files, TOKENIZER: StoredFile.of(folder / TOKENIZER)}
        with pytest.raises(ProgramError, match=r"tokenizer\.json: malformed"):
            dataclasses.replace(manifest, files=files).read_tokenizer(folder)
    with pytest.raises(ProgramError, match="checksum"):
        manifest.read_tokenizer(folder)


def test_weights_are_safetensors_at_places_that_a_processor_reads(tmp_path):
    from safetensors.numpy import load_file

    path = tmp_path / "w.safetensors"
    write_weights(path, ARRAYS, model="f00d")
    back = read_weights(path, model="f00d")
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(back[name], array)
        assert back[name].dtype == array.dtype
    assert back["a"].ctypes.data % 64 == 0
    np.testing.assert_array_equal(load_file(path)["a"], ARRAYS["a"])


def test_weights_of_another_bundle_or_none(tmp_path):
    path = tmp_path / "w.safetensors"
    write_weights(path, ARRAYS, model="f00d")
    with pytest.raises(ProgramError, match=r"another bundle \(f00d\) than the programs beside them \(beef\)"):
        read_weights(path, model="beef")
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])

    def with_header(value):
        text = json.dumps(value).encode()
        return struct.pack("<Q", len(text)) + text + raw[8 + length :]

    flat = {**header, "a": {**header["a"], "shape": [-1, 8]}}
    nameless = {**header, "__metadata__": 7}
    cases = (b"", raw[:20], raw[:-5], b"\xff" * 64, *map(with_header, ([], "x", flat, nameless)))
    for broken in cases:
        path.write_bytes(broken)
        with pytest.raises(ProgramError, match="malformed"):
            read_weights(path, model="f00d")
