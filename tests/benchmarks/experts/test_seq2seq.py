"""The bench of Switch Transformers: its task, what it counts, and all systems at equal bytes."""

import dataclasses

import pytest
from click.testing import CliRunner

from benchmarks.experts import seq2seq as room
from benchmarks.experts.seq2seq import Measured, Seq2SeqPlan, TaskPairs, _by_layer, _share_lost, run_seq2seq
from benchmarks.experts.systems import OURS, config_of
from benchmarks.measuring.storage import REAL
from benchmarks.models.shapes import SWITCHES, write_random_switch
from jaxllm.bundle import Bundle, expert_widths
from jaxllm.bundle.experts import expert_parts
from jaxllm.errors import ConfigError
from jaxllm.experts.activation_paths import PathCounts
from jaxllm.models.parameters import parameter_count
from jaxllm.prepare import prepare
from serving.cli import cli
from serving.engine import Engine
from serving.options import EngineOptions
from serving.request import GenerationConfig
from tests import tiny_encdec
from tests.serving.test_streamed_switch import SWITCH
from tests.tiny import tiny_params
from tests.training.seq2seq.tiny import SWITCH as TINY
from tests.training.seq2seq.tiny import tiny_recipe
from training.seq2seq.pairs import TextPairs, pair_tokenizer
from training.seq2seq.run import write_seq2seq

MODEL = {
    **TINY, "d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 64, "num_experts": 8, "num_layers": 4,
    "num_sparse_encoder_layers": 2,
}  # fmt: skip
PAIRS = [(f"{word} of them", f"all of {word}") for word in ("one", "two", "three", "four", "five", "six")]


def test_pairs_are_lines_of_the_same_number(tmp_path):
    source, target = tmp_path / "source.txt", tmp_path / "target.txt"
    source.write_text("a\nb\n\n")
    target.write_text("x\n\nz\n")
    with pytest.raises(ConfigError, match="4 lines"):
        TaskPairs.read(source, _written(tmp_path / "other.txt", "x"))
    assert TaskPairs.read(source, target).pairs == [("a", "x")]
    target.write_text("\n\nz\n")
    with pytest.raises(ConfigError, match="have no pair"):
        TaskPairs.read(source, target)


def _written(path, text):
    path.write_text(text)
    return path


def test_rates_and_loads_by_hand():
    each = Measured(prompts=4)
    each.visits.update({0: 20, 2: 40})
    each.hits.update({0: 5})
    each.loads.update({0: 15})
    assert _by_layer(each, 0, "hit_rate") == 0.25
    assert _by_layer(each, 0, "loads_per_prompt") == 3.75
    assert _by_layer(each, 1, "hit_rate") == _by_layer(each, 2, "loads_per_prompt") == 0
    assert _share_lost(0.48, 0.5, 0.05) == "lost 4.0%, within 5%"
    assert _share_lost(0.46, 0.5, 0.05) == "lost 8.0%, more than 5%"
    assert "none to lose" in _share_lost(0.0, 0.0, 0.05)


def test_random_weights_are_a_bundle_with_experts_apart(tmp_path):
    """As those of switch-base-64, of which this takes the sizes alone."""
    whole = SWITCHES["switch-base-64"]
    assert parameter_count(whole) == pytest.approx(3.8e9, rel=0.02)
    path = tmp_path / "small.jaxllm"
    cfg = dataclasses.replace(SWITCH, logit_scale=0.125)
    write_random_switch(path, cfg, lambda *_: None)
    with Bundle.open(path) as bundle:
        assert expert_widths(bundle).tolist() == [[4, 2] * 4] * 4
    engine = Engine.open(path, options=EngineOptions(context_tokens=32, chunk_tokens=(16,)))
    assert len(engine.generate([3, 4, 5], GenerationConfig(max_tokens=2, ignore_eos=True)).tokens) == 2
    engine.close()


def test_models_are_asked_as_they_answer(tmp_path):
    path = tiny_encdec.write_bundle(tmp_path / "t5.jaxllm")
    file = str(_written(tmp_path / "lines.txt", "a\n"))

    def asked(*words):
        return CliRunner().invoke(cli, ["bench", "experts", *words], catch_exceptions=False)

    with pytest.raises(ConfigError, match="is measured on a task; give --task or its --pairs"):
        asked("-m", str(path))
    with pytest.raises(ConfigError, match="give --text instead"):
        asked("--pairs", file, file)
    got = asked("-m", str(path), "--prefix", "to English:")
    assert (got.exit_code, "--prefix goes with --pairs" in got.stderr) == (2, True)
    assert asked("--shape", "switch-base-64", "--only", "systems").exit_code == 2
    assert "--data goes with --task" in asked("-m", str(path), "--data", str(tmp_path)).stderr
    with pytest.raises(ConfigError, match="no mixture of experts"):
        config_of([path])


@pytest.mark.slow
def test_the_whole_bench(tmp_path, monkeypatch):
    """Systems answer the same sources, and every claim has its rows."""
    # IO-EXP and STI are opened alike; each system takes its time to compile.
    systems = OURS, "IO-FREE", "IO-QEXP"
    monkeypatch.setattr(room, "SYSTEMS", systems)
    folder, mixed, recipe = tmp_path / "hf", tmp_path / "mixed.jaxllm", tiny_recipe(MODEL)
    tokenizer = pair_tokenizer(TextPairs(PAIRS, [0] * len(PAIRS)), recipe)
    params = {name: 3 * value if value.ndim > 1 else value for name, value in tiny_params(recipe.cfg).items()}
    write_seq2seq(folder, recipe, tokenizer, params)
    facts = {
        "most_loss": 0.05, "loss": 0.04, "held_out_loss": 0.06, "lowered": 0, "experts": 24, "lower": 2,
        "upper": 4, "measure": "rouge2",
    }  # fmt: skip
    parts = expert_parts(PathCounts.none(layers=1, experts=8), facts)
    prepare(folder, mixed, expert_bits=4, parts=parts)
    plan = Seq2SeqPlan(
        devices=(REAL,), task=TaskPairs(pairs=PAIRS), answers=2, judged=2, tokens=4, context_tokens=32,
        share=0.34, buffers=(0.5,), parts=("systems", "losses"),
    )  # fmt: skip
    rows = run_seq2seq(folder, [mixed], tmp_path / "cache", plan)
    by_metric = {metric: {row.system for row in rows if row.metric == metric} for metric in _metrics(rows)}
    assert by_metric["tpot_ms"] == by_metric["encode_ms"] == {*systems}
    assert by_metric["rouge2"] == {*systems, "IO-EXP"}
    assert by_metric["hit_rate"] == by_metric["loads_per_prompt"] == {OURS, "IO-QEXP"}
    # An encoder's experts are loaded at most once for a source.
    loads = {row.case: row.value for row in rows if row.metric == "loads_per_prompt"}
    assert len(loads) == 3
    assert all(0 < value <= 8 for case, value in loads.items() if case.startswith("encoder"))
    assert by_metric["rouge2_loss"] == by_metric["rouge2_held_out_loss"] == {OURS}
    noted = [row.note for row in rows if row.metric == "rouge2"]
    assert all("lost" in note or "lose" in note for note in noted)


def _metrics(rows):
    return {row.metric for row in rows}
