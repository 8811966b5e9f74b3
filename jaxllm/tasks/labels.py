"""Tasks of labelling texts: sentiment of reviews, topic of news, emotion of messages."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from jaxllm.errors import ConfigError
from jaxllm.tasks.example import Split, TaskExample, text_field
from jaxllm.tasks.files import Record, read_jsonl


@dataclasses.dataclass(frozen=True, kw_only=True)
class Labels:
    """Task with files `{train,valid}.jsonl` that have `{"text": ..., "label": ...}` per line.

    Attributes:
      folder: folder of the files, under the folder of all data.
      instruction: instruction for the model; it names the labels.
      labels: all labels.
      called: (label in the files, our label) pairs; empty if they are the same.
    """

    folder: str
    instruction: str
    labels: tuple[str, ...]
    called: tuple[tuple[str, str], ...] = ()

    def read(self, data: Path, split: Split) -> Iterator[TaskExample]:
        """The examples of a split.

        Raises:
          ConfigError: the file is missing, or a line has no such label.
        """
        return read_jsonl(Path(data) / self.folder / f"{split}.jsonl", lambda record: [self.example(record)])

    def example(self, record: Record) -> TaskExample:
        """The question of a record."""
        stored = text_field(record, "label")
        label = dict(self.called).get(stored) if self.called else stored
        if label not in self.labels:
            known = [theirs for theirs, _ in self.called] or self.labels
            raise ConfigError(f"the label {stored!r} is none of {', '.join(known)}")
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
# The emotion messages under labels that no packaged model was trained on, for adapters to learn.
MOOD = Labels(
    folder="tasks/emotion",
    instruction="How does this person feel: well, unwell or amazed?",
    labels=("well", "unwell", "amazed"),
    called=(
        ("joy", "well"),
        ("love", "well"),
        ("sadness", "unwell"),
        ("anger", "unwell"),
        ("fear", "unwell"),
        ("surprise", "amazed"),
    ),
)
