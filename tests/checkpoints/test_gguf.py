"""GGUF files that the `gguf` package writes give the model of the folder that they were made of."""

import dataclasses
import json

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.bundle import Bundle
from jaxllm.checkpoints.gguf_config import read_gguf_config
from jaxllm.checkpoints.gguf_file import read_gguf
from jaxllm.checkpoints.gguf_model import read_gguf_params
from jaxllm.checkpoints.gguf_tokenizer import _SPLITS, read_gguf_tokenizer
from jaxllm.checkpoints.huggingface import read_config, read_params
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer
from jaxllm.config import ModelConfig, RopeConfig
from jaxllm.errors import CheckpointError
from jaxllm.kv.cache import new_cache
from jaxllm.models import decoder
from jaxllm.models.parameters import param_specs
from jaxllm.nn.layers import inverse_frequencies
from jaxllm.prepare import prepare
from jaxllm.quant import QArray, dequantize
from jaxllm.quant import weights as quant_weights
from jaxllm.text.tokenizer import Tokenizer
from tests.checkpoints.gguf_files import config_keys, gguf_tensors, tokenizer_keys, write_file, write_model
from tests.checkpoints.memory import mapped_bytes
from tests.quick_jit import jit

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
    ("kind", "weights"), [("F16", "f32"), ("Q8_0", "int8"), ("Q4_0", "int4"), ("Q4_1", "int4-min")]
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


def test_scales_and_minima_of_six_bits_are_rounded_to_halves(tmp_path):
    path, expected = wide_model(tmp_path, "Q4_K")
    _, params = read(path)
    found, wide = params["layers.0.ffn.down"], expected["layers.0.ffn.down"]
    assert isinstance(found, QArray)
    assert (found.bits, found.group) == (4, 32)
    assert found.minimum is not None
    # Levels are the same: no number is a step away.
    step = np.repeat(np.asarray(found.scale, np.float32), 32, -2)
    assert np.all(np.abs(values(found) - wide) <= 2.0**-11 * (15 * step + np.abs(wide) + 15 * step))
    assert relative(values(found), wide) < 3e-4


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
    path = write_file(tmp_path / "m.gguf", "qwen2", keys, {"token_embd.weight": np.zeros((500, 8))})
    files = read_gguf_tokenizer(read_gguf(path), 500)
    ours = Tokenizer(files)
    assert (files.eos_ids, files.bos_id, files.chat_template) == ((0,), None, "{{ messages }}")
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
