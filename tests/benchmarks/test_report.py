import dataclasses
import json

import click
import pytest

from benchmarks.report import Row, emit, machine, peak_memory_bytes

ROWS = [
    Row(case="a", system="jaxllm", metric="ttft_ms", value=2.0, unit="ms", baseline="other", ratio=1.5),
    Row(case="a", system="other", metric="ttft_ms", value=3.0, unit="ms"),
    Row(case="b", system="jaxllm", metric="decode_tokens_per_s", value=1e4, unit="tokens/s"),
]


def test_json_is_one_object_of_the_agreed_shape_and_nothing_else(capsys):
    emit("engine", ROWS, as_json=True, plot=None)
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"bench", "machine", "rows"}
    assert result["bench"] == "engine"
    assert result["rows"] == [dataclasses.asdict(row) for row in ROWS]


def test_table_shows_every_row(capsys):
    emit("engine", ROWS, as_json=False, plot=None)
    text = capsys.readouterr().out
    assert "1.50x" in text
    assert "10,000.0 tokens/s" in text


def test_plot_draws_one_figure_per_metric(tmp_path):
    pytest.importorskip("matplotlib")
    emit("engine", ROWS, as_json=True, plot=tmp_path / "figures")
    drawn = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert drawn == ["engine_decode_tokens_per_s.png", "engine_ttft_ms.png"]
    assert all(path.stat().st_size > 1000 for path in (tmp_path / "figures").iterdir())


def test_plot_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.pyplot", None)
    with pytest.raises(click.UsageError, match="matplotlib"):
        emit("engine", ROWS, as_json=True, plot=tmp_path)


def test_the_machine_is_described_without_its_name():
    facts = machine()
    assert facts["cores"] >= 1
    assert facts["backend"] == "cpu"
    assert __import__("socket").gethostname() not in json.dumps(facts)


def test_peak_memory_counts_what_the_process_holds():
    before = peak_memory_bytes()
    block = bytearray(64 << 20)
    block[::4096] = b"x" * len(block[::4096])
    assert peak_memory_bytes() >= before
    assert peak_memory_bytes() > len(block)
