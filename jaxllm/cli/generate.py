"""`jaxllm generate` continues a prompt, `jaxllm chat` holds a conversation in the terminal."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxllm.cli.console import answer_facts, draft_facts, print_json, progress_bars, read_text
from jaxllm.cli.lazy import EngineCommand
from jaxllm.cli.model_choice import ModelChoice
from jaxllm.cli.shared_options import (
    answer_options,
    image_option,
    json_option,
    model_options,
    path_option,
    running_options,
    sampling_options,
    task_option,
)
from jaxllm.errors import ConfigError, ContextOverflow

if TYPE_CHECKING:
    from jaxllm.serving.engine.engine import Engine
    from jaxllm.serving.engine.request import GenerationConfig, Session


@click.command("generate", cls=EngineCommand)
@click.option("-p", "--prompt", metavar="TEXT", help="The text to continue.  [default: standard input]")
@path_option("--prompt-file", help="Read the prompt from a file.")
@image_option
@model_options
@running_options
@task_option
@sampling_options
@json_option
def generate_command(
    choice: ModelChoice,
    prompt: str | None,
    prompt_file: Path | None,
    images: tuple[Path, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Continue a prompt with a model, streaming the text.

    Reads the prompt from --prompt, a file or standard input, and streams the answer to standard output; with
    --json, prints one object with the text, counts and times at the end. Images come before the prompt, or in
    place of each <image>.

    \b
    Example:
      jaxllm generate --prompt "Once upon a time" --max-tokens 50
      jaxllm generate --model model.jaxllm --memory 300MB --draft ngram --prompt-file prompt.txt --json
      jaxllm generate --model smolvlm.jaxllm --image photo.jpg --prompt "User: What is this? Assistant:"
      jaxllm generate --model t5-small --task translation_en_to_de --prompt "Good morning."
    """
    from jaxllm.serving.host.machine import process_age_ms

    if prompt is not None and prompt_file is not None:
        raise click.UsageError("give --prompt or --prompt-file, not both")
    answers = answer_options(options)
    asked = read_text(prompt_file) if prompt is None else prompt
    files, rows = _image_files(images), None
    with progress_bars() as progress:
        engine = choice.open(progress, warm_up=False, images=bool(files))
        config = answers.of(engine.tokenizer.files)
        text: str | list[int] = asked
        if files:
            from jaxllm.serving.images.prompt import with_places

            text, rows = engine.image_rows(engine.tokenizer.encode(with_places(asked, len(files))), files)
        generation = engine.stream(text, config, rows=rows)
        # One request needs few buckets; compiling all would only delay its answer.
        engine.warm_up(
            prompt_tokens=generation.prompt_tokens, max_tokens=config.max_tokens, progress=progress
        )
    if as_json:
        asked_ms = process_age_ms()
        facts = answer_facts(generation.result())
        first_ms = None if asked_ms is None else round(asked_ms + generation.timings.ttft_ms)
        facts |= {"first_token_ms": first_ms, "prefill": generation.prefill_mode}
        print_json({**facts, **engine.model.facts(), **draft_facts(engine.speculation)})
        return
    for piece in generation:
        click.echo(piece, nl=False)
    click.echo()


_HELP = "/reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


@click.command("chat", cls=EngineCommand)
@click.option("--system", metavar="TEXT", help="A system message to begin with.")
@image_option
@model_options
@running_options
@sampling_options
def chat_command(
    choice: ModelChoice,
    system: str | None,
    images: tuple[Path, ...],
    **options: Any,
) -> None:
    """Talk with a model in the terminal.

    Reads one turn per line from standard input and writes answers to standard output. Each turn only computes
    new tokens; a full context drops its oldest turn. Images come with the first turn.

    \b
    Example:
      jaxllm chat --system "You are brief."
      jaxllm chat --model smolvlm.jaxllm --image photo.jpg
    """
    answers = answer_options(options)
    with progress_bars() as progress:
        engine = choice.open(progress, images=bool(images))
    converse(engine, answers.of(engine.tokenizer.files), system, images)


def converse(
    engine: "Engine", config: "GenerationConfig", system: str | None, images: Sequence[Path] = ()
) -> None:
    """Answers turns from standard input until it ends.

    Args:
      engine: an engine of a model with a chat template.
      config: config of each answer.
      system: system message; None for none.
      images: image files that come with the first turn.

    Raises:
      ConfigError: the model has no chat template, or an image cannot be read.
    """
    # Imported here, so that --help does not wait for the imports.
    from jaxllm.serving.engine.request import Session

    if not engine.tokenizer.has_chat_template:
        raise ConfigError(f"{engine.name} has no chat template; use `jaxllm generate` for a base model")
    click.echo(f"{engine.name}. {_HELP}", err=True)
    opening: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages, session = list(opening), Session()
    parts: list[dict[str, Any]] = []
    if images:
        from jaxllm.serving.images.prompt import image_part

        parts = [image_part(each) for each in _image_files(images)]
    new = parts
    while True:
        text = _read_turn()
        if text is None or text == "/exit":
            return
        if text == "/reset":
            messages, session, new = list(opening), Session(), parts
        elif text.startswith("/"):
            click.echo(_HELP, err=True)
        elif text:
            content = [*new, {"type": "text", "text": text}] if new else text
            messages.append({"role": "user", "content": content})
            new = []
            messages = _answer(engine, messages, len(opening), config, session)


def _answer(
    engine: "Engine",
    messages: list[dict[str, Any]],
    kept: int,
    config: "GenerationConfig",
    session: "Session",
) -> list[dict[str, Any]]:
    """Answers the last message; returns the conversation with the answer, without dropped old turns."""
    while True:
        try:
            generation = engine.chat(messages, config, session=session)
            break
        except ContextOverflow:
            if len(messages) - kept <= 1:
                raise
            # Drop the oldest turn: a user message and its answer.
            del messages[kept : min(kept + 2, len(messages) - 1)]
            click.echo("(the oldest turn was dropped: the context is full)", err=True)
    try:
        for piece in generation:
            click.echo(piece, nl=False)
    except KeyboardInterrupt:
        generation.close()
    click.echo()
    return [*messages, {"role": "assistant", "content": generation.text}]


def _read_turn() -> str | None:
    """Reads one line from the user; None at the end of input."""
    if sys.stdin.isatty():
        try:
            return input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            click.echo()
            return None
    raw = sys.stdin.buffer.readline()
    if not raw:
        return None
    try:
        return raw.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise ConfigError("standard input is not UTF-8; convert it first") from error


def _image_files(paths: Sequence[Path]) -> list[bytes]:
    """The bytes of image files."""
    if not paths:
        return []
    from jaxllm.serving.images.prompt import read_image_file

    return [read_image_file(path) for path in paths]
