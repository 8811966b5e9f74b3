"""The prompts of `jaxllm demo`: three questions per task, written for the demo and not from a data set.

The tasks' own functions render them, so that they have the form that models were trained on.
"""

import dataclasses
from typing import Any

from jaxllm.tasks import api_choice, labels, ui_steps
from jaxllm.tasks.example import TaskExample
from jaxllm.tasks.free_text import SHORTEN, TELL

STORY = "story"
# The packaged encoder-decoder, and what it translates: the first by the task that it takes unasked.
TRANSLATOR = "translate"
TRANSLATED = (
    "Zwei Kinder spielen mit einem kleinen Hund im Park.",
    "translate English to German: A woman in a red jacket is sitting on a bench.",
)


@dataclasses.dataclass(frozen=True)
class DemoPrompt:
    """A question of the demo.

    Attributes:
      task: its name; `story` is not a task of `jaxllm.tasks`.
      example: the question; its answer is empty where no answer is the right one.
      judged: whether an answer other than the example's is wrong.
    """

    task: str
    example: TaskExample
    judged: bool = True


def demo_prompts() -> list[DemoPrompt]:
    """All questions, task by task."""
    labelled = (
        ("sentiment", labels.SENTIMENT, _REVIEWS),
        ("news", labels.NEWS, _NEWS),
        ("emotion", labels.EMOTION, _MESSAGES),
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
# App, goal, what was done, screen, and the number of the element to use next; -1: done.
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
# Request, the function that answers it, and all functions with what they do.
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
    return ui_steps.example(app, goal, step)


def _call(request: str, answer: str, functions: dict[str, str]) -> TaskExample:
    record: dict[str, Any] = {
        "id": f"demo {answer}",
        "question": [[{"role": "user", "content": request}]],
        "function": [{"name": name, "description": text} for name, text in functions.items()],
    }
    return api_choice.example(record, answer, api_choice.lines([record]), 0)
