"""GGUF files that the gguf package writes give the model of the folder that they were made of; what is
damaged, hostile or not supported gives one line that names what is wrong."""

import dataclasses
import json
import struct

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.bundle import Bundle
from jaxllm.bundle.calibrations import has_channel_scales
from jaxllm.checkpoints.gguf_config import read_gguf_config
from jaxllm.checkpoints.gguf_file import is_gguf, read_gguf
from jaxllm.checkpoints.gguf_model import read_gguf_params
from jaxllm.checkpoints.gguf_tokenizer import _SPLITS, read_gguf_tokenizer
from jaxllm.checkpoints.huggingface import read_config, read_params
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer
from jaxllm.config import ModelConfig, RopeConfig
from jaxllm.errors import CheckpointError, JaxllmError
from jaxllm.kv.cache import new_cache
from jaxllm.models import decoder
from jaxllm.models.parameters import param_specs
from jaxllm.nn.layers import inverse_frequencies
from jaxllm.prepare import prepare
from jaxllm.quant import QArray, dequantize
from jaxllm.quant import weights as quant_weights
from jaxllm.text.tokenizer import Tokenizer
from tests.checkpoints.gguf_files import config_keys, gguf_tensors, tokenizer_keys, write_file, write_model
from tests.checkpoints.memory import Most, is_refused, mapped_bytes, traced
from tests.quick_jit import jit
from tests.tiny import TINY, random_params, write_tiny_bundle

TEXT = "Once upon a time, there was a little girl named Lily. She saw 2 birds — “hello”, she said!\n\tEnd"


def values(param):
    """A parameter's numbers, in float32."""
    if isinstance(param, QArray):
        return np.asarray(dequantize(jax.tree.map(jnp.asarray, param), jnp.float32))
    return np.asarray(getattr(param, "value", param), np.float32)


def read(path, weights=None):
    file = read_gguf(path)
    cfg = read_gguf_config(file)
    return cfg, dict(read_gguf_params(file, cfg, weights))


# Stories260K: every type


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_numbers_are_those_of_the_blocks(stories_folder, tmp_path, kind):
    """Bit for bit what the `gguf` package makes of the same blocks."""
    path = write_model(tmp_path / "m.gguf", stories_folder, kind)
    cfg, params = read(path)
    assert cfg == read_config(stories_folder)
    own = {each.name: each for each in gguf.GGUFReader(path).tensors}
    wide = {
        name: gguf.quants.dequantize(np.asarray(each.data), each.tensor_type).astype(np.float32)
        for name, each in own.items()
    }
    floats = write_file(
        tmp_path / "wide.gguf",
        "llama",
        {**config_keys(cfg), **tokenizer_keys(stories_folder, cfg.vocab_size)},
        wide,
    )
    expected = read(floats)[1]
    for name, param in params.items():
        np.testing.assert_array_equal(values(param), values(expected[name]), err_msg=name)
    quantized = kind.startswith("Q")
    assert isinstance(params["layers.0.attn.q"], QArray) == quantized
    if kind == "F32":
        for name, value in read_params(stories_folder, cfg):
            np.testing.assert_array_equal(values(params[name]), value, err_msg=name)


@pytest.mark.parametrize(
    ("kind", "weights"), [("F16", "f32"), ("Q8_0", "int8"), ("Q4_0", "int4"), ("Q4_1", "int4")]
)
def test_a_prepared_bundle_has_its_numbers(stories_folder, tmp_path, kind, weights):
    path = write_model(tmp_path / "m.gguf", stories_folder, kind)
    cfg, params = read(path)
    prepare(path, tmp_path / "m.jaxllm")
    with Bundle.open(tmp_path / "m.jaxllm") as bundle:
        assert bundle.cfg == cfg
        assert bundle.layout.weights == weights
        for name, tensor in bundle.layout.tensors.items():
            if isinstance(params[name], QArray):
                assert (tensor.bits, tensor.group) == (8 if kind == "Q8_0" else 4, 32)
        stored = {name: dequantize(each, jnp.float32) for name, each in bundle.load().items()}
    for name, param in params.items():
        np.testing.assert_array_equal(np.asarray(stored[name]), values(param), err_msg=name)


@pytest.mark.parametrize("kind", ["BF16", "Q4_1"])
def test_an_embedding_in_parts_is_stored_as_one(stories_folder, tmp_path, monkeypatch, kind):
    """Byte for byte; what was read is given back before the next parameter."""
    path = write_model(tmp_path / "m.gguf", stories_folder, kind)
    prepare(path, tmp_path / "whole.jaxllm")
    monkeypatch.setattr(quant_weights, "PART_NUMBERS", 48 * 64)
    file, dropped = read_gguf(path), []
    monkeypatch.setattr(type(file), "drop_pages", lambda own: dropped.append(own))
    name, embedding = next(read_gguf_params(file, read_gguf_config(file), by_rows=True))
    parts = list(embedding.parts)
    assert (name, len(parts), len(dropped)) == ("embed.tokens", 11, 11)
    monkeypatch.undo()
    monkeypatch.setattr(quant_weights, "PART_NUMBERS", 48 * 64)
    prepare(path, tmp_path / "parts.jaxllm")
    assert (tmp_path / "parts.jaxllm").read_bytes() == (tmp_path / "whole.jaxllm").read_bytes()


def test_pages_that_were_read_are_given_back(stories_folder, tmp_path):
    path = write_model(tmp_path / "m.gguf", stories_folder)
    file = read_gguf(path)
    before = {name: np.array(each.data) for name, each in file.tensors.items()}
    if mapped_bytes(path) is None:
        pytest.skip("the system does not tell")
    assert mapped_bytes(path) > 500_000
    file.drop_pages()
    assert mapped_bytes(path) == 0
    for name, each in file.tensors.items():
        np.testing.assert_array_equal(each.data, before[name])


@pytest.mark.parametrize(
    ("kind", "weights", "most"),
    [
        ("Q6_K", None, 0.01), ("Q5_0", None, 0.01), ("Q5_K", None, 0.012), ("Q2_K", "int8", 0.012),
        ("Q3_K", "int8", 0.012), ("Q4_K", "int8", 0.012), ("Q4_1", "int8", 0.012), ("Q6_K", "int8", 0.012),
    ],
)  # fmt: skip
def test_other_blocks_become_groups_of_eight_bits(tmp_path, kind, weights, most):
    """With the error that the documents state, of a model whose rows divide into blocks of 256; those of
    fewer bits, or with minima, by option."""
    path, expected = wide_model(tmp_path, kind)
    if kind in ("Q2_K", "Q3_K"):
        with pytest.raises(CheckpointError, match=rf"blocks of {kind}, .* choose --weights int8 .*0\.7 %"):
            read(path)
    found = read(path, weights)[1]["layers.0.ffn.down"]
    assert isinstance(found, QArray)
    assert (found.bits, found.group, found.minimum) == (8, 32, None)
    assert relative(values(found), expected["layers.0.ffn.down"]) < most


def relative(got, expected):
    return float(np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2)))


def wide_model(tmp_path, kind):
    """A file of random blocks of a type, and the numbers that the `gguf` package makes of them."""
    cfg = ModelConfig(
        model_type="llama", vocab_size=64, hidden_size=256, layers=1, heads=4, kv_heads=2, head_dim=64,
        ffn_size=512, window_tokens=64, rope=RopeConfig(dim=64),
    )  # fmt: skip
    draw = np.random.default_rng(0)
    shapes = {name: spec.shape for name, spec in param_specs(cfg).items()}
    params = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    tensors, number = gguf_tensors(cfg, params), gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    for name, value in tensors.items():
        if value.ndim == 1:
            continue
        raw = draw.integers(0, 256, (value.shape[0], value.shape[1] // block, size), dtype=np.uint8)
        # Scales and minima of a sane size, at whichever end of a block they are.
        for at in (0, 2, size - 4, size - 2):
            halves = draw.uniform(0.005, 0.01, raw.shape[:2]).astype(np.float16)
            raw[..., at : at + 2] = halves[..., None].view(np.uint8)
        tensors[name] = raw.reshape(value.shape[0], -1), kind
    keys = {**config_keys(cfg), **tokenizer_keys(tmp_path, cfg.vocab_size)}
    down = gguf.quants.dequantize(tensors["blk.0.ffn_down.weight"][0], number)
    return write_file(tmp_path / "wide.gguf", "llama", keys, tensors), {"layers.0.ffn.down": down.T}


# Tokenizers


def test_sentence_pieces_are_rebuilt(stories_folder, tmp_path):
    file = read_gguf(write_model(tmp_path / "m.gguf", stories_folder))
    ours, theirs = Tokenizer(read_gguf_tokenizer(file, 512)), Tokenizer(read_tokenizer(stories_folder))
    assert ours.same_tokens(theirs)
    assert (ours.bos_id, ours.eos_ids) == (theirs.bos_id, theirs.eos_ids)
    for text in (TEXT, "", " ", "  a", "</s> x", "ünïcödé 語", "tab\tnew\nline"):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("split", ["gpt-2", "llama-bpe", "qwen2", "smollm", "gpt-4o"])
def test_byte_pairs_are_rebuilt(tmp_path, split):
    """As `tokenizers` has them with the split of that name."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    expression = _SPLITS[split][1]
    plain = tokenizers.Tokenizer(models.BPE(ignore_merges=split == "llama-bpe"))
    first = [pre_tokenizers.Digits(individual_digits=True)] if split == "smollm" else []
    plain.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *first,
            pre_tokenizers.Split(tokenizers.Regex(expression), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    plain.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    plain.train_from_iterator([TEXT, "the cat and the dog and 1234 birds"] * 3, trainer)
    model = json.loads(plain.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    own = {
        "model": "gpt2", "pre": split, "tokens": tokens, "token_type": [3, *[1] * (len(tokens) - 1)],
        "merges": merges, "eos_token_id": 0,
    }  # fmt: skip
    keys = {f"tokenizer.ggml.{name}": value for name, value in own.items()}
    keys["tokenizer.chat_template"] = "{{ messages }}"
    keys["tokenizer.chat_template.tool_use"] = "{{ tools }}"
    path = write_file(tmp_path / "m.gguf", "qwen2", keys, {"token_embd.weight": np.zeros((500, 8))})
    files = read_gguf_tokenizer(read_gguf(path), 500)
    ours = Tokenizer(files)
    assert (files.eos_ids, files.bos_id, files.chat_template) == ((0,), None, "{{ messages }}")
    assert files.templates == {"tool_use": "{{ tools }}"}
    for text in (TEXT, "12345 cats", "  two  spaces\n\n", "x<|end|>y", "don't, WE'LL"):
        expected = plain.encode(text).ids
        assert ours.encode(text) == expected
        assert ours.decode(expected) == plain.decode(expected)


# Families

FAMILY_VARIANTS = (
    "llama", "llama-linear-rope", "llama-yarn", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "olmo2", "olmoe", "gemma", "gemma2", "gemma3", "phi", "phi3-partial", "smollm3", "granite", "stablelm",
    "ernie4_5", "gpt_oss",
)  # fmt: skip
# What llama.cpp fixes by architecture, or the file has as float32, and the tiny variants have otherwise.
_FIXED = {
    "gemma2": {"attention_scale"}, "gemma3": {"attention_scale", "attention_windows"},
    "smollm3": {"rope_layers"}, "granite": {"embed_scale", "norm_eps"},
}  # fmt: skip


# Whose variants have biases, which neither llama.cpp nor published models have.
_BIASED = ("qwen3", "olmo2", "gemma")


@pytest.mark.parametrize("variant", FAMILY_VARIANTS)
def test_every_family_gives_the_folders_model(tmp_path, variant):
    pytest.importorskip("transformers")
    from tests import tiny_hf

    keys = {**tiny_hf.VARIANTS[variant][1], **({"attention_bias": False} if variant in _BIASED else {})}
    folder = tiny_hf.save(variant, tmp_path / "hf", keys=keys)
    cfg, params = read(write_model(tmp_path / "m.gguf", folder))
    theirs = read_config(folder)
    names = [each.name for each in dataclasses.fields(cfg)]
    differing = {name for name in names if getattr(cfg, name) != getattr(theirs, name)}
    assert differing == _FIXED.get(variant, set())
    for name, value in read_params(folder, theirs):
        np.testing.assert_array_equal(values(params[name]), value, err_msg=name)


@pytest.mark.parametrize("variant", ["mixtral", "gpt_oss"])
def test_experts_keep_their_blocks(tmp_path, variant):
    pytest.importorskip("transformers")
    from tests import tiny_hf

    wide = {**tiny_hf.VARIANTS[variant][1], "intermediate_size": 64}
    folder = tiny_hf.save(variant, tmp_path / "hf", keys=wide)
    for kind, bits in (("Q8_0", 8), ("Q4_0", 4), ("MXFP4", 8)):
        path = write_model(tmp_path / f"{kind}.gguf", folder, kind)
        cfg, params = read(path)
        tensor = {each.name: each for each in gguf.GGUFReader(path).tensors}["blk.1.ffn_down_exps.weight"]
        found = params["layers.1.experts.down"]
        assert isinstance(found, QArray)
        assert (found.bits, found.shape) == (bits, (4, 64, cfg.hidden_size))
        expected = gguf.quants.dequantize(np.asarray(tensor.data), tensor.tensor_type)
        np.testing.assert_array_equal(values(found), expected.swapaxes(1, 2))


def test_factors_of_frequencies(stories_folder, tmp_path):
    """As files of Llama 3.1 have them: they divide the inverse frequencies."""
    cfg = read_config(stories_folder)
    tensors = gguf_tensors(cfg, dict(read_params(stories_folder, cfg)))
    tensors["rope_freqs.weight"] = np.asarray([1, 1, 2, 8], np.float32)
    keys = {**config_keys(cfg), **tokenizer_keys(stories_folder, cfg.vocab_size)}
    found, _ = read(write_file(tmp_path / "m.gguf", "llama", keys, tensors))
    assert found.rope == RopeConfig(dim=8, factors=(1.0, 1.0, 2.0, 8.0))
    plain = inverse_frequencies(RopeConfig(dim=8))[0]
    np.testing.assert_allclose(inverse_frequencies(found.rope)[0], plain / [1, 1, 2, 8])
    assert ModelConfig.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_greedy_tokens_are_those_of_llama_cpp(stories_folder, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    path = write_model(tmp_path / "m.gguf", stories_folder, "F16")
    cfg, params = read(path)
    theirs = llama_cpp.Llama(str(path), n_ctx=256, logits_all=True, verbose=False, n_threads=1)
    ids = theirs.tokenize(b"Once upon a time")
    assert ids == Tokenizer(read_gguf_tokenizer(read_gguf(path), cfg.vocab_size)).encode("Once upon a time")
    theirs.eval(ids)
    expected = []
    for _ in range(200):
        expected.append(int(np.argmax(theirs.scores[len(ids) + len(expected) - 1])))
        theirs.eval(expected[-1:])
    got, weights = [], {name: jnp.asarray(values(param)) for name, param in params.items()}
    cache = new_cache(cfg, batch=1, tokens=256, dtype=jnp.float32)

    @jit
    def step(params, tokens, cache):
        hidden, cache = decoder.forward(params, tokens, cache, cfg=cfg)
        return decoder.logits(params, hidden[:, -1], cfg=cfg), cache

    logits, cache = step(weights, jnp.asarray([ids], jnp.int32), cache)
    for _ in range(200):
        got.append(int(np.argmax(logits[0])))
        logits, cache = step(weights, jnp.asarray([got[-1:]], jnp.int32), cache)
    assert got == expected


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
        (b"GGUF" + struct.pack(">I", 3), "big-endian"),
        (_HEAD + struct.pack("<QQ", 1 << 60, 0), "tensors, above"),
        (_HEAD + struct.pack("<QQ", 0, 1) + struct.pack("<Q", 1 << 62), "text of .* bytes"),
        (_HEAD + struct.pack("<QQ", 0, 1) + text(b"a") + struct.pack("<I", 99), "type 99"),
        (_HEAD + struct.pack("<QQ", 0, 1) + text(b"a") + struct.pack("<IIQ", 9, 4, 1 << 60), "truncated"),
        (_HEAD + struct.pack("<QQ", 0, 2) + 2 * (text(b"a") + struct.pack("<II", 4, 1)), "'a' twice"),
        (_HEAD + struct.pack("<QQ", 1, 0) + text(b"t") + struct.pack("<I", 9), "9 dimensions"),
        (_HEAD + struct.pack("<QQ", 1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 1 << 61, 0, 0), "shape"),
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
        ({"block_count": 4096}, "4096 layers"),
        ({"embedding_length": 32}, "where the metadata implies"),
        ({"attention.head_count": 2**31}, "head_count"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon"),
        ({"context_length": "long"}, "must be a whole number"),
        ({"rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ({"something.new": 3}, "unknown for .* --ignore-config-key llama.something.new"),
        ({"attention.head_count_kv": [2, 1]}, "head_count_kv' must be a whole number .* array of 2"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.tokens": ["a"] * 96}, "distinct"),
        ({"tokenizer.ggml.token_type": [77] * 96}, "token_type"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id must be a token id"),
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


SINKS, UP = "blk.0.attn_sinks.weight", "blk.1.ffn_up.weight"


@pytest.mark.parametrize(
    ("architecture", "change", "match"),
    [
        ("llama", {UP: None}, r"lacks the tensor blk\.1\.ffn_up\.weight"),
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
