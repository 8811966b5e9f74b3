"""Reads the files of tasks as questions: one function from a record to its `TaskExample` per format.

A reader is a function from (folder of all data, split) to the split's examples, read lazily. It raises
DataMissing if a file is missing, and ConfigError, with file and line, for a record of another form.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.tasks.example import (
    Record,
    Split,
    TaskExample,
    held_out,
    read_json,
    read_jsonl,
    shuffled,
    text_field,
)

Reader = Callable[[Path, Split], Iterator[TaskExample]]


def split_files(folder: str, make: Callable[[Record], TaskExample]) -> Reader:
    """The reader of `{train,valid}.jsonl` in a folder under the folder of all data."""
    return lambda data, split: read_jsonl(Path(data) / folder / f"{split}.jsonl", lambda each: [make(each)])


def only_split(path: str | Path, own: Split, make: Callable[[Record], TaskExample]) -> Reader:
    """The reader of a file, absolute or under the folder of all data, that has one split."""

    def read(data: Path, split: Split) -> Iterator[TaskExample]:
        if split != own:
            raise ConfigError(f"{path} has only examples of the split {own}, none of {split}")
        return read_jsonl(Path(data) / path, lambda each: [make(each)])

    return read


# Texts to label: sentiment of reviews, topics of news, emotions of messages.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Labels:
    """Questions of `{"text": ..., "label": ...}` per line.

    Attributes:
      instruction: instruction for the model; it names the labels.
      renamed: label in the files -> our label; empty if they are the same.
    """

    instruction: str
    labels: tuple[str, ...]
    renamed: Record = dataclasses.field(default_factory=dict)

    def example(self, record: Record) -> TaskExample:
        """The question of a record."""
        stored = text_field(record, "label")
        label = self.renamed.get(stored) if self.renamed else stored
        if label not in self.labels:
            raise ConfigError(f"the label {stored!r} is none of {', '.join(self.renamed or self.labels)}")
        return TaskExample(
            system=self.instruction, user=text_field(record, "text"), answer=label, options=self.labels
        )


SENTIMENT = Labels(instruction="Is this review positive or negative?", labels=("positive", "negative"))
NEWS = Labels(
    instruction="What is the topic of this news: World, Sports, Business or Sci/Tech?",
    labels=("World", "Sports", "Business", "Sci/Tech"),
)
EMOTION = Labels(
    instruction="Which emotion is it: sadness, joy, love, anger, fear or surprise?",
    labels=("sadness", "joy", "love", "anger", "fear", "surprise"),
)
# The emotion messages under labels that no packaged model was trained on, for adapters to learn.
MOOD = Labels(
    instruction="How does this person feel: well, unwell or amazed?",
    labels=("well", "unwell", "amazed"),
    renamed={
        **dict.fromkeys(("joy", "love"), "well"),
        **dict.fromkeys(("sadness", "anger", "fear"), "unwell"),
        "surprise": "amazed",
    },
)


# Multiple-choice questions in the formats of ARC (arXiv 1803.05457) and OpenBookQA (arXiv 1809.02789). A
# question is a text to continue, and its choices are scored as continuations, as is common for models that
# were only pretrained.

_ASKED = re.compile(
    r"Please choose the correct answer to the question: (.*?)\n\n(Answer1: .*?)\n\nAnswer", re.S
)
_CHOICE = re.compile(r"\s*Answer\d+: ")


def multiple_choice(record: Record) -> TaskExample:
    """The question in a record of one of three forms: the original one (`question` with `stem` and `choices`,
    each with `label` and `text`, and `answerKey`); that of copies with columns (`question` or
    `question_stem`, `choices` with lists of `label` and `text`, `answerKey`); or one instruction that
    includes question and choices."""
    if "answerKey" in record:
        if isinstance(record.get("question"), dict):
            question, choices = text_field(record["question"], "stem"), record["question"]["choices"]
        else:
            question = text_field(record, "question_stem" if "question_stem" in record else "question")
            pairs = zip(record["choices"]["label"], record["choices"]["text"], strict=True)
            choices = [{"label": label, "text": text} for label, text in pairs]
        labels = [text_field(choice, "label") for choice in choices]
        texts = [text_field(choice, "text").strip() for choice in choices]
        key = text_field(record, "answerKey")
        if key not in labels:
            raise ConfigError(f"the answer {key!r} is none of {labels}")
        answer = texts[labels.index(key)]
    else:
        asked = _ASKED.match(text_field(record, "instruction"))
        if not asked:
            raise ConfigError("the instruction has no question with choices")
        question, texts = asked[1], [text.strip() for text in _CHOICE.split(asked[2])[1:]]
        number = text_field(record, "answer").removeprefix("answer")
        if not number.isdecimal() or not 1 <= int(number) <= len(texts):
            raise ConfigError(f"the answer {number!r} is none of {len(texts)} choices")
        answer = texts[int(number) - 1]
    return TaskExample(
        user=f"Question: {question.strip()}\nAnswer:",
        options=tuple(dict.fromkeys(f" {text}" for text in texts)),
        answer=f" {answer}",
        form="text",
    )


# Free answers: shorter sentences, summaries of chats, stories from their first sentence, and the last word of
# a passage.

SHORTEN = "Say this in a shorter way."
SUM_UP = "Sum up this chat."
TELL = "Tell a story that begins like this."
_COMPRESSION_FILES = tuple(f"tasks/compression/{name}.jsonl" for name in ("google", "broadcast", "gigaword"))
_HELD_OUT_COMPRESSIONS = 0.1
# A longer text is a collection, not one story.
_MAX_STORY_CHARACTERS = 8000
_FIRST_SENTENCE = re.compile(r"\s*(.+?[.!?][\"']?)\s+(.*)", re.DOTALL)


def read_compression(data: Path, split: Split) -> Iterator[TaskExample]:
    """Sentences with shorter versions."""

    def make(record: Record) -> list[TaskExample]:
        text, summaries = text_field(record, "text"), record["summaries"]
        if not isinstance(summaries, list) or not all(isinstance(each, str) for each in summaries):
            raise ConfigError(f"'summaries' must be a list of texts, got {summaries!r:.80}")
        if not summaries or held_out(text, _HELD_OUT_COMPRESSIONS) != (split == "valid"):
            return []
        references = tuple(summaries)
        return [TaskExample(system=SHORTEN, user=text, answer=references[0], references=references)]

    for file in _COMPRESSION_FILES:
        yield from read_jsonl(Path(data) / file, make)


def _chat(record: Record) -> TaskExample:
    # SAMSum's names of the fields, or generic ones.
    names = ("dialogue", "summary") if "dialogue" in record else ("context", "response")
    chat, summary = (text_field(record, name).replace("\r\n", "\n").strip() for name in names)
    return TaskExample(system=SUM_UP, user=chat, answer=summary, references=(summary,))


def _last_word(record: Record) -> TaskExample:
    if "text" in record:
        # LAMBADA's form: the whole passage.
        context, _, word = text_field(record, "text").rstrip().rpartition(" ")
    else:
        context, word = text_field(record, "context"), text_field(record, "continuation").strip()
    if not context.strip() or not word:
        raise ConfigError("a passage needs at least two words")
    return TaskExample(user=context.rstrip(), answer=f" {word}", form="text")


# Chats with summaries (SAMSum, arXiv 1911.12237), and passages without their last word (LAMBADA, 1606.06031).
read_chats = only_split("tasks/samsum/valid.jsonl", "valid", _chat)
read_last_words = only_split("tasks/lambada/valid.jsonl", "valid", _last_word)


def story_example(story: str) -> TaskExample | None:
    """The request to tell `story` from its first sentence; None if it has only one, or is too long."""
    found = _FIRST_SENTENCE.fullmatch(story) if len(story) <= _MAX_STORY_CHARACTERS else None
    if not found or not found[2].strip():
        return None
    return TaskExample(system=TELL, user=found[1], answer=found[2].strip())


# The next step on a phone's screen towards a goal: DroidTask (AutoDroid, arXiv 2308.15272). An answer names
# the element by its text and not by its number: `tap Settings`, `type in Search`, `check Dark mode`, or
# `finish` when the goal is reached.

_STEPS_FILE = "tasks/ui_automation/steps.json"
_FINISH = "finish"
_HELD_OUT_GOALS = 0.2
_VERBS = {"button": "tap", "p": "tap", "input": "type in", "checkbox": "check"}
# A quoted text may contain apostrophes and tags (`text='What's new<br>Menu'`): it ends at the quote after
# which another attribute follows, or the tag ends.
_ELEMENT = re.compile(
    r"<(?P<tag>\w+) id=(?P<id>\d+)(?: text='(?P<text>.*?)'| \w+=[^\s>']*)* ?>(?P<body>.*?)</(?P=tag)>",
    re.DOTALL,
)
_NUMBER = re.compile(r" id=\d+")


def read_ui_steps(data: Path, split: Split) -> Iterator[TaskExample]:
    """The steps of a split's goals; all steps of a goal are in one split."""
    path = Path(data) / _STEPS_FILE
    apps = read_json(path)
    try:
        for app, goals in sorted(apps.items()):
            for goal in goals.values():
                if held_out(f"{app}\0{goal['task']}", _HELD_OUT_GOALS) == (split == "valid"):
                    yield from (ui_step(app, goal["task"], step) for step in goal["profile"])
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{path} does not hold steps per app and goal: {error!r}") from error


def ui_step(app: str, goal: str, step: dict[str, Any]) -> TaskExample:
    """The question at one step: `{"label": [element, text], "history": ..., "state": ...}`."""
    chosen = int(step["label"][0])
    actions = screen_actions(step["state"])
    history, screen = (_NUMBER.sub("", step[part]).strip() for part in ("history", "state"))
    return TaskExample(
        system="What is the next step on this screen?",
        user=f"App: {app}\nGoal: {goal}\nDone:\n{history}\nScreen:\n{screen}",
        answer=_FINISH if chosen < 0 else actions[chosen],
        # Elements with the same text are one option.
        options=tuple(dict.fromkeys([_FINISH, *actions.values()])),
    )


def screen_actions(screen: str) -> dict[int, str]:
    """Element number -> the action on it, for a screen in HTML."""
    actions = {}
    for element in _ELEMENT.finditer(screen):
        text = element["body"] if element["text"] is None else element["text"]
        name = " ".join(text.replace("<br>", " ").split())
        actions[int(element["id"])] = f"{_VERBS.get(element['tag'], 'tap')} {name}".strip()
    return actions


# The function that answers a request: single-call sets of the Berkeley Function-Calling Leaderboard. Each
# question offers four functions: its own, and functions of other questions. In training every question comes
# in several variants, with other fillers in another order, so that a model learns to choose instead of
# learning names.

_CALL_FILES = ("tasks/api_calling/BFCL_v4_simple_python.jsonl", "tasks/api_calling/BFCL_v4_multiple.jsonl")
_HELD_OUT_CALLS = 0.2
_OFFERED = 4
_TRAINING_VARIANTS = 12
_DESCRIPTION_CHARACTERS = 120


def read_api_choices(data: Path, split: Split) -> Iterator[TaskExample]:
    """The questions of a split; fillers come from the same split, so that training never sees held-out
    functions."""
    records = [record for file in _CALL_FILES for record in read_jsonl(Path(data) / file, _single_call)]
    answers = {}
    for file in _CALL_FILES:
        path = Path(data) / file.replace(".jsonl", "_answers.jsonl")
        answers |= read_jsonl(
            path, lambda each: [(text_field(each, "id"), next(iter(each["ground_truth"][0])))]
        )
    records = [each for each in records if held_out(_request(each), _HELD_OUT_CALLS) == (split == "valid")]
    offered = function_lines(records)
    for record in records:
        if record["id"] not in answers:
            raise ConfigError(f"there is no answer to the question {record['id']!r}")
        for variant in range(_TRAINING_VARIANTS if split == "train" else 1):
            yield api_choice(record, answers[record["id"]], offered, variant)


def function_lines(records: Sequence[Record]) -> dict[str, str]:
    """Function name -> its line in a prompt, for all functions of the questions."""

    def line(function: dict[str, Any]) -> str:
        description = " ".join(function.get("description", "").split()).split(". ")[0]
        return f"- {function['name']}: {description[:_DESCRIPTION_CHARACTERS]}"

    return {function["name"]: line(function) for each in records for function in each["function"]}


def api_choice(record: Record, answer: str, offered: dict[str, str], variant: int) -> TaskExample:
    """One variant of a question; `offered`: function name -> its line."""
    own = [function["name"] for function in record["function"]]
    key = f"{record['id']}\0{variant}"
    fillers = shuffled(sorted(set(offered) - set(own)), key)[: max(0, _OFFERED - len(own))]
    names = shuffled([*own, *fillers], key)
    return TaskExample(
        system="Which function answers the request?",
        user="\n".join([_request(record), *(offered[name] for name in names)]),
        answer=answer,
        options=tuple(names),
    )


def _single_call(record: Record) -> Sequence[Record]:
    names = [text_field(function, "name") for function in record["function"]]
    text_field(record, "id")
    return [record] if names and _request(record) else []


def _request(record: Record) -> str:
    return " ".join(text_field(record["question"][0][-1], "content").split())


# The user's own questions, without code: JSON lines, one question with its options per line.
#
#     {"question": TEXT, "options": [TEXT, TEXT, ...], "answer": TEXT or the option's number from 0}
#
# `system` is the system's turn, if there is one; `"form": "text"` makes the question a text to continue
# instead of a turn of a chat. Other keys are ignored.


def own_questions(path: Path) -> Reader:
    """The reader of the questions in a file; all are of the training split."""
    return only_split(path, "train", _own_question)


def _own_question(record: Record) -> TaskExample:
    options = record.get("options")
    texts = isinstance(options, list) and all(isinstance(each, str) and each for each in options)
    if not isinstance(options, list) or not texts or len(set(options)) < 2:
        raise ConfigError(f"options must be a list of at least two different texts, got {options!r:.80}")
    answer = record.get("answer")
    if isinstance(answer, int) and not isinstance(answer, bool):
        if not 0 <= answer < len(options):
            raise ConfigError(f"the answer {answer} is none of the {len(options)} options, counted from 0")
        answer = options[answer]
    elif not isinstance(answer, str):
        raise ConfigError(f"the answer must be an option or its number, got {answer!r:.80}")
    form = record.get("form", "chat")
    if form not in ("chat", "text"):
        raise ConfigError(f"form must be chat or text, got {form!r:.80}")
    return TaskExample(
        user=text_field(record, "question"),
        system=text_field(record, "system") if record.get("system") else "",
        options=tuple(options),
        answer=answer,
        form=form,
    )
