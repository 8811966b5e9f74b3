"""`jaxllm eval`: how good a model is."""

import dataclasses
from pathlib import Path

import click

from serving.console import engine_options, model_options, print_json, progress_bars, read_text
from serving.engine import Engine
from serving.evaluation.perplexity import perplexity


@click.command("eval")
@model_options
@click.option(
    "--perplexity", "text_file", required=True, type=click.Path(path_type=Path), help="A UTF-8 text."
)
@click.option("--separator", help="Split the text into documents at this string, scored apart.")
@click.option(
    "--window", "window_tokens", type=int, default=0, help="Window in tokens. [default: the context]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def eval_command(
    model: Path | None,
    weights: str | None,
    context_tokens: int,
    text_file: Path,
    separator: str | None,
    window_tokens: int,
    as_json: bool,
) -> None:
    """Measure a model: perplexity of a text."""
    if separator == "":
        raise click.UsageError("--separator must not be empty")
    text = read_text(text_file)
    documents = text.split(separator) if separator else [text]
    documents = [document for document in documents if document.strip()]
    with progress_bars() as progress:
        engine = Engine.open(
            model, weights=weights, options=engine_options(context_tokens), warm_up=False, progress=progress
        )
        result = perplexity(engine, documents, window_tokens=window_tokens, progress=progress)
    if as_json:
        print_json(
            {"model": engine.bundle.layout.name, "weights": engine.bundle.layout.weights}
            | dataclasses.asdict(result)
        )
        return
    click.echo(
        f"perplexity {result.perplexity:.4f}, {result.bits_per_byte:.4f} bits/byte over {result.tokens} "
        f"tokens in {result.documents} documents (windows of {result.window_tokens} tokens)"
    )
