"""`jaxllm export`, and answers of what it wrote."""

from pathlib import Path

import pytest

from tests.cli.outcome import WINDOW, Run, answer, failed, succeeded
from tests.cli.test_chat import expected_answers, turns
from tests.tiny import write_tiny_bundle

pytest.importorskip("flatbuffers")


@pytest.fixture(scope="module")
def program(home: Path) -> Path:
    """The bundle that chats, exported."""
    from click.testing import CliRunner

    from jaxllm.cli.main import cli

    out = home / "program"
    arguments = [str(home / "tiny.jaxllm"), "-o", str(out), "--platform", "cpu"]
    arguments += ["--chunk-tokens", "16", "--verify-tokens", "4"]
    done = CliRunner().invoke(cli, ["export", *arguments], catch_exceptions=False)
    assert done.output.startswith(f"{out}: 4 programs of tiny, ")
    return out


def test_generate_and_chat_answer_as_the_bundle_does(run: Run, bundle: Path, program: Path) -> None:
    asked = ("-p", "hello the", "-n", 10, "--ignore-eos")
    text = succeeded(run("generate", "-m", bundle, *asked))
    assert succeeded(run("generate", "--program", program, *asked)) == text
    got = answer(run("generate", "--program", program, *asked, "--json"))
    assert got["text"] + "\n" == text
    assert got["completion_tokens"] == 10
    assert "compiled_buckets" not in got
    assert "drafts" not in got
    # And alike with drafts.
    asked = ("--program", program, "-p", "hello the hello the", "-n", 10, "--ignore-eos")
    text = succeeded(run("generate", *asked))
    for draft in ("ngram", program):
        got = answer(run("generate", *asked, "--draft", draft, "--json"))
        assert got["text"] + "\n" == text
        assert got["drafts"]["verifications"] + got["drafts"]["plain_tokens"] > 0
    failed(run("generate", *asked, "--draft", "level:30"), "level 30 was not exported")
    got = run("chat", "--program", program, "-n", 4, "--ignore-eos", stdin=turns("hi", "hello"))
    assert got.code == 0
    assert got.out == expected_answers(bundle, ["hi", "hello"])
    assert got.err.startswith("tiny. ")


def test_what_was_exported_cannot_be_changed(run: Run, bundle: Path, program: Path, tmp_path: Path) -> None:
    for option in (
        ("--model", bundle), ("--context", 32), ("--memory", "1GB"), ("--prefill", "float"),
        ("--processors", 2), ("--weights", "f32"), ("--adapter", tmp_path),
    ):  # fmt: skip
        done = run("generate", "--program", program, "-p", "x", *option)
        failed(done, f"{option[0]} cannot be given with --program")
    failed(run("generate", "--program", program, "-p", "x", "--level", 30), "level 30 was not exported")
    failed(run("generate", "--program", tmp_path, "-p", "x"), "not a folder of programs", "jaxllm export")
    failed(run("generate", "--program", tmp_path / "none", "-p", "x"), "no such folder")


def test_what_cannot_be_exported(run: Run, bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    failed(run("export", bundle, "-o", tmp_path), "exists already")
    failed(run("export", bundle, "-o", out, "--context", WINDOW + 1), f"window of {WINDOW}")
    failed(run("export", bundle, "-o", out, "--level", 30), "no levels")
    failed(run("export", write_tiny_bundle(tmp_path / "four.jaxllm", "int4"), "-o", out), "native-only width")
    failed(run("export", tmp_path, "-o", out), "jaxllm prepare")
    for options in (
        ("--format", "tflite", "--precision", "w8a8"),
        ("--format", "tflite", "--platform", "cpu"),
        ("--precision", "int8"),
        ("--calibration-text", bundle),
    ):
        assert run("export", bundle, "-o", out, *options).code == 2
    assert not out.exists()
