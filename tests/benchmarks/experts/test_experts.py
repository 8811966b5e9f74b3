"""The bench of mixtures larger than memory: the replay of policies by hand, its systems, its figures."""

import dataclasses

import numpy as np
import pytest

from benchmarks.experts.figures import draw
from benchmarks.experts.nested import BASELINE, BUFFERS, LOSSES, text_windows
from benchmarks.experts.quality import NODES, PROMPT
from benchmarks.experts.replay import hit_ratio
from benchmarks.experts.run import Plan, run
from benchmarks.experts.systems import OURS, SYSTEMS, ablations
from benchmarks.experts.widened import widened_folder
from benchmarks.measuring.intervals import median_ratio_interval
from benchmarks.measuring.report import Row
from benchmarks.measuring.storage import DEVICES, REAL
from jaxllm.bundle import Bundle
from jaxllm.checkpoints.huggingface import read_config, read_params
from jaxllm.errors import ConfigError
from jaxllm.experts.eviction import eviction_policy
from jaxllm.models.decoder import forward
from jaxllm.prepare import prepare
from tests.serving.weights.experts.conftest import CFG, drawn_params
from tests.tiny import write_tiny_folder


def ratio(visits, policy, room, layers=1, experts=4):
    shape = np.array(visits).reshape(-1, layers, 1).transpose(1, 0, 2)
    return hit_ratio(shape, eviction_policy(policy), room, np.zeros((layers, experts)))


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


def test_room_for_all_misses_only_once():
    visits = np.random.default_rng(0).integers(0, 4, (3, 100, 1))
    found = hit_ratio(visits, eviction_policy("lru"), 12, np.zeros((3, 4)))
    assert found == pytest.approx(1 - 12 / 300)


def test_figures(tmp_path):
    def row(case, metric, value, system=OURS):
        return Row(case=case, system=system, metric=metric, value=value, unit="")

    rows = [
        *(row(f"predictor: layer {layer}", "hit_rate", 0.5 + 0.1 * layer) for layer in range(3)),
        *(row(f"eviction: {room} experts", "hit_rate", room / 10, "LRU") for room in (2, 5)),
        row("buffer of 4 experts: HDD", "tpot_ms", 9.0),
        row("tolerable loss 5%", "tpot_ms", 8.0),
        row("tolerable loss 5%", "rouge2", 0.4),
        *(row(f"{side} layer 2: HDD", "hit_rate", 0.5) for side in ("encoder", "decoder")),
        row("HDD", "tpot_ms", 7.0),
        row("ablation: HDD", "tpot_ms", 7.0),
    ]
    draw(rows, tmp_path)
    names = (
        "predictors", "evictions", "buffers", "losses", "rouge", "encoder_hits", "decoder_hits", "systems",
        "ablations",
    )  # fmt: skip
    assert {each.name for each in tmp_path.iterdir()} == {f"experts_{name}.png" for name in names}


def test_quick_runs_on_one_storage():
    assert Plan.quick().devices == (DEVICES["tx2-ssd"],)
    assert Plan().devices[0] == REAL


def test_wider_experts_answer_as_before(tmp_path):
    folder = write_tiny_folder(tmp_path / "folder", cfg=CFG, params=drawn_params())
    wide = widened_folder(folder, tmp_path, 4)
    cfg = read_config(wide)
    assert cfg.expert_ffn_size == 4 * CFG.expert_ffn_size
    tokens = np.arange(12, dtype=np.int32)[None]
    (before, _), (after, _) = (
        forward(dict(read_params(path, read_config(path))), tokens, cfg=read_config(path))
        for path in (folder, wide)
    )
    np.testing.assert_allclose(np.asarray(after), np.asarray(before), rtol=1e-3, atol=1e-4)
    assert widened_folder(folder, tmp_path, 4) == wide
    with pytest.raises(ConfigError, match="2 times and more"):
        widened_folder(folder, tmp_path, 1)


def test_intervals_of_ratios():
    ours = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert median_ratio_interval(ours, [2 * each for each in ours]) == (2.0, 2.0)
    low, high = median_ratio_interval(ours, [5.0, 4.0, 3.0, 2.0, 1.0])
    assert low < 1.0 < high


def test_windows_of_a_text():
    size = PROMPT + NODES + 1
    windows = text_windows(list(range(10 * size)), 3)
    assert [len(each) for each in windows] == [size] * 3
    assert (windows[0][0], windows[-1][-1]) == (0, 10 * size - 1)
    assert len(text_windows(list(range(size)), 5)) == 1


@pytest.mark.slow
def test_the_whole_bench(tmp_path):
    """Every system answers, and every claim has its rows."""
    folder = write_tiny_folder(tmp_path / "folder", cfg=CFG, params=drawn_params())
    mixed = tmp_path / "mixed.jaxllm"
    prepare(folder, mixed, expert_bits=4)
    plan = dataclasses.replace(
        Plan.quick(), tokens=4, prompt_tokens=8, context_tokens=64, buffers=(3,), watched_tokens=20
    )
    rows = run(folder, [mixed], tmp_path / "cache", plan)
    systems = {row.system for row in rows if row.metric == "tpot_ms"}
    with Bundle.open(mixed) as bundle:
        assert {*SYSTEMS, *ablations(bundle)} <= systems
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
    memory = {row.baseline: row.ratio for row in rows if row.metric == "peak_memory_bytes" and row.baseline}
    assert memory["IO-FREE"] > 1
