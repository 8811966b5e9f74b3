"""`jaxllm chat`, fed line by line."""

from pathlib import Path
from typing import Any

import pytest

from jaxllm import Engine, GenerationConfig
from jaxllm.serving.engine.step import Answer
from tests.cli.outcome import WINDOW, Run, failed


def turns(*lines: str) -> bytes:
    return "".join(line + "\n" for line in lines).encode()


def expected_answers(bundle: Path, *turns: list[str], system: str | None = None) -> str:
    """What the engine says, one conversation after another, four tokens an answer."""
    engine = Engine.open(bundle)
    config = GenerationConfig(max_tokens=4, ignore_eos=True)
    out = ""
    for conversation in turns:
        messages = [{"role": "system", "content": system}] if system else []
        for text in conversation:
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": engine.chat(messages, config).result().text})
            out += messages[-1]["content"] + "\n"
    return out


def test_chat(run: Run, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Answer] = []
    stream = Engine.stream

    def watched(*args: Any, **kwargs: Any) -> Answer:
        answers.append(stream(*args, **kwargs))
        return answers[-1]

    monkeypatch.setattr(Engine, "stream", watched)
    typed = turns("hi", "", "/what", "  hello  ", "/reset", "hi", "/exit", "never answered")
    got = run("chat", "-m", bundle, "-n", 4, "--ignore-eos", stdin=typed)
    assert got.code == 0
    # Only what is new is fed.
    first, second, again = answers
    assert first.reused_tokens == again.reused_tokens == 0
    assert second.reused_tokens >= first.prompt_tokens
    assert got.out == expected_answers(bundle, ["hi", "hello"], ["hi"])
    # The greeting, and once more for a command that there is not.
    greeting, help_ = got.err.splitlines()
    assert greeting.startswith("tiny. ")
    assert greeting.removeprefix("tiny. ") == help_
    assert all(word in help_ for word in ("/reset", "/exit", "Ctrl-C"))


def test_chat_with_a_system_message_until_the_end_of_input(run: Run, bundle: Path) -> None:
    typed = b"hi\n/reset\nhi\nlast line without an end"
    got = run("chat", "-m", bundle, "-n", 4, "--ignore-eos", "--system", "Be kind.", stdin=typed)
    assert got.code == 0
    expected = expected_answers(bundle, ["hi"], ["hi", "last line without an end"], system="Be kind.")
    assert got.out == expected
    # It is the system message that makes the difference.
    assert expected_answers(bundle, ["hi"]) != expected_answers(bundle, ["hi"], system="Be kind.")


def test_chat_drops_the_oldest_turn_when_the_context_is_full(run: Run, bundle: Path) -> None:
    typed = turns("a" * 30, "b" * 30, "c" * 30)
    got = run("chat", "-m", bundle, "-n", 4, "--ignore-eos", stdin=typed)
    assert got.code == 0
    assert got.err.count("(the oldest turn was dropped: the context is full)") == 2
    assert got.out == expected_answers(bundle, ["a" * 30], ["b" * 30], ["c" * 30])


def test_chat_without_a_template(run: Run, home: Path) -> None:
    got = run("chat", "-m", home / "base.jaxllm", stdin=b"hi\n")
    failed(got, "base has no chat template; use `jaxllm generate`")


@pytest.mark.parametrize(
    ("part", "stdin"), [("standard input is not UTF-8", b"\xff\n"), ("the prompt has", b"x" * WINDOW + b"\n")]
)
def test_chat_with_what_cannot_be_answered(run: Run, bundle: Path, part: str, stdin: bytes) -> None:
    got = run("chat", "-m", bundle, stdin=stdin)
    assert (got.code, got.out) == (1, "")
    greeting, error = got.err.splitlines()
    assert greeting.startswith("tiny. ")
    assert error.startswith("error: ")
    assert part in error
