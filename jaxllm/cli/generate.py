"""`jaxllm generate` continues a prompt."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


def _image_files(paths: Sequence[Path]) -> list[bytes]:
    """The bytes of image files."""
    if not paths:
        return []
    from jaxllm.serving.images.prompt import read_image_file

    return [read_image_file(path) for path in paths]
