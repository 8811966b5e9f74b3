import dataclasses
import json

import click
import pytest

from benchmarks.measuring.report import Row, check_plot, compared, emit, label_bars, machine

ROWS = [
    Row(case="a", system="jaxllm", metric="ttft_ms", value=2.0, unit="ms", baseline="other", ratio=1.5),
    Row(case="a", system="other", metric="ttft_ms", value=3.0, unit="ms", note="at its best"),
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
    assert "at its best" in text


def test_plot_draws_one_figure_per_metric(tmp_path):
    pytest.importorskip("matplotlib")
    emit("engine", ROWS, as_json=True, plot=tmp_path / "figures")
    drawn = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert drawn == ["engine_decode_tokens_per_s.png", "engine_ttft_ms.png"]
    assert all(path.stat().st_size > 1000 for path in (tmp_path / "figures").iterdir())


def test_plot_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.pyplot", None)
    with pytest.raises(click.UsageError, match="matplotlib"):
        check_plot(tmp_path)


def test_plot_into_what_is_no_folder_is_refused(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(click.UsageError, match="cannot be written"):
        check_plot(tmp_path / "file")
    check_plot(None)
    check_plot(tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())


def test_ours_comes_once_per_baseline_with_how_many_times_better():
    values = {"jaxllm": 10.0, "a": 5.0, "b": 20.0}
    rows = compared(values, ours="jaxllm", case="c", metric="m", unit="u", notes={"a": "so"})
    assert [(r.system, r.baseline, r.ratio, r.note) for r in rows] == [
        ("jaxllm", "a", 2.0, None),
        ("jaxllm", "b", 0.5, None),
        ("a", None, None, "so"),
        ("b", None, None, None),
    ]
    lower = compared(values, ours="jaxllm", case="c", metric="m", unit="u", lower_is_better=True)
    assert [r.ratio for r in lower] == [0.5, 2.0, None, None]


def test_without_a_baseline_there_is_one_row():
    (row,) = compared({"jaxllm": 10.0}, ours="jaxllm", case="c", metric="m", unit="u")
    assert (row.value, row.baseline, row.ratio) == (10.0, None, None)


def test_the_machine_is_described_without_its_name():
    facts = machine()
    assert facts["cores"] >= 1
    assert facts["backend"] == "cpu"
    assert __import__("socket").gethostname() not in json.dumps(facts)


@pytest.mark.parametrize("values", [[1.0, 12345.6], [-3.0, 2.0], [0.0, 0.0]])
def test_what_is_written_behind_bars_is_inside_of_the_frame(values):
    plt = pytest.importorskip("matplotlib.pyplot")
    figure, axes = plt.subplots(figsize=(7, 2), layout="constrained")
    label_bars(axes, axes.barh(["a prompt of many tokens, on all cores\njaxllm", "b"], values), "{:,.1f}")
    figure.draw_without_rendering()
    frame = axes.get_window_extent()
    boxes = [label.get_window_extent() for label in axes.texts]
    plt.close(figure)
    assert len(boxes) == 2
    assert all(frame.x0 < box.x0 and box.x1 < frame.x1 for box in boxes)
