"""The bench of models larger than memory: its baselines, its prompts, its figures."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.measuring.storage import DEVICES
from benchmarks.speculative import memory, systems
from benchmarks.speculative.prompts import TASKS, read_prompts
from benchmarks.speculative.run import _agreement, _token_ms
from benchmarks.speculative.systems import OURS, Setting, big_little, drafted, fixed_lines, plain
from jaxllm.errors import ConfigError
from serving.engine import Engine
from serving.options import EngineOptions
from serving.request import GenerationConfig
from tests.tiny import TINY, tiny_params, tiny_tokenizer, write_tiny_bundle

CFG = dataclasses.replace(TINY, layers=6, attention_windows=())
SMALL = dataclasses.replace(TINY, layers=1, attention_windows=())
CONFIG = GenerationConfig(max_tokens=12, ignore_eos=True)
PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speculative")
    write_tiny_bundle(folder / "target.jaxllm", "int8", cfg=CFG, params=tiny_params(CFG))
    write_tiny_bundle(folder / "draft.jaxllm", "int8", cfg=SMALL, params=tiny_params(SMALL))
    engine = Engine.open(folder / "target.jaxllm", warm_up=False)
    return Setting(
        model=folder / "target.jaxllm",
        draft=folder / "draft.jaxllm",
        narrow=folder / "target.jaxllm",
        weights_bytes=int(0.9 * engine.model.bundle.weight_bytes),
        context_tokens=128,
        storage=DEVICES["eufs"].storage,
    )


def answer(engine):
    found = engine.generate(PROMPT, CONFIG).tokens
    engine.close()
    return found


@pytest.mark.slow
def test_exact_systems_give_the_targets_answer(setting):
    whole = Engine.open(setting.model, options=EngineOptions(context_tokens=128))
    expected = answer(whole)
    for opened in (drafted, plain, lambda s: plain(s, read_ahead=False), lambda s: fixed_lines(s, 2)):
        engine = opened(setting)
        assert engine.model.streamed is not None
        assert answer(engine) == expected


@pytest.mark.slow
def test_big_little_keeps_what_the_large_model_does_not_find_too_unlikely(setting, monkeypatch):
    expected = answer(plain(setting))
    # Nothing is sure enough to be said by the small model alone, or nothing of it may stay.
    for name, value in (("_BLD_FALLBACK", 2.0), ("_BLD_ROLLBACK", -1.0)):
        with monkeypatch.context() as patch:
            patch.setattr(systems, name, value)
            assert answer(big_little(setting)) == expected
    # All of it may stay: the small model's answer, but for a token of the large one now and then.
    monkeypatch.setattr(systems, "_BLD_FALLBACK", 0.0)
    monkeypatch.setattr(systems, "_BLD_ROLLBACK", 1e9)
    engine = big_little(setting)
    small = Engine.open(setting.draft, options=EngineOptions(context_tokens=128))
    first, *rest = engine.generate(PROMPT, CONFIG).tokens
    assert first == expected[0]
    assert small.generate([*PROMPT, first], CONFIG).tokens[:10] == rest[:10]
    assert engine.speculation.counts.acceptance_length > 5
    engine.close()


def test_every_system_has_a_name():
    names = list(systems.systems())
    assert names[0] == OURS
    assert {"Std", "StdPL", "BLD", "STI"} < set(names)
    assert list(systems.systems(baselines=False, ablations=False)) == [OURS]
    assert not set(systems.systems(baselines=False)) & {"Std", "StdPL", "BLD", "STI"}


def test_prompts_are_held_out_and_fit(tmp_path):
    story = "Once there was a dog. " + "It ran far and was glad. " * 12
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "tinystories_valid.txt").write_text("\n<|endoftext|>\n".join([story] * 6))
    (tmp_path / "tasks" / "compression").mkdir(parents=True)
    lines = [json.dumps({"text": f"the {n} dogs ran home", "summaries": ["dogs ran"]}) for n in range(100)]
    for name in ("google", "broadcast", "gigaword"):
        (tmp_path / "tasks" / "compression" / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "tasks" / "samsum").mkdir()
    chat = json.dumps({"dialogue": "Ann: hi\nBob: hello", "summary": "They greet."})
    (tmp_path / "tasks" / "samsum" / "valid.jsonl").write_text("\n".join([chat] * 6))
    from jaxllm.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(tiny_tokenizer())
    found = read_prompts(tmp_path, tokenizer, count=3, most_tokens=120, seed=0)
    assert list(found) == list(TASKS)
    assert all(0 < len(each) <= 120 for prompts in found.values() for each in prompts)
    assert len(found["story"]) == len(found["shorten"]) == 3
    assert found == read_prompts(tmp_path, tokenizer, count=3, most_tokens=120, seed=0)
    with pytest.raises(ConfigError, match=r"tinystories_valid\.txt: cannot be read"):
        read_prompts(tmp_path / "nowhere", tokenizer, count=1, most_tokens=99, seed=0)


def said(tokens, ttft_ms, total_ms):
    return SimpleNamespace(tokens=tokens, timings=SimpleNamespace(ttft_ms=ttft_ms, total_ms=total_ms))


def test_tasks_count_alike_however_long_their_answers_are():
    answers = {
        "long": [said([1] * 11, 5.0, 105.0), said([1] * 11, 5.0, 25.0)],
        "short": [said([1, 2], 5.0, 7.0), said([1], 5.0, 5.0)],
    }
    assert _token_ms(answers) == pytest.approx(((100 + 20) / 20 + 2) / 2)
    with pytest.raises(ConfigError, match="no answer had more than one token"):
        _token_ms({"none": [said([1], 5.0, 5.0)]})


def test_agreement_is_of_tokens_at_their_places():
    ours, theirs = {"a": [said([1, 2, 3, 9], 0, 0)]}, {"a": [said([1, 5, 3, 4, 7], 0, 0)]}
    assert _agreement(ours, theirs) == pytest.approx(2 / 5)


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own(setting, monkeypatch):
    monkeypatch.setattr(memory, "_BLOCK_BYTES", 1 << 16)
    budget = systems._options(setting, setting.model).memory_bytes
    rows = memory.memory_rows(setting.model, [budget])
    values = {row.metric: row for row in rows}
    assert set(values) == {"peak_memory_bytes", "tpot_ms", "bandwidth_share"}
    assert values["peak_memory_bytes"].baseline == "budget"
    assert np.isfinite([row.value for row in rows]).all()
    with pytest.raises(ConfigError, match="all of the model fits"):
        memory.memory_rows(setting.model, [1 << 30])
