"""`jaxllm demo`: runs a model on a few questions per task, and shows its size and speed."""

import functools
import importlib.resources
import json
import statistics
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxllm.cli.console import answer_facts, print_json, progress_bars
from jaxllm.cli.lazy import EngineCommand
from jaxllm.cli.model_choice import ModelChoice
from jaxllm.cli.shared_options import json_option, model_options
from jaxllm.tasks import readers
from jaxllm.tasks.example import TaskExample
from jaxllm.tasks.readers import SHORTEN, TELL

if TYPE_CHECKING:
    from jaxllm.serving.engine.engine import Engine
    from jaxllm.serving.engine.step import Answer


_ANSWER_TOKENS = 64


@click.command("demo", cls=EngineCommand)
@model_options
@click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(min=1),
    default=160,
    show_default=True,
    help="Maximum number of tokens of an answer.",
)
@json_option
def demo_command(choice: ModelChoice, max_tokens: int, as_json: bool) -> None:
    """Ask a model a few questions of each task, and show its answers and its speed.

    The questions are in the package. Writes answers to standard output as they come, and whether they are
    right; then, without --model, two translations by the packaged encoder-decoder. `jaxllm eval tasks`
    measures a model on complete data sets.

    \b
    Example:
      jaxllm demo --model small
    """
    from jaxllm.models.parameters import parameter_count

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
    aloud = not as_json
    answers: list[dict[str, Any]] = []
    for task, examples in demo_prompts().items():
        if aloud:
            click.secho(f"\n{task}: {examples[0].system}", bold=True)
        answers += [_ask(engine, task, each, max_tokens, aloud=aloud) for each in examples]
    rates = [each["decode_tokens_per_s"] for each in answers if each["decode_tokens_per_s"]]
    totals = {
        "right": sum(each["right"] is True for each in answers),
        "judged": sum(each["right"] is not None for each in answers),
        "median_ttft_ms": statistics.median(each["ttft_ms"] for each in answers),
        "median_decode_tokens_per_s": statistics.median(rates) if rates else None,
    }
    if aloud:
        first = f"first token after {totals['median_ttft_ms']:.1f} ms"
        rate = _rate(totals["median_decode_tokens_per_s"])
        click.echo(f"\n{totals['right']} of {totals['judged']} right; {first}{rate} (medians)")
    translations = _translations(max_tokens, aloud=aloud) if choice.model is None else []
    if as_json:
        print_json({**facts, "answers": answers, "translations": translations, **totals})


def _ask(
    engine: "Engine", task: str, example: TaskExample, max_tokens: int, *, aloud: bool
) -> dict[str, Any]:
    """Asks a question, printing it and the answer as it comes if `aloud`; returns its facts for JSON."""
    from jaxllm.sampling import Sampling
    from jaxllm.serving.engine.request import GenerationConfig
    from jaxllm.serving.evaluation.tasks import is_right
    from jaxllm.text.prompts import prompt_ids

    story = task == STORY
    # Stories are sampled, because greedy small models repeat themselves; seeded, so that runs are
    # reproducible.
    sampling = Sampling(temperature=0.7, top_p=0.9, seed=7) if story else Sampling()
    config = GenerationConfig(
        max_tokens=max_tokens if story else min(max_tokens, _ANSWER_TOKENS), sampling=sampling
    )
    ids = prompt_ids(engine.tokenizer, example, now=datetime.now())
    judge = functools.partial(is_right, example) if example.options else None
    facts = _told(example.user, engine.stream(ids, config), aloud=aloud, judge=judge, answer=example.answer)
    return {"task": task, **facts}


def _translations(max_tokens: int, *, aloud: bool) -> list[dict[str, Any]]:
    """Translates the demo's sentences as `_ask` answers; none if the package has no encoder-decoder."""
    from jaxllm.serving.engine.request import GenerationConfig
    from jaxllm.serving.ground.bundles import packaged_models

    if TRANSLATOR not in packaged_models():
        return []
    with progress_bars() as progress:
        engine = ModelChoice(model=Path(TRANSLATOR)).open(progress)
    if aloud:
        click.secho(f"\n{TRANSLATOR}: German to English, and English to German", bold=True)
    config = GenerationConfig(max_tokens=max_tokens)
    return [_told(text, engine.stream(text, config), aloud=aloud) for text in _data()[TRANSLATOR]]


def _told(
    text: str,
    generation: "Answer",
    *,
    aloud: bool,
    judge: Callable[[str], bool] | None = None,
    answer: str = "",
) -> dict[str, Any]:
    """Runs the answer to a text to its end. `judge` says whether it is right, None if more than one may be;
    `answer` is a right one, or empty."""
    if aloud:
        click.echo("\n" + "\n".join(f"  {line}" for line in text.splitlines()))
        click.secho("  > ", nl=False, fg="cyan")
    for piece in generation:
        if aloud:
            click.echo(piece, nl=False)
    right = None if judge is None else judge(generation.text)
    facts = {"prompt": text, "right_answer": answer or None, "right": right, **answer_facts(generation)}
    if aloud:
        click.echo()
        if right is not None:
            click.secho(f"  {'right' if right else 'wrong'}", fg="green" if right else "red", nl=False)
        if answer and not right:
            click.echo(f"  one of ours: {answer}" if right is None else f", it is: {answer}", nl=False)
        first = f"first after {facts['ttft_ms']:.1f} ms{_rate(facts['decode_tokens_per_s'])}"
        click.secho(f"  [{facts['completion_tokens']} tokens, {first}]", dim=True)
    return facts


def _rate(tokens_per_s: float | None) -> str:
    return f", then {tokens_per_s:,.0f} tokens/s" if tokens_per_s else ""


STORY = "story"
# The packaged encoder-decoder, which translates the demo's sentences: the first by its default task.
TRANSLATOR = "translate"


@functools.cache
def _data() -> dict[str, list[Any]]:
    """Questions by task, as arguments of the functions of `demo_prompts`, and sentences to translate."""
    return json.loads((importlib.resources.files("jaxllm") / "assets" / "demo.json").read_text("utf-8"))


def demo_prompts() -> dict[str, list[TaskExample]]:
    """All questions by task; `story` is not a task of `jaxllm.tasks`. Without options an answer is empty, or
    one of several right ones."""

    def labelled(reader: readers.Labels, text: str, label: str) -> TaskExample:
        return reader.example({"text": text, "label": label})

    def step(app: str, goal: str, done: str, screen: list[str], chosen: int) -> TaskExample:
        # The element to use after some actions, -1 for none.
        state = {"label": [chosen, "null"], "history": done, "state": "\n".join(screen)}
        return readers.ui_step(app, goal, state)

    def call(request: str, answer: str, functions: dict[str, str]) -> TaskExample:
        record: dict[str, Any] = {
            "id": f"demo {answer}",
            "question": [[{"role": "user", "content": request}]],
            "function": [{"name": name, "description": text} for name, text in functions.items()],
        }
        return readers.api_choice(record, answer, readers.function_lines([record]), 0)

    make: dict[str, Callable[..., TaskExample]] = {
        "sentiment": functools.partial(labelled, readers.SENTIMENT),
        "news": functools.partial(labelled, readers.NEWS),
        "emotion": functools.partial(labelled, readers.EMOTION),
        "ui-step": step,
        "api-choice": call,
        "shorten": lambda text, short: TaskExample(system=SHORTEN, user=text, answer=short),
        STORY: lambda text: TaskExample(system=TELL, user=text, answer=""),
    }
    return {task: [made(*each) for each in _data()[task]] for task, made in make.items()}
