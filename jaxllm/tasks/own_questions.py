"""Reads the user's own questions, without code: JSON lines, one question with its options per line.

    {"question": TEXT, "options": [TEXT, TEXT, ...], "answer": TEXT or the option's number from 0}

`system` is the system's turn, if there is one; `"form": "text"` makes the question a text to continue
instead of a turn of a chat. Other keys are ignored.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from jaxllm.errors import ConfigError
from jaxllm.tasks.example import Split, TaskExample, text_field
from jaxllm.tasks.files import Record, read_jsonl

SUFFIX = ".jsonl"


@dataclasses.dataclass(frozen=True)
class OwnQuestions:
    """The questions in a file, absolute or under the folder of all data; all are of the training split."""

    path: Path

    def read(self, data: Path, split: Split) -> Iterator[TaskExample]:
        """The questions.

        Raises:
          ConfigError: the file is missing, or a line is no such question: the message has its number.
        """
        if split != "train":
            raise ConfigError(f"{self.path} has questions to train on alone, none of the split {split}")
        return read_jsonl(Path(data) / self.path, lambda record: [question(record)])


def question(record: Record) -> TaskExample:
    """The question in a record.

    Raises:
      ConfigError: the record has another form.
    """
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
