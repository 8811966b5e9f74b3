"""The harness: the machine, processes, rows and figures; options of benches, and runs without any."""

import dataclasses
import importlib
import json
import os
import socket
import sys

import click
import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import models as shapes
from benchmarks import prepare, readme, service
from benchmarks import speculation as speculative
from benchmarks.cli import SECTIONS
from benchmarks.contexts import Plan as ContextsPlan
from benchmarks.engine import PEERS as ENGINE_PEERS
from benchmarks.harness import bench as options
from benchmarks.harness import machine as quiet
from benchmarks.harness.bench import Run
from benchmarks.harness.children import in_process, in_turns, taken_by
from benchmarks.harness.machine import EnergyMeter
from benchmarks.harness.report import Row, compared, emit, less_is_better, row, unit_of
from benchmarks.peers import PEERS
from benchmarks.prepare import run as preparing
from benchmarks.service import systems
from benchmarks.traces import PATTERNS
from jaxllm.cli.main import cli
from jaxllm.elastic.slo import Slo
from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.serving.ground.bundles import packaged_models
from jaxllm.serving.host.bandwidth import memory_probe

ROWS = [
    Row(case="a", system="jaxllm", metric="ttft_ms", value=2.0, unit="ms", baseline="other", ratio=1.5),
    Row(case="a", system="other", metric="ttft_ms", value=3.0, unit="ms", note="at its best"),
    Row(case="b", system="jaxllm", metric="decode_tokens_per_s", value=1e4, unit="tokens/s"),
]


def test_rows_are_one_object_or_a_table_and_figures(tmp_path, capsys):
    emit("engine", ROWS, subject="small", as_json=True)
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"bench", "subject", "machine", "rows"}
    assert result["subject"] == "small"
    assert (result["bench"], result["rows"]) == ("engine", [dataclasses.asdict(row) for row in ROWS])
    # The machine is described without its name.
    assert (result["machine"]["cores"] >= 1, result["machine"]["backend"]) == (True, "cpu")
    assert socket.gethostname() not in json.dumps(result["machine"])
    emit("engine", ROWS, subject="small", as_json=False)
    text = capsys.readouterr().out
    assert all(part in text for part in ("1.50x", "10,000.0 tokens/s", "at its best"))
    pytest.importorskip("matplotlib")
    folder = options.check_plot(None, None, tmp_path / "figures")
    emit("engine", ROWS, subject="small", as_json=True, plot=folder)
    drawn = {path.name: path.stat().st_size for path in (tmp_path / "figures").iterdir()}
    assert set(drawn) == {"engine_decode_tokens_per_s.png", "engine_ttft_ms.png"}
    assert min(drawn.values()) > 1000


def test_a_folder_that_cannot_be_drawn_into_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(click.UsageError, match="cannot be written"):
        options.check_plot(None, None, tmp_path / "file")
    options.check_plot(None, None, None)
    options.check_plot(None, None, tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(click.UsageError, match="matplotlib"):
        options.check_plot(None, None, tmp_path)


@pytest.mark.parametrize("bench", ["elastic", "contexts", "experts"])
def test_every_figure_is_drawn_of_rows_that_it_is_of(bench, tmp_path):
    pytest.importorskip("matplotlib")
    cases = {
        "elastic": {
            "level_accuracy": ("level_accuracy", "level 50"),
            "ttft_ms": ("ttft_ms", "level 50, prompt 16"),
            "tpot_ms": ("tpot_ms", "level 100, prompt 16"),
            "trace_accuracy": ("accuracy", "trace <40,70>"),
            "trace_right_and_met": ("right_and_met", "trace all six"),
        },
        "contexts": {
            "switch_markov_emulated_emmc_5_1": ("switch_ms", "markov, 4 contexts in 3 MB, emulated eMMC 5.1"),
            "ablation": ("switch_ms", "ablation: markov, 4 contexts in 3 MB, real storage"),
            "chunk_size": ("switch_ms", "chunk size: markov, 4 contexts in 3 MB, real storage"),
            "perplexity": ("perplexity", "text behind 96 stored tokens"),
            "accuracy": ("accuracy", "questions in up to 96 stored tokens"),
            "recall": ("recall", "passage of 96 stored tokens repeated"),
        },
        "experts": {
            "predictors": ("hit_rate", "predictor: layer 2"),
            "evictions": ("hit_rate", "eviction: 5 experts"),
            "buffers": ("tpot_ms", "buffer of 4 experts: HDD"),
            "losses": ("tpot_ms", "tolerable loss 5%"),
            "rouge": ("rouge2", "tolerable loss 5%"),
            "encoder_hits": ("hit_rate", "encoder layer 2: HDD"),
            "decoder_hits": ("hit_rate", "decoder layer 2: HDD"),
            "systems": ("tpot_ms", "HDD"),
            "ablations": ("tpot_ms", "ablation: HDD"),
        },
    }[bench]
    draw = importlib.import_module(f"benchmarks.{bench}.run").draw
    of_none = [row("density: channel", "perplexity", 4.0), row("planning", "ttft_share", 0.04)]
    draw([*(row(case, metric, 0.5) for metric, case in cases.values()), *of_none], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"{bench}_{name}.png" for name in cases}


def test_ours_comes_once_per_baseline_with_how_many_times_better():
    values = {"jaxllm": 10.0, "a": 5.0, "b": 20.0}
    rows = compared("c", "decode_tokens_per_s", values, {"a": "so"})
    assert [(r.system, r.baseline, r.ratio, r.note) for r in rows] == [
        ("jaxllm", "a", 2.0, None),
        ("jaxllm", "b", 0.5, None),
        ("a", None, None, "so"),
        ("b", None, None, None),
    ]
    assert [r.ratio for r in compared("c", "tpot_ms", values)] == [0.5, 2.0, None, None]
    (alone,) = compared("c", "tpot_ms", {"jaxllm": 10.0})
    assert (alone.value, alone.baseline, alone.ratio) == (10.0, None, None)


def test_metrics_have_the_units_of_their_names():
    units = {
        "switch_ms": "ms", "contexts_within_10_ms": "contexts", "peak_memory_bytes": "bytes",
        "recall": "nats/token", "decode_tokens_per_s": "tokens/s", "goodput_per_s": "answers/s",
        "rouge2_held_out_loss": "share",
        "slo_met": "share", "perplexity": "", "context_bytes_share": "times", "read_bandwidth": "bytes/s",
    }  # fmt: skip
    assert {metric: unit_of(metric) for metric in units} == units
    less = {metric for metric in units if less_is_better(metric)}
    assert less == {"switch_ms", "peak_memory_bytes", "perplexity", "context_bytes_share"}


def test_systems_take_turns_and_none_is_always_behind_the_same():
    assert [*in_turns("ab", [10, 20])] == [(0, 10, "b"), (0, 10, "a"), (1, 20, "a"), (1, 20, "b")]


def test_what_a_process_of_its_own_finds_and_takes():
    taken = taken_by(np.ones, 64 << 20, np.uint8)
    assert taken.found.nbytes == 64 << 20
    assert in_process(os.getenv, "JAXLLM_X", environment={"JAXLLM_X": "1"}) == "1"
    assert "JAXLLM_X" not in os.environ
    # What was there before is kept apart.
    assert 60 << 20 < taken.peak_bytes < 200 << 20
    assert taken.idle_bytes > 60 << 20
    with pytest.raises(ConfigError, match="an SLO is written like"):
        in_process(Slo.parse, "soon")
    with pytest.raises(JaxllmError, match="_exit ended with its process"):
        in_process(os._exit, 1)


@pytest.mark.parametrize(("others_s", "disturbed"), [(0.0, False), (0.05, False), (0.5, True), (None, None)])
def test_what_others_take_is_what_is_left_of_all(monkeypatch, others_s, disturbed):
    own_s, now = 2.0, {"busy": None if others_s is None else 100.0, "wall": 0.0}
    monkeypatch.setattr(quiet, "_busy_s", lambda: now["busy"])
    monkeypatch.setattr(quiet.time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(quiet.time, "process_time", lambda: 0.0)
    disturbance = quiet.Disturbance()
    # Where the system does not tell, nothing is known.
    now |= {"busy": None if others_s is None else 100.0 + own_s + others_s, "wall": 1.0}
    assert disturbance.ended(own_s=own_s) is disturbed


def test_bandwidth_is_bytes_per_second():
    with memory_probe(1, buffer_bytes=1 << 22) as bytes_per_s:
        # Between a floppy drive and what no cache reaches.
        assert 1e6 < bytes_per_s() < 1e13


def package(folder, name, uj, kind="package-0"):
    own = folder / name
    own.mkdir(parents=True, exist_ok=True)
    for file, text in (("name", kind), ("energy_uj", uj), ("max_energy_range_uj", 9_999_999)):
        (own / file).write_text(f"{text}\n")
    return own


def test_packages_count_and_counters_begin_anew(tmp_path):
    first = package(tmp_path, "intel-rapl:0", 1_000_000)
    second = package(tmp_path, "intel-rapl:1", 9_500_000)
    # A part of the first, and the whole platform.
    package(tmp_path, "intel-rapl:0:0", 5, "core")
    package(tmp_path, "intel-rapl:2", 5, "psys")
    meter = EnergyMeter.of_machine(tmp_path)
    assert meter is not None
    assert meter.joules() == 0
    (first / "energy_uj").write_text("3500000\n")
    (second / "energy_uj").write_text("500000\n")
    assert meter.joules() == pytest.approx(2.5 + 1.0)
    assert meter.joules() == 0
    # There is none where nothing tells.
    (first / "energy_uj").write_text("")
    assert EnergyMeter.of_machine(tmp_path) is None


NAMES = [name for name in SECTIONS["Benchmarks"] if name != "train"]


def test_values_are_those_of_the_modules_that_define_them():
    assert (*options.DENSE_SHAPES, *options.MIXTURE_SHAPES) == tuple(shapes.SHAPES)
    assert tuple(name for name, cfg in shapes.SHAPES.items() if cfg.experts) == options.MIXTURE_SHAPES
    assert tuple(shapes.ENCODER_DECODERS) == options.SEQ2SEQ_SHAPES
    assert tuple(shapes.SWITCHES) == options.SWITCH_SHAPES
    assert {*options.PHONES, *options.BOARDS} == {*quiet.DEVICES}
    assert tuple(PATTERNS) == ContextsPlan().patterns
    assert tuple(PEERS) == ENGINE_PEERS
    assert (*systems.ABLATIONS, systems.LLAMA) == service.SYSTEMS
    assert tuple(preparing.FORMATS) == prepare.Plan().kinds
    assert tuple(preparing.SHAPES) == prepare.VOCABULARY_SHAPES


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs_without_options_on_packaged_models(name, monkeypatch):
    """What is measured is left out; what would be measured is there."""
    seen = []

    def run(*arguments, **_):
        seen.extend(arguments)
        return []

    room = {"prefill": "int8_prefill", "speculative": "speculation"}.get(name, name)
    module = importlib.import_module(f"benchmarks.{room}.run")
    monkeypatch.setattr(module, "run", run)
    got = CliRunner().invoke(cli, ["bench", name, "--json"], catch_exceptions=False)
    assert got.exit_code == 0
    assert json.loads(got.stdout)["bench"] == name
    (bench,) = seen
    quick = module.Plan.quick()
    changed = {key for key, value in vars(quick).items() if value != getattr(bench.plan, key)}
    assert changed <= {"parts", "tasks", "text"}
    assert bench.model.stem in packaged_models()
    assert bench.model.exists()


def test_parts_that_random_weights_lack_are_left_out_aloud():
    told = []

    def left(*parts):
        plan = ContextsPlan(parts=parts)
        return Run(plan=plan, tell=told.append).without(("b", "d"), "no reason").plan.parts

    assert (left("a", "b", "c"), told) == (("a", "c"), ["without b: no reason"])
    assert (left("a"), len(told)) == (("a",), 1)
    with pytest.raises(click.UsageError, match="--only b measures nothing here: no reason"):
        left("b")


def bench_speculative(monkeypatch, *options):
    """What `bench speculative` would measure, how, and how the command ended."""
    seen = []
    monkeypatch.setattr("benchmarks.speculation.run.run", lambda bench: seen.append(bench.plan) or [])
    got = CliRunner().invoke(cli, ["bench", "speculative", *options], catch_exceptions=False)
    return seen, got


def test_budgets_prompts_and_presets_are_what_was_asked_for(monkeypatch, tmp_path):
    file = tmp_path / "prompts" / "spec_bench.jsonl"
    file.parent.mkdir()
    file.write_text("{}")
    monkeypatch.setenv("JAXLLM_DATA", str(tmp_path))
    asked = ("--full", "--budget", "25%", "--budget", "0.75", "--preset", "published", "--count", "30")
    (plan,), got = bench_speculative(monkeypatch, *asked, "--prompts", "spec-bench")
    assert got.exit_code == 0
    assert (plan.shares, plan.presets, plan.prompts) == ((0.25, 0.75), ("published",), 30)
    assert plan.file == file
    assert bench_speculative(monkeypatch, "--prompts", str(file))[0][0].file == file
    (plan,), _ = bench_speculative(monkeypatch, "--full")
    assert (plan.shares, plan.presets, plan.file) == ((0.5,), tuple(speculative.PRESETS), None)
    # Of random weights memory alone is measured.
    assert bench_speculative(monkeypatch, "--shape", "110m")[1].exit_code == 0


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("speculative --shape 110m --count 3", "--count: for a --model"),
        ("speculative --prompts spec-bench", "$JAXLLM_DATA"),
        ("speculative --prompts none.jsonl", "no such file"),
        ("engine --shape 15m --model x", "exclude each other"),
        ("contexts --shape 110m --only quality", "--only quality measures nothing here"),
        ("prepare --data .", "--data goes with --shape"),
    ],
)
def test_what_cannot_be_asked_is_refused(monkeypatch, command, message):
    monkeypatch.delenv("JAXLLM_DATA", raising=False)
    got = CliRunner().invoke(cli, ["bench", *command.split()], catch_exceptions=False)
    assert got.exit_code == 2
    assert message in " ".join(got.stderr.split())


# The rows of the README: what their commands printed, and the strongest baseline of each.

CLAIM = readme.Claim(
    name="speed", claim="a token", command="jaxllm bench x", case="emmc: .*", metric="tpot_ms",
    rivals=("Std", "SP"), also=("Std",),
)  # fmt: skip


def printed(system, value, *, case="emmc: all", metric="tpot_ms", unit="ms", note=None):
    return {"case": case, "system": system, "metric": metric, "value": value, "unit": unit, "note": note}


def cells(monkeypatch, claim, rows):
    monkeypatch.setattr("benchmarks.readme.CLAIMS", (claim,))
    run = {"name": claim.name, "command": claim.command, "rows": readme.kept_rows([claim], rows)}
    return readme.table([run])[2].strip("| ").split(" | ")


def test_the_table_of_the_readme_is_what_was_recorded():
    runs = readme.recorded()
    text = readme.README.read_text()
    assert text == readme.written(text, readme.table(runs))
    # Every claim's run has every row that its cells are made of.
    for run in runs:
        claims = [each for each in readme.CLAIMS if each.name == run["name"]]
        assert readme.kept_rows(claims, run["rows"]) == run["rows"]
        assert {each.command for each in claims} == {run["command"]}
        assert {"recorded", "machine"} <= run.keys()


def test_no_figure_stands_in_the_readme_without_its_record():
    section = readme.README.read_text().partition("## Results")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert rows == readme.table(readme.recorded())
    prose = section.replace("\n".join(rows), "")
    assert not [word for word in prose.split() if word.rstrip(".,)x%").replace(".", "", 1).isdigit()]


def test_the_strongest_baseline_is_named(monkeypatch):
    rows = [
        printed("jaxllm", 8.0),
        printed("jaxllm", 8.0),
        printed("SP", 12.0),
        printed("Std", 24.0),
        printed("STI", 1.0),
    ]
    assert cells(monkeypatch, CLAIM, rows) == [
        "a token", "8.0 ms", "SP 12.0 ms, 1.50x", "Std 24.0 ms, 3.00x", "`jaxllm bench x`",
    ]  # fmt: skip
    # Where a baseline is ahead the row says so.
    ahead = [printed("jaxllm", 8.0), printed("SP", 4.0), printed("Std", 24.0)]
    assert cells(monkeypatch, CLAIM, ahead)[2] == "SP 4.0 ms, 0.50x"


def test_what_was_not_measured_is_not_recorded():
    rows = [printed("jaxllm", 8.0), printed("Std", 24.0)]
    with pytest.raises(click.ClickException, match="a token: SP was not measured"):
        readme.kept_rows([CLAIM], rows)
    with pytest.raises(click.ClickException, match="must match one case"):
        readme.kept_rows([CLAIM], [*rows, printed("SP", 9.0), printed("SP", 9.0, case="emmc: shorten")])
    with pytest.raises(click.ClickException, match="has no line"):
        readme.written("# jaxllm", ["| a |"])
