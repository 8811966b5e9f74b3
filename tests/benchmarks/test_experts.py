"""The bench of mixtures larger than memory: systems, policies and figures; tasks of Switch Transformers."""

import dataclasses

import numpy as np
import pytest

from benchmarks.experts import run as room
from benchmarks.experts import systems as rivals
from benchmarks.experts.run import Mixture, Plan, TaskPairs, hit_ratio
from benchmarks.experts.systems import BASELINE, BUFFERS, LOSSES, widened_folder
from benchmarks.harness.bench import Run
from benchmarks.harness.machine import named_devices
from benchmarks.harness.report import OURS
from benchmarks.models import SWITCHES, write_random_switch
from jaxllm.bundle import Bundle, expert_widths
from jaxllm.bundle.calibrations import expert_parts
from jaxllm.checkpoints.huggingface import read_config, read_params
from jaxllm.errors import ConfigError
from jaxllm.experts.prediction import POLICIES, PathCounts
from jaxllm.models.decoder import forward
from jaxllm.models.parameters import parameter_count
from jaxllm.prepare import prepare
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.opening.engine import Engine
from jaxllm.training.seq2seq.pairs import TextPairs
from jaxllm.training.seq2seq.run import pair_tokenizer, write_seq2seq
from tests.serving.experts.conftest import CFG, drawn_params
from tests.serving.test_encoder_decoders import SWITCH
from tests.tiny import tiny_params, write_tiny_folder
from tests.training.seq2seq.tiny import SWITCH as TINY
from tests.training.seq2seq.tiny import tiny_recipe


def ratio(visits, policy, room, layers=1, experts=4):
    shape = np.array(visits).reshape(-1, layers, 1).transpose(1, 0, 2)
    return hit_ratio(shape, POLICIES[policy], room, np.zeros((layers, experts)))


@pytest.mark.parametrize(
    ("policy", "hits"),
    [
        # 0 comes first and goes first, although it is visited again.
        ("fifo", 1),
        # At 2 expert 1 was not visited for longest, at 1 then 2.
        ("lru", 2),
        # 0 was visited most when 1 comes back.
        ("lfu", 2),
    ],
)
def test_replay_by_hand(policy, hits):
    """Experts 0, 1, 0, 2, 0, 1 of one layer, with room for two."""
    assert ratio([0, 1, 0, 2, 0, 1], policy, 2) == pytest.approx(hits / 6)


def test_policies_differ_by_layers():
    """Two layers, each visiting one of two experts: what the next layer needs is kept from this one's."""
    visits = [0, 0, 1, 0] * 6
    ours = ratio(visits, "frequency-nearness", 2, layers=2, experts=2)
    assert ours == pytest.approx((12 - 1) / 24)
    assert ratio(visits, "fifo", 2, layers=2, experts=2) < ours


def test_wider_experts_answer_as_before(tmp_path):
    folder = write_tiny_folder(tmp_path / "folder", cfg=CFG, params=drawn_params())
    wide = widened_folder(folder, 4)
    cfg = read_config(wide)
    assert cfg.expert_ffn_size == 4 * CFG.expert_ffn_size
    tokens = np.arange(12, dtype=np.int32)[None]
    (before, _), (after, _) = (
        forward(dict(read_params(path, read_config(path))), tokens, cfg=read_config(path))
        for path in (folder, wide)
    )
    np.testing.assert_allclose(np.asarray(after), np.asarray(before), rtol=1e-3, atol=1e-4)
    assert widened_folder(folder, 4) == wide
    with pytest.raises(ConfigError, match="2 times and more"):
        widened_folder(folder, 1)
    rivals.write_random_mixed(folder, tmp_path / "mixed.jaxllm")
    assert (
        rivals.widths_of(tmp_path / "mixed.jaxllm")
        == "experts: 50% at 4 bits, 50% at 2 bits, by no calibration"
    )


@pytest.mark.slow
def test_the_whole_bench(tmp_path):
    """Every system answers, and every claim has its rows."""
    folder = write_tiny_folder(tmp_path / "folder", cfg=CFG, params=drawn_params())
    mixed = tmp_path / "mixed.jaxllm"
    prepare(folder, mixed, expert_bits=4)
    plan = dataclasses.replace(
        Plan.quick(), tokens=4, prompt_tokens=8, context_tokens=64, buffers=(3,), watched_tokens=20
    )
    rows = Mixture(Run(plan=plan), folder, [mixed]).rows()
    systems = {row.system for row in rows if row.metric == "tpot_ms"}
    with Bundle.open(mixed) as bundle:
        assert {*rivals.SYSTEMS, rivals.EQUAL, *rivals.ablations(bundle)} <= systems
    nested = [row for row in rows if row.case.startswith("nested") and row.baseline == BASELINE]
    assert len(nested) == len(LOSSES) * len(BUFFERS)
    assert all("interval" in row.note and "calls a token" in row.note for row in nested)
    # Nobody has counted which experts follow which: what foresees by that alone has no row.
    assert not {f"{OURS}-paths", f"{OURS}-tokens"} & {row.system for row in rows}
    layers = {row.case for row in rows if row.case.startswith("predictor")}
    assert len(layers) == sum(CFG.sparse_layers)
    assert {row.system for row in rows if row.case.startswith("eviction")} == {
        OURS, "FIFO", "LRU", "LFU", "LFRU"
    }  # fmt: skip
    memory = {row.system: row for row in rows if row.metric == "peak_memory_bytes"}
    assert memory.keys() == {*rivals.SYSTEMS, rivals.EQUAL}
    # Of so small a model processes differ by less than what they allocate besides.
    assert all(row.value > 0 and row.note.startswith("measured, above ") for row in memory.values())
    assert "all in memory" in memory["IO-FREE"].note
    assert all("planned" in memory[name].note for name in (OURS, "IO-QEXP", rivals.EQUAL))
    (where,) = (each.name for each in named_devices(plan.devices))
    timed = [row for row in rows if row.metric == "tpot_ms" and row.case == where and row.system == OURS]
    assert timed
    assert all(" reads, " in row.note and " MB in all" in row.note for row in timed)
    assert all(row.note.endswith("experts: 100% at 4 bits, by no calibration") for row in timed)


MODEL = {
    **TINY, "d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 64, "num_experts": 8, "num_layers": 4,
    "num_sparse_encoder_layers": 2,
}  # fmt: skip
PAIRS = [(f"{word} of them", f"all of {word}") for word in ("one", "two", "three", "four", "five", "six")]


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


@pytest.mark.slow
def test_the_whole_bench_of_an_encoder_decoder(tmp_path, monkeypatch):
    """Systems answer the same sources, and every claim has its rows."""
    # IO-EXP and STI are opened alike; each system takes its time to compile.
    systems = OURS, "IO-FREE", "IO-QEXP"
    monkeypatch.setattr(room.systems, "SYSTEMS", systems)
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
    plan = Plan(
        devices=("real",), task_answers=2, judged=2, task_tokens=4, task_context_tokens=32, share=0.34,
        task_buffers=(0.5,), parts=("systems", "losses"),
    )  # fmt: skip
    task = TaskPairs(pairs=PAIRS)
    rows = Mixture(Run(plan=plan), folder, [mixed], task=task).rows()
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
