"""`jaxllm demo`: runs a model on a few questions of each task, and shows its size and speed."""

import statistics
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from serving.commands.answer_facts import answer_facts
from serving.commands.console import print_json, progress_bars
from serving.commands.demo_prompts import STORY, TRANSLATED, TRANSLATOR, DemoPrompt, demo_prompts
from serving.commands.lazy import EngineCommand
from serving.commands.model_choice import ModelChoice
from serving.commands.shared_options import json_option, model_options

if TYPE_CHECKING:
    from serving.answer import Answer
    from serving.engine import Engine

_ANSWER_TOKENS = 64


@click.command("demo", cls=EngineCommand)
@model_options
@click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(min=1),
    default=160,
    show_default=True,
    help="Most tokens of an answer.",
)
@json_option
def demo_command(choice: ModelChoice, max_tokens: int, as_json: bool) -> None:
    """Ask a model a few questions of each task, and show its answers and its speed.

    The questions are in the package. Writes answers to standard output as they come, with whether they are
    right; then, without --model, two translations by the packaged encoder-decoder. `jaxllm eval tasks`
    measures a model on whole data sets.

    \b
    Example:
      jaxllm demo --model small
    """
    from jaxllm.models.parameters import parameter_count

    prompts = demo_prompts()
    with progress_bars() as progress:
        engine = choice.open(progress)
    facts: dict[str, Any] = {
        "model": engine.model.bundle.layout.name,
        "weights": engine.model.bundle.layout.weights,
        "parameters": parameter_count(engine.cfg),
        "load_ms": round(engine.model.load_ms, 1),
        "build_ms": round(engine.runner.buckets.build_ms, 1),
    }
    if not as_json:
        click.echo(
            f"{facts['model']}: {facts['parameters'] / 1e6:.1f} M parameters, {facts['weights']} weights"
        )
    answers = _ask(engine, prompts, max_tokens, aloud=not as_json)
    totals = _totals(answers)
    if not as_json:
        _say_totals(totals)
    translations = _translations(max_tokens, aloud=not as_json) if choice.model is None else []
    if as_json:
        print_json({**facts, "answers": answers, "translations": translations, **totals})


def _ask(
    engine: "Engine", prompts: Sequence[DemoPrompt], max_tokens: int, *, aloud: bool
) -> list[dict[str, Any]]:
    """Asks all questions, printing answers as they come where `aloud`; returns their facts for JSON."""
    from jaxllm.sampling import Sampling
    from jaxllm.text.prompts import prompt_ids
    from serving.evaluation.tasks import is_right
    from serving.request import GenerationConfig

    # Stories are sampled, because greedy small models repeat themselves; seeded, so that a run can be
    # repeated.
    story_sampling = Sampling(temperature=0.7, top_p=0.9, seed=7)
    answers, task = [], ""
    for prompt in prompts:
        if aloud and prompt.task != task:
            click.secho(f"\n{prompt.task}: {prompt.example.system}", bold=True)
        task = prompt.task
        story = task == STORY
        config = GenerationConfig(
            max_tokens=max_tokens if story else min(max_tokens, _ANSWER_TOKENS),
            sampling=story_sampling if story else Sampling(),
        )
        generation = engine.stream(prompt_ids(engine.tokenizer, prompt.example, now=datetime.now()), config)
        _tell(prompt.example.user, generation, aloud=aloud)
        right = is_right(prompt.example, generation.text) if prompt.judged else None
        answer = {
            "task": task,
            "prompt": prompt.example.user,
            "right_answer": prompt.example.answer or None,
            "right": right,
            **answer_facts(generation),
        }
        answers.append(answer)
        if aloud:
            _say_facts(answer)
    return answers


def _translations(max_tokens: int, *, aloud: bool) -> list[dict[str, Any]]:
    """Translates the demo's sentences, printing as they come where `aloud`; returns their facts for JSON.
    There are none where the package has no encoder-decoder."""
    from serving.bundles import packaged_models
    from serving.request import GenerationConfig

    if TRANSLATOR not in packaged_models():
        return []
    with progress_bars() as progress:
        engine = ModelChoice(model=Path(TRANSLATOR)).open(progress)
    if aloud:
        click.secho(f"\n{TRANSLATOR}: German to English, and English to German", bold=True)
    answers = []
    for text in TRANSLATED:
        generation = engine.stream(text, GenerationConfig(max_tokens=max_tokens))
        _tell(text, generation, aloud=aloud)
        answer = {"prompt": text, "right_answer": None, "right": None, **answer_facts(generation)}
        answers.append(answer)
        if aloud:
            _say_facts(answer)
    return answers


def _tell(text: str, generation: "Answer", *, aloud: bool) -> None:
    """Runs an answer to its end, printing it as it comes, behind what was asked."""
    if aloud:
        click.echo()
        click.echo("\n".join(f"  {line}" for line in text.splitlines()))
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
