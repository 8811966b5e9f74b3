"""Bundles made to harm, every checksum in them right: refused as bundles, or harmless."""

import functools
import itertools
import json
import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xxhash

from jaxllm.bundle import Bundle, WeightFormat
from jaxllm.bundle.calibrations import expert_parts, read_path_counts, read_token_experts
from jaxllm.bundle.layout import HEADER, MAGIC, MAX_MANIFEST_BYTES, PAGE, VERSION
from jaxllm.config import ModelConfig
from jaxllm.errors import BundleError
from jaxllm.experts.prediction import PathCounts, TokenExperts
from jaxllm.models import decoder
from tests.bundle.forging import (
    MICRO,
    MIXED,
    ORNATE,
    every_format,
    forge,
    manifest_at,
    manifest_of,
    open_only,
    refused,
    use,
    write,
)

Manifest = dict[str, Any]

HOSTILE_BYTES = {
    "empty": b"",
    "not UTF-8": b'{"name": "\xff"}',
    "nested model": b'{"name":"m","weights":"f32","model":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "long number": b'{"name": ' + b"9" * 100_000 + b"}",
    "null": b"null",
}


@pytest.mark.parametrize("raw", HOSTILE_BYTES.values(), ids=HOSTILE_BYTES)
def test_manifests_that_are_no_object(micro_file: Path, raw: bytes) -> None:
    refused(forge(micro_file, raw), when=open_only)


# A place in the manifest, another value or what makes one of the manifest, and what is said at opening.
# What JUNK below is not: values that could be right elsewhere, and what is missing, double or out of order.
Change = tuple[tuple[Any, ...], Any, str]
GONE = object()
HEAD, UP, LOW, NORM = "head", "layers.0.ffn.up", "layers.0.attn.q", "layers.0.attn_norm.scale"
HOSTILE: list[Change] = [
    (("tensors", HEAD, "data", "offset"), 0, "outside its segment"),
    (("tensors", NORM, "data", "offset"), lambda m: m["tensors"][NORM]["data"]["offset"] + 4, "not aligned"),
    (("tensors", HEAD, "data", "shape"), [1 << 40, 1 << 40], "outside its segment"),
    (("tensors", HEAD, "data", "dtype"), "complex128", "'complex128' is not one"),
    (("tensors", "final_norm.scale", "data", "dtype"), "bfloat16", "must be float32"),
    (("tensors", HEAD), GONE, "differing: ['head']"),
    (("tensors", "more"), lambda m: m["tensors"][HEAD], "differing: ['more']"),
    (("tensors",), lambda m: dict(reversed(m["tensors"].items())), "do not match the config"),
    (("tensors", HEAD, "segment"), "heap", "outside its segment"),
    (("segments", 0), GONE, "tokenizer is missing"),
    (("segments", -1), GONE, "outside its segment"),
    (("segments", 0, "offset"), 0, "outside the file"),
    (("segments", -1, "size_bytes"), 1 << 60, "outside the file"),
    (("segments", 0, "xxh3_128"), "", "'tokenizer' is corrupt"),
    (("model", "vocab_size"), 9, "embed.tokens must be"),
    (("model", "layers"), 2, ""),
    (("experts_apart",), True, "experts_apart is True in a model of 0"),
]


def of_up(dtype: str, *shape: int) -> dict[str, Any]:
    return {"offset": PAGE, "dtype": dtype, "shape": [*shape]}


QUANTIZED: list[Change] = [
    (("tensors", UP, "bits"), 8, ""),
    (("tensors", UP, "columns"), 8, ""),
    (("tensors", UP, "data"), of_up("uint8", 1, 2, 256), ""),
    (("tensors", UP, "data"), of_up("int8", 1, 1, 256), ""),
    (("tensors", UP, "group"), 1 << 62, ""),
    (("tensors", UP, "scale"), of_up("float32", 1, 1, 16), ""),
]


def segments(m: Manifest, name: str, other: str = "") -> list[dict[str, Any]]:
    """The segments without one, or with it where another is."""
    places = {each["name"]: each["offset"] for each in m["segments"]}
    moved = (
        {**each, "offset": places.get(other)} if each["name"] == name else each for each in m["segments"]
    )
    return [each for each in moved if each["offset"] is not None]


# Low planes where the high ones are, not aligned, endless, not there, of a vector, without a segment, before.
PLANES: list[Change] = [
    (("tensors", LOW, "low", "offset"), lambda m: m["tensors"][LOW]["data"]["offset"], ""),
    (("tensors", LOW, "low", "offset"), lambda m: m["tensors"][LOW]["low"]["offset"] + 1, ""),
    (("tensors", LOW, "low", "shape"), [1 << 62, 1 << 62], ""),
    (("tensors", LOW, "low"), GONE, ""),
    (("tensors", NORM, "low"), lambda m: m["tensors"][LOW]["low"], ""),
    (("segments",), lambda m: segments(m, "layers.0.low"), ""),
    (("segments",), lambda m: segments(m, "layers.0.low", "layers.0"), ""),
]
EXPERT, NEIGHBOUR, COUNTS = (
    "layers.1.experts.0.gate",
    "layers.1.experts.1.gate",
    ("parts", "experts", "tensors"),
)
EXPERTS: list[Change] = [
    (("tensors", EXPERT, "segment"), "layers.1.experts.1", "outside its segment"),
    (("tensors", EXPERT, "data"), lambda m: m["tensors"][NEIGHBOUR]["data"], "outside its segment"),
    (("tensors", EXPERT, "bits"), 4, "quantized in a way"),
    (("segments",), lambda m: segments(m, "layers.1.experts.0"), "outside its segment"),
    (("experts_apart",), False, "parameters do not match"),
    ((*COUNTS, "alone", "data", "shape"), [1, 1 << 40], "outside its segment"),
    ((*COUNTS, "pairs", "data", "dtype"), "int128", "not one a bundle may hold"),
]


def changed(path: Path, place: tuple[Any, ...], value: Any) -> Path:
    """The bundle with another value at a place of its manifest, or with none."""
    manifest = manifest_of(path)
    node = functools.reduce(lambda node, key: node[key], place[:-1], manifest)
    if value is GONE:
        del node[place[-1]]
    else:
        node[place[-1]] = value(manifest) if callable(value) else value
    return forge(path, manifest)


def write_mixture(path: Path) -> Path:
    """A mixture whose three experts have widths of their own, and counts of one layer's visits."""
    counts = PathCounts(
        np.ones((1, 3), np.float32), np.zeros((1, 3, 3), np.float32), np.full((1, 0), -1, np.int32),
        np.zeros((1, 0, 3), np.float32),
    )  # fmt: skip
    tokens = TokenExperts(np.array([1, 2], np.int32), np.zeros((1, 2, MIXED.experts_per_token), np.uint8))
    bits, parts = np.array([[8, 4, 2]]), expert_parts(counts, tokens=tokens)
    return write(path, "int8", MIXED, expert_bits=bits, parts=parts)


WRITTEN: list[tuple[Callable[[Path], Path], list[Change]]] = [
    (lambda path: write(path, cfg=MICRO), HOSTILE),
    (lambda path: write(path, "int4", MICRO), QUANTIZED),
    (lambda path: write(path, "int8-nested", MICRO), PLANES),
    (write_mixture, EXPERTS),
]


@pytest.mark.parametrize(
    ("made", "place", "value", "part"), [(made, *change) for made, changes in WRITTEN for change in changes]
)
def test_hostile_manifests_are_refused(tmp_path: Path, made: Any, place: Any, value: Any, part: str) -> None:
    path = changed(made(tmp_path / "m.jaxllm"), place, value)
    # At opening; only a segment's checksum is compared later.
    refused(path, part, when=use if part.endswith("corrupt") else open_only)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("alone", [3, 1]), ("after_one", [1, 9]), ("pairs", [0]), ("tokens", [1]), ("token_experts", [2, 1])],
)
def test_counts_of_another_model_are_refused(tmp_path: Path, name: str, shape: list[int]) -> None:
    path = write_mixture(tmp_path / "m.jaxllm")

    def read(path: Path) -> list[Any]:
        with Bundle.open(path) as bundle:
            return [read_path_counts(bundle).alone.tolist(), read_token_experts(bundle).tokens.tolist()]

    assert read(path) == [[[1.0, 1.0, 1.0]], [1, 2]]
    said = "make it again with `jaxllm calibrate experts`"
    refused(changed(path, (*COUNTS, name, "data", "shape"), shape), said, when=read)


@pytest.mark.parametrize("name", ["final_norm.scale", "embed.positions", "layers.0.attn.q_bias"])
def test_vectors_cannot_be_quantized(tmp_path: Path, name: str) -> None:
    """Even one of a matrix's rank: the graphs use it without dequantizing."""
    path = write(tmp_path / "m", "int8", ORNATE)
    manifest = manifest_of(path)
    entry = manifest["tensors"][name]
    shape, offset = entry["data"]["shape"], entry["data"]["offset"]
    entry["data"]["dtype"] = "int8"
    entry["scale"] = {"offset": offset, "dtype": "float32", "shape": [*shape[:-1], 1]}
    entry.update(bits=8, group=0, axis=-1)
    refused(forge(path, manifest), f"parameter {name}", when=open_only)


@pytest.mark.parametrize("name", ["\ud800", "\x1b[2J\x07", "a\nb", "\u202e", 5, None, ["x"], {}])
def test_a_name_is_safe_to_print(micro_file: Path, name: Any) -> None:
    with Bundle.open(changed(micro_file, ("name",), name)) as bundle:
        assert bundle.layout.name.isprintable()
        bundle.layout.name.encode()


# What would do most harm first: of the values that a place accepts, the first is run.
JUNK: tuple[Any, ...] = (
    {}, [], "", "x", [0], [[]], {"a": 0}, float("nan"), float("inf"), 10**400, 1 << 62, -1, 0, True, False,
    3, 0.5, 32.0, 64, None,
)  # fmt: skip


def places(node: Any, *at: Any) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside a JSON value."""
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield (*at, key)
        yield from places(child, *at, key)


# One tensor of each role; the others' entries differ in nothing.
ROLES = ("embed.tokens", "layers.0.attn.q", "layers.0.ffn.down", "final_norm.scale")


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["f32", "int4"])
def test_any_value_anywhere_is_refused_or_runs(tmp_path: Path, weights: WeightFormat) -> None:
    """What a bundle with one wrong value does not refuse as such, its own config can run."""
    path = write(tmp_path / "m", weights, MICRO)
    original = path.read_bytes()
    manifest = manifest_of(path)
    accepted: dict[tuple[Any, ...], list[Any]] = {}
    models = set()

    def run(params: Any, cfg: ModelConfig) -> jax.Array:
        hidden, _ = decoder.forward(params, jnp.zeros((1, 2), jnp.int32), cfg=cfg)
        return decoder.logits(params, hidden, cfg=cfg)

    tried = [at for at in places(manifest) if at[0] != "tensors" or (*at, None)[1] in (None, *ROLES)]
    if weights == "int4":
        # Only tensors look different.
        tried = [at for at in tried if at[0] == "tensors"]
    for at, value in itertools.product(tried, JUNK):
        path.write_bytes(original)
        try:
            with Bundle.open(changed(path, at, value)) as bundle:
                bundle.tokenizer_files()
                params = bundle.load()
                bundle.verify()
        except BundleError:
            continue
        accepted.setdefault(at, []).append(value)
        json.dumps(bundle.cfg.to_json(), allow_nan=False)
        model = (bundle.cfg, *map(jax.tree.structure, params.values()))
        if len(accepted[at]) == 1 and model not in models:
            models.add(model)
            assert jax.eval_shape(functools.partial(run, cfg=bundle.cfg), params).shape == (1, 2, 8)
    # Names are free, some numbers are; no place of a tensor is, but for a group that covers as much.
    assert len(models) >= (3 if weights == "f32" else 2)
    assert {at[-1] for at in accepted if at[0] == "tensors"} <= {"axis", "group"}
    assert {at[-1] for at in accepted if at[0] == "segments"} == set()


HOSTILE_TOKENIZERS = {
    "not UTF-8": b'"\xff\xfe"',
    "nested": b"[" * 200_000,
    "null": b'{"tokenizer_json": null}',
}


@pytest.mark.parametrize("raw", HOSTILE_TOKENIZERS.values(), ids=HOSTILE_TOKENIZERS)
def test_hostile_tokenizers_are_refused(micro_file: Path, raw: bytes) -> None:
    """The tokenizer's segment holds other bytes, and a checksum that fits them."""
    manifest = manifest_of(micro_file)
    file = bytearray(micro_file.read_bytes())
    place = manifest_at(file)
    file[place:] = raw
    header = list(HEADER.unpack(file[: HEADER.size]))
    header[3] = len(file)
    micro_file.write_bytes(HEADER.pack(*header) + file[HEADER.size :])
    manifest["segments"][0].update(offset=place, size_bytes=len(raw), xxh3_128=xxhash.xxh3_128_hexdigest(raw))
    with Bundle.open(forge(micro_file, manifest)) as bundle:
        with pytest.raises(BundleError, match="the tokenizer is malformed") as caught:
            bundle.tokenizer_files()
        assert "\n" not in str(caught.value)
        # The weights are not to blame.
        bundle.load()


# Bundles that were cut, flipped, mixed up with other files: caught, and named.


def test_missing(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "No such file", when=open_only)
    refused(tmp_path, "a folder, not a regular file", when=open_only)
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "a pipe or device, not a regular file", when=open_only)
    refused(Path("/dev/zero"), "a pipe or device, not a regular file", when=open_only)


def test_every_length_that_is_not_the_whole_is_caught_at_opening(tmp_path: Path) -> None:
    whole = write(tmp_path / "tiny.jaxllm")
    raw = whole.read_bytes()
    with Bundle.open(whole) as bundle:
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
