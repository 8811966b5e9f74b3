"""Reads the turns of a conversation and shows answers: with line editing and markdown on a terminal, as plain
text elsewhere."""

import contextlib
import os
import re
import stat
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click
import platformdirs

from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from rich.console import Console
    from rich.segment import Segment

# Older turns are dropped from a longer history.
MAX_HISTORY_BYTES = 1 << 20
# An answer is drawn again at most this often: decoding has the processor to itself in between.
_REDRAW_S = 0.06
# A model may write anything; control characters would move the cursor, or program the terminal.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Screen(Protocol):
    """Where a conversation is read and shown.

    Attributes:
      interactive: whether a person reads and types, who may ask again after an error.
    """

    interactive: bool

    def read(self) -> str | None:
        """The next turn; None at the end of input."""
        ...

    def show(self, pieces: Iterable[str]) -> None:
        """Shows the pieces of an answer as they come, also those before an error or an interrupt."""
        ...

    def note(self, text: str) -> None:
        """Shows a line beside the conversation, on standard error."""
        ...


def open_screen(*, plain: bool, history: bool, commands: Sequence[str]) -> Screen:
    """The screen of standard input and output.

    Args:
      plain: whether to write text as it comes, also on a terminal.
      history: whether turns are stored for later conversations.
    """
    capable = sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") not in (None, "dumb")
    return (
        TerminalScreen(history_path() if history else None, commands)
        if capable and not plain
        else PlainScreen()
    )


def history_path() -> Path:
    """The file of the turns of earlier conversations, in the user's state folder."""
    return platformdirs.user_state_path("jaxllm") / "chat-history"


class PlainScreen:
    """One turn per line of standard input, and text on standard output."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()

    def read(self) -> str | None:
        """Reads a line.

        Raises:
          ConfigError: it is not UTF-8.
        """
        if self.interactive:
            click.echo("> ", nl=False, err=True)
        try:
            raw = sys.stdin.buffer.readline()
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            raw = b"\n"
            click.echo(err=True)
        if not raw:
            return None
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError("standard input is not UTF-8; convert it first") from error

    def show(self, pieces: Iterable[str]) -> None:
        """Writes the pieces, and the end of the line."""
        try:
            for piece in pieces:
                click.echo(piece, nl=False)
        finally:
            click.echo()

    def note(self, text: str) -> None:
        """Writes a line."""
        click.echo(text, err=True)


class TerminalScreen:
    """Edits turns of several lines, with a history of earlier ones, and draws answers as markdown."""

    def __init__(self, history: Path | None, commands: Sequence[str]) -> None:
        """See the class.

        Args:
          history: file of earlier turns; None to keep none.
        """
        # Imported here: other commands do without. All of it now: an interrupt in the midst of an import ends
        # the process.
        import rich.live
        import rich.markdown  # noqa: F401
        from rich.console import Console

        self.interactive = True
        self._console = Console(highlight=False)
        self._errors = Console(stderr=True, highlight=False)
        self._session = _prompt_session(None if history is None else self._opened(history), commands)

    def read(self) -> str | None:
        """Reads a turn; an interrupt drops what was typed."""
        try:
            return self._session.prompt()
        except KeyboardInterrupt:
            return ""
        except EOFError:
            return None

    def show(self, pieces: Iterable[str]) -> None:
        """Draws the pieces."""
        with MarkdownStream(self._console) as stream:
            for piece in pieces:
                stream.feed(piece)

    def note(self, text: str) -> None:
        """Writes a line, dimmed."""
        self._errors.print(_CONTROLS.sub("", text), style="dim", markup=False, soft_wrap=True)

    def _opened(self, history: Path) -> Path | None:
        try:
            prepare_history(history)
        except (OSError, ConfigError) as error:
            self.note(f"turns are not stored: {error}")
            return None
        return history


def prepare_history(path: Path) -> None:
    """Makes the file of turns if it is missing, closes it to others, and drops the oldest of many turns.

    Raises:
      OSError: it cannot be written.
      ConfigError: it is another user's, or not a regular file.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "r+b") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            raise ConfigError(f"{path} is not a regular file of this user; remove it, or give --no-history")
        os.fchmod(file.fileno(), 0o600)
        if facts.st_size > MAX_HISTORY_BYTES:
            file.seek(facts.st_size - MAX_HISTORY_BYTES // 2)
            # A turn begins with a comment, after an empty line.
            kept = file.read().partition(b"\n\n")[2]
            file.seek(0)
            file.write(b"\n" + kept)
            file.truncate()


def _prompt_session(history: Path | None, commands: Sequence[str]) -> "PromptSession[str]":
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    class StoredHistory(FileHistory):
        """Goes on without the file where it cannot be written."""

        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):
                super().store_string(string)

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("c-j")
    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return PromptSession(
        "> ",
        multiline=True,
        prompt_continuation="  ",
        key_bindings=keys,
        history=InMemoryHistory() if history is None else StoredHistory(str(history)),
        completer=WordCompleter(list(commands), sentence=True),
        complete_while_typing=False,
        enable_open_in_editor=True,
    )


class MarkdownStream:
    """Draws markdown that arrives piece by piece: finished blocks are printed; the last one is drawn again as
    it grows, as much of it as the terminal is high. A context manager, at whose end all is printed."""

    def __init__(self, console: "Console") -> None:
        from markdown_it import MarkdownIt
        from rich.live import Live

        self._console, self._parser = console, MarkdownIt("js-default")
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._last, self._printed, self._drawn_s = "", False, 0.0

    def __enter__(self) -> "MarkdownStream":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        self._print(self._last)

    def feed(self, piece: str) -> None:
        """Adds text."""
        self._last += _CONTROLS.sub("", piece)
        if (now := time.monotonic()) - self._drawn_s < _REDRAW_S:
            return
        tops = [each.map[0] for each in self._parser.parse(self._last) if each.level == 0 and each.map]
        if tops and tops[-1]:
            # Blocks before the last one cannot change any more.
            lines = self._last.splitlines(keepends=True)
            self._print("".join(lines[: tops[-1]]))
            self._last = "".join(lines[tops[-1] :])
        self._draw()
        self._drawn_s = now

    def _draw(self) -> None:
        from rich.segment import Segments

        newest = self._rendered(self._last)[-max(1, self._console.height - 2) :]
        self._live.update(Segments([segment for line in newest for segment in line]), refresh=True)

    def _print(self, text: str) -> None:
        from rich.segment import Segments

        if text.strip():
            lines = self._rendered(text)
            self._console.print(Segments([segment for line in lines for segment in line]), end="")
            self._printed = True

    def _rendered(self, text: str) -> list[list["Segment"]]:
        """The lines of blocks, with an empty one before them unless they are the first."""
        from rich.markdown import Markdown
        from rich.segment import Segment

        lines = self._console.render_lines(Markdown(text), pad=False)
        # Some blocks begin with a line of no text, if they are alone.
        while lines and not any(segment.text for segment in lines[0]):
            del lines[0]
        return [[*line, Segment.line()] for line in ([[], *lines] if self._printed else lines)]
