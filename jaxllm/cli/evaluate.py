"""`jaxllm eval`: measures a model's quality on texts and tasks."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxllm.cli.console import print_columns, print_json, progress_bars, read_text
from jaxllm.cli.lazy import EngineCommand
from jaxllm.cli.model_choice import ModelChoice
from jaxllm.cli.shared_options import (
    MODEL,
    json_option,
    model_argument,
    model_options,
    path_argument,
    path_option,
    prefill_option,
)
from jaxllm.errors import ConfigError
from jaxllm.options import Command, combined
from jaxllm.tasks import TASKS

if TYPE_CHECKING:
    from jaxllm.serving.engine.engine import Engine

_COLUMNS = ("task", "score", "level", "%", "95 %", "chance", "majority", "examples", "tokens", "seconds")


class _TaskName(click.Choice[str]):
    """The name of a task, including tasks added by other distributions."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.Choice`."""
        return value if value in TASKS else super().convert(value, param, ctx)


_separator_option = click.option(
    "--separator",
    metavar="TEXT",
    callback=lambda _context, _parameter, text: _not_empty(text),
    help="Split the text at this string into documents, scored separately.",
)
_window_option = click.option(
    "--window",
    "window_tokens",
    type=int,
    default=0,
    metavar="TOKENS",
    help="Score windows of this many tokens.  [default: the context]",
)


@click.group("eval")
def eval_command() -> None:
    """Measure how good a model is, on texts and on tasks."""


def _text_measure(name: str, line: str) -> Callable[[Command], click.Command]:
    """Makes a subcommand that measures a model on TEXT, from a function of (engine, documents, progress,
    choice, further options) that returns a dataclass.

    Args:
      line: format of the printed line, with the result as argument.
    """

    def decorate(command: Command) -> click.Command:
        @functools.wraps(command)
        def run(choice: ModelChoice, text: Path, separator: str | None, as_json: bool, **more: Any) -> None:
            whole = read_text(text)
            documents = [each for each in (whole.split(separator) if separator else [whole]) if each.strip()]
            with progress_bars() as progress:
                engine = choice.open(progress, warm_up=False)
                found = command(engine, documents, progress=progress, choice=choice, **more)
            if as_json:
                print_json({**_names(engine), **dataclasses.asdict(found)})
            else:
                click.echo(line.format(found))

        options = combined(path_argument("text"), _separator_option, model_options, json_option)
        return eval_command.command(name, cls=EngineCommand)(options(run))

    return decorate


@_text_measure(
    "perplexity",
    "perplexity {0.perplexity:.4f} (95 % in [{0.interval[0]:.4f}, {0.interval[1]:.4f}]), "
    "{0.bits_per_byte:.4f} bits/byte over {0.tokens} tokens in {0.documents} documents (windows of "
    "{0.window_tokens} tokens)",
)
@_window_option
@click.option(
    "--high-planes",
    is_flag=True,
    help="Predict with the high planes of int8-nested weights only, the 4-bit model used for drafts.",
)
def perplexity_command(engine: "Engine", documents: list[str], *, choice: ModelChoice, **how: Any) -> Any:
    """Measure the perplexity of a text.

    Reads TEXT, a UTF-8 file or - for standard input, and writes the perplexity and the bits per byte.

    \b
    Example:
      jaxllm eval perplexity text.txt --model model.jaxllm
    """
    from jaxllm.serving.evaluation.texts import perplexity

    return perplexity(engine, documents, **how)


@_text_measure(
    "agreement",
    "agreement {0.agreement:.1%} over {0.tokens} tokens (right: {0.right:.1%}, the other "
    "{0.other_right:.1%})",
)
@path_argument("other")
@_window_option
def agreement_command(
    engine: "Engine", documents: list[str], *, choice: ModelChoice, other: Path, **how: Any
) -> Any:
    """Measure how often two models choose the same next token.

    Reads TEXT, a UTF-8 file or - for standard input. OTHER is a bundle, a Hugging Face folder or a packaged
    model's name with the same tokenizer. Writes the share of tokens on which both models' greedy choices
    agree.

    \b
    Example:
      jaxllm eval agreement text.txt draft --model default
    """
    from jaxllm.serving.evaluation.texts import greedy_agreement

    return greedy_agreement(engine, choice.open_other(other, how["progress"]), documents, **how)


@_text_measure(
    "routing",
    "experts: {0.dead} dead, between {0.least:.2f} and {0.most:.2f} of an even share; {0.paths} of "
    "{0.possible_paths} paths seen, the top tenth of them carries {0.top_paths_share:.1%} of {0.tokens} "
    "tokens",
)
def routing_command(engine: "Engine", documents: list[str], *, choice: ModelChoice, **how: Any) -> Any:
    """Measure how evenly a mixture spreads tokens over its experts.

    Reads TEXT, a UTF-8 file or - for standard input, and writes how often each expert and path of experts is
    visited.

    \b
    Example:
      jaxllm eval routing text.txt --model moe
    """
    from jaxllm.serving.evaluation.texts import expert_use

    return expert_use(engine, documents, **how)


@eval_command.command("tasks", cls=EngineCommand)
@path_option(
    "--data", required=True, metavar="DIR", help="Folder with a subfolder tasks/ of the tasks' files."
)
@click.option(
    "--task",
    "names",
    multiple=True,
    type=_TaskName(list(TASKS)),
    help="Answer this task's questions. Repeatable.  [default: every task with files in DIR]",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="Ask a fixed sample of N questions per task.  [default: all]",
)
@click.option(
    "--each-level", is_flag=True, help="Measure every level of an elastic bundle, the whole model first."
)
@path_option("--text", help="Measure the perplexity of this UTF-8 text, too.")
@path_option("--predictions", help="Write every answer to FILE, one JSON line per question.")
@prefill_option(
    "Feed questions in floats, in 8-bit integers (requires a bundle of `jaxllm calibrate prefill`), or in "
    "whichever is faster for a prompt (requires times of `jaxllm profile --prefill auto`).  [default: float]"
)
@model_options
@json_option
def tasks_command(
    choice: ModelChoice,
    data: Path,
    names: tuple[str, ...],
    limit: int | None,
    each_level: bool,
    text: Path | None,
    predictions: Path | None,
    as_json: bool,
) -> None:
    """Measure how many questions of tasks a model answers right.

    Reads the tasks' validation questions from DIR and writes a row of scores per task and level, with their
    95 % intervals.

    \b
    Example:
      jaxllm eval tasks --data DIR --task sentiment --task news --limit 200
      jaxllm eval tasks --data DIR --task arc-easy --each-level --text text.txt
    """
    from jaxllm.serving.evaluation.tasks import (
        ALL,
        check_predictions,
        read_questions,
        run_task,
        write_predictions,
    )
    from jaxllm.serving.evaluation.tasks import as_json as results_json
    from jaxllm.serving.evaluation.texts import perplexity
    from jaxllm.tasks import find_task
    from jaxllm.tasks.rouge import require_rouge

    if predictions is not None:
        check_predictions(predictions)
    questions = read_questions(names or (ALL,), data, limit or 0)
    if any(find_task(name).score == "rouge" for name in questions.examples):
        require_rouge()
    read = None if text is None else read_text(text)
    results, answers, texts = [], [], []
    with progress_bars() as progress:
        engine = choice.open(progress, warm_up=False, each_level=each_level)
        for each in [engine, *(engine.at(level) for level in engine.levels[-2::-1] if each_level)]:
            for name, examples in questions.examples.items():
                result, made = run_task(each, find_task(name), examples, progress)
                results.append(result)
                answers += [{"level": each.level, **prediction} for prediction in made]
            if read is not None:
                texts.append(perplexity(each, [read], progress=progress))
    if predictions is not None:
        write_predictions(predictions, answers)
    if as_json:
        found = {"tasks": results_json(results), "texts": [dataclasses.asdict(each) for each in texts]}
        print_json({**_names(engine), **found, "missing": list(questions.missing)})
        return
    rows: list[Sequence[str]] = []
    for result in results:
        shares = (_percent(result.chance), _percent(result.majority))
        counts = [f"{count:,}" for count in (result.examples, result.tokens)]
        rest, lead = (*shares, *counts, f"{result.seconds:.1f}"), result.task
        for measure, value in result.scores.items() or [("nothing fits", None)]:
            low, high = (_percent(each) for each in result.intervals.get(measure, (None, None)))
            rows.append((lead, measure, str(result.level), _percent(value), f"{low}-{high}", *rest))
            lead, rest = "", ()
    print_columns(_COLUMNS, rows, texts=2)
    for found in texts:
        low, high = found.interval
        click.echo(
            f"Level {found.level}: perplexity {found.perplexity:.3f} ({low:.3f} to {high:.3f}) over "
            f"{found.tokens:,} tokens."
        )
    if skipped := sum(result.skipped for result in results):
        click.echo(f"{skipped} questions are longer than the context and were skipped.")
    if questions.missing:
        click.echo(f"No files of: {', '.join(questions.missing)}.")


@eval_command.command("pairs")
@model_argument()
@path_option("--source", required=True, help="A UTF-8 text file with one source per line.")
@path_option("--reference", help="A UTF-8 text file with the right target of each line.")
@click.option(
    "--fields",
    nargs=2,
    metavar="SOURCE TARGET",
    help="Read the source file as JSON lines, from these fields; any target of a list is right.",
)
@click.option(
    "--held-out",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="SHARE",
    help="Read only the JSON lines that a recipe with this held_out_share does not train on.",
)
@click.option("--prefix", metavar="TEXT", help="Prefix of the task.  [default: the model's own]")
@path_option(
    "--draft",
    type=MODEL,
    metavar="DRAFT",
    help="A smaller model with the same tokenizer, to measure its agreement with MODEL.",
)
@path_option("-o", "--output", help="Write the translations here.")
def pairs_command(
    model: Path,
    source: Path,
    reference: Path | None,
    fields: tuple[str, str] | None,
    held_out: float | None,
    prefix: str | None,
    draft: Path | None,
    output: Path | None,
) -> None:
    """Measure an encoder-decoder's greedy answers to a file, and print a JSON object.

    MODEL and DRAFT are Hugging Face folders or bundles. Answers to text files are scored by BLEU, those to
    JSON lines by Rouge and exact match. Agreement is the share of tokens in MODEL's answers that DRAFT
    predicts greedily from the tokens before them.

    \b
    Example:
      jaxllm eval pairs runs/translate/hf --source val.de --reference val.en
      jaxllm eval pairs runs/switch/hf --prefix "emotion:" --source valid.jsonl --fields text label
    """
    # Imported here, so that --help and usage errors do not wait for JAX.
    from jaxllm.tasks.rouge import require_rouge
    from jaxllm.training.loop.run_files import write_text
    from jaxllm.training.seq2seq.pairs import held_out_of, read_json_pairs, read_pair_files
    from jaxllm.training.seq2seq.run import Translator, bleu, likeness

    if (reference is None) == (fields is None):
        raise click.UsageError("give --reference with text files, or --fields with JSON lines")
    if held_out is not None and fields is None:
        raise click.UsageError("--held-out is for JSON lines: give --fields")
    if reference is not None:
        pairs = [(text, [right]) for text, right in read_pair_files(source, reference).texts]
    else:
        assert fields is not None
        require_rouge()
        pairs = read_json_pairs(source, *fields)
        if held_out is not None:
            pairs = held_out_of(pairs, held_out)
    if not pairs:
        raise ConfigError(f"{source} has no source with a target; give texts, one per line")
    translator = Translator.read(model)
    lead = f"{prefix.strip()} " if prefix is not None else translator.tokenizer.files.source_prefix
    sources = translator.encode([lead + text for text, _ in pairs])
    answers = translator.translate(sources)
    said = [translator.tokenizer.decode(answer).strip() for answer in answers]
    found: dict[str, float] = {"lines": len(pairs)}
    if reference is not None:
        found["bleu"] = round(bleu(said, [right[0] for _, right in pairs]), 2)
    else:
        found.update(likeness(said, [right for _, right in pairs]))
    if draft is not None:
        found["agreement"] = round(Translator.read(draft).agreement(sources, answers), 4)
    if output is not None:
        write_text(output, "".join(f"{text}\n" for text in said))
    print_json(found)


def _not_empty(text: str | None) -> str | None:
    if text == "":
        raise click.UsageError("--separator must not be empty")
    return text


def _names(engine: "Engine") -> dict[str, Any]:
    return {"model": engine.model.bundle.layout.name, "weights": engine.model.bundle.layout.weights}


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
