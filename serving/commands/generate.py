"""`jaxllm generate`: continue a prompt."""

from pathlib import Path
from typing import Any

import click

from serving.console import (
    ModelChoice,
    generation_config,
    model_options,
    print_json,
    progress_bars,
    read_text,
    running_options,
    sampling_options,
)
from serving.engine import Engine
from serving.generation import Generation
from serving.machine import process_age_ms
from serving.speculative.rounds import Rounds


@click.command("generate")
@model_options
@running_options
@click.option("-p", "--prompt", help="Text to continue. [default: read standard input]")
@click.option("--prompt-file", type=click.Path(path_type=Path), help="Read the prompt from a file.")
@sampling_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when done.")
def generate_command(
    choice: ModelChoice,
    prompt: str | None,
    prompt_file: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Continue a prompt with a model, streaming the text."""
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("give --prompt or --prompt-file, not both")
    config = generation_config(options)
    text = read_text(prompt_file) if prompt is None else prompt
    with progress_bars() as progress:
        engine = choice.open(progress, warm_up=False)
        generation = engine.stream(text, config)
        # One request needs few graphs; compiling all of them would only delay its answer.
        engine.warm_up(
            prompt_tokens=generation.prompt_tokens, max_tokens=config.max_tokens, progress=progress
        )
    if as_json:
        asked_ms = process_age_ms()
        facts = summary(generation.result())
        first_ms = None if asked_ms is None else round(asked_ms + generation.timings.ttft_ms)
        more: dict[str, Any] = {}
        if isinstance(engine, Engine):
            read = generation.prompt_tokens - generation.reused_tokens
            more = {"prefill": engine.prefill_mode(read), **graphs(engine), **memory(engine)}
        more |= drafts(engine.speculative)
        print_json({**facts, "first_token_ms": first_ms, **more})
        return
    for piece in generation:
        click.echo(piece, nl=False)
    click.echo()


def graphs(engine: Engine) -> dict[str, int]:
    """How many graphs the engine read from disk, and how many it compiled."""
    table = engine.table
    return {
        "loaded_graphs": len(table.loaded),
        "compiled_graphs": len(table.bucket_ms.keys() - table.loaded),
    }


def memory(engine: Engine) -> dict[str, Any]:
    """What reading of weights came to, where they are not all in memory."""
    return {} if engine.streamed is None else {"memory": engine.streamed.facts()}


def drafts(rounds: Rounds[Any] | None) -> dict[str, Any]:
    """What drafts came to, where there were any."""
    if rounds is None:
        return {}
    counts = rounds.counts
    return {
        "drafts": {
            "verifications": counts.rounds,
            "acceptance_length": round(counts.acceptance_length, 2),
            "useful_share": round(counts.useful_share, 3),
            "plain_tokens": counts.plain_tokens,
        }
    }


def summary(generation: Generation) -> dict[str, Any]:
    """A finished answer as programs read it; times in milliseconds."""
    tokens, timings = len(generation.tokens), generation.timings
    tpot_ms = timings.tpot_ms(tokens)
    return {
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "stop_string": generation.stop_string,
        "prompt_tokens": generation.prompt_tokens,
        "reused_tokens": generation.reused_tokens,
        "completion_tokens": tokens,
        "seed": generation.seed,
        "ttft_ms": round(timings.ttft_ms, 3),
        "tpot_ms": round(tpot_ms, 3),
        "decode_tokens_per_s": round(1000 / tpot_ms, 1) if tpot_ms else None,
    }
