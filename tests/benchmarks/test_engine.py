import pytest

from benchmarks import engine as bench
from serving import EngineOptions
from tests.tiny import write_tiny_bundle


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "tiny.jaxllm"
    write_tiny_bundle(path, weights="int8")
    options = EngineOptions(context_tokens=64, chunk_tokens=(16,), cache_tokens=(64,), decode_block=8)
    plan = bench.Plan(prompt_tokens=(16, 32), decode_tokens=12, rounds=2)
    return bench.run(path, weights=None, options=options, plan=plan)


def test_reports_load_build_and_run_apart(rows):
    metrics = {row.metric for row in rows}
    assert metrics == {
        "load_ms", "build_ms", "graphs", "ttft_ms", "prefill_tokens_per_s", "decode_tokens_per_s",
        "weight_bytes", "peak_memory_bytes",
    }  # fmt: skip
    assert all(row.value > 0 for row in rows)


def test_rates_agree_with_times(rows):
    by_metric = {(row.case, row.metric): row.value for row in rows}
    for (case, metric), value in by_metric.items():
        if metric == "prefill_tokens_per_s":
            tokens = int(case.rsplit(" ", 1)[1])
            assert value == pytest.approx(1000 * tokens / by_metric[case, "ttft_ms"])


def test_our_decode_row_names_its_baseline_and_the_ratio(rows):
    decode = {row.system: row for row in rows if row.metric == "decode_tokens_per_s"}
    ours, plain = decode[bench.OURS], decode[bench.PER_TOKEN]
    assert ours.baseline == bench.PER_TOKEN
    assert ours.ratio == pytest.approx(ours.value / plain.value)
    assert (plain.baseline, plain.ratio) == (None, None)
