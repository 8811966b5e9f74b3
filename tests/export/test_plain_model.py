"""Levels as plain models give the level's logits: in transformers, and read again from GGUF files."""

import dataclasses
import json

import click.testing
import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.bundle import Bundle
from jaxllm.bundle.levels import elastic_parts
from jaxllm.checkpoints.gguf_config import read_gguf_config
from jaxllm.checkpoints.gguf_file import read_gguf
from jaxllm.checkpoints.gguf_model import read_gguf_params
from jaxllm.checkpoints.gguf_tokenizer import read_gguf_tokenizer
from jaxllm.checkpoints.huggingface import read_config, read_params
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer
from jaxllm.cli.export import export_command
from jaxllm.config import FULL_LEVEL
from jaxllm.elastic.ladder import Ladder
from jaxllm.errors import ConfigError
from jaxllm.export.gguf_file import write_plain_gguf
from jaxllm.export.plain_model import read_plain, write_plain_folder
from jaxllm.kv.cache import new_cache
from jaxllm.models import decoder
from jaxllm.text.tokenizer import Tokenizer
from tests.export.models import LADDER, write_elastic
from tests.quick_jit import jit
from tests.tiny import TINY, tiny_params, write_tiny_bundle

TOKENS = np.asarray([[(7 * i) % 61 for i in range(20)]], np.int32)
F32 = np.dtype(np.float32)
WIDE = dataclasses.replace(TINY, heads=8, kv_heads=4)


def logits(params, cfg):
    @jit
    def run(params):
        return decoder.logits(params, decoder.forward_documents(params, TOKENS, cfg=cfg), cfg=cfg)

    return np.asarray(run({name: jnp.asarray(np.asarray(value)) for name, value in params.items()}))[0]


def of_level(model):
    """The level's own logits, by our forward."""
    return logits(model.params(model.cfg, F32), model.cfg)


def elastic_of(folder, path):
    """An elastic bundle of a folder's weights, whose last layer is an anchor."""
    cfg = read_config(folder)
    return anchored(path, cfg, dict(read_params(folder, cfg)))


def anchored(path, cfg=WIDE, params=None, weights="f32"):
    """An elastic bundle whose layers differ: the last one is an anchor."""
    parts = elastic_parts(Ladder(levels=LADDER.levels, anchors=(cfg.layers - 1,)))
    return write_tiny_bundle(path, weights, cfg=cfg, params=params or tiny_params(cfg), parts=parts)


@pytest.mark.parametrize(
    ("variant", "fewer_heads"),
    [("llama", True), ("qwen3", True), ("gemma2", True), ("gpt2", False), ("mixtral", True)],
)
def test_transformers_gives_the_levels_logits(tmp_path, variant, fewer_heads):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tests import tiny_hf

    bundle = elastic_of(tiny_hf.save(variant, tmp_path / "hf"), tmp_path / "m.jaxllm")
    with Bundle.open(bundle) as opened:
        model = read_plain(opened, level=40)
        cfg = write_plain_folder(tmp_path / "out", model, "f32")
        expected = of_level(model)
    assert (cfg.heads < model.cfg.heads) <= fewer_heads
    assert not cfg.layer_units
    with tiny_hf.quiet(), torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        found = theirs(torch.tensor(TOKENS.astype(np.int64))).logits[0].numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_a_folder_has_the_recovery_of_its_level_and_the_tokenizer(tmp_path):
    sampling = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}
    with Bundle.open(write_elastic(tmp_path / "m.jaxllm")) as opened:
        model = read_plain(opened, level=40)
        model = dataclasses.replace(model, tokenizer=dataclasses.replace(model.tokenizer, sampling=sampling))
        write_plain_folder(tmp_path / "out", model, "bf16")
        plain = dataclasses.replace(model, changes=())
        assert not np.array_equal(model.read("layers.0.attn.q"), plain.read("layers.0.attn.q"))
        files = opened.tokenizer_files()
        with pytest.raises(ConfigError, match="exists already"):
            write_plain_folder(tmp_path / "out", model, "bf16")
    again = read_tokenizer(tmp_path / "out")
    assert again.sampling == sampling
    for part in ("eos_ids", "bos_id", "chat_template"):
        assert getattr(again, part) == getattr(files, part)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(("precision", "most"), [("f32", 0), ("f16", 1e-3), ("int8", 0.01)])
def test_gguf_is_read_again_as_the_model(tmp_path, precision, most):
    with Bundle.open(write_elastic(tmp_path / "m.jaxllm")) as opened:
        model = read_plain(opened, level=FULL_LEVEL)
        write_plain_gguf(tmp_path / "m.gguf", model, precision)
        expected = {name: np.asarray(value) for name, value in model.params(model.cfg, F32).items()}
        ours = Tokenizer(model.tokenizer)
    file = read_gguf(tmp_path / "m.gguf")
    cfg = read_gguf_config(file)
    assert cfg == model.cfg
    for name, value in read_gguf_params(file, cfg, "f32"):
        found = np.asarray(value, np.float32)
        assert np.max(np.abs(found - expected[name])) <= most * np.max(np.abs(expected[name])), name
    theirs = Tokenizer(read_gguf_tokenizer(file, cfg.vocab_size))
    assert theirs.encode("Hello, you <|end|>") == ours.encode("Hello, you <|end|>")
    assert (theirs.bos_id, theirs.eos_ids) == (ours.bos_id, ours.eos_ids)


def test_layers_of_a_gguf_differ_where_llama_cpp_has_an_architecture_for_it(tmp_path):
    with Bundle.open(anchored(tmp_path / "m.jaxllm")) as opened:
        model = read_plain(opened, level=40)
        assert write_plain_gguf(tmp_path / "m.gguf", model, "f32").layer_units == model.cfg.layer_units
        up = model.read("layers.0.ffn.up")
    found = gguf.GGUFReader(tmp_path / "m.gguf")
    units = [model.cfg.units(layer) for layer in range(WIDE.layers)]
    assert found.fields["general.architecture"].contents() == "deci"
    assert found.fields["deci.feed_forward_length"].contents() == [each.neurons for each in units]
    assert found.fields["deci.attention.head_count_kv"].contents() == [each.kv_heads for each in units]
    tensors = {each.name: each for each in found.tensors}
    np.testing.assert_array_equal(tensors["blk.0.ffn_up.weight"].data, up)
    shape = (units[0].kv_heads * 2 * WIDE.head_dim, WIDE.hidden_size)
    assert tensors["blk.0.attn_q.weight"].data.shape == shape


def test_a_gguf_of_equal_layers_gives_the_levels_logits(tmp_path):
    """Of a family without an architecture whose layers differ: what is missing is zeros."""
    cfg = dataclasses.replace(WIDE, model_type="qwen3", qk_norm=True, attention_windows=())
    with Bundle.open(anchored(tmp_path / "m.jaxllm", cfg)) as opened:
        model = read_plain(opened, level=40)
        write_plain_gguf(tmp_path / "m.gguf", model, "f32")
        expected = of_level(model)
    file = read_gguf(tmp_path / "m.gguf")
    cfg = read_gguf_config(file)
    np.testing.assert_allclose(logits(dict(read_gguf_params(file, cfg)), cfg), expected, rtol=1e-4, atol=1e-4)


def test_llama_cpp_says_what_the_level_says(tmp_path, stories_folder, shipped_compilations):
    """100 greedy tokens of a trained model's level whose layers differ."""
    llama_cpp = pytest.importorskip("llama_cpp")
    with Bundle.open(elastic_of(stories_folder, tmp_path / "m.jaxllm")) as opened:
        model = read_plain(opened, level=40)
        write_plain_gguf(tmp_path / "m.gguf", model, "f32")
        params = {name: jnp.asarray(np.asarray(each)) for name, each in model.params(model.cfg, F32).items()}
    assert model.cfg.layer_units
    theirs = llama_cpp.Llama(str(tmp_path / "m.gguf"), n_ctx=128, logits_all=True, verbose=False, n_threads=1)
    ids = theirs.tokenize(b"Once upon a time")
    assert ids == Tokenizer(model.tokenizer).encode("Once upon a time")
    theirs.eval(ids)
    expected = []
    for _ in range(100):
        expected.append(int(np.argmax(theirs.scores[len(ids) + len(expected) - 1])))
        theirs.eval(expected[-1:])
    cfg, cache = model.cfg, new_cache(model.cfg, batch=1, tokens=128, dtype=jnp.float32)

    @jit
    def step(params, tokens, cache):
        hidden, cache = decoder.forward(params, tokens, cache, cfg=cfg)
        return decoder.logits(params, hidden[:, -1], cfg=cfg), cache

    found, fed = [], ids
    for _ in range(100):
        scores, cache = step(params, jnp.asarray([fed], jnp.int32), cache)
        found.append(int(np.argmax(scores[0])))
        fed = found[-1:]
    assert found == expected


def test_the_command_writes_a_level_and_refuses_options_of_programs(tmp_path):
    asked = [str(write_elastic(tmp_path / "m.jaxllm")), "-o", str(tmp_path / "m.gguf"), "--format", "gguf"]
    for options, code, said in (
        (["--precision", "w8a8", "--calibration-text", "x"], 2, "takes --precision f32"),
        (["--chunk-tokens", "16"], 2, "shape programs"),
        (["--level", "40", "--precision", "f16"], 0, "M parameters"),
    ):
        ran = click.testing.CliRunner().invoke(export_command, [*asked, *options])
        assert (ran.exit_code, said in ran.output) == (code, True)
    assert (tmp_path / "m.gguf").is_file()


def test_numbers_of_a_gguf_are_those_of_float32_and_what_it_has_not_is_named(tmp_path):
    """1e-5 in float32, as transformers writes it after it has read a GGUF file."""
    cfg = dataclasses.replace(TINY, norm_eps=float(np.float32(1e-5)), attention_windows=())
    path = write_tiny_bundle(tmp_path / "m.jaxllm", cfg=cfg)
    with Bundle.open(path) as opened:
        model = read_plain(opened)
        write_plain_gguf(tmp_path / "m.gguf", model, "f32")
        assert np.float32(read_gguf_config(read_gguf(tmp_path / "m.gguf")).norm_eps) == np.float32(1e-5)
        for change, match in (
            ({"model_type": "gpt2"}, r"type gpt2 are not written as GGUF, only llama.*export as hf"),
            ({"attention_windows": (4,) * TINY.layers}, r"it loses attention_windows .*as hf"),
        ):
            other = dataclasses.replace(model, cfg=dataclasses.replace(cfg, **change))
            with pytest.raises(ConfigError, match=match):
                write_plain_gguf(tmp_path / "other.gguf", other, "f32")
    assert not (tmp_path / "other.gguf").exists()
