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
import numpy as np
import pytest
import xxhash

from jaxllm.bundle import Bundle, WeightFormat
from jaxllm.bundle.calibrations import expert_parts, read_path_counts, read_token_experts
from jaxllm.bundle.layout import HEADER, PAGE
from jaxllm.config import ModelConfig
from jaxllm.errors import BundleError
from jaxllm.experts.prediction import PathCounts, TokenExperts
from jaxllm.models import decoder
from tests.bundle.forging import (
    MICRO,
    MIXED,
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
    "not UTF-8": b'{"name": "\xff"}',
    "cut": b'{"name": "tiny", "weights": ',
    "nested lists": b"[" * 200_000,
    "nested model": b'{"name":"m","weights":"f32","model":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "long number": b'{"name": ' + b"9" * 100_000 + b"}",
    "null": b"null",
    "not a number": b"NaN",
}


@pytest.mark.parametrize("raw", HOSTILE_BYTES.values(), ids=HOSTILE_BYTES)
def test_manifests_that_are_no_object(micro_file: Path, raw: bytes) -> None:
    refused(forge(micro_file, raw), when=open_only)


Edit = Callable[[Manifest], Any]


def _tensor(name: str, **change: Any) -> Edit:
    return lambda m: m["tensors"][name].update(change)


def _data(name: str, **change: Any) -> Edit:
    return lambda m: m["tensors"][name]["data"].update(change)


def _segment(at: int, **change: Any) -> Edit:
    return lambda m: m["segments"][at].update(change)


def _model(**change: Any) -> Edit:
    return lambda m: m["model"].update(change)


def _rename(m: Manifest) -> None:
    m["tensors"]["haed"] = m["tensors"].pop("head")


def _shift(name: str, array: str, by: int) -> Edit:
    def edit(m: Manifest) -> None:
        m["tensors"][name][array]["offset"] += by

    return edit


# What JUNK below is not: values that could be right elsewhere, and what is missing, double or out of order.
HOSTILE: dict[str, tuple[str, Edit]] = {
    "tensor before its segment": ("outside its segment", _data("head", offset=0)),
    "tensor in another segment": ("outside its segment", _data("head", offset=PAGE)),
    "tensor behind the file": ("outside its segment", _data("head", offset=1 << 40)),
    "negative offset": ("malformed place", _data("head", offset=-64)),
    "misaligned offset": ("not aligned", _shift("layers.0.attn_norm.scale", "data", 4)),
    "huge shape": ("outside its segment", _data("head", shape=[1 << 40, 1 << 40])),
    "no elements": ("must be float32", _data("head", shape=[1 << 100, 0])),
    "transposed shape": ("must be float32", _data("layers.0.ffn.up", shape=[8, 6])),
    "nested shape": ("malformed place", _data("head", shape=[[8], 8])),
    "number as shape": ("malformed manifest", _data("head", shape=8)),
    "integers without scales": ("must be float32", _data("head", dtype="int8")),
    "unknown dtype": ("'complex128' is not one", _data("head", dtype="complex128")),
    "narrow vector": ("must be float32", _data("final_norm.scale", dtype="bfloat16")),
    "missing tensor": ("differing: ['head']", lambda m: m["tensors"].pop("head")),
    "extra tensor": ("differing: ['more']", lambda m: m["tensors"].update(more=m["tensors"]["head"])),
    "renamed tensor": ("differing: ['haed', 'head']", _rename),
    "tensors out of order": (
        "do not match the config", lambda m: m.update(tensors=dict(reversed(m["tensors"].items())))
    ),
    "tensor with more keys": ("malformed manifest", _tensor("head", code="import os")),
    "tensor of an unknown segment": ("outside its segment", _tensor("head", segment="heap")),
    "tensor of another layer's segment": ("outside its segment", _tensor("head", segment="embed")),
    "no tokenizer": ("tokenizer is missing", lambda m: m["segments"].pop(0)),
    "no last segment": ("outside its segment", lambda m: m["segments"].pop()),
    "segment over the header": ("outside the file", _segment(0, offset=0)),
    "segment past the end": ("outside the file", _segment(-1, size_bytes=1 << 60)),
    "negative segment": ("malformed segment", _segment(0, size_bytes=-1)),
    "other checksum": ("'tokenizer' is corrupt", _segment(0, xxh3_128="")),
    "unknown weights": ("weights 'f64' is not one of", lambda m: m.update(weights="f64")),
    "empty model": ("malformed model config", lambda m: m.update(model={})),
    "unknown model key": ("malformed model config", _model(trust_remote_code=True)),
    "another vocabulary": ("embed.tokens must be", _model(vocab_size=9)),
    "more layers": ("do not match the config", _model(layers=2, attention_windows=[])),
    "too many layers": ("layers must be", _model(layers=1 << 60)),
    "flag as width": ("hidden_size must be", _model(hidden_size=True)),
    "endless whole scale": ("embed_scale", _model(embed_scale=10**400)),
    "list as window": ("attention_windows", _model(attention_windows=[[1]])),
    "endless rope base": ("theta", _model(rope={"dim": 4, "theta": float("inf")})),
    "experts apart where there are none": (
        "experts_apart is True in a model of 0", lambda m: m.update(experts_apart=True)
    ),
}  # fmt: skip
UP = "layers.0.ffn.up"


def _array(array: str, dtype: str, *shape: int) -> Edit:
    return _tensor(UP, **{array: {"offset": PAGE, "dtype": dtype, "shape": [*shape]}})


QUANTIZED: dict[str, tuple[str, Edit]] = {
    "width of the other bits": ("", _tensor(UP, bits=8)),
    "axis of the other role": ("", _tensor("layers.0.ffn.down", axis=-1)),
    "columns of a weight that is not in blocks": ("", _tensor(UP, columns=8)),
    "columns in place of blocks": ("", _array("data", "uint8", 6, 32)),
    "a block too many": ("", _array("data", "uint8", 1, 2, 256)),
    "a panel too few": ("", _array("data", "uint8", 0, 1, 256)),
    "signed nibbles": ("", _array("data", "int8", 1, 1, 256)),
    "groups that there are not": ("", _tensor(UP, group=4)),
    "endless group": ("", _tensor(UP, group=1 << 62)),
    "no scales": ("", _tensor(UP, scale=None)),
    "scales of integers": ("", _array("scale", "int8", 1, 1, 16)),
    "wide scales of groups": ("", _array("scale", "float32", 1, 1, 16)),
    "scales that are cut short": ("", _array("scale", "float16", 1, 1, 8)),
}
LOW = "layers.0.attn.q"


def _low(**change: Any) -> Edit:
    return lambda m: m["tensors"][LOW]["low"].update(change)


def _place_of_segment(name: str, other: str) -> Edit:
    def edit(m: Manifest) -> None:
        segments = {each["name"]: each for each in m["segments"]}
        segments[name]["offset"] = segments[other]["offset"]

    return edit


def _without_segment(name: str) -> Edit:
    return lambda m: m.update(segments=[each for each in m["segments"] if each["name"] != name])


PLANES: dict[str, tuple[str, Edit]] = {
    "in the high planes' segment": (
        "", lambda m: m["tensors"][LOW]["low"].update(offset=m["tensors"][LOW]["data"]["offset"])
    ),
    "of another layer": ("", _shift(LOW, "low", 1 << 20)),
    "not aligned": ("", _shift(LOW, "low", 1)),
    "signed": ("", _low(dtype="int8")),
    "of no shape": ("", _low(shape=[])),
    "endless": ("", _low(shape=[1 << 62, 1 << 62])),
    "not there": ("", lambda m: m["tensors"][LOW].pop("low")),
    "of a vector": (
        "", lambda m: m["tensors"]["layers.0.attn_norm.scale"].update(low=m["tensors"][LOW]["low"])
    ),
    "without scales": ("", lambda m: m["tensors"][LOW].pop("scale")),
    "of eight bits": ("", _tensor(LOW, bits=8)),
    "of other groups": ("", _tensor(LOW, group=32)),
    "without a segment": ("", _without_segment("layers.0.low")),
    "whose segment comes first": ("", _place_of_segment("layers.0.low", "layers.0")),
}  # fmt: skip
EXPERT, NEIGHBOUR = "layers.1.experts.0.gate", "layers.1.experts.1.gate"


def _counts(name: str, **change: Any) -> Edit:
    return lambda m: m["parts"]["experts"]["tensors"][name]["data"].update(change)


EXPERTS: dict[str, tuple[str, Edit]] = {
    "in its neighbour's segment": ("outside its segment", _tensor(EXPERT, segment="layers.1.experts.1")),
    "where its neighbour is": (
        "outside its segment",
        lambda m: m["tensors"][EXPERT].update(
            {each: m["tensors"][NEIGHBOUR][each] for each in ("data", "scale", "bits")}
        ),
    ),
    "at its neighbour's width": ("quantized in a way", _tensor(EXPERT, bits=4)),
    "missing": ("parameters do not match", lambda m: m["tensors"].pop(EXPERT)),
    "one too many": (
        "parameters do not match",
        lambda m: m["tensors"].update({"layers.1.experts.3.gate": m["tensors"][EXPERT]}),
    ),
    "more than the router knows": ("do not match", _model(experts=4)),
    "without a segment": ("outside its segment", _without_segment("layers.1.experts.0")),
    "all together": ("parameters do not match", lambda m: m.update(experts_apart=False)),
    "apart by a number": ("experts_apart is 1", lambda m: m.update(experts_apart=1)),
    "counts beyond their segment": ("outside its segment", _counts("alone", shape=[1, 1 << 40])),
    "counts of a type that there is not": ("not one a bundle may hold", _counts("pairs", dtype="int128")),
}


def write_mixture(path: Path) -> Path:
    """A mixture whose three experts have widths of their own, and counts of one layer's visits."""
    counts = PathCounts(
        np.ones((1, 3), np.float32), np.zeros((1, 3, 3), np.float32), np.full((1, 0), -1, np.int32),
        np.zeros((1, 0, 3), np.float32),
    )  # fmt: skip
    tokens = TokenExperts(np.array([1, 2], np.int32), np.zeros((1, 2, MIXED.experts_per_token), np.uint8))
    bits, parts = np.array([[8, 4, 2]]), expert_parts(counts, tokens=tokens)
    return write(path, "int8", MIXED, expert_bits=bits, parts=parts)


WRITTEN: dict[str, tuple[Callable[[Path], Path], dict[str, tuple[str, Edit]]]] = {
    "floats": (lambda path: write(path, cfg=MICRO), HOSTILE),
    "quantized": (lambda path: write(path, "int4", MICRO), QUANTIZED),
    "low planes": (lambda path: write(path, "int8-nested", MICRO), PLANES),
    "experts": (write_mixture, EXPERTS),
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, (_, edits) in WRITTEN.items() for name in edits]
)
def test_hostile_manifests_are_refused(tmp_path: Path, kind: str, name: str) -> None:
    made, edits = WRITTEN[kind]
    path, (part, edit) = made(tmp_path / "m.jaxllm"), edits[name]
    manifest = manifest_of(path)
    edit(manifest)
    # At opening; only a segment's checksum is compared later.
    refused(forge(path, manifest), part, when=use if part.endswith("corrupt") else open_only)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("alone", [3, 1]), ("after_one", [1, 9]), ("pairs", [0]), ("tokens", [1]), ("token_experts", [2, 1])],
)
def test_counts_of_another_model_are_refused(tmp_path: Path, name: str, shape: list[int]) -> None:
    path = write_mixture(tmp_path / "m.jaxllm")
    with Bundle.open(path) as bundle:
        assert read_path_counts(bundle).alone.tolist() == [[1.0, 1.0, 1.0]]
        assert read_token_experts(bundle).tokens.tolist() == [1, 2]
    manifest = manifest_of(path)
    _counts(name, shape=shape)(manifest)

    def read(path: Path) -> None:
        with Bundle.open(path) as bundle:
            read_path_counts(bundle)
            read_token_experts(bundle)

    refused(forge(path, manifest), "make it again with `jaxllm calibrate experts`", when=read)


def test_a_damaged_low_plane_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "nested", "int8-nested", MICRO)
    with Bundle.open(path) as bundle:
        at = bundle.layout.segments["layers.0.low"].offset
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    refused(path, "segment 'layers.0.low' is corrupt", "copy the file again", when=use)


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
