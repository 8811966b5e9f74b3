"""`jaxllm chat`: turns from a pipe and a terminal, commands, a full context, and markdown as it arrives."""

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from jaxllm import Engine, GenerationConfig
from jaxllm.bundle.levels import elastic_parts
from jaxllm.cli import screen
from jaxllm.cli.chat import COMMANDS
from jaxllm.elastic.ladder import Ladder
from jaxllm.serving.engine.step import Answer
from tests.cli.outcome import CFG, PARAMS, WINDOW, Run, failed
from tests.tiny import write_tiny_bundle

FOUR = ("-n", 4, "--ignore-eos")


def turns(*lines: str) -> bytes:
    return "".join(line + "\n" for line in lines).encode()


def expected_answers(
    bundle: Path, *turns: list[str], system: str | None = None, level: int = 100, tokens: int = 4
) -> str:
    """What the engine says, one conversation after another."""
    engine = Engine.open(bundle, level=level)
    config = GenerationConfig(max_tokens=tokens, ignore_eos=True)
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
    typed = turns("hi", "", "/usr/bin", "/reset", "hi", "/help", "/exit", "never answered")
    got = run("chat", "-m", bundle, *FOUR, "--speed", stdin=typed)
    assert got.code == 0
    # Only what is new is fed.
    first, second, again = answers
    assert first.reused_tokens == again.reused_tokens == 0
    assert second.reused_tokens >= first.prompt_tokens
    assert got.out == expected_answers(bundle, ["hi", "/usr/bin"], ["hi"])
    greeting, *speeds, help_ = got.err.split("\n", 4)
    assert greeting == "tiny. /help lists the commands."
    assert all(re.fullmatch(r"\[4 tokens, first after .* tokens/s\]", each) for each in speeds)
    assert [line.split()[0] for line in help_.splitlines()] == list(COMMANDS)


def test_a_system_message_and_the_end_of_input_or_of_the_context(
    run: Run, bundle: Path, tmp_path: Path
) -> None:
    file = tmp_path / "chat.jsonl"
    typed = turns("hi", "/reset", "/system Be kind.", "hi", f"/save {file}") + b"last line without an end"
    got = run("chat", "-m", bundle, *FOUR, "--system", "Be brief.", stdin=typed)
    assert got.code == 0
    expected = expected_answers(bundle, ["hi"], system="Be brief.")
    expected += expected_answers(bundle, ["hi", "last line without an end"], system="Be kind.")
    assert got.out == expected
    (saved,) = map(json.loads, file.read_text().splitlines())
    assert [each["role"] for each in saved["messages"]] == ["system", "user", "assistant"]
    # Where the context is full, or has no room for an answer, the oldest turns are dropped.
    typed = turns("a" * 30, "b" * 30, "c" * 24)
    got = run("chat", "-m", bundle, "-n", 12, "--ignore-eos", stdin=typed)
    assert got.code == 0
    assert got.err.count("(the oldest turn was dropped: the context is full)") == 2
    assert got.out == expected_answers(bundle, ["a" * 30], ["b" * 30], ["c" * 24], tokens=12)


def test_what_cannot_be_answered_or_done(run: Run, home: Path, bundle: Path, tmp_path: Path) -> None:
    got = run("chat", "-m", home / "base.jaxllm", stdin=b"hi\n")
    failed(got, "base has no chat template; use `jaxllm generate`")
    (tmp_path / "there").touch()
    for part, stdin in (
        ("standard input is not UTF-8", b"\xff\n"),
        ("the prompt has", b"x" * WINDOW + b"\n"),
        ("no command /what", b"/what\n"),
        ("takes a file", b"/save\n"),
        ("exists already", f"/save {tmp_path}/there\n".encode()),
        ("has no levels", b"/level 50\n"),
        ("'half' is no level", b"/level half\n"),
    ):
        got = run("chat", "-m", bundle, stdin=stdin)
        assert (got.out, got.code != 0) == ("", True), part
        assert part in got.err


def test_the_level_of_an_elastic_model(run: Run, tmp_path: Path) -> None:
    parts = elastic_parts(Ladder(levels=(50, 100), anchors=(1,)))
    elastic = write_tiny_bundle(tmp_path / "e.jaxllm", cfg=CFG, params=PARAMS, parts=parts)
    got = run("chat", "-m", elastic, *FOUR, stdin=turns("ab", "/reset", "/level 50", "ab"))
    assert got.code == 0
    halved = expected_answers(elastic, ["ab"], level=50)
    assert got.out == expected_answers(elastic, ["ab"]) + halved
    assert "level: 50 %" in got.err


# On a terminal

# A shell that runs the tests in the background has them ignore interrupts.
MAIN = (
    "import fcntl, signal, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.default_int_handler); "
)
PROMPT = "\x1b[?2004h"


class Terminal:
    """`jaxllm chat` on a terminal of its own."""

    def __init__(self, state: Path, *arguments: object) -> None:
        self._own, theirs = pty.openpty()
        environment = {"TERM": "xterm-256color", "XDG_STATE_HOME": str(state), "PROMPT_TOOLKIT_NO_CPR": "1"}
        script = MAIN + "from jaxllm.cli.entry import main; main()"
        command = [sys.executable, "-c", script, "chat", *map(str, arguments)]
        self._process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env=os.environ | environment,
        )  # fmt: skip
        os.close(theirs)
        self._text = ""

    def wait(self, text: str) -> None:
        """Waits until something is shown, or for the end of the process if it is empty."""
        late = time.monotonic() + 240
        while text not in self._text or not text:
            if time.monotonic() > late:
                self._process.kill()
                self._process.wait()
                pytest.fail(self._text)
            if select.select([self._own], [], [], 0.1)[0]:
                try:
                    self._text += os.read(self._own, 1 << 16).decode(errors="replace")
                except OSError:  # The other end is closed.
                    assert not text, self._text
                    break
        self._text = self._text.partition(text)[2] if text else ""

    def type(self, text: str, *, after: str = PROMPT) -> None:
        """Types when something is shown; an interrupt, once the terminal makes a signal of it: one that comes
        before is a key that the next turn reads."""
        self.wait(after)
        late = time.monotonic() + 60
        while after != PROMPT and not termios.tcgetattr(self._own)[3] & termios.ISIG:
            assert time.monotonic() < late
            time.sleep(0.001)
        os.write(self._own, text.encode())

    def ended(self) -> int:
        self.wait("")
        os.close(self._own)
        return self._process.wait(60)


@pytest.mark.slow
def test_a_terminal(tmp_path: Path) -> None:
    cfg = CFG.__class__.from_json(CFG.to_json() | {"window_tokens": 1 << 15})
    bundle = write_tiny_bundle(tmp_path / "m.jaxllm", cfg=cfg, params=PARAMS)
    history, saved = tmp_path / "state/jaxllm/chat-history", tmp_path / "chat.jsonl"
    asked = ("-m", bundle, "--context", 1 << 15, "-n", 1 << 14, "--ignore-eos")
    terminal = Terminal(tmp_path / "state", *asked)
    terminal.type("hi\nthere\r")
    # Two interrupts: of the turn before its answer, and of an answer that is drawn for the second time.
    terminal.type("\x03", after="\x1b[?2004l")
    terminal.type("again\nthere\r")
    terminal.type("\x03", after="\x1b[2K")
    terminal.type("typed, not sent\x03")
    terminal.type(f"/save {saved}\r")
    terminal.wait("saved: ")
    terminal.type("/speed\r")
    terminal.wait("speed: shown")
    terminal.type("\x04")
    assert terminal.ended() == 0
    (user, assistant) = json.loads(saved.read_text())["messages"][-2:]
    assert user == {"role": "user", "content": "again\nthere"}
    assert 0 < len(assistant["content"]) < 1 << 14
    assert history.stat().st_mode & 0o777 == 0o600
    # The next chat has the turns of this one, but none if it is not to have any.
    again = (((), "\x1b[A\r", "speed: shown"), (("--no-history",), "\x1b[Ahi\r", "cut off"))
    for more, typed, shown in again:
        terminal = Terminal(tmp_path / "state", *asked[:2], "--context", WINDOW, "-n", 2, *more)
        terminal.type(typed)
        terminal.wait(shown)
        terminal.type("x" * WINDOW + "\r")
        terminal.wait("error: the prompt has")
        terminal.type("\x04")
        assert terminal.ended() == 0
    assert history.read_text().count("+xxxx") == 1


def test_a_history_is_bounded_and_closed_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state" / "history"
    screen.prepare_history(path)
    entries = [f"\n# then\n+turn {n}\n" for n in range(9)]
    path.write_text("".join(entries))
    path.chmod(0o644)
    monkeypatch.setattr(screen, "MAX_HISTORY_BYTES", 2 * len("".join(entries[:4])))
    screen.prepare_history(path)
    assert path.read_text() == "".join(entries[-3:])
    assert path.stat().st_mode & 0o777 == 0o600
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        screen.prepare_history(tmp_path / "link")


def test_markdown_that_arrives_piece_by_piece_is_shown_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console
    from rich.markdown import Markdown

    text = (
        "# Title\n\nSome *text* of\ntwo lines.\n\n- one\n- two\n\n```python\nif x:\n\n    y()\n```\n\n"
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n> said\n\nThe end"
    )
    monkeypatch.setattr(screen, "_REDRAW_S", 0)
    whole, pieces = io.StringIO(), io.StringIO()
    Console(file=whole, width=40).print(Markdown(text))
    with screen.MarkdownStream(Console(file=pieces, width=40)) as stream:
        for at in range(0, len(text), 3):
            stream.feed(f"\x1b\x07{text[at : at + 3]}")
    assert pieces.getvalue() == whole.getvalue()
