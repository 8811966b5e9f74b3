"""`jaxllm demo`: a model at work on the tasks, with its size and speed."""

import statistics
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from jaxllm.models.parameters import parameter_count
from jaxllm.sampling import Sampling
from jaxllm.tasks import find_task
from jaxllm.tasks.prompts import prompt_ids
from serving.commands.generate import summary
from serving.console import ModelChoice, model_options, print_json, progress_bars
from serving.demo_prompts import STORY, DemoPrompt, demo_prompts
from serving.engine import Engine
from serving.evaluation.report import as_json, print_table
from serving.evaluation.tasks import TaskResult, is_right, read_task_group, run_task
from serving.generation import Generation, GenerationConfig

# For stories. Not greedy, which makes a small model repeat itself; seeded, so that a run can be repeated.
SAMPLING = Sampling(temperature=0.7, top_p=0.9, seed=7)
_ANSWER_TOKENS = 64


@click.command("demo")
@model_options
@click.option(
    "-n", "--max-tokens", type=click.IntRange(min=1), default=160, show_default=True, help="Of an answer."
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Add accuracies over the validation data in DIR (see `jaxllm eval --data`).",
)
@click.option("--json", "as_object", is_flag=True, help="Print one JSON object.")
def demo_command(
    choice: ModelChoice,
    max_tokens: int,
    data: Path | None,
    as_object: bool,
) -> None:
    """Ask a model a few questions of each task: its answers, right or wrong, and its speed."""
    prompts = demo_prompts()
    tasks = [name for name in dict.fromkeys(each.task for each in prompts) if _by_options(name)]
    questions = None if data is None else read_task_group(tasks, data)
    with progress_bars() as progress:
        engine = choice.open(progress)
    facts: dict[str, Any] = {
        "model": engine.bundle.layout.name,
        "weights": engine.bundle.layout.weights,
        "parameters": parameter_count(engine.cfg),
        "load_ms": round(engine.load_ms, 1),
        "build_ms": round(engine.table.build_ms, 1),
    }
    if not as_object:
        click.echo(
            f"{facts['model']}: {facts['parameters'] / 1e6:.1f} M parameters, {facts['weights']} weights"
        )
    answers = _ask(engine, prompts, max_tokens, aloud=not as_object)
    totals = _totals(answers)
    results: list[TaskResult] = []
    if questions is not None:
        with progress_bars() as progress:
            results = [
                run_task(engine, find_task(name), examples, progress)[0]
                for name, examples in questions.examples.items()
            ]
    if as_object:
        tables = {} if questions is None else {"tasks": as_json(results), "missing": list(questions.missing)}
        print_json({**facts, "answers": answers, **totals, **tables})
        return
    _say_totals(totals)
    if questions is not None:
        click.echo()
        print_table(results, questions.missing)


def _by_options(task: str) -> bool:
    return task != STORY and find_task(task).score == "accuracy"


def _ask(
    engine: Engine, prompts: Sequence[DemoPrompt], max_tokens: int, *, aloud: bool
) -> list[dict[str, Any]]:
    """The model's answers as programs read them, told as they come where `aloud`."""
    answers, task = [], ""
    for prompt in prompts:
        if aloud and prompt.task != task:
            click.secho(f"\n{prompt.task}: {prompt.example.system}", bold=True)
        task = prompt.task
        story = task == STORY
        config = GenerationConfig(
            max_tokens=max_tokens if story else min(max_tokens, _ANSWER_TOKENS),
            sampling=SAMPLING if story else Sampling(),
        )
        generation = engine.stream(prompt_ids(engine.tokenizer, prompt.example, now=datetime.now()), config)
        _tell(prompt, generation, aloud=aloud)
        right = is_right(prompt.example, generation.text) if prompt.judged else None
        answer = {
            "task": task,
            "prompt": prompt.example.user,
            "right_answer": prompt.example.answer or None,
            "right": right,
            **summary(generation),
        }
        answers.append(answer)
        if aloud:
            _say_facts(answer)
    return answers


def _tell(prompt: DemoPrompt, generation: Generation, *, aloud: bool) -> None:
    """Runs an answer to its end, printing it as it comes."""
    if aloud:
        click.echo()
        click.echo("\n".join(f"  {line}" for line in prompt.example.user.splitlines()))
        click.secho("  > ", nl=False, fg="cyan")
    for piece in generation:
        if aloud:
            click.echo(piece, nl=False)


def _say_facts(answer: dict[str, Any]) -> None:
    verdict, colour = {True: ("right", "green"), False: ("wrong", "red"), None: ("", None)}[answer["right"]]
    click.echo()
    if verdict:
        click.secho(f"  {verdict}", fg=colour, nl=False)
    if answer["right_answer"] and not answer["right"]:
        said = f", it is: {answer['right_answer']}" if verdict else f"  one of ours: {answer['right_answer']}"
        click.echo(said, nl=False)
    rate = answer["decode_tokens_per_s"]
    pace = f", then {rate:,.0f} tokens/s" if rate else ""
    click.secho(
        f"  [{answer['completion_tokens']} tokens, first after {answer['ttft_ms']:.1f} ms{pace}]", dim=True
    )


def _totals(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rates = [each["decode_tokens_per_s"] for each in answers if each["decode_tokens_per_s"]]
    return {
        "right": sum(each["right"] is True for each in answers),
        "judged": sum(each["right"] is not None for each in answers),
        "median_ttft_ms": statistics.median(each["ttft_ms"] for each in answers),
        "median_decode_tokens_per_s": statistics.median(rates) if rates else None,
    }


def _say_totals(totals: dict[str, Any]) -> None:
    rate = totals["median_decode_tokens_per_s"]
    pace = f", then {rate:,.0f} tokens/s" if rate else ""
    first = f"first token after {totals['median_ttft_ms']:.1f} ms"
    click.echo(f"\n{totals['right']} of {totals['judged']} right; {first}{pace} (medians)")
