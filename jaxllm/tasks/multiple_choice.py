"""Multiple-choice questions in the formats of ARC (arXiv 1803.05457) and OpenBookQA (arXiv 1809.02789).

A question is a text to continue, and its choices are scored as continuations, as is common for models that
were only pretrained. A line of a file has one of three forms: the original one (`question` with `stem` and
`choices`, each with `label` and `text`, and `answerKey`); that of copies with columns (`question` or
`question_stem`, `choices` with lists of `label` and `text`, `answerKey`); or one instruction that includes
question and choices.
"""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from jaxllm.errors import ConfigError
from jaxllm.tasks.example import Split, TaskExample, text_field
from jaxllm.tasks.files import Record, read_jsonl

_ASKED = re.compile(
    r"Please choose the correct answer to the question: (.*?)\n\n(Answer1: .*?)\n\nAnswer", re.S
)
_CHOICE = re.compile(r"\s*Answer\d+: ")


@dataclasses.dataclass(frozen=True)
class MultipleChoice:
    """A set of questions in `{train,valid}.jsonl` of a folder under the folder of all data."""

    folder: str

    def read(self, data: Path, split: Split) -> Iterator[TaskExample]:
        """The questions of a split.

        Raises:
          ConfigError: the file is missing, or a line is no such question.
        """
        return read_jsonl(Path(data) / self.folder / f"{split}.jsonl", lambda record: [example(record)])


def example(record: Record) -> TaskExample:
    """The question in a record.

    Raises:
      ConfigError: the record has another form.
    """
    if "answerKey" in record:
        question, choices = _keyed(record)
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


def _keyed(record: Record) -> tuple[str, list[Record]]:
    """Question and choices of a record with an answer key."""
    if isinstance(record.get("question"), dict):
        return text_field(record["question"], "stem"), record["question"]["choices"]
    question = text_field(record, "question_stem" if "question_stem" in record else "question")
    choices = record["choices"]
    pairs = zip(choices["label"], choices["text"], strict=True)
    return question, [{"label": label, "text": text} for label, text in pairs]


ARC_EASY = MultipleChoice("tasks/arc_easy")
OPENBOOKQA = MultipleChoice("tasks/openbookqa")
