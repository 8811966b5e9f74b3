"""The bench of contexts: its rows by hand, its devices by the clock, and the whole of it on a tiny model."""

import dataclasses
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.contexts import PARTS, quality, run
from benchmarks.contexts.quality import EIGHT, RAW, Stored, write_with_outliers
from benchmarks.contexts.run import most_contexts, switch_rows, traffic_rows
from benchmarks.contexts.switching import ABLATIONS, SYSTEMS, Switches, flush_times
from benchmarks.harness.bench import Run
from benchmarks.harness.machine import DEVICES, REAL
from benchmarks.harness.report import OURS, Row
from jaxllm import Engine
from jaxllm.bundle import Bundle
from jaxllm.cli.main import cli
from jaxllm.errors import ConfigError
from jaxllm.kv.cache import new_cache
from jaxllm.models.decoder import forward
from jaxllm.serving.contexts.chunk_io import ChunkIO
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.plan import Restoration
from tests.tiny import TINY, write_tiny_bundle

DATA = Path(__file__).parents[3] / "shared" / "data"


def switches(*times_ms, caching="direct"):
    restorations = [Restoration(resident=3, read=(4,), took_ms=each) for each in times_ms]
    return Switches(restorations, [each + 20 for each in times_ms], [5.0, 7.0], [1.0, 4.0], caching)


def test_bytes_of_switches_are_counted_without_a_model():
    plan = run.Plan(patterns=("random",), contexts=(4, 8), fitting=4, calls=40, devices=("real", "emmc"))
    rows = {
        (row.case.split(" contexts")[0], row.system, row.metric): row.value
        for row in traffic_rows(TINY, Run(plan=plan))
        if row.system != OURS or row.baseline == "VLLM-SQ"
    }
    four, eight = "traffic: random, 4", "traffic: random, 8"
    # All chunks of ours fit, and half of twice as many at twice the bytes.
    assert rows[four, OURS, "switch_read_bytes"] == 0 < rows[four, "VLLM-SQ", "switch_read_bytes"]
    assert 0 < 2 * rows[eight, OURS, "switch_read_bytes"] < rows[eight, "VLLM-SQ", "switch_read_bytes"]
    assert rows[eight, "VLLM-SQ", "switch_read_bytes"] < rows[eight, "VLLM-S", "switch_read_bytes"]
    # Ours has written ahead.
    assert rows[eight, OURS, "switch_written_bytes"] == 0 < rows[eight, "VLLM-SQ", "switch_written_bytes"]
    emmc = DEVICES["emmc"].storage
    assert rows[eight, OURS, "switch_bound_ms"] == pytest.approx(
        1000 * rows[eight, OURS, "switch_read_bytes"] / emmc.bytes_per_s
    )


def test_a_mean_switch_and_how_it_was_read():
    metered = dataclasses.replace(switches(40.0, caching=""), joules=3.0)
    rows = switch_rows(
        "a case", {OURS: dataclasses.replace(switches(1.0, 3.0), joules=2.0), "LMK": metered}, REAL
    )
    assert [(row.metric, row.value, row.baseline, row.ratio) for row in rows if row.system == OURS] == [
        ("switch_ms", 2.0, "LMK", 20.0),
        ("ttft_ms", 22.0, "LMK", 60 / 22),
        ("finish_ms", 6.0, "LMK", 1.0),
        ("finish_unflushed_ms", 3.5, "LMK", 1.0),
        ("switch_and_finish_ms", 8.0, "LMK", 46 / 8),
        ("joules_per_call", 2.0, "LMK", 1.5),
    ]
    assert "3 in memory, 1 read, 0 computed; read by O_DIRECT" in (rows[0].note or "")
    assert "nothing on storage" in (rows[1].note or "")
    fed = Restoration(read=(4,), took_ms=30.0, fed_tokens=9, fed_ms=20.0)
    assert Switches([fed], [31.0], [5.0], [1.0], "").metrics["switch_ms"] == 10.0
    # Without a meter nobody's energy is known.
    (row, *others) = switch_rows("a case", {OURS: switches(1.0)}, DEVICES["emmc"])
    assert "emulated: reads 250 MB/s" in (row.note or "")
    assert "joules_per_call" not in {each.metric for each in others}


def test_most_contexts_are_those_before_the_first_that_are_too_many():
    found = {
        2: {OURS: switches(5.0), "LMK": switches(5.0), "Swapping": switches(50.0)},
        4: {OURS: switches(9.0), "LMK": None, "Swapping": switches(50.0)},
        8: {OURS: switches(12.0), "LMK": switches(6.0), "Swapping": switches(6.0)},
    }
    values = {(row.system, row.baseline): (row.value, row.ratio) for row in most_contexts("c", found, 10.0)}
    assert values == {
        (OURS, "LMK"): (4, 2.0),
        (OURS, "Swapping"): (4, None),
        ("LMK", None): (2, None),
        ("Swapping", None): (0, None),
    }


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_bundle(tmp_path_factory.mktemp("contexts") / "tiny.jaxllm", "int8")


@pytest.mark.slow
def test_caches_are_restored_from_each_encoding(tiny):
    options = EngineOptions(kv_codec="channel", chunk_tokens=(16,), cache_tokens=(128,), buckets_bytes=0)
    chunk_io = ChunkIO(Engine.open(tiny, options=options).runner)
    tokens = np.random.default_rng(0).integers(0, 250, 96).tolist()
    stored = Stored.of(chunk_io, tokens, 0)
    assert stored.encodings[:2] == [OURS, f"{OURS}-shuffled"]
    rows = {
        encoding: np.asarray(stored.restored(encoding).past(1).own[0], np.float32)[:, :, :96]
        for encoding in stored.encodings
    }
    off = {encoding: np.abs(each - rows[RAW]).mean() for encoding, each in rows.items()}
    assert off[RAW] == 0 < off[EIGHT] < off["4 bit"] < off["2 bit"]
    assert (
        stored.bytes_of("2 bit") < stored.bytes_of(OURS) <= stored.bytes_of("4 bit") < stored.bytes_of(EIGHT)
    )
    assert int(stored.restored(OURS).length) == 96


@pytest.mark.slow
def test_the_whole_bench(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    plan = run.Plan(
        patterns=("markov",), contexts=(2, 6), fitting=6, calls=6, chunk_tokens=(8,), repeats=1,
        budget_shares=(0.5,), context_tokens=(64, 4096), interval_s=(0.001,), devices=("real", "emmc"),
    )  # fmt: skip
    monkeypatch.setattr(run.Plan, "quick", classmethod(lambda _: plan))
    parts = [each for part in list(PARTS)[:-2] for each in ("--only", part)]
    command = ["bench", "contexts", "--json", *parts]
    result = CliRunner().invoke(
        cli, [*command, "-m", str(tiny), "--plot", str(tmp_path)],
        catch_exceptions=False,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = [Row(**row) for row in json.loads(result.stdout.splitlines()[-1])["rows"]]
    switching = [row for row in rows if row.metric == "switch_ms" and not row.case.startswith("resident")]
    assert {row.system for row in switching} == {
        *(each.name for each in (*SYSTEMS, *ABLATIONS)), f"{OURS}-chunks-of-8-ratio-0.6",
    }  # fmt: skip
    assert all(row.value > 0 for row in switching)
    assert {row.metric for row in rows} - {"joules_per_call"} == {
        "switch_ms", "ttft_ms", "finish_ms", "finish_unflushed_ms", "switch_and_finish_ms",
        "contexts_within_10_ms", "contexts_within_25_ms", "prefill_tokens_per_s", "decode_tokens_per_s",
        "context_bytes", "context_bytes_share", "at_once_ttft_ms",
        "switch_read_bytes", "switch_written_bytes", "switch_bound_ms",
    }  # fmt: skip
    # Chunks of a hundred bytes take more for their objects.
    assert all(row.value >= 1 for row in rows if row.metric == "context_bytes_share")
    # All of ours fits where that was planned for, and nothing is left behind.
    begins = {row.case.partition(":")[0] for row in rows}
    assert {"budget", "length", "interval", "ablation", "chunk size", "resident"} <= begins
    assert {row.case.split(",")[0] for row in rows if row.case.startswith("length")} == {"length: 64 tokens"}
    fitting = [
        row.note for row in switching
        if row.system == OURS and " 6 contexts" in row.case and not row.case.startswith("interval")
    ]  # fmt: skip
    assert fitting
    assert all(" 0 read, 0 computed" in (note or "") for note in fitting)
    assert not list((tmp_path / "cache" / "benchmarks").iterdir())
    assert len(list(tmp_path.glob("contexts_*.png"))) == 4


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is missing")
def test_quality_of_the_packaged_model():
    plan = run.Plan(texts=2, questions=1, passages=2, data=DATA)
    model = Path(__file__).parents[2] / "jaxllm" / "assets" / "default.jaxllm"
    rows = quality.quality_rows(Run(plan=plan, model=model))
    values = {(row.metric, row.system): row.value for row in rows}
    assert {metric for metric, _ in values} == {"perplexity", "accuracy", "recall"}
    assert values["perplexity", OURS] < 1.02 * values["perplexity", EIGHT]
    assert values["perplexity", "2 bit"] > values["perplexity", EIGHT]


def test_flat_widths_are_spread_and_fit():
    sizes = {8: 10, 4: 6, 2: 4}
    assert quality.flat_widths(4, 20, sizes).tolist() == [2, 4, 2, 4]
    assert quality.flat_widths(4, 31, sizes).tolist() == [4, 4, 4, 8]
    assert quality.flat_widths(3, 12, sizes).tolist() == [2] * 3
    with pytest.raises(ConfigError, match="3 chunks take more than 11 bytes at 2 bits"):
        quality.flat_widths(3, 11, sizes)


def test_outliers_change_keys_and_no_answer(tiny, tmp_path):
    write_with_outliers(tiny, tmp_path / "outliers.jaxllm", 8.0)
    tokens, found = jnp.arange(40, dtype=jnp.int32)[None], []
    for path in (tiny, tmp_path / "outliers.jaxllm"):
        with Bundle.open(path) as bundle:
            cfg, params = bundle.cfg, jax.tree.map(jnp.array, bundle.load())
        cache = new_cache(cfg, batch=1, tokens=40, dtype=jnp.dtype(jnp.float32))
        hidden, cache = forward(params, tokens, cache, cfg=cfg)
        found.append((np.asarray(hidden), np.asarray(cache.past(1).own[0])))
    (plain, keys), (same, larger) = found
    np.testing.assert_allclose(same, plain, rtol=1e-4, atol=1e-5)
    ratio = np.abs(larger).mean((0, 1, 2)) / np.abs(keys).mean((0, 1, 2))
    np.testing.assert_allclose(ratio[[7, 15]], 8, rtol=1e-3)
    np.testing.assert_allclose(np.delete(ratio, [7, 15]), 1, rtol=1e-3)
    with pytest.raises(ConfigError, match="outliers cannot be put into"):
        write_with_outliers(write_tiny_bundle(tmp_path / "float.jaxllm"), tmp_path / "out.jaxllm")


def test_flushes_are_counted_and_nothing_stays(tmp_path):
    before = os.fsync
    with flush_times() as taken_ms, (tmp_path / "file").open("wb") as file:
        assert taken_ms == []
        file.write(b"text")
        os.fsync(file.fileno())
        (taken,) = taken_ms
        assert taken > 0
    assert os.fsync is before
