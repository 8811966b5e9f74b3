"""Systems in memory answer the same prompts in turns, each at its fastest setting."""

import dataclasses

import pytest

from benchmarks.peers import DRAFTED, PEERS
from benchmarks.speculative import in_memory
from benchmarks.speculative.in_memory import LLAMA, LLAMA_DRAFTED, NESTED, PLAIN, in_memory_rows
from tests.tiny import TINY, tiny_params, write_tiny_folder

PROMPTS = {"chat": [[1, 2], [3, 4]], "summary": [[5, 6]]}
# Milliseconds of a token in each setting.
SPEEDS = {NESTED: {"own": 2.0}, PLAIN: {"blocks": 3.0, "single": 4.0}, LLAMA: {"a": 7.0, "b": 6.0}}


@dataclasses.dataclass
class Scripted:
    """A system whose answers take as long as its setting says."""

    label: str
    opening: object
    progress: object

    def __post_init__(self):
        self.asked = []
        self.speeds = SPEEDS[self.opening.peer]
        self.settings = list(self.speeds)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait_until_asleep(self):
        pass

    def answer(self, prompt, tokens, setting):
        self.asked.append(setting)
        ids = [7] * (1 + tokens) if self.opening.peer != LLAMA or prompt != [5, 6] else [8] * (1 + tokens)
        passes = tokens // 4 if self.opening.peer == NESTED else 0
        return {"decode_ms": self.speeds[setting] * tokens, "passes": passes, "ids": ids}


def test_each_system_stands_beside_ours_at_its_fastest(tmp_path, monkeypatch):
    folder = write_tiny_folder(tmp_path / "tiny", cfg=TINY, params=tiny_params(TINY))
    monkeypatch.setattr(in_memory, "Child", Scripted)
    monkeypatch.setattr(type(PEERS[LLAMA]), "missing", lambda self: None)
    monkeypatch.setattr(type(DRAFTED[1]), "missing", lambda self: "llama_cpp")
    told = []
    rows = in_memory_rows(
        folder, PROMPTS, {}, tokens=8, context_tokens=64, progress=lambda *_: None, tell=told.append
    )
    assert told == [f"without {LLAMA_DRAFTED}: llama_cpp is not installed: pip install 'jaxllm[peers]'"]
    ratios = {row.baseline: row.ratio for row in rows if row.baseline}
    assert ratios == {PLAIN: pytest.approx(1.5), LLAMA: pytest.approx(3.0)}
    notes = {row.system: row.note for row in rows}
    assert "4.0 tokens a pass" in notes[NESTED]
    assert "b; 2 of 3 answers are those of jaxllm" in notes[LLAMA]
