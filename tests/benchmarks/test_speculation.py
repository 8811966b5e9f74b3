"""The bench of models larger than memory: systems, prompts, figures, tuning, shards, enlarged models."""

import dataclasses
import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.harness.bench import Run
from benchmarks.harness.machine import DEVICES
from benchmarks.harness.report import OURS
from benchmarks.peers import DRAFTED, PEERS
from benchmarks.speculation import run
from benchmarks.speculation.answers import (
    agreement,
    quality_rows,
    ratio_interval,
    read_prompts,
    spec_bench,
    spent,
    time_rows,
    token_ms,
    tuned,
)
from benchmarks.speculation.run import (
    LLAMA,
    LLAMA_DRAFTED,
    NESTED,
    PLAIN,
    enlarge,
    enlarged_bundle,
    in_memory_rows,
)
from benchmarks.speculation.systems import (
    PUBLISHED,
    Setting,
    _options,
    big_little,
    drafted,
    fixed_lines,
    narrow_bundles,
    ours,
    plain,
    plan_widths,
    shard_importance,
    shards_of,
    systems,
    tuned_systems,
)
from jaxllm.bundle import Bundle
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models import decoder
from jaxllm.models.parameters import param_specs
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.opening.engine import Engine
from jaxllm.text.tokenizer import Tokenizer
from tests import tiny_encdec
from tests.kernels.switching import needs_native
from tests.tiny import TINY, random_params, tiny_params, tiny_tokenizer, write_tiny_bundle, write_tiny_folder

CFG = dataclasses.replace(TINY, layers=6, attention_windows=())
SMALL = dataclasses.replace(TINY, layers=1, attention_windows=())
CONFIG = GenerationConfig(max_tokens=12, ignore_eos=True)
PROMPT = list(range(40, 60))
IN_MEMORY = EngineOptions(context_tokens=128)


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


@pytest.fixture(scope="module")
def expected(setting):
    """What the target says in memory."""
    return answer(Engine.open(setting.model, options=IN_MEMORY))


@pytest.mark.slow
def test_exact_systems_give_the_targets_answer(setting, expected):
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
def test_big_little_keeps_what_the_large_model_does_not_find_too_unlikely(setting, expected):
    # Nothing is sure enough to be said by the small model alone, or nothing of it may stay.
    for fallback, rollback in ((2.0, 3.0), (0.6, -1.0)):
        assert answer(big_little(setting, fallback, rollback)) == expected
    # All of it may stay: the small model's answer, but for a token of the large one now and then.
    engine = big_little(setting, 0.0, 1e9)
    small = Engine.open(setting.draft, options=EngineOptions(context_tokens=128))
    first, *rest = engine.generate(PROMPT, CONFIG).tokens
    assert first == expected[0]
    assert small.generate([*PROMPT, first], CONFIG).tokens[:10] == rest[:10]
    assert engine.speculation.counts.acceptance_length > 5
    engine.close()


LINES = [
    {"question_id": 1, "category": "writing", "turns": ["Write a poem.", "Now another."]},
    {"question_id": 2, "category": "qa", "turns": ["Who wrote it?"]},
    {"question_id": 3, "category": "rag", "turns": ["word " * 400]},
    {"question_id": 4, "category": "coding", "turns": ["Sort a list."]},
]


def test_prompts_of_spec_bench_are_asked_by_category(tmp_path):
    file = tmp_path / "question.jsonl"
    file.write_text("\n".join(map(json.dumps, LINES)))
    found = spec_bench(file)
    assert [each.user for each in found["multi-turn conversation"]] == ["Write a poem.", "Sort a list."]
    assert [len(each) for each in found.values()] == [2, 0, 0, 1, 0, 1]
    tokenizer = Tokenizer(tiny_tokenizer())
    samples = read_prompts(None, tokenizer, count=3, most_tokens=120, seed=0)
    assert samples == read_prompts(None, tokenizer, count=3, most_tokens=120, seed=0)
    assert all(0 < len(each) <= 120 for prompts in samples.values() for each in prompts)
    # What is too long, and categories without prompts, are left out.
    asked = read_prompts(None, tokenizer, count=5, most_tokens=100, seed=0, file=file)
    assert {task: len(each) for task, each in asked.items()} == {"multi-turn conversation": 2, "qa": 1}
    for line in ("{", json.dumps({"category": "qa", "turns": []})):
        file.write_text(f"{json.dumps(LINES[0])}\n{line}\n")
        with pytest.raises(ConfigError, match="line 2: is no prompt of Spec-Bench"):
            spec_bench(file)


@pytest.mark.slow
def test_a_run_has_rows_of_every_system(setting, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    file, told = tmp_path / "question.jsonl", []
    file.write_text("\n".join(map(json.dumps, LINES)))
    plan = run.Plan(
        prompts=2, tokens=4, tried=0, context_tokens=128, shares=(0.01, 0.9), devices=("eufs",),
        parts=("systems",), draft=str(setting.draft), file=file,
    )  # fmt: skip
    bench = Run(plan=plan, model=setting.model, tell=told.append)
    rows = run.run(bench)
    assert len(told) == 1
    assert "1% of the model in memory: a memory budget" in told[0]
    whole = {row.baseline: row for row in rows if row.case.endswith("all tasks") and row.system == OURS}
    others = {PUBLISHED, "Std", "StdPL", "SP", "BLD", "STI"}
    assert others <= {*whole}
    assert {row.system for row in rows} == {OURS, *others}
    metrics = {"tpot_ms", "rouge_l", "acceptance_length", "useful_share", "draft_ms", "verify_ms"}
    assert {row.metric for row in rows} == metrics
    assert [row.value for row in rows if row.metric == "rouge_l" and row.system == OURS] == [1, 1]
    with pytest.raises(ConfigError, match="no budget holds two layers"):
        run.run(bench.changed(shares=(0.01,)))
    with pytest.raises(ConfigError, match="all prompts are taken"):
        run.run(bench.changed(tried=2))


@pytest.mark.slow
@needs_native
def test_a_model_drafts_for_itself_as_its_memory_allows(setting, tmp_path):
    model = write_tiny_bundle(tmp_path / "nested.jaxllm", "int8-nested", cfg=CFG, params=tiny_params(CFG))
    (tmp_path / "question.jsonl").write_text("\n".join(map(json.dumps, LINES)))
    plan = run.Plan(
        prompts=1, tokens=8, tried=0, context_tokens=128, shares=(0.95,), devices=("eufs",),
        parts=("drafters",), draft="nested", file=tmp_path / "question.jsonl",
    )  # fmt: skip
    rows = run.run(Run(plan=plan, model=model))
    assert {row.system for row in rows} == {OURS, "StdPL", f"{OURS}-ngram"}
    assert len({row.case for row in rows if row.metric == "acceptance_length"}) == 1
    size, expected = Bundle.open(model).weight_bytes, answer(Engine.open(model, options=IN_MEMORY))
    for share, drafter in ((0.5, "ngram"), (0.95, "nested")):
        engine = ours(dataclasses.replace(setting, model=model, draft=None, weights_bytes=int(share * size)))
        assert (engine.speculation.options.drafter, answer(engine)) == (drafter, expected)
    assert "no-pipeline" not in " ".join(systems(pipelined=False))
    other = write_tiny_bundle(tmp_path / "plain.jaxllm", "int8", cfg=CFG, params=tiny_params(CFG))
    with pytest.raises(CheckpointError, match="holds int8 weights, not int8-nested"):
        run.run(Run(plan=plan, model=other))


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own(setting, monkeypatch):
    monkeypatch.setattr(run, "_BLOCK_BYTES", 1 << 16)
    budget = _options(setting, setting.model).memory_bytes
    rows = run.memory_rows(setting.model, [budget])
    values = {row.metric: row for row in rows}
    assert all("context of 128 tokens" in row.case for row in rows)
    assert set(values) == {"peak_memory_bytes", "tpot_ms", "bandwidth_share"}
    assert values["peak_memory_bytes"].baseline == "budget"
    assert np.isfinite([row.value for row in rows]).all()
    with pytest.raises(ConfigError, match="all of the model fits"):
        run.memory_rows(setting.model, [1 << 30])


PROMPTS = {"chat": [[1, 2], [3, 4]], "summary": [[5, 6]]}
# Milliseconds of a token in each setting.
SPEEDS = {
    NESTED: {"own": 2.0},
    PLAIN: {"blocks": 3.0, "single": 4.0},
    LLAMA: {"a": 7.0, "b": 6.0},
}


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
    monkeypatch.setattr("benchmarks.peers.process.Child", Scripted)
    monkeypatch.setattr(PEERS[LLAMA], "packages", ())
    monkeypatch.setattr(DRAFTED[1], "packages", ("nowhere",))
    told = []
    bench = Run(plan=run.Plan(tokens=9, context_tokens=64), tell=told.append)
    rows = in_memory_rows(folder, None, PROMPTS, {}, bench)
    assert told == [f"without {LLAMA_DRAFTED}: nowhere is not installed: pip install 'jaxllm[peers]'"]
    ratios = {row.baseline: row.ratio for row in rows if row.baseline}
    assert ratios == {PLAIN: pytest.approx(1.5), LLAMA: pytest.approx(3.0)}
    notes = {row.system: row.note for row in rows}
    assert "4.0 tokens a pass" in notes[NESTED]
    assert "b; 2 of 3 answers are those of jaxllm" in notes[LLAMA]


ONE = dataclasses.replace(TINY, layers=2, attention_windows=())


def logits(cfg, params):
    tokens = jnp.arange(20, 40)[None]
    return np.asarray(decoder.logits(params, decoder.forward_documents(params, tokens, cfg=cfg), cfg=cfg))


@pytest.mark.parametrize(
    "change",
    [
        {},
        # Every head has keys of its own.
        {"heads": 4, "kv_heads": 4, "qk_norm": True, "post_norms": True},
        {"heads": 6, "kv_heads": 2, "qkv_bias": True, "o_bias": True, "ffn_bias": True, "gated_ffn": False},
    ],
)
def test_a_grown_model_says_the_same(change):
    times = 3 if change else 2
    cfg = dataclasses.replace(ONE, **change)
    params = {name: np.float32(0.3) * value for name, value in random_params(cfg).items()}
    large, values = enlarge(cfg, params, times)
    enlarged = dict(values)
    specs = param_specs(large)
    assert {name: value.shape for name, value in enlarged.items()} == {n: s.shape for n, s in specs.items()}
    assert (large.layers, large.ffn_size) == (times * cfg.layers, times * cfg.ffn_size)
    np.testing.assert_allclose(logits(large, enlarged), logits(cfg, params), rtol=2e-4, atol=2e-4)
    # What was added is no zeros, which storage might skip.
    matrices = [value for name, value in enlarged.items() if value.ndim > 1 and "bias" not in name]
    assert np.mean([np.mean(value == 0) for value in matrices]) < 0.01


def test_a_bundle_grows_once_at_its_own_width(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    small = write_tiny_bundle(tmp_path / "small.jaxllm", "int8", cfg=ONE)
    path = enlarged_bundle(small, 3)
    large = Bundle.open(path)
    assert large.layout.weights == "int8"
    assert large.cfg.layers == 3 * ONE.layers
    assert large.weight_bytes > 4 * Bundle.open(small).weight_bytes
    written = path.stat().st_mtime_ns
    assert enlarged_bundle(small, 3) == path
    assert path.stat().st_mtime_ns == written
    for change, times in (({"heads": 3, "kv_heads": 3}, 2), ({}, 1), ({"ffn_size": 31}, 2)):
        with pytest.raises(ConfigError, match="enlarge"):
            enlarge(dataclasses.replace(ONE, **change), {}, times)
    with pytest.raises(ConfigError, match="enlarged models: not for encoder-decoders"):
        enlarged_bundle(tiny_encdec.write_bundle(tmp_path / "t5.jaxllm", "int8"), 2)


def said(tokens, ttft_ms, total_ms, text=""):
    timings = SimpleNamespace(ttft_ms=ttft_ms, total_ms=total_ms)
    return SimpleNamespace(tokens=tokens, timings=timings, text=text)


def took(*each_ms, tokens=10):
    """Answers of one task, each of so many tokens after the first and so many milliseconds for them."""
    return {"a": [said([1] * (tokens + 1), 5.0, 5.0 + ms) for ms in each_ms]}


def test_figures_of_answers_by_hand():
    """Tasks count alike however long their answers are, and agreement is of tokens at their places."""
    answers = {
        "long": [said([1] * 11, 5.0, 105.0), said([1] * 11, 5.0, 25.0)],
        "short": [said([1, 2], 5.0, 7.0), said([1], 5.0, 5.0)],
    }
    assert token_ms(spent(answers)) == pytest.approx(((100 + 20) / 20 + 2) / 2)
    with pytest.raises(ConfigError, match="no answer had more than one token"):
        token_ms(spent({"none": [said([1], 5.0, 5.0)]}))
    ours, theirs = {"a": [said([1, 2, 3, 9], 0, 0)]}, {"a": [said([1, 5, 3, 4, 7], 0, 0)]}
    assert agreement(ours, theirs) == pytest.approx(2 / 5)


def test_intervals_are_paired():
    def interval(ours, theirs):
        return ratio_interval(spent(ours), spent(theirs))

    # Prompts differ much, the systems by the same factor at each: the interval is a point.
    assert interval(took(10, 100, 1000), took(20, 200, 2000)) == pytest.approx((2, 2))
    # One of two prompts is 1, the other 3 times as fast, and as long in ours: draws are 1, 2 and 3.
    assert interval(took(10, 10), took(10, 30)) == pytest.approx((1, 3))
    both = {**took(10), "b": took(10)["a"], "none": [said([1], 5.0, 5.0)]}
    other = {**took(30), "b": took(10)["a"], "none": both["none"]}
    assert interval(both, other) == pytest.approx((2, 2))


def test_rows_compare_ours_and_what_is_published():
    names = ("jaxllm", "LLMCad", "StdPL", "BLD", "LLMCad-no-tree")
    answers = {name: took(ms, ms) for name, ms in zip(names, (10, 20, 40, 30, 50), strict=True)}
    for each in answers["BLD"]["a"]:
        each.text = "other"
    rows = time_rows("case", answers, dict.fromkeys(names, "so"))
    whole = {(r.system, r.baseline): r for r in rows if r.case == "case: all tasks"}
    assert {key: row.ratio for key, row in whole.items() if key[1]} == {
        ("jaxllm", "LLMCad"): 2,
        ("jaxllm", "StdPL"): 4,
        ("jaxllm", "BLD"): 3,
        ("LLMCad", "LLMCad-no-tree"): 2.5,
    }
    assert whole["jaxllm", "StdPL"].note == "paired 95 % in [4.00x, 4.00x] of 2 prompts; so"
    assert whole["StdPL", None].note == "so"
    quality = {(r.system, r.baseline): r.value for r in quality_rows("case", answers)}
    assert quality == {("jaxllm", "BLD"): 1, ("BLD", None): 0}
    assert quality_rows("case", {name: answers[name] for name in ("jaxllm", "StdPL")}) == []


class Candidate:
    """Answers in so many milliseconds."""

    def __init__(self, ms, text):
        self.ms, self.text, self.asked, self.closed = ms, text, 0, False

    def generate(self, prompt, config):
        self.asked += 1
        return said([1] * 11, 5.0, 5.0 + self.ms, self.text)

    def close(self):
        self.closed = True


def test_tuning_opens_all_and_keeps_one():
    made = {
        "quick": Candidate(10, "no"),
        "right": Candidate(20, "so it is"),
        "slow": Candidate(30, "so it is"),
    }
    candidates = {name: lambda _, engine=engine: engine for name, engine in made.items()}
    target, config = Candidate(40, "so it is"), GenerationConfig()
    asked = {"a": [[1], [2]]}
    engine, how = tuned("BLD", candidates, None, target, asked, config)  # pyright: ignore
    assert engine is made["right"]
    tried = "quick: 1.0 ms at a Rouge-L of 0.00, right: 2.0 ms, slow: 3.0 ms"
    assert how == f"right, the best of these on 2 other prompts ({tried})"
    assert [each.closed for each in (*made.values(), target)] == [True, False, True, False]
    assert [each.asked for each in made.values()] == [2, 2, 2]
    engine, how = tuned("BLD", candidates, None, target, {}, config)  # pyright: ignore
    assert (engine, how) == (made["right"], "right, not tuned")


SHARDED = dataclasses.replace(TINY, layers=2, attention_windows=())
TEXTS = [list(range(5, 45)), list(range(60, 80))]


def test_what_is_left_goes_to_the_important_shards():
    sizes, importance = {"a": 100, "b": 100, "c": 50, "d": 50}, {"a": 0.1, "b": 0.4, "c": 0.3, "d": 0.2}
    # 300 bits are left above 4 each: none is enough for `b`, which is most important; `c` takes 200 of them.
    assert plan_widths(importance, sizes, 5) == {"a": 4, "b": 4, "c": 8, "d": 4}
    # 300 above 2: 200 for `b` at 4, and 100 for `c`.
    assert plan_widths(importance, sizes, 3) == {"a": 2, "b": 4, "c": 4, "d": 2}


def test_a_shard_that_does_nothing_is_unimportant():
    params = {name: np.asarray(each, np.float32) for name, each in tiny_params(SHARDED).items()}
    # Nothing that this block computes is added to the residual stream.
    params["layers.1.ffn.down"] = np.zeros_like(params["layers.1.ffn.down"])
    found, shards = shard_importance(SHARDED, params, TEXTS, 2), shards_of(SHARDED)
    # A shard is a layer's attention or its block.
    assert list(found) == list(shards) == [f"layers.{n}.{each}" for n in (0, 1) for each in ("attn", "ffn")]
    assert shards["layers.1.attn"] == [f"layers.1.attn.{each}" for each in ("q", "k", "v", "o")]
    assert not [name for names in shards.values() for name in names if "norm" in name or "bias" in name]
    assert found["layers.1.ffn"] == pytest.approx(0, abs=1e-6)
    wider = shard_importance(SHARDED, params, TEXTS, 8)
    assert all(found[each] > 10 * abs(wider[each]) > 0 for each in found if each != "layers.1.ffn")


@pytest.mark.slow
def test_bundles_of_mixed_widths_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    write_tiny_bundle(tmp_path / "target.jaxllm", "int8", cfg=SHARDED, params=tiny_params(SHARDED))
    made = narrow_bundles(tmp_path / "target.jaxllm", (3.0, 6.0), TEXTS)
    widths = {}
    for bits, path in made.items():
        with Bundle.open(path) as bundle:
            tensors = bundle.layout.tensors
            widths[bits] = {tensors[name].bits for names in shards_of(SHARDED).values() for name in names}
            assert tensors["embed.tokens"].bits == 8
    assert widths == {3.0: {2, 4}, 6.0: {4, 8}}
    sizes = [path.stat().st_size for path in made.values()]
    assert sizes == sorted(sizes)
    engine = Engine.open(made[3.0], options=EngineOptions(context_tokens=64))
    assert len(engine.generate(PROMPT, GenerationConfig(max_tokens=4, ignore_eos=True)).tokens) == 4
    engine.close()
    # Made once.
    times = [path.stat().st_mtime_ns for path in made.values()]
    assert narrow_bundles(tmp_path / "target.jaxllm", (3.0, 6.0), TEXTS) == made
    assert [path.stat().st_mtime_ns for path in made.values()] == times
