"""`jaxllm demo`: runs a model on a few questions per task, and shows its size and speed."""

import dataclasses
import statistics
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxllm.cli.answer_facts import answer_facts
from jaxllm.cli.console import print_json, progress_bars
from jaxllm.cli.lazy import EngineCommand
from jaxllm.cli.model_choice import ModelChoice
from jaxllm.cli.shared_options import json_option, model_options
from jaxllm.tasks import readers
from jaxllm.tasks.example import TaskExample
from jaxllm.tasks.readers import SHORTEN, TELL

if TYPE_CHECKING:
    from jaxllm.serving.engine.answer import Answer
    from jaxllm.serving.engine.engine import Engine


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
    engine: "Engine", prompts: "Sequence[DemoPrompt]", max_tokens: int, *, aloud: bool
) -> list[dict[str, Any]]:
    """Asks all questions, printing answers as they come if `aloud`; returns their facts for JSON."""
    from jaxllm.sampling import Sampling
    from jaxllm.serving.engine.request import GenerationConfig
    from jaxllm.serving.evaluation.tasks import is_right
    from jaxllm.text.prompts import prompt_ids

    # Stories are sampled, because greedy small models repeat themselves; seeded, so that runs are
    # reproducible.
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
    """Translates the demo's sentences, printing them as they come if `aloud`; returns their facts for JSON,
    none if the package has no encoder-decoder."""
    from jaxllm.serving.engine.request import GenerationConfig
    from jaxllm.serving.ground.bundles import packaged_models

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
    """Runs an answer to its end, printing the question and the answer as it comes."""
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


STORY = "story"
# The packaged encoder-decoder, and sentences: the first for its default task.
TRANSLATOR = "translate"
TRANSLATED = (
    "Zwei Kinder spielen mit einem kleinen Hund im Park.",
    "translate English to German: A woman in a red jacket is sitting on a bench.",
)


@dataclasses.dataclass(frozen=True)
class DemoPrompt:
    """A question of the demo.

    Attributes:
      task: name of the task; `story` is not a task of `jaxllm.tasks`.
      example: the question; its answer is empty if there is no single right one.
      judged: whether answers other than the example's are wrong.
    """

    task: str
    example: TaskExample
    judged: bool = True


def demo_prompts() -> list[DemoPrompt]:
    """All questions, by task."""
    labelled = (
        ("sentiment", readers.SENTIMENT, _REVIEWS),
        ("news", readers.NEWS, _NEWS),
        ("emotion", readers.EMOTION, _MESSAGES),
    )
    prompts = [
        DemoPrompt(task, kind.example({"text": text, "label": label}))
        for task, kind, pairs in labelled
        for text, label in pairs
    ]
    prompts += [DemoPrompt("ui-step", _step(*each)) for each in _STEPS]
    prompts += [DemoPrompt("api-choice", _call(*each)) for each in _REQUESTS]
    prompts += [
        DemoPrompt("shorten", TaskExample(system=SHORTEN, user=text, answer=shorter), judged=False)
        for text, shorter in _SENTENCES
    ]
    prompts += [
        DemoPrompt(STORY, TaskExample(system=TELL, user=text, answer=""), judged=False) for text in _OPENINGS
    ]
    return prompts


_REVIEWS = (
    ("a warm , funny film that never loses its way", "positive"),
    ("two hours of noise without a single idea", "negative"),
    ("the young actors are a joy to watch", "positive"),
)
_NEWS = (
    ("The goalkeeper saved two penalties and her team won the cup final in the last minute.", "Sports"),
    ("Shares of the airline fell after it said that profits would be lower this quarter.", "Business"),
    ("A new version of the browser blocks spyware and loads pages faster, its makers say.", "Sci/Tech"),
)
_MESSAGES = (
    ("i feel so lonely since my best friend moved away", "sadness"),
    ("i am furious that they lied to me again", "anger"),
    ("i feel nervous and shaky before the big exam", "fear"),
)
# App, goal, past actions, screen, and the number of the element to use next; -1: done.
_STEPS = (
    (
        "alarm",
        "turn on the dark theme",
        "- Start the alarm app.",
        (
            "<button id=0 text='Add alarm'></button>",
            "<button id=1 text='Settings'></button>",
            "<button id=2>Stopwatch</button>",
            "<button id=3>go back</button>",
        ),
        1,
    ),
    (
        "notes",
        "search for the note about groceries",
        "- Start the notes app.",
        (
            "<input id=0>Search notes</input>",
            "<button id=1 text='New note'></button>",
            "<button id=2 text='More options'></button>",
            "<button id=3>go back</button>",
        ),
        0,
    ),
    (
        "music",
        "open the list of albums",
        "- Start the music app.\n- TapOn: <button text='Albums'></button>",
        (
            "<p id=0>Albums</p>",
            "<button id=1>Morning songs</button>",
            "<button id=2>Live at home</button>",
            "<button id=3>go back</button>",
        ),
        -1,
    ),
)
# Request, the function that answers it, and descriptions of all functions.
_REQUESTS = (
    (
        "How far is it from Lisbon to Porto by car?",
        "route.distance",
        {
            "route.distance": "Calculate the distance between two cities by road.",
            "hotel.book": "Book a hotel room in a city.",
            "currency.convert": "Convert an amount of money from one currency to another.",
            "weather.today": "Get today's weather for a city.",
        },
    ),
    (
        "What is 250 dollars in yen?",
        "convert_currency",
        {
            "get_stock_price": "Get the current price of a company's stock.",
            "convert_currency": "Convert an amount of money from one currency to another.",
            "translate_text": "Translate a text into another language.",
            "set_timer": "Set a timer for a number of minutes.",
        },
    ),
    (
        "Find the area of a circle with a radius of 3 meters.",
        "geometry.circle_area",
        {
            "recipe.search": "Search for recipes by ingredient.",
            "geometry.square_area": "Calculate the area of a square from its side.",
            "geometry.circle_area": "Calculate the area of a circle from its radius.",
            "movie.rating": "Get the rating of a movie.",
        },
    ),
)
_SENTENCES = (
    (
        "The city council voted on Tuesday night to close the old bridge for repairs until the spring.",
        "The city council voted to close the old bridge.",
    ),
    (
        "A farmer in the north has grown what may be the largest pumpkin ever seen in the region.",
        "A farmer has grown the largest pumpkin.",
    ),
    (
        "The singer, who turned 40 last week, said that she will release a new album in the spring.",
        "The singer will release a new album.",
    ),
)
_OPENINGS = (
    "Once upon a time, there was a little robot who lived in a lighthouse.",
    "Tom and Sue went to the beach with a big red bucket.",
    "The cat looked at the moon and wanted to touch it.",
)


def _step(app: str, goal: str, done: str, screen: tuple[str, ...], chosen: int) -> TaskExample:
    step = {"label": [chosen, "null"], "history": done, "state": "\n".join(screen)}
    return readers.ui_step(app, goal, step)


def _call(request: str, answer: str, functions: dict[str, str]) -> TaskExample:
    record: dict[str, Any] = {
        "id": f"demo {answer}",
        "question": [[{"role": "user", "content": request}]],
        "function": [{"name": name, "description": text} for name, text in functions.items()],
    }
    return readers.api_choice(record, answer, readers.function_lines([record]), 0)
