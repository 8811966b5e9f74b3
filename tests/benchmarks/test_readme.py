"""The rows of the README: what their commands printed, and the strongest baseline of each."""

import dataclasses
import shlex

import click
import pytest

from benchmarks import readme
from jaxllm.cli.main import cli

CLAIM = readme.Claim(
    name="speed", claim="a token", command="jaxllm bench x", case="emmc: .*", metric="tpot_ms",
    rivals=("Std", "SP"), also=("Std",),
)  # fmt: skip


def row(system, value, *, case="emmc: all", metric="tpot_ms", unit="ms", note=None):
    return {"case": case, "system": system, "metric": metric, "value": value, "unit": unit, "note": note}


def run_of(claim, rows):
    return {"name": claim.name, "command": claim.command, "rows": readme.kept_rows([claim], rows)}


def cells(monkeypatch, claim, rows):
    monkeypatch.setattr("benchmarks.readme.CLAIMS", (claim,))
    return readme.table([run_of(claim, rows)])[2].strip("| ").split(" | ")


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


@pytest.mark.parametrize("command", sorted({each.command for each in readme.CLAIMS}))
def test_commands_are_those_of_the_command_line(command, tmp_path):
    words = [str(tmp_path) if each == readme.DATA else each for each in shlex.split(command)]
    group: click.Command = cli
    context = click.Context(cli)
    names, options = words[1:3], words[3:]
    for name in names:
        assert isinstance(group, click.Group)
        found = group.get_command(context, name)
        assert found is not None
        group, context = found, click.Context(found, parent=context)
    # Reads every option, and refuses what there is not.
    group.make_context(names[-1], [*options, "--json"], parent=context.parent)
    with pytest.raises(click.NoSuchOption):
        group.make_context(names[-1], [*options, "--fulll"], parent=context.parent)


def test_the_strongest_baseline_is_named(monkeypatch):
    rows = [row("jaxllm", 8.0), row("jaxllm", 8.0), row("SP", 12.0), row("Std", 24.0), row("STI", 1.0)]
    assert cells(monkeypatch, CLAIM, rows) == [
        "a token", "8.0 ms", "SP 12.0 ms, 1.50x", "Std 24.0 ms, 3.00x", "`jaxllm bench x`",
    ]  # fmt: skip
    # Where a baseline is ahead the row says so.
    ahead = [row("jaxllm", 8.0), row("SP", 4.0), row("Std", 24.0)]
    assert cells(monkeypatch, CLAIM, ahead)[2] == "SP 4.0 ms, 0.50x"
    more = dataclasses.replace(CLAIM, metric="requests_per_s")
    rows = [{**each, "metric": more.metric} for each in rows]
    assert cells(monkeypatch, more, rows)[2:4] == ["Std 24.0 ms, 0.33x", ""]


def test_shares_and_perplexities_have_no_ratio(monkeypatch):
    share = dataclasses.replace(CLAIM, rivals=("PFS",), also=("bound",))
    rows = [row(name, value, unit="share") for name, value in (("jaxllm", 0.5), ("PFS", 0.4), ("bound", 0.6))]
    assert cells(monkeypatch, share, rows)[1:4] == ["50.0 %", "PFS 40.0 %", "bound 60.0 %"]
    loss = dataclasses.replace(CLAIM, rivals=("8 bit", "4 bit"), also=(), detail=r"(\d+ bytes per token)")
    rows = [row(name, 15.5, unit="", note=f"at {size} bytes per token") for name, size in (
        ("jaxllm", 60), ("8 bit", 90), ("4 bit", 50)
    )]  # fmt: skip
    assert cells(monkeypatch, loss, rows)[1:4] == [
        "15.500 in 60 bytes per token",
        "8 bit 15.500 in 90 bytes per token",
        "4 bit 15.500 in 50 bytes per token",
    ]  # fmt: skip


def test_what_was_not_measured_is_not_recorded():
    rows = [row("jaxllm", 8.0), row("Std", 24.0)]
    with pytest.raises(click.ClickException, match="a token: SP was not measured"):
        readme.kept_rows([CLAIM], rows)
    with pytest.raises(click.ClickException, match="must match one case"):
        readme.kept_rows([CLAIM], [*rows, row("SP", 9.0), row("SP", 9.0, case="emmc: shorten")])
    with pytest.raises(click.ClickException, match="has no line"):
        readme.written("# jaxllm", ["| a |"])


def test_a_table_is_replaced_and_nothing_else():
    text, lines = f"# jaxllm\n\n{readme.MARK}\n\n## Limits\n\n- None.\n", ["| a |", "|---|", "| b |"]
    once = readme.written(text, lines)
    assert once == f"# jaxllm\n\n{readme.MARK}\n\n| a |\n|---|\n| b |\n\n## Limits\n\n- None.\n"
    assert readme.written(once, lines) == once
    assert readme.written(once, lines[:2]) == once.replace("| b |\n", "")
    assert readme.written(once, readme.table([])) == text
