"""The systems of the elastic bench: their policies by hand, and the whole bench on a tiny model."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.elastic.systems import Variants, at_random, best, interval, largest, run_trace
from benchmarks.report import Row
from jaxllm.bundle.elastic import elastic_parts
from jaxllm.bundle.tiny_lm import TinyLm, tiny_lm_parts
from jaxllm.elastic.ladder import Ladder
from jaxllm.elastic.slo import Slo, marks
from jaxllm.encoder.config import EncoderConfig
from jaxllm.models.tlm import TlmConfig, init_tlm
from serving.cli import cli
from tests.tiny import TINY, VOCAB_SIZE, write_tiny_bundle

# Two questions, three sizes; the whole model takes 10 and 20 ms to the first token, 2 ms per further one.
VARIANTS = Variants(
    names=("small", "middle", "whole"),
    ttft_ms=np.array([[2.0, 5.0, 10.0], [4.0, 10.0, 20.0]]),
    tpot_ms=np.array([[0.5, 1.0, 2.0]] * 2),
    right=np.array([[True, False, True], [False, True, True]]),
    change_ms=np.array([0.0, 0.0, 0.0]),
)
WHOLE = (np.array([10.0, 20.0]), np.array([2.0, 2.0]))


def chosen(slo, policy=largest, variants=VARIANTS, questions=(0, 1), **more):
    done = run_trace(variants, questions, [slo] * len(questions), WHOLE, policy, **more)
    return done.right.tolist(), done.held.tolist()


def test_the_largest_in_time():
    assert chosen(Slo(ttft=1.0, tpot=1.0)) == ([True, True], [True, True])
    assert chosen(Slo(ttft=0.5, tpot=0.5)) == ([False, True], [True, True])
    assert chosen(Slo(ttft=0.5, tpot=0.4)) == ([True, False], [True, True])
    # Nothing is in time: the quickest is used, and misses.
    assert chosen(Slo(ttft=0.1, tpot=1.0)) == ([True, False], [False, False])


def test_a_margin_is_planned_for_and_the_objective_is_what_counts():
    assert chosen(Slo(ttft=0.52, tpot=1.0), margin=0.9) == ([True, False], [True, True])
    assert chosen(Slo(ttft=0.21, tpot=1.0), margin=0.9) == ([True, False], [True, True])


def test_times_per_token_may_be_taken_as_met():
    assert chosen(Slo(ttft=1.0, tpot=0.1), ignore_tpot=True) == ([True, True], [True, True])


def test_changing_costs_time():
    swapped = dataclasses.replace(VARIANTS, change_ms=np.array([1.0, 6.0, 0.0]))
    tight = Slo(ttft=0.5, tpot=0.5)
    # To the middle size takes too long for both questions, to the small one not.
    assert chosen(tight, variants=swapped) == ([True, False], [True, True])
    # Once it is there it stays in use.
    free = dataclasses.replace(VARIANTS, change_ms=np.array([0.0, 6.0, 0.0]))
    done = run_trace(free, [1, 1, 0], [Slo(ttft=0.8, tpot=0.5), tight, tight], WHOLE, largest)
    assert done.right.tolist() == [True, True, False]


def test_the_oracle_takes_the_smallest_right_answer_in_time():
    policy = best(VARIANTS.right)
    assert chosen(Slo(ttft=0.5, tpot=0.5), policy) == ([True, True], [True, True])
    assert chosen(Slo(ttft=0.3, tpot=0.5), policy) == ([True, False], [True, True])


def test_random_choices_are_in_time():
    many = [0] * 300
    done = run_trace(VARIANTS, many, [Slo(ttft=0.5, tpot=0.5)] * 300, WHOLE, at_random(0))
    assert done.held.all()
    assert 0.4 < done.right.mean() < 0.6


def test_confidence_intervals_hold_the_mean_and_shrink():
    draw = np.random.default_rng(0)
    few, many = draw.random(50) < 0.8, draw.random(5000) < 0.8
    low, high = interval(many)
    assert low < many.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(0.16 / 5000), rel=0.15)
    assert np.diff(interval(few)) > 5 * (high - low)


def test_some_of_the_ways():
    some = VARIANTS.only([0, 2], less_ms=np.array([1.0, 2.0]))
    assert some.names == ("small", "whole")
    assert some.ttft_ms.tolist() == [[1.0, 10.0], [2.0, 20.0]]
    assert VARIANTS.ttft_ms[0, 0] == 2.0


@pytest.fixture(scope="module")
def elastic(tmp_path_factory):
    cfg = TlmConfig(
        encoder=EncoderConfig(
            vocab_size=VOCAB_SIZE, embedding_size=4, hidden_size=8, layers=1, heads=2, ffn_size=8,
            window_tokens=64,
        ),
        shared_layers=0,
        levels=2,
        prompt_levels=2,
    )  # fmt: skip
    tiny = TinyLm(
        cfg=cfg, params=jax.device_get(init_tlm(cfg, jax.random.key(0))), levels=(50, 100),
        prompt_ratios=(0.5, 1.0), mark_ids=tuple(range(len(marks()))),
    )  # fmt: skip
    facts = {"layer_importance": [0.5, 0.1]}
    parts = {**elastic_parts(Ladder(levels=(50, 100)), facts=facts), **tiny_lm_parts(tiny)}
    return write_tiny_bundle(tmp_path_factory.mktemp("elastic") / "e.jaxllm", cfg=TINY, parts=parts)


@pytest.mark.slow
def test_the_whole_bench(elastic, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tasks" / "sst2"
    folder.mkdir(parents=True)
    records = [{"text": f"film {n}", "label": ("positive", "negative")[n % 2]} for n in range(8)]
    (folder / "valid.jsonl").write_text("\n".join(map(json.dumps, records)))
    monkeypatch.setattr("benchmarks.elastic.run.TRACE_TASKS", ("sentiment",))
    plain = write_tiny_bundle(
        tmp_path / "plain.jaxllm", cfg=dataclasses.replace(TINY, layers=1, attention_windows=())
    )
    options = {"-m": elastic, "--data": tmp_path, "--pfs": plain, "--beside": elastic}
    arguments = [str(each) for pair in options.items() for each in pair]
    result = CliRunner().invoke(
        cli, ["bench", "elastic", *arguments, "--quick", "--json"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    systems = {row["system"] for row in rows if row["metric"] == "accuracy"}
    assert systems == {
        "jaxllm", "jaxllm-random", "jaxllm-oracle", "jaxllm-model-only", "jaxllm-prompt-only", "LG2+CS",
        "PFS", "PFS-swap", "LLM-Pruner", "LE",
    }  # fmt: skip
    accuracy = {
        row["system"]: row["value"]
        for row in rows
        if row["case"] == "trace all six" and row["metric"] == "accuracy"
    }
    assert accuracy["jaxllm-oracle"] >= max(accuracy["jaxllm"], accuracy["jaxllm-model-only"])
    switching = [row for row in rows if row["metric"] == "switch_ms" and row["system"] == "jaxllm"]
    assert all(row["note"].startswith("0 bytes") for row in switching)
    assert {"ttft_ms", "tpot_ms", "peak_memory_bytes", "slo_met", "ttft_share"} <= {
        row["metric"] for row in rows
    }
    levels = [row["value"] for row in rows if row["metric"] == "level_accuracy"]
    assert len(levels) == 4
    assert levels[:2] == levels[2:]


def test_figures(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.elastic.figures import draw

    def row(case, system, metric, value):
        return Row(case=case, system=system, metric=metric, value=value, unit="share")

    rows = [
        *(
            row(f"level {level}", system, "level_accuracy", 0.5)
            for level in (50, 100)
            for system in ("a", "b")
        ),
        *(row(f"level {level}, prompt 16", "jaxllm", "ttft_ms", level) for level in (50, 100)),
        *(
            row(f"trace {case}", system, "accuracy", 0.7)
            for case in ("<40,70>", "all six")
            for system in "ab"
        ),
        row("planning", "jaxllm", "ttft_share", 0.04),
    ]
    draw(rows, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"elastic_level_accuracy.png", "elastic_ttft_ms.png", "elastic_trace_accuracy.png"}
