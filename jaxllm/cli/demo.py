"""`jaxllm demo`: runs a model on a few questions per task, and shows its size and speed."""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
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
    aloud = not as_json
    answers = [_ask(engine, each, max_tokens, aloud=aloud) for each in prompts]
    totals = _totals(answers)
    if aloud:
        first = f"first token after {totals['median_ttft_ms']:.1f} ms"
        rate = _rate(totals["median_decode_tokens_per_s"])
        click.echo(f"\n{totals['right']} of {totals['judged']} right; {first}{rate} (medians)")
    translations = _translations(max_tokens, aloud=aloud) if choice.model is None else []
    if as_json:
        print_json({**facts, "answers": answers, "translations": translations, **totals})


def _ask(engine: "Engine", prompt: "DemoPrompt", max_tokens: int, *, aloud: bool) -> dict[str, Any]:
    """Asks a question, printing the answer as it comes if `aloud`; returns its facts for JSON."""
    from jaxllm.sampling import Sampling
    from jaxllm.serving.engine.request import GenerationConfig
    from jaxllm.serving.evaluation.tasks import is_right
    from jaxllm.text.prompts import prompt_ids

    story = prompt.task == STORY
    # Stories are sampled, because greedy small models repeat themselves; seeded, so that runs are
    # reproducible.
    sampling = Sampling(temperature=0.7, top_p=0.9, seed=7) if story else Sampling()
    config = GenerationConfig(
        max_tokens=max_tokens if story else min(max_tokens, _ANSWER_TOKENS), sampling=sampling
    )
    ids = prompt_ids(engine.tokenizer, prompt.example, now=datetime.now())
    if aloud and prompt.first:
        click.secho(f"\n{prompt.task}: {prompt.example.system}", bold=True)
    judge = functools.partial(is_right, prompt.example) if prompt.judged else None
    facts = _told(prompt.example.user, engine.stream(ids, config), judge, prompt.example.answer, aloud=aloud)
    return {"task": prompt.task, **facts}


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
    config = GenerationConfig(max_tokens=max_tokens)
    return [_told(text, engine.stream(text, config), None, "", aloud=aloud) for text in TRANSLATED]


def _told(
    text: str, generation: "Answer", judge: Callable[[str], bool] | None, answer: str, *, aloud: bool
) -> dict[str, Any]:
    """Runs an answer to its end, printing the question and the answer as it comes if `aloud`; returns its
    facts for JSON.

    Args:
      text: the question.
      generation: the answer to come.
      judge: whether an answer is right; None if there is no single right one.
      answer: a right answer; empty for none.
      aloud: whether to print.
    """
    if aloud:
        click.echo()
        click.echo("\n".join(f"  {line}" for line in text.splitlines()))
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


def _totals(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rates = [each["decode_tokens_per_s"] for each in answers if each["decode_tokens_per_s"]]
    return {
        "right": sum(each["right"] is True for each in answers),
        "judged": sum(each["right"] is not None for each in answers),
        "median_ttft_ms": statistics.median(each["ttft_ms"] for each in answers),
        "median_decode_tokens_per_s": statistics.median(rates) if rates else None,
    }


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
      first: whether it is the first question of its task.
    """

    task: str
    example: TaskExample
    judged: bool = True
    first: bool = False


def demo_prompts() -> list[DemoPrompt]:
    """All questions, by task."""
    labelled = (readers.SENTIMENT, _REVIEWS), (readers.NEWS, _NEWS), (readers.EMOTION, _MESSAGES)
    reviews, news, messages = (
        [kind.example({"text": text, "label": label}) for text, label in pairs] for kind, pairs in labelled
    )
    examples: dict[str, list[TaskExample]] = {
        "sentiment": reviews,
        "news": news,
        "emotion": messages,
        "ui-step": [_step(*each) for each in _STEPS],
        "api-choice": [_call(*each) for each in _REQUESTS],
        "shorten": [TaskExample(system=SHORTEN, user=text, answer=short) for text, short in _SENTENCES],
        STORY: [TaskExample(system=TELL, user=text, answer="") for text in _OPENINGS],
    }
    return [
        DemoPrompt(task, example, judged=bool(example.options), first=number == 0)
        for task, those in examples.items()
        for number, example in enumerate(those)
    ]


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
