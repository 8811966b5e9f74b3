"""Defines the task of choosing the function for a request: single-call sets of the Berkeley
Function-Calling Leaderboard.

Each question offers four functions: its own, and functions of other questions. In training every question
comes in several variants, with other fillers in another order, so that a model learns to choose instead of
learning names.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.tasks.example import Split, TaskExample, held_out, shuffled, text_field
from jaxllm.tasks.files import Record, read_jsonl

FILES = ("tasks/api_calling/BFCL_v4_simple_python.jsonl", "tasks/api_calling/BFCL_v4_multiple.jsonl")
INSTRUCTION = "Which function answers the request?"
HELD_OUT_SHARE = 0.2
OFFERED = 4
TRAINING_VARIANTS = 12
DESCRIPTION_CHARACTERS = 120


def read(data: Path, split: Split) -> Iterator[TaskExample]:
    """Yields the questions of a split; fillers come from the same split, so that training never sees
    held-out functions.

    Raises:
      ConfigError: a file is missing or has another form.
    """
    records = [record for file in FILES for record in read_jsonl(Path(data) / file, _single_call)]
    answers = {}
    for file in FILES:
        answers_file = Path(data) / file.replace(".jsonl", "_answers.jsonl")
        answers.update(read_jsonl(answers_file, _answer))
    records = [each for each in records if held_out(_request(each), HELD_OUT_SHARE) == (split == "valid")]
    offered = lines(records)
    for record in records:
        if record["id"] not in answers:
            raise ConfigError(f"there is no answer to the question {record['id']!r}")
        for variant in range(TRAINING_VARIANTS if split == "train" else 1):
            yield example(record, answers[record["id"]], offered, variant)


def lines(records: Sequence[Record]) -> dict[str, str]:
    """Function name -> its line in a prompt, for all functions of the questions."""
    return {function["name"]: _line(function) for each in records for function in each["function"]}


def example(record: Record, answer: str, offered: dict[str, str], variant: int) -> TaskExample:
    """One variant of a question; `offered`: function name -> its line."""
    own = [function["name"] for function in record["function"]]
    key = f"{record['id']}\0{variant}"
    fillers = shuffled(sorted(set(offered) - set(own)), key)[: max(0, OFFERED - len(own))]
    names = shuffled([*own, *fillers], key)
    told = [offered[name] for name in names]
    return TaskExample(
        system=INSTRUCTION,
        user="\n".join([_request(record), *told]),
        answer=answer,
        options=tuple(names),
    )


def _single_call(record: Record) -> Sequence[Record]:
    names = [text_field(function, "name") for function in record["function"]]
    text_field(record, "id")
    return [record] if names and _request(record) else []


def _answer(record: Record) -> Sequence[tuple[str, str]]:
    return [(text_field(record, "id"), next(iter(record["ground_truth"][0])))]


def _request(record: Record) -> str:
    return " ".join(text_field(record["question"][0][-1], "content").split())


def _line(function: dict[str, Any]) -> str:
    description = " ".join(function.get("description", "").split()).split(". ")[0]
    return f"- {function['name']}: {description[:DESCRIPTION_CHARACTERS]}"
