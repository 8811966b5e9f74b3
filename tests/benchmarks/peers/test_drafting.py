"""Drafts in memory: whatever a draft guesses, answers stay the same, and passes are counted."""

import numpy as np
import pytest

from benchmarks.peers.drafting import DraftedLlamaSession, NestedSession
from benchmarks.peers.jaxllm_engine import BLOCKS, EngineSession
from benchmarks.peers.llama import LlamaCppSession
from benchmarks.peers.peer import Opening
from tests.tiny import TINY, tiny_params, write_tiny_folder

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


def test_the_binding_has_what_drafts_call():
    for name in ("begin", "forget", "feed", "feed_all"):
        assert callable(getattr(LlamaCppSession, name))
    llama_cpp = pytest.importorskip("llama_cpp")
    assert llama_cpp.llama_memory_seq_rm
