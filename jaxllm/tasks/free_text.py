"""Tasks with free answers: shorter sentences, summaries of chats, stories from their first sentence, and the
last word of a passage (LAMBADA, arXiv 1606.06031)."""

import re
from collections.abc import Iterator
from pathlib import Path

from jaxllm.errors import ConfigError
from jaxllm.tasks.example import Split, TaskExample, held_out, text_field
from jaxllm.tasks.files import Record, read_jsonl

COMPRESSION_FILES = tuple(f"tasks/compression/{name}.jsonl" for name in ("google", "broadcast", "gigaword"))
CHATS_FILE = "tasks/samsum/valid.jsonl"
LAMBADA_FILE = "tasks/lambada/valid.jsonl"
SHORTEN = "Say this in a shorter way."
SUM_UP = "Sum up this chat."
TELL = "Tell a story that begins like this."
HELD_OUT_SHARE = 0.1
# A longer text is a collection, not one story.
MAX_STORY_CHARACTERS = 8000

_FIRST_SENTENCE = re.compile(r"\s*(.+?[.!?][\"']?)\s+(.*)", re.DOTALL)


def read_compression(data: Path, split: Split) -> Iterator[TaskExample]:
    """Sentences with shorter versions.

    Raises:
      ConfigError: a file is missing or has another form.
    """

    def make(record: Record) -> list[TaskExample]:
        text, summaries = text_field(record, "text"), record["summaries"]
        if not isinstance(summaries, list) or not all(isinstance(each, str) for each in summaries):
            raise ConfigError(f"'summaries' must be a list of texts, got {summaries!r:.80}")
        if not summaries or held_out(text, HELD_OUT_SHARE) != (split == "valid"):
            return []
        references = tuple(summaries)
        return [TaskExample(system=SHORTEN, user=text, answer=references[0], references=references)]

    for file in COMPRESSION_FILES:
        yield from read_jsonl(Path(data) / file, make)


def read_chats(data: Path, split: Split) -> Iterator[TaskExample]:
    """Yields chats with summaries (SAMSum, arXiv 1911.12237); there is only a validation split.

    Raises:
      ConfigError: the file is missing or has another form, or the split is training.
    """
    if split != "valid":
        raise ConfigError("chats come in a validation split alone: nothing is to be trained on them")

    def make(record: Record) -> list[TaskExample]:
        # SAMSum's names of the fields, or generic ones.
        names = ("dialogue", "summary") if "dialogue" in record else ("context", "response")
        chat, summary = (text_field(record, name).replace("\r\n", "\n").strip() for name in names)
        return [TaskExample(system=SUM_UP, user=chat, answer=summary, references=(summary,))]

    return read_jsonl(Path(data) / CHATS_FILE, make)


def read_last_words(data: Path, split: Split) -> Iterator[TaskExample]:
    """Yields passages without their last word; there is only a validation split.

    Raises:
      ConfigError: the file is missing or has another form, or the split is training.
    """
    if split != "valid":
        raise ConfigError("LAMBADA comes in a validation split alone: nothing is to be trained on it")

    def make(record: Record) -> list[TaskExample]:
        if "text" in record:
            # LAMBADA's form: the whole passage.
            context, _, word = text_field(record, "text").rstrip().rpartition(" ")
        else:
            context, word = text_field(record, "context"), text_field(record, "continuation").strip()
        if not context.strip() or not word:
            raise ConfigError("a passage needs at least two words")
        return [TaskExample(user=context.rstrip(), answer=f" {word}", form="text")]

    return read_jsonl(Path(data) / LAMBADA_FILE, make)


def story_example(story: str) -> TaskExample | None:
    """Returns the request to tell `story` from its first sentence; None if it has only one, or is too
    long."""
    found = _FIRST_SENTENCE.fullmatch(story) if len(story) <= MAX_STORY_CHARACTERS else None
    if not found or not found[2].strip():
        return None
    return TaskExample(system=TELL, user=found[1], answer=found[2].strip())
