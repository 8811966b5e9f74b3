"""The bench of models larger than memory: its baselines, its prompts, its figures."""

import dataclasses
import json
from functools import partial

import numpy as np
import pytest

from benchmarks.measuring.storage import DEVICES
from benchmarks.speculative import memory, run, shards
from benchmarks.speculative.enlarged import enlarged_bundle
from benchmarks.speculative.prompts import TASKS, read_prompts, spec_bench
from benchmarks.speculative.systems import (
    OURS,
    PUBLISHED,
    Setting,
    Thresholds,
    _options,
    big_little,
    drafted,
    fixed_lines,
    plain,
    systems,
    tuned_systems,
)
from jaxllm.errors import ConfigError
from serving.engine import Engine
from serving.options import EngineOptions
from serving.request import GenerationConfig
from tests import tiny_encdec
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
        narrow={},
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
    tuned = {name: list(each.values())[-1] for name, each in tuned_systems(baselines=False).items()}
    assert list(tuned) == [f"{OURS}-no-fallback", f"{PUBLISHED}-no-fallback"]
    published = [each for name, each in systems().items() if name.startswith(PUBLISHED)]
    assert len(published) == 3
    others = (drafted, plain, lambda s: plain(s, read_ahead=False), lambda s: fixed_lines(s, 2))
    for opened in (*others, *published, *tuned.values()):
        engine = opened(setting)
        assert engine.model.streamed is not None
        assert answer(engine) == expected


@pytest.mark.slow
def test_big_little_keeps_what_the_large_model_does_not_find_too_unlikely(setting):
    expected = answer(plain(setting))
    # Nothing is sure enough to be said by the small model alone, or nothing of it may stay.
    for thresholds in (Thresholds(fallback=2.0, rollback=3.0), Thresholds(fallback=0.6, rollback=-1.0)):
        assert answer(big_little(setting, thresholds)) == expected
    # All of it may stay: the small model's answer, but for a token of the large one now and then.
    engine = big_little(setting, Thresholds(fallback=0.0, rollback=1e9))
    small = Engine.open(setting.draft, options=EngineOptions(context_tokens=128))
    first, *rest = engine.generate(PROMPT, CONFIG).tokens
    assert first == expected[0]
    assert small.generate([*PROMPT, first], CONFIG).tokens[:10] == rest[:10]
    assert engine.speculation.counts.acceptance_length > 5
    engine.close()


@pytest.mark.slow
def test_systems_answer_sources_as_the_target_in_memory(tmp_path):
    small = dataclasses.replace(tiny_encdec.ENCODER, layers=1, attention_windows=(0,))
    draft = dataclasses.replace(small, encoder=small, window_tokens=64)
    deep = dataclasses.replace(tiny_encdec.ENCODER, layers=4, attention_windows=(0,) * 4)
    target = dataclasses.replace(deep, encoder=deep, window_tokens=64)
    for name, cfg in (("target", target), ("draft", draft)):
        tiny_encdec.write_bundle(tmp_path / f"{name}.jaxllm", "int8", cfg=cfg)
    (tmp_path / "pairs.txt").write_text("the hello\tder Gruß\nhello there\n", encoding="utf-8")
    whole = Engine.open(tmp_path / "target.jaxllm", options=EngineOptions(context_tokens=64))
    prompts = read_prompts(
        None, whole.tokenizer, count=4, most_tokens=40, seed=0, file=tmp_path / "pairs.txt"
    )
    assert sorted(prompts["sources"]) == sorted(
        whole.tokenizer.encode(each) for each in ("the hello", "hello there")
    )
    setting = Setting(
        model=tmp_path / "target.jaxllm", draft=tmp_path / "draft.jaxllm", narrow={},
        weights_bytes=int(0.9 * whole.model.bundle.weight_bytes), context_tokens=64,
        storage=DEVICES["eufs"].storage,
    )  # fmt: skip
    opened = {"Std": partial(plain, read_ahead=False), "StdPL": plain, "SP": partial(fixed_lines, length=2)}
    expected = [whole.generate(each, CONFIG).tokens for each in prompts["sources"]]
    for name, of in {OURS: drafted, **opened}.items():
        engine = of(setting)
        assert engine.model.streamed is not None, name
        assert [engine.generate(each, CONFIG).tokens for each in prompts["sources"]] == expected, name
        engine.close()


def test_encoder_decoders_are_refused_by_name(tmp_path):
    path = tiny_encdec.write_bundle(tmp_path / "t5.jaxllm", "int8")
    with pytest.raises(ConfigError, match="enlarged models: not for encoder-decoders"):
        enlarged_bundle(path, 2)


def test_every_system_has_a_name():
    names = [*systems(), *tuned_systems()]
    assert names[0] == OURS
    assert {"Std", "StdPL", "SP", "BLD", "STI"} < set(names)
    none = {"baselines": False, "ablations": False, "presets": ("ours",)}
    assert [*systems(**none), *tuned_systems(**none)] == [OURS]
    assert not {*systems(baselines=False), *tuned_systems(baselines=False)} & {
        "Std",
        "StdPL",
        "SP",
        "BLD",
        "STI",
    }
    # Of LLMCad's three techniques each is left out once.
    left_out = {name.removeprefix(f"{PUBLISHED}-") for name in names if name.startswith(f"{PUBLISHED}-")}
    assert left_out == {"no-tree", "no-fallback", "no-pipeline"}
    only = {"presets": ("published",)}
    assert not [name for name in (*systems(**only), *tuned_systems(**only)) if name.startswith(f"{OURS}-")]


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


LINES = [
    {"question_id": 1, "category": "writing", "turns": ["Write a poem.", "Now another."]},
    {"question_id": 2, "category": "qa", "turns": ["Who wrote it?"]},
    {"question_id": 3, "category": "rag", "turns": ["word " * 400]},
    {"question_id": 4, "category": "coding", "turns": ["Sort a list."]},
]


def test_prompts_of_spec_bench_are_asked_by_category(tmp_path):
    from jaxllm.text.tokenizer import Tokenizer

    file = tmp_path / "question.jsonl"
    file.write_text("\n".join(map(json.dumps, LINES)))
    found = spec_bench(file)
    assert [each.user for each in found["multi-turn conversation"]] == ["Write a poem.", "Sort a list."]
    assert [len(each) for each in found.values()] == [2, 0, 0, 1, 0, 1]
    tokenizer = Tokenizer(tiny_tokenizer())
    # What is too long, and categories without prompts, are left out.
    asked = read_prompts(None, tokenizer, count=5, most_tokens=100, seed=0, file=file)
    assert {task: len(each) for task, each in asked.items()} == {"multi-turn conversation": 2, "qa": 1}
    with pytest.raises(ConfigError, match="has at most 1 tokens"):
        read_prompts(None, tokenizer, count=5, most_tokens=1, seed=0, file=file)
    for line in ("{", "[]", json.dumps({"category": "qa", "turns": []}), json.dumps({"turns": ["a"]})):
        file.write_text(f"{json.dumps(LINES[0])}\n{line}\n")
        with pytest.raises(ConfigError, match="line 2: is no prompt of Spec-Bench"):
            spec_bench(file)


def test_the_real_spec_bench_is_read(data_dir):
    file = data_dir / "prompts" / "spec_bench.jsonl"
    if not file.is_file():
        pytest.skip("Spec-Bench is not here")
    assert {task: len(each) for task, each in spec_bench(file).items()} == dict.fromkeys(
        ("multi-turn conversation", "translation", "summarization", "qa", "math_reasoning", "rag"), 80
    )


@pytest.mark.slow
def test_a_run_has_rows_of_every_system(setting, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "cache_folder", lambda: tmp_path / "cache")
    file, told = tmp_path / "question.jsonl", []
    file.write_text("\n".join(map(json.dumps, LINES)))
    subject = run.Subject(model=setting.model, draft=setting.draft, prompts=file)
    plan = run.Plan(
        prompts=2,
        tokens=6,
        tried=0,
        context_tokens=128,
        shares=(0.01, 0.9),
        devices=(DEVICES["eufs"],),
        parts=("systems",),
    )
    rows = run.run(subject, plan, tell=told.append)
    assert len(told) == 1
    assert "1% of the model in memory: a memory budget" in told[0]
    whole = {row.baseline: row for row in rows if row.case.endswith("all tasks") and row.system == OURS}
    others = {PUBLISHED, "Std", "StdPL", "SP", "BLD", "STI"}
    assert others <= {*whole}
    assert {row.system for row in rows} == {OURS, *others}
    metrics = {"tpot_ms", "rouge_l", "acceptance_length", "useful_share", "draft_ms", "verify_ms"}
    assert {row.metric for row in rows} == metrics
    assert [row.value for row in rows if row.metric == "rouge_l" and row.system == OURS] == [1, 1]
    with pytest.raises(ConfigError, match="no budget holds a draft"):
        run.run(subject, dataclasses.replace(plan, shares=(0.01,)))
    with pytest.raises(ConfigError, match="all prompts are taken"):
        run.run(subject, dataclasses.replace(plan, tried=2))


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own(setting, monkeypatch):
    monkeypatch.setattr(memory, "_BLOCK_BYTES", 1 << 16)
    budget = _options(setting, setting.model).memory_bytes
    rows = memory.memory_rows(setting.model, [budget])
    values = {row.metric: row for row in rows}
    assert set(values) == {"peak_memory_bytes", "tpot_ms", "bandwidth_share"}
    assert values["peak_memory_bytes"].baseline == "budget"
    assert np.isfinite([row.value for row in rows]).all()
    with pytest.raises(ConfigError, match="all of the model fits"):
        memory.memory_rows(setting.model, [1 << 30])
