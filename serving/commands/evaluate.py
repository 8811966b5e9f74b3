"""`jaxllm eval`: how good a model is."""

import dataclasses
from pathlib import Path
from typing import Any

import click

from jaxllm.tasks import TASKS, find_task
from serving.console import (
    ModelChoice,
    model_options,
    prefill_option,
    print_json,
    progress_bars,
    read_text,
)
from serving.evaluation.agreement import greedy_agreement
from serving.evaluation.perplexity import Perplexity, perplexity
from serving.evaluation.report import as_json, check_predictions, print_table, write_predictions
from serving.evaluation.rouge import require_rouge
from serving.evaluation.routing import expert_use
from serving.evaluation.tasks import ALL, Prediction, Questions, TaskResult, read_questions, run_task


@click.command("eval")
@model_options
@prefill_option
@click.option("--perplexity", "text_file", type=click.Path(path_type=Path), help="A UTF-8 text.")
@click.option("--separator", help="Split the text into documents at this string, scored apart.")
@click.option(
    "--window", "window_tokens", type=int, default=0, help="Window in tokens. [default: the context]"
)
@click.option(
    "--agreement",
    "other_model",
    type=click.Path(path_type=Path),
    metavar="MODEL",
    help="Also how often MODEL, of the same tokenizer, would say the same next token of that text.",
)
@click.option("--routing", is_flag=True, help="Also which experts the tokens of that text visit.")
@click.option(
    "--task",
    "names",
    multiple=True,
    type=click.Choice([*TASKS, ALL]),
    help="Answer a task's validation questions. Repeatable; all: every task that DIR has files of.",
)
@click.option("--data", type=click.Path(path_type=Path), metavar="DIR", help="Where the tasks' files are.")
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help="Ask a fixed sample of N questions a task."
)
@click.option(
    "--predictions", type=click.Path(path_type=Path), metavar="FILE", help="Write a JSON line per question."
)
@click.option("--json", "as_object", is_flag=True, help="Print one JSON object.")
def eval_command(
    choice: ModelChoice,
    text_file: Path | None,
    separator: str | None,
    window_tokens: int,
    other_model: Path | None,
    routing: bool,
    names: tuple[str, ...],
    data: Path | None,
    limit: int | None,
    predictions: Path | None,
    as_object: bool,
) -> None:
    """Measure a model: perplexity of a text, right answers to tasks, or both."""
    if text_file is None and not names:
        raise click.UsageError("give --perplexity FILE, --task NAME, or both")
    if text_file is not None and choice.prefill == "int8":
        raise click.UsageError("--prefill int8 is judged by --task; the bundle says what perplexity it costs")
    if separator == "":
        raise click.UsageError("--separator must not be empty")
    if text_file is None and (separator or window_tokens or other_model or routing):
        raise click.UsageError("--separator, --window, --agreement and --routing belong to --perplexity")
    if names and data is None:
        raise click.UsageError("--task needs --data DIR, the folder that holds tasks/")
    if not names and (data or limit or predictions):
        raise click.UsageError("--data, --limit and --predictions belong to --task")
    if predictions is not None:
        check_predictions(predictions)
    documents = None if text_file is None else _documents(text_file, separator)
    questions = read_questions(names, data, limit or 0) if data is not None else Questions(examples={})
    if any(find_task(name).score == "rouge" for name in questions.examples):
        require_rouge()
    with progress_bars() as progress:
        engine = choice.open(progress, warm_up=False)
        measured = None
        if documents is not None:
            measured = perplexity(engine, documents, window_tokens=window_tokens, progress=progress)
        agreement = None
        if other_model is not None and documents is not None:
            other = choice.open_other(other_model, progress)
            agreement = greedy_agreement(
                engine, other, documents, window_tokens=window_tokens, progress=progress
            )
        use = expert_use(engine, documents, progress=progress) if routing and documents else None
        results: list[TaskResult] = []
        answers: list[Prediction] = []
        for name, examples in questions.examples.items():
            result, made = run_task(engine, find_task(name), examples, progress)
            results.append(result)
            answers += made
    if predictions is not None:
        write_predictions(predictions, answers)
    if as_object:
        facts: dict[str, Any] = {"model": engine.bundle.layout.name, "weights": engine.bundle.layout.weights}
        if measured is not None:
            facts |= dataclasses.asdict(measured)
        if agreement is not None:
            facts["agreement"] = dataclasses.asdict(agreement)
        if use is not None:
            facts["routing"] = dataclasses.asdict(use)
        if names:
            facts |= {"tasks": as_json(results), "missing": list(questions.missing)}
        print_json(facts)
        return
    if measured is not None:
        _show(measured)
    if agreement is not None:
        click.echo(
            f"agreement {agreement.agreement:.1%} over {agreement.tokens} tokens (right: "
            f"{agreement.right:.1%}, the other {agreement.other_right:.1%})"
        )
    if use is not None:
        click.echo(
            f"experts: {use.dead} dead, between {use.least:.2f} and {use.most:.2f} of an even share; "
            f"{use.paths} of {use.possible_paths} paths seen, the top tenth of them carries "
            f"{use.top_paths_share:.1%} of {use.tokens} tokens"
        )
    if names:
        print_table(results, questions.missing)


def _documents(path: Path, separator: str | None) -> list[str]:
    text = read_text(path)
    documents = text.split(separator) if separator else [text]
    return [document for document in documents if document.strip()]


def _show(result: Perplexity) -> None:
    click.echo(
        f"perplexity {result.perplexity:.4f}, {result.bits_per_byte:.4f} bits/byte over {result.tokens} "
        f"tokens in {result.documents} documents (windows of {result.window_tokens} tokens)"
    )
