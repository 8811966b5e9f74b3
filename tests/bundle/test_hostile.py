"""Bundles made to harm, every checksum in them right: refused as bundles, or harmless."""

import copy
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import xxhash

from jaxllm.bundle import Bundle, WeightFormat
from jaxllm.bundle.layout import HEADER, PAGE
from jaxllm.config import ModelConfig
from jaxllm.errors import BundleError
from jaxllm.models import decoder
from tests.bundle.forging import (
    MICRO,
    ORNATE,
    forge,
    manifest_at,
    manifest_of,
    open_only,
    params_of,
    refused,
    same_bits,
    use,
    write,
)

Manifest = dict[str, Any]

HOSTILE_BYTES = {
    "empty": b"",
    "not JSON": b"\x93NUMPY",
    "not UTF-8": b'{"name": "\xff"}',
    "cut": b'{"name": "tiny", "weights": ',
    "nested lists": b"[" * 200_000,
    "nested objects": b'{"a":' * 200_000,
    "nested and closed": b"[" * 200_000 + b"]" * 200_000,
    "nested model": b'{"name":"m","weights":"f32","model":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "long number": b'{"name": ' + b"9" * 100_000 + b"}",
    "null": b"null",
    "a list": b"[]",
    "a text": b'"manifest"',
    "a number": b"1e999",
    "not a number": b"NaN",
}


@pytest.mark.parametrize("raw", HOSTILE_BYTES.values(), ids=HOSTILE_BYTES)
def test_manifests_that_are_no_object(micro_file: Path, raw: bytes) -> None:
    refused(forge(micro_file, raw), when=open_only)


def _move(name: str, offset: Any) -> Callable[[Manifest], None]:
    return lambda m: m["tensors"][name]["data"].update(offset=offset)


def _shape(name: str, shape: Any) -> Callable[[Manifest], None]:
    return lambda m: m["tensors"][name]["data"].update(shape=shape)


def _dtype(name: str, dtype: Any) -> Callable[[Manifest], None]:
    return lambda m: m["tensors"][name]["data"].update(dtype=dtype)


def _segment(at: int, **change: Any) -> Callable[[Manifest], None]:
    return lambda m: m["segments"][at].update(change)


def _model(**change: Any) -> Callable[[Manifest], None]:
    return lambda m: m["model"].update(change)


def _rename(m: Manifest) -> None:
    m["tensors"]["haed"] = m["tensors"].pop("head")


def _reorder(m: Manifest) -> None:
    m["tensors"] = dict(reversed(m["tensors"].items()))


def _swap_segments(m: Manifest) -> None:
    m["tensors"]["head"]["segment"] = "embed"


def _drop_segment(at: int) -> Callable[[Manifest], None]:
    return lambda m: m["segments"].pop(at)


HOSTILE: dict[str, tuple[str, Callable[[Manifest], Any]]] = {
    "tensor before its segment": ("outside its segment", _move("head", 0)),
    "tensor in another segment": ("outside its segment", _move("head", PAGE)),
    "tensor behind the file": ("outside its segment", _move("head", 1 << 40)),
    "tensor past 64 bits": ("outside its segment", _move("head", 1 << 200)),
    "negative offset": ("malformed place", _move("head", -64)),
    "fractional offset": ("malformed place", _move("head", 64.0)),
    "boolean offset": ("malformed place", _move("head", True)),
    "infinite offset": ("malformed place", _move("head", float("inf"))),
    "text offset": ("malformed place", _move("head", "64")),
    "null offset": ("malformed place", _move("head", None)),
    "misaligned offset": (
        "not aligned",
        lambda m: m["tensors"]["layers.0.attn_norm.scale"]["data"].update(
            offset=m["tensors"]["layers.0.attn_norm.scale"]["data"]["offset"] + 4
        ),
    ),
    "negative shape": ("malformed place", _shape("head", [-8, -8])),
    "huge shape": ("outside its segment", _shape("head", [1 << 40, 1 << 40])),
    "shape past 64 bits": ("outside its segment", _shape("head", [1 << 100, 1 << 100])),
    "no elements": ("must be float32", _shape("head", [1 << 100, 0])),
    "empty shape": ("must be float32", _shape("head", [])),
    "flat shape": ("must be float32", _shape("head", [64])),
    "transposed shape": ("must be float32", _shape("layers.0.ffn.up", [8, 6])),
    "text shape": ("malformed place", _shape("head", "88")),
    "nested shape": ("malformed place", _shape("head", [[8], 8])),
    "number as shape": ("malformed manifest", _shape("head", 8)),
    "null shape": ("malformed manifest", _shape("head", None)),
    "integers without scales": ("must be float32", _dtype("head", "int8")),
    "unknown dtype": ("'complex128' is not one", _dtype("head", "complex128")),
    "object dtype": ("'object' is not one", _dtype("head", "object")),
    "list as dtype": ("malformed manifest", _dtype("head", ["float32"])),
    "narrow vector": ("must be float32", _dtype("final_norm.scale", "bfloat16")),
    "no tensors": ("do not match the config", lambda m: m["tensors"].clear()),
    "missing tensor": ("differing: ['head']", lambda m: m["tensors"].pop("head")),
    "extra tensor": (
        "differing: ['more']",
        lambda m: m["tensors"].update(more=copy.deepcopy(m["tensors"]["head"])),
    ),
    "renamed tensor": ("differing: ['haed', 'head']", _rename),
    "tensors out of order": ("do not match the config", _reorder),
    "list of tensors": ("malformed manifest", lambda m: m.update(tensors=list(m["tensors"].items()))),
    "null tensor": ("malformed manifest", lambda m: m["tensors"].update(head=None)),
    "text as tensor": ("", lambda m: m["tensors"].update(head="data")),
    "tensor with more keys": ("malformed manifest", lambda m: m["tensors"]["head"].update(code="import os")),
    "tensor without data": ("malformed manifest", lambda m: m["tensors"]["head"].update(data=None)),
    "tensor without segment": ("malformed manifest", lambda m: m["tensors"]["head"].pop("segment")),
    "tensor of an unknown segment": (
        "outside its segment",
        lambda m: m["tensors"]["head"].update(segment="heap"),
    ),
    "tensor of another layer's segment": ("outside its segment", _swap_segments),
    "no tokenizer": ("tokenizer is missing", _drop_segment(0)),
    "no last segment": ("outside its segment", _drop_segment(-1)),
    "no segments": ("tokenizer is missing", lambda m: m["segments"].clear()),
    "segment before the file": ("malformed segment", _segment(0, offset=-4096)),
    "segment over the header": ("outside the file", _segment(0, offset=0)),
    "segment behind the file": ("outside the file", _segment(0, offset=1 << 60)),
    "segment past the end": ("outside the file", _segment(-1, size_bytes=1 << 60)),
    "negative segment": ("malformed segment", _segment(0, size_bytes=-1)),
    "fractional segment": ("malformed segment", _segment(0, size_bytes=4096.0)),
    "text in a segment": ("malformed segment", _segment(0, offset="4096")),
    "null checksum": ("malformed segment", _segment(0, xxh3_128=None)),
    "other checksum": ("'tokenizer' is corrupt", _segment(0, xxh3_128="")),
    "nameless segment": ("malformed manifest", lambda m: m["segments"][0].pop("name")),
    "list as segment name": ("malformed", _segment(0, name=[])),
    "number as segment": ("malformed manifest", lambda m: m["segments"].append(5)),
    "null segments": ("malformed manifest", lambda m: m.update(segments=None)),
    "unknown weights": ("weights 'f64' is not one of", lambda m: m.update(weights="f64")),
    "null weights": ("weights None is not one of", lambda m: m.update(weights=None)),
    "null model": ("malformed manifest", lambda m: m.update(model=None)),
    "empty model": ("malformed model config", lambda m: m.update(model={})),
    "unknown model key": ("malformed model config", _model(trust_remote_code=True)),
    "another vocabulary": ("embed.tokens must be", _model(vocab_size=9)),
    "another width": ("must be float32", _model(hidden_size=16)),
    "more layers": ("do not match the config", _model(layers=2, attention_windows=[])),
    "most layers": ("do not match the config", _model(layers=4096, attention_windows=[])),
    "too many layers": ("layers must be", _model(layers=1 << 60)),
    "no layers": ("layers must be", _model(layers=0)),
    "text as width": ("hidden_size must be", _model(hidden_size="8")),
    "flag as width": ("hidden_size must be", _model(hidden_size=True)),
    "null norm_eps": ("", _model(norm_eps=None)),
    "text as scale": ("embed_scale", _model(embed_scale="1")),
    "not a number as scale": ("embed_scale", _model(embed_scale=float("nan"))),
    "endless whole scale": ("embed_scale", _model(embed_scale=10**400)),
    "endless scale": ("attention_scale", _model(attention_scale=float("inf"))),
    "list as scale": ("attention_scale", _model(attention_scale=[1])),
    "text as flag": ("qk_norm", _model(qk_norm="no")),
    "fractional window": ("attention_windows", _model(attention_windows=[0.5])),
    "list as window": ("attention_windows", _model(attention_windows=[[1]])),
    "number as model type": ("model_type", _model(model_type=5)),
    "text as rope": ("malformed model config", _model(rope="yes")),
    "list as rope base": ("theta", _model(rope={"dim": 4, "theta": [1]})),
    "endless rope base": ("theta", _model(rope={"dim": 4, "theta": float("inf")})),
}


@pytest.mark.parametrize(("part", "edit"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_manifests_are_refused(micro_file: Path, part: str, edit: Callable[[Manifest], Any]) -> None:
    manifest = manifest_of(micro_file)
    edit(manifest)
    # At opening; only a segment's checksum is compared later.
    when = use if part.endswith("corrupt") else open_only
    refused(forge(micro_file, manifest), part, when=when)


HOSTILE_QUANTIZATION: dict[str, tuple[str, dict[str, Any]]] = {
    "bits": ("layers.0.ffn.up", {"bits": 5}),
    "fractional bits": ("layers.0.ffn.up", {"bits": 4.0}),
    "null bits": ("layers.0.ffn.up", {"bits": None}),
    "width of the other bits": ("layers.0.ffn.up", {"bits": 8}),
    "axis": ("layers.0.ffn.up", {"axis": 0}),
    "axis of the other role": ("layers.0.ffn.down", {"axis": -1}),
    "columns of version 1": ("layers.0.ffn.up", {"columns": 8}),
    "no axis": ("layers.0.ffn.up", {"axis": None}),
    "columns in place of blocks": (
        "layers.0.ffn.up",
        {"data": {"offset": PAGE, "dtype": "uint8", "shape": [6, 32]}},
    ),
    "a block too many": (
        "layers.0.ffn.up",
        {"data": {"offset": PAGE, "dtype": "uint8", "shape": [1, 2, 256]}},
    ),
    "a panel too few": (
        "layers.0.ffn.up",
        {"data": {"offset": PAGE, "dtype": "uint8", "shape": [0, 1, 256]}},
    ),
    "signed nibbles": (
        "layers.0.ffn.up",
        {"data": {"offset": PAGE, "dtype": "int8", "shape": [1, 1, 256]}},
    ),
    "group": ("layers.0.ffn.up", {"group": 4}),
    "negative group": ("layers.0.ffn.up", {"group": -32}),
    "endless group": ("layers.0.ffn.up", {"group": 1 << 62}),
    "fractional group": ("layers.0.ffn.up", {"group": 32.0}),
    "text group": ("layers.0.ffn.up", {"group": "32"}),
    "no scales": ("layers.0.ffn.up", {"scale": None}),
    "scales of integers": (
        "layers.0.ffn.up",
        {"scale": {"offset": PAGE, "dtype": "int8", "shape": [1, 1, 16]}},
    ),
    "scales of columns": (
        "layers.0.ffn.up",
        {"scale": {"offset": PAGE, "dtype": "float16", "shape": [6, 1]}},
    ),
    "wide scales of groups": (
        "layers.0.ffn.up",
        {"scale": {"offset": PAGE, "dtype": "float32", "shape": [1, 1, 16]}},
    ),
    "scales that are cut short": (
        "layers.0.ffn.up",
        {"scale": {"offset": PAGE, "dtype": "float16", "shape": [1, 1, 8]}},
    ),
}


@pytest.mark.parametrize(("name", "change"), HOSTILE_QUANTIZATION.values(), ids=HOSTILE_QUANTIZATION)
def test_hostile_quantization_is_refused(tmp_path: Path, name: str, change: dict[str, Any]) -> None:
    path = write(tmp_path / "m", "int4", MICRO)
    manifest = manifest_of(path)
    manifest["tensors"][name].update(change)
    refused(forge(path, manifest), when=open_only)


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


def test_tensors_may_overlap(micro_file: Path) -> None:
    """Two names of the same bytes harm nobody."""
    manifest = manifest_of(micro_file)
    tensors = manifest["tensors"]
    tensors["layers.0.ffn.up"] = tensors["layers.0.ffn.gate"]
    with Bundle.open(forge(micro_file, manifest)) as bundle:
        loaded = bundle.load()
    assert same_bits(loaded["layers.0.ffn.up"], params_of(MICRO)["layers.0.ffn.gate"])


@pytest.mark.parametrize("name", ["\ud800", "\x1b[2J\x07", "a\nb", "\u202e", 5, None, ["x"], {}])
def test_a_name_is_safe_to_print(micro_file: Path, name: Any) -> None:
    manifest = manifest_of(micro_file)
    manifest["name"] = name
    with Bundle.open(forge(micro_file, manifest)) as bundle:
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
        forged = copy.deepcopy(manifest)
        functools.reduce(lambda node, key: node[key], at[:-1], forged)[at[-1]] = value
        path.write_bytes(original)
        try:
            with Bundle.open(forge(path, forged)) as bundle:
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
    "empty": b"",
    "not JSON": b"GGUF",
    "not UTF-8": b'"\xff\xfe"',
    "nested": b"[" * 200_000,
    "a list": b"[]",
    "no tokenizer": b"{}",
    "more keys": b'{"tokenizer_json": "{}", "auto_map": "evil.py"}',
    "null": b'{"tokenizer_json": null}',
    "text as id": b'{"tokenizer_json": "{}", "eos_ids": ["</s>"]}',
    "number as special": b'{"tokenizer_json": "{}", "special": {"bos_token": 1}}',
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
