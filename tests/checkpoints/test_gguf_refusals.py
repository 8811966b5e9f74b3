"""GGUF files that are damaged, hostile or not supported give one line that names what is wrong."""

import dataclasses
import struct

import numpy as np
import pytest

from jaxllm.bundle import Bundle
from jaxllm.bundle.calibrations import has_channel_scales
from jaxllm.checkpoints.gguf_config import read_gguf_config
from jaxllm.checkpoints.gguf_file import is_gguf, read_gguf
from jaxllm.checkpoints.gguf_model import read_gguf_params
from jaxllm.checkpoints.gguf_tokenizer import read_gguf_tokenizer
from jaxllm.errors import CheckpointError, JaxllmError
from jaxllm.prepare import prepare
from tests.checkpoints.gguf_files import config_keys, gguf_tensors, tokenizer_keys, write_file
from tests.checkpoints.memory import Most, is_refused, traced
from tests.tiny import TINY, random_params, write_tiny_bundle

_HEAD = b"GGUF" + struct.pack("<I", 3)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Keys and tensors of a file, with a SentencePiece tokenizer."""
    cfg = dataclasses.replace(TINY, vocab_size=96)
    folder = tmp_path_factory.mktemp("none")
    return {**config_keys(cfg), **tokenizer_keys(folder, 96)}, gguf_tensors(cfg, random_params(cfg))


def use(path):
    """All that `prepare` does with a file, but for writing."""
    file = read_gguf(path)
    cfg = read_gguf_config(file)
    read_gguf_tokenizer(file, cfg.vocab_size)
    for _ in read_gguf_params(file, cfg):
        pass


def refused(path, match):
    with pytest.raises(JaxllmError, match=match) as caught:
        use(path)
    assert "\n" not in str(caught.value)


def text(value):
    return struct.pack("<Q", len(value)) + value


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "no GGUF file"),
        (b"GGUF", "truncated"),
        (b"GGUF" + struct.pack("<I", 1), "version 1"),
        (b"GGUF" + struct.pack(">I", 3), "big-endian"),
        (_HEAD + struct.pack("<QQ", 1 << 60, 0), "tensors, above"),
        (_HEAD + struct.pack("<QQ", 0, 1 << 60), "metadata keys, above"),
        (_HEAD + struct.pack("<QQ", 0, 1) + struct.pack("<Q", 1 << 62), "text of .* bytes"),
        (_HEAD + struct.pack("<QQ", 0, 1) + text(b"a") + struct.pack("<I", 99), "type 99"),
        (_HEAD + struct.pack("<QQ", 0, 1) + text(b"a") + struct.pack("<IIQ", 9, 4, 1 << 60), "truncated"),
        (_HEAD + struct.pack("<QQ", 0, 1) + text(b"a") + struct.pack("<IIQ", 9, 9, 4), "array of"),
        (_HEAD + struct.pack("<QQ", 0, 2) + 2 * (text(b"a") + struct.pack("<II", 4, 1)), "'a' twice"),
        (_HEAD + struct.pack("<QQ", 1, 0) + text(b"t") + struct.pack("<I", 9), "9 dimensions"),
        (_HEAD + struct.pack("<QQ", 1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 1 << 61, 0, 0), "shape"),
        (_HEAD + struct.pack("<QQ", 1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 4, 4242, 0), "type 4242"),
        (_HEAD + struct.pack("<QQ", 1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 4, 2, 0), "Q4_0 has the s"),
        (_HEAD + struct.pack("<QQ", 1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 4, 0, 1 << 62), "truncated"),
        (_HEAD + struct.pack("<QQ", 1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 4, 0, 7), "not aligned"),
        (
            _HEAD + struct.pack("<QQ", 2, 0) + 2 * (text(b"t") + struct.pack("<IQIQ", 1, 4, 0, 0)) + bytes(9),
            "truncated|twice|overlaps",
        ),
    ],
)  # fmt: skip
def test_hostile_headers(tmp_path, data, match):
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    refused(path, match)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"block_count": 3}, "lacks the tensor blk.2"),
        ({"block_count": 4096}, "4096 layers"),
        ({"embedding_length": 32}, "where the metadata implies"),
        ({"embedding_length": None}, "embedding_length' is missing"),
        ({"attention.head_count": 2**31}, "head_count"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon"),
        ({"attention.value_length": 4}, "values of another size"),
        ({"context_length": "long"}, "must be a whole number"),
        ({"rope.freq_base": -1.0}, "theta"),
        ({"rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ({"something.new": 3}, "unknown for .* --ignore-config-key llama.something.new"),
        ({"attention.head_count_kv": [2, 1]}, "head_count_kv' must be a whole number .* array of 2"),
        ({"tokenizer.ggml.model": None}, "no tokenizer"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.tokens": ["a"] * 96}, "distinct"),
        ({"tokenizer.ggml.scores": [0.0]}, "scores must be an array of"),
        ({"tokenizer.ggml.token_type": [77] * 96}, "token_type"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id must be a token id"),
        ({"tokenizer.ggml.add_bos_token": 3}, "add_bos_token' must be true or false"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "new"}, "splits texts by 'new'"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["x y z"]},
            "merges of tokens that it does not have",
        ),
    ],
)  # fmt: skip
def test_metadata(tmp_path, parts, changes, match):
    keys, tensors = parts
    refused(write_file(tmp_path / "m.gguf", "llama", {**keys, **changes}, tensors), match)


def test_unknown_key_can_be_ignored(tmp_path, parts):
    keys, tensors = parts
    file = read_gguf(write_file(tmp_path / "m.gguf", "llama", {**keys, "something.new": 3}, tensors))
    assert read_gguf_config(file, ignore_keys=["llama.something.new"]).layers == keys["block_count"]


SINKS, UP, TABLE = "blk.0.attn_sinks.weight", "blk.1.ffn_up.weight", "token_embd.weight"


@pytest.mark.parametrize(
    ("architecture", "change", "match"),
    [
        ("llama", {UP: None}, r"lacks the tensor blk\.1\.ffn_up\.weight"),
        ("llama", {TABLE: None}, r"lacks the tensor token_embd\.weight"),
        ("llama", {SINKS: np.zeros(4)}, r"holds blk\.0\.attn_sinks\.weight"),
        ("mamba", {}, "'mamba' are not supported"),
        ("llama", {"rope_freqs.weight": np.ones(3, np.float32)}, r"rope_freqs\.weight is F32"),
        (
            "llama",
            {UP: (np.full((80, 68), 0xFF, np.uint8), "Q8_0")},
            r"ffn_up\.weight: a scale is not finite",
        ),
    ],
)
def test_tensors(tmp_path, parts, architecture, change, match):
    keys, tensors = parts
    given = {name: each for name, each in {**tensors, **change}.items() if each is not None}
    refused(write_file(tmp_path / "m.gguf", architecture, keys, given), match)


def test_split_files(tmp_path, parts):
    keys, tensors = parts
    names = sorted(tensors)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    paths = [tmp_path / f"m-{at:05d}-of-00002.gguf" for at in (1, 2)]
    for number, (path, own) in enumerate(zip(paths, halves, strict=True)):
        split = {"split.no": number, "split.count": 2, "split.tensors.count": len(names)}
        write_file(
            path, "llama", {**(keys if number == 0 else {}), **split}, {name: tensors[name] for name in own}
        )
    for path in paths:
        use(path)
    whole = write_file(tmp_path / "whole.gguf", "llama", keys, tensors)
    assert read_gguf(paths[1]).tensors.keys() == read_gguf(whole).tensors.keys()
    prepare(paths[0], tmp_path / "m.jaxllm")
    other = tmp_path / "renamed.gguf"
    other.write_bytes(paths[0].read_bytes())
    refused(other, "not named like one")
    second = paths[1].read_bytes()
    paths[1].write_bytes(paths[0].read_bytes())
    refused(paths[0], r"says that it is part 0 of 2")
    paths[1].unlink()
    refused(paths[0], "00002-of-00002.gguf is missing")
    paths[1].write_bytes(second[: len(second) // 2])
    refused(paths[0], "truncated")


def test_files_of_other_kinds_and_what_is_not_prepared_of_one(tmp_path, parts):
    missing = tmp_path / "none.gguf"
    assert not is_gguf(missing)
    with pytest.raises(CheckpointError, match="no such file"):
        read_gguf(missing)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_gguf(tmp_path)
    path = write_file(tmp_path / "m.gguf", "llama", *parts)
    with pytest.raises(CheckpointError, match="second step"):
        prepare(path, tmp_path / "m.jaxllm", expert_bits=4)
    with pytest.raises(CheckpointError, match="the model itself"):
        prepare(path, path)


# Mutations

_NUMBERS = (
    0, 1, 2, 3, 8, 9, 31, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 63,
    (1 << 64) - 1,
)  # fmt: skip


def mutated(draw, data, header_bytes):
    """A copy with some bytes, numbers or lengths changed, most of them in the header; or cut, or repeated."""
    data = bytearray(data)
    for _ in range(int(draw.integers(1, 4))):
        if len(data) < 64:
            break
        kind = draw.integers(0, 10)
        at = int(draw.integers(4, min(header_bytes, len(data)) if kind < 9 else len(data)))
        if kind < 4:
            data[at] = int(draw.integers(0, 256))
        elif kind < 7:
            size = (4, 8)[int(draw.integers(0, 2))]
            number = _NUMBERS[int(draw.integers(0, len(_NUMBERS)))] & ((1 << 8 * size) - 1)
            data[at : at + size] = number.to_bytes(size, "little")
        elif kind == 7:
            del data[at : at + int(draw.integers(1, 40))]
        elif kind == 8:
            other = int(draw.integers(4, header_bytes))
            data[at:at] = data[other : other + int(draw.integers(1, 40))]
        else:
            del data[at:]
    return bytes(data)


def check_mutations(tmp_path, parts, count, first=0):
    """Returns how many of the copies were refused."""
    keys, tensors = parts
    originals = []
    for kind in ("F16", "Q8_0", "Q4_0"):
        path = write_file(tmp_path / f"{kind}.gguf", "llama", keys, tensors, kind)
        data = path.read_bytes()
        header = len(data) - sum(each.data.nbytes for each in read_gguf(path).tensors.values())
        use(path)
        originals.append((data, header))
    refusals, path, most = 0, tmp_path / "mutated.gguf", Most()
    with traced():
        for seed in range(first, first + count):
            data, header = originals[seed % len(originals)]
            data = mutated(np.random.default_rng(seed), data, header)
            path.unlink(missing_ok=True)
            path.write_bytes(data)
            refusals += is_refused(lambda: use(path), len(data), f"seed {seed}", most)
    print(f"{count} mutated files, {refusals} refused, at most {most.share:.1f} times a file's size")
    return refusals


def test_some_mutations(tmp_path, parts):
    assert check_mutations(tmp_path, parts, 150) > 75


@pytest.mark.slow
def test_five_thousand_mutations(tmp_path, parts):
    assert check_mutations(tmp_path, parts, 5000, first=1000) > 2500


def test_groups_have_no_integer_prefill(tmp_path, parts):
    path = write_file(tmp_path / "m.gguf", "llama", *parts, "Q8_0")
    prepare(path, tmp_path / "groups.jaxllm")
    prepare(path, tmp_path / "wide.jaxllm", weights="f32")
    write_tiny_bundle(tmp_path / "channels.jaxllm", weights="int8")
    found = {}
    for name in ("groups", "wide", "channels"):
        with Bundle.open(tmp_path / f"{name}.jaxllm") as bundle:
            found[name] = has_channel_scales(bundle)
    assert found == {"groups": False, "wide": False, "channels": True}
