"""transformers as a peer: it computes with our weights, in both of its caches."""

import numpy as np
import pytest

from benchmarks.peers.peer import Opening
from benchmarks.peers.torch_transformers import TorchTransformers
from jaxllm import Engine, EngineOptions, GenerationConfig
from tests.tiny import TINY, tiny_params, write_tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("torch") / "tiny", cfg=TINY, params=tiny_params(TINY))


@pytest.fixture(scope="module")
def session(folder):
    for library in ("torch", "transformers"):
        pytest.importorskip(library)
    opening = Opening(peer="transformers", model=folder, format="f32", threads=1, context_tokens=64)
    return TorchTransformers().open(opening, lambda *_: None)


@pytest.fixture(scope="module")
def ours(folder):
    options = EngineOptions(context_tokens=64, chunk_tokens=(16,), cache_tokens=(64,))
    return Engine.open(folder, weights="f32", options=options)


def test_it_decodes_as_ours_in_every_setting(session, ours):
    prompt = list(range(20))
    expected = ours.generate(prompt, GenerationConfig(max_tokens=12, ignore_eos=True)).tokens
    for setting in session.settings * 2:  # the second time with caches that have been used
        first = session.prefill(prompt, setting)
        assert [first, *session.decode(11, setting)] == list(expected)


def test_it_scores_as_ours(session, ours):
    tokens = np.random.default_rng(1).integers(0, TINY.vocab_size, 40).tolist()
    scorer = ours.runner.scorer()
    scorer.prepare(len(tokens))
    expected = scorer.score(tokens, [*tokens[1:], 3])
    np.testing.assert_allclose(session.score(tokens, [*tokens[1:], 3]), expected, atol=1e-4)


def test_both_widths_stand_beside_ours(session):
    assert dict(TorchTransformers().systems("int4")) == {
        "transformers-f32": "f32",
        "transformers-bf16": "bf16",
    }
    facts = session.facts()
    assert facts["bits_per_weight"] == 32
    assert facts["weight_bytes"] - facts["step_bytes"] == 4 * TINY.vocab_size * TINY.hidden_size
