"""llama.cpp as a peer: it computes with our weights, in every setting and at every width, and drafts.

On one thread in this process, where a benchmark would give it one of its own.
"""

import dataclasses

import numpy as np
import pytest

from benchmarks.peers.llama import DraftedLlamaSession, gguf_of, open_llama, tensor_bytes
from benchmarks.peers.ours import BLOCKS, EngineSession, NestedSession
from benchmarks.peers.peer import Opening
from jaxllm import Engine, EngineOptions, GenerationConfig
from jaxllm.serving.runners.scorer import Scorer
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
    return open_llama(opening, nothing)


def test_floats_decode_and_score_as_ours_in_every_setting(folder):
    options = EngineOptions(context_tokens=64, chunk_tokens=(16,), cache_tokens=(64,))
    ours, peer = Engine.open(folder, weights="f32", options=options), session(folder, "F32")
    prompt = list(range(20))
    expected = ours.generate(prompt, GenerationConfig(max_tokens=12, ignore_eos=True)).tokens
    for setting in peer.settings:
        first = peer.prefill(prompt, setting)
        assert [first, *peer.decode(11, setting)] == list(expected)
    tokens = np.random.default_rng(1).integers(0, EVEN.vocab_size, 40).tolist()
    targets = [*tokens[1:], 3]
    scorer = Scorer(ours.runner)
    scorer.prepare(len(tokens))
    # llama.cpp keeps keys and values in float16.
    np.testing.assert_allclose(peer.score(tokens, targets), scorer.score(tokens, targets), atol=0.02)


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


def test_files_are_made_once_and_again_when_the_folder_changes(folder, tmp_path):
    first = gguf_of(folder, "Q8_0", threads=1, progress=nothing)
    made = first.stat().st_mtime_ns
    assert gguf_of(folder, "Q8_0", threads=1, progress=nothing).stat().st_mtime_ns == made
    write_tiny_folder(folder, cfg=EVEN, params=tiny_params(EVEN))
    again = gguf_of(folder, "Q8_0", threads=1, progress=nothing)
    assert again != first
    assert not first.exists()
    # No wider file is left behind.
    other = write_tiny_folder(tmp_path / "tiny", cfg=EVEN, params=tiny_params(EVEN))
    alone = gguf_of(other, "Q4_0", threads=1, progress=nothing)
    assert list(alone.parent.glob("*.gguf")) == [alone]


VOCAB = 11


class Counting:
    """A model whose next token follows from all before it, in the place of llama.cpp's."""

    def __init__(self, *, wrong_at=(), sure=True):
        self.memory, self.wrong_at, self.sure = [], wrong_at, sure
        self.settings = ("usual",)

    def begin(self, setting):
        self.memory = []

    def forget(self, seen):
        assert seen <= len(self.memory)
        self.memory = self.memory[:seen]

    def feed(self, tokens):
        return self.feed_all(tokens, len(self.memory))[-1]

    def feed_all(self, tokens, seen):
        assert seen == len(self.memory)
        rows = np.zeros((len(tokens), VOCAB))
        for row, token in zip(rows, tokens, strict=True):
            self.memory.append(token)
            guess = (sum(self.memory) + len(self.memory)) % VOCAB
            wrong = len(self.memory) in self.wrong_at
            row[(guess + wrong) % VOCAB] = 9.0 if self.sure else 0.5
        return rows


def answered(draft, tokens=30, most=4):
    target = Counting()
    session = object.__new__(DraftedLlamaSession)
    for name in ("begin", "forget", "feed", "feed_all"):
        setattr(session, name, getattr(target, name))
    session._passes = 0
    session._kinds = {"usual, lines": ("usual", most, draft)}
    first = session.prefill([1, 2, 3], "usual, lines")
    return [first, *session.decode(tokens, "usual, lines")], session.passes()


def test_answers_are_those_of_the_target_alone():
    alone, _ = answered(Counting(), most=0)
    assert len(alone) == 31
    for draft in (Counting(), Counting(wrong_at=range(5, 40, 3)), Counting(sure=False)):
        ids, passes = answered(draft)
        assert ids == alone
        assert passes <= 30
    # A right line of 4 gives 5 tokens; one that is not sure ends after its first token.
    assert answered(Counting())[1] == 6
    assert answered(Counting(sure=False))[1] == 15


def test_a_drafted_engine_says_what_its_engine_says(tmp_path):
    folder = write_tiny_folder(tmp_path / "tiny", cfg=TINY, params=tiny_params(TINY))

    def session(kind, format_, **options):
        opening = Opening(
            peer="any", model=folder, format=format_, threads=1, context_tokens=64, options=options
        )
        return kind(opening, lambda *_: None)

    drafted = session(NestedSession, "int8-nested", answer_tokens=13, draft=str(folder))
    assert drafted.settings == ("drafts of high planes", "drafts of tiny")
    alone = session(EngineSession, "int8-nested", context_tokens=64)
    prompt = [3, 4, 5, 6]
    first = alone.prefill(prompt, BLOCKS)
    answer = alone.decode(12, BLOCKS)
    for setting in drafted.settings:
        before = drafted.passes()
        assert drafted.prefill(prompt, setting) == first
        assert drafted.decode(12, setting) == answer
        assert 0 < drafted.passes() - before <= 12
    assert drafted.facts()["weight_bytes"] > 0
