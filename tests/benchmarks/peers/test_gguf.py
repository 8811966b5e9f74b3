"""GGUF files: our parameters under llama.cpp's names and in its order."""

import dataclasses

import numpy as np
import pytest

from benchmarks.peers.gguf_file import interleave_halves, refusal, write_gguf
from jaxllm.config import RopeConfig
from tests.tiny import TINY, random_params

# Every row of these divides into blocks of 32.
EVEN = dataclasses.replace(TINY, ffn_size=96, tied_head=False)


def nothing(*_):
    pass


def written(path, cfg, params):
    gguf = pytest.importorskip("gguf")
    write_gguf(path, cfg, params.items(), nothing)
    return {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}


def test_halves_of_a_head_are_interleaved():
    rows = np.arange(6)[None, :, None]  # one head of 6
    assert interleave_halves(rows)[0, :, 0].tolist() == [0, 3, 1, 4, 2, 5]


def test_interleaving_turns_the_right_pairs():
    """Rotating neighbours after it is rotating halves before it: the law that makes scores agree."""
    size, angles = 8, np.linspace(0.1, 1.5, 4)
    vector = np.random.default_rng(0).normal(size=(1, size, 1))
    cos, sin = np.cos(angles), np.sin(angles)
    low, high = vector[0, : size // 2, 0], vector[0, size // 2 :, 0]
    halves = np.concatenate([low * cos - high * sin, low * sin + high * cos])
    pairs = interleave_halves(vector)[0, :, 0].reshape(-1, 2)
    neighbours = np.stack([pairs[:, 0] * cos - pairs[:, 1] * sin, pairs[:, 0] * sin + pairs[:, 1] * cos], -1)
    np.testing.assert_allclose(neighbours.ravel(), interleave_halves(halves[None, :, None])[0, :, 0])


def test_every_tensor_is_there_in_llama_cpps_order(tmp_path):
    params = random_params(EVEN)
    tensors = written(tmp_path / "model.gguf", EVEN, params)
    layer = (
        "attn_norm",
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_output",
        "ffn_norm",
        "ffn_gate",
        "ffn_up",
        "ffn_down",
    )
    expected = {f"blk.{i}.{name}.weight" for i in range(EVEN.layers) for name in layer}
    assert set(tensors) == expected | {"token_embd.weight", "output_norm.weight", "output.weight"}
    np.testing.assert_array_equal(tensors["output.weight"], params["head"])
    np.testing.assert_array_equal(tensors["blk.1.ffn_up.weight"], params["layers.1.ffn.up"])
    # Matrices that come back to the model's width are stored by output there, by input here.
    np.testing.assert_array_equal(tensors["blk.1.ffn_down.weight"], params["layers.1.ffn.down"].T)
    o = params["layers.0.attn.o"].reshape(-1, EVEN.hidden_size)
    np.testing.assert_array_equal(tensors["blk.0.attn_output.weight"], o.T)
    v = params["layers.0.attn.v"].reshape(-1, EVEN.hidden_size)
    np.testing.assert_array_equal(tensors["blk.0.attn_v.weight"], v)
    q = params["layers.0.attn.q"].reshape(EVEN.heads, 2, EVEN.head_dim // 2, EVEN.hidden_size)
    stored = tensors["blk.0.attn_q.weight"].reshape(EVEN.heads, EVEN.head_dim // 2, 2, EVEN.hidden_size)
    np.testing.assert_array_equal(stored[:, :, 1], q[:, 1])


def test_a_tied_head_is_written_once(tmp_path):
    cfg = dataclasses.replace(EVEN, tied_head=True)
    assert "output.weight" not in written(tmp_path / "model.gguf", cfg, random_params(cfg))


def test_nothing_is_left_of_a_file_that_fails(tmp_path):
    pytest.importorskip("gguf")

    def broken():
        yield next(iter(random_params(EVEN).items()))
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError):
        write_gguf(tmp_path / "model.gguf", EVEN, broken(), nothing)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "qwen2"},
        {"qkv_bias": True},
        {"activation": "gelu"},
        {"attention_windows": (4, 0)},
        {"rope": RopeConfig(dim=16, kind="yarn", factor=2.0, original_window_tokens=64)},
    ],
)
def test_models_without_words_in_gguf_are_refused(change):
    assert refusal(TINY) is None
    assert "GGUF" in refusal(dataclasses.replace(TINY, **change))
