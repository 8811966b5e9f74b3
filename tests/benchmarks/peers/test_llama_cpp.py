"""llama.cpp as a peer: it computes with our weights, in every setting and at every width.

On one thread in this process, where a benchmark would give it one of its own.
"""

import dataclasses

import numpy as np
import pytest

from benchmarks.peers.gguf_cache import gguf_of
from benchmarks.peers.gguf_file import tensor_bytes
from benchmarks.peers.llama import LlamaCpp
from benchmarks.peers.peer import Opening
from jaxllm import Engine, EngineOptions, GenerationConfig
from tests.tiny import TINY, tiny_params, write_tiny_folder

# Every row of these divides into blocks of 32.
EVEN = dataclasses.replace(TINY, ffn_size=96, tied_head=False)


def nothing(*_):
    pass


@pytest.fixture(scope="module", autouse=True)
def installed():
    for library in ("gguf", "llama_cpp"):
        pytest.importorskip(library)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny"
    return write_tiny_folder(path, cfg=EVEN, params=tiny_params(EVEN))


def session(folder, file_type):
    opening = Opening(peer="llama.cpp", model=folder, format=file_type, threads=1, context_tokens=64)
    return LlamaCpp().open(opening, nothing)


@pytest.fixture(scope="module")
def ours(folder):
    options = EngineOptions(context_tokens=64, chunk_tokens=(16,), cache_tokens=(64,))
    return Engine.open(folder, weights="f32", options=options)


def test_floats_score_as_ours(folder, ours):
    tokens = np.random.default_rng(1).integers(0, EVEN.vocab_size, 40).tolist()
    targets = [*tokens[1:], 3]
    scorer = ours.runner.scorer()
    scorer.prepare(len(tokens))
    expected = scorer.score(tokens, targets)
    got = session(folder, "F32").score(tokens, targets)
    # llama.cpp keeps keys and values in float16.
    np.testing.assert_allclose(got, expected, atol=0.02)


def test_floats_decode_as_ours_in_every_setting(folder, ours):
    prompt = list(range(20))
    expected = ours.generate(prompt, GenerationConfig(max_tokens=12, ignore_eos=True)).tokens
    peer = session(folder, "F32")
    for setting in peer.settings:
        first = peer.prefill(prompt, setting)
        assert [first, *peer.decode(11, setting)] == list(expected)


def test_prompts_longer_than_a_batch_are_one_prompt(folder, monkeypatch):
    whole = session(folder, "F32")
    prompt = list(range(40))
    expected = whole.prefill(prompt, whole.settings[0]), whole.score(prompt, prompt)
    monkeypatch.setattr("benchmarks.peers.llama._BATCH_TOKENS", 16)
    cut = session(folder, "F32")
    assert cut.prefill(prompt, cut.settings[0]) == expected[0]
    np.testing.assert_allclose(cut.score(prompt, prompt), expected[1], atol=0.01)


@pytest.mark.parametrize(("file_type", "bits"), [("Q8_0", 8.5), ("Q4_0", 4.5), ("BF16", 16.0)])
def test_every_matrix_is_narrowed(folder, file_type, bits):
    sizes = tensor_bytes(gguf_of(folder, file_type, threads=1, progress=nothing))
    for name, (size, count) in sizes.items():
        assert 8 * size / count == (32.0 if "norm" in name else bits)
    facts = session(folder, file_type).facts()
    assert facts["weight_bytes"] == sum(size for size, _ in sizes.values())
    assert facts["weight_bytes"] - facts["step_bytes"] == sizes["token_embd.weight"][0]


def test_no_wider_file_is_left_behind(tmp_path):
    folder = write_tiny_folder(tmp_path / "tiny", cfg=EVEN, params=tiny_params(EVEN))
    made = gguf_of(folder, "Q4_0", threads=1, progress=nothing)
    assert list(made.parent.glob("*.gguf")) == [made]


def test_files_are_made_once_and_again_when_the_folder_changes(folder):
    first = gguf_of(folder, "Q8_0", threads=1, progress=nothing)
    made = first.stat().st_mtime_ns
    assert gguf_of(folder, "Q8_0", threads=1, progress=nothing).stat().st_mtime_ns == made
    write_tiny_folder(folder, cfg=EVEN, params=tiny_params(EVEN))
    again = gguf_of(folder, "Q8_0", threads=1, progress=nothing)
    assert again != first
    assert not first.exists()
