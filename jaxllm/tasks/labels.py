"""Texts to be labelled: sentiment of reviews, topic of news, emotion of messages."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from jaxllm.errors import ConfigError
from jaxllm.tasks.example import Split, TaskExample, text_field
from jaxllm.tasks.files import Record, read_jsonl


@dataclasses.dataclass(frozen=True, kw_only=True)
class Labels:
    """A task whose files, `{train,valid}.jsonl`, hold `{"text": ..., "label": ...}` a line.

    Attributes:
      folder: of the files, under the folder of all data.
      instruction: what the model is told; it names the labels.
      labels: all of them.
    """

    folder: str
    instruction: str
    labels: tuple[str, ...]

    def read(self, data: Path, split: Split) -> Iterator[TaskExample]:
        """The examples of a split.

        Raises:
          ConfigError: the file is missing, or a line has no such label.
        """
        return read_jsonl(Path(data) / self.folder / f"{split}.jsonl", lambda record: [self.example(record)])

    def example(self, record: Record) -> TaskExample:
        """The question that a record asks."""
        label = text_field(record, "label")
        if label not in self.labels:
            raise ConfigError(f"the label {label!r} is none of {', '.join(self.labels)}")
        return TaskExample(
            system=self.instruction, user=text_field(record, "text"), answer=label, options=self.labels
        )


SENTIMENT = Labels(
    folder="tasks/sst2",
    instruction="Is this review positive or negative?",
    labels=("positive", "negative"),
)
NEWS = Labels(
    folder="tasks/agnews",
    instruction="What is the topic of this news: World, Sports, Business or Sci/Tech?",
    labels=("World", "Sports", "Business", "Sci/Tech"),
)
EMOTION = Labels(
    folder="tasks/emotion",
    instruction="Which emotion is it: sadness, joy, love, anger, fear or surprise?",
    labels=("sadness", "joy", "love", "anger", "fear", "surprise"),
)
