"""Reads the questions that a tiny LM learns decisions from, and stores an elastic model's answers on disk."""

import dataclasses
import hashlib
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.files.atomic import atomic_file
from jaxllm.tasks import find_task
from jaxllm.tasks.example import TaskExample, held_out, pseudo_random
from jaxllm.tasks.questions import Question
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.training.elastic.tiny_lm.recipe import TinyLmRecipe
from jaxllm.training.elastic.tiny_lm.self_labels import Answers

# Number of questions whose answers are stored together.
SHARD_QUESTIONS = 512


@dataclasses.dataclass(frozen=True, eq=False)
class Questions:
    """Questions on either side of a split.

    Attributes:
      all: of all tasks.
      held_out: `[N]` bool, by content, variants of one question together.
      numbers: `[N]` int, number within its task, from 0; the first ones are a fair sample of all.
    """

    all: list[Question]
    held_out: np.ndarray
    numbers: np.ndarray

    def first(self, count: int) -> "Questions":
        """The first `count` of each task."""
        chosen = self.numbers < count
        some = [each for each, taken in zip(self.all, chosen, strict=True) if taken]
        return Questions(some, self.held_out[chosen], self.numbers[chosen])


def read_questions(recipe: TinyLmRecipe, data: Path, tokenizer: Tokenizer, window_tokens: int) -> Questions:
    """Reads the questions of a recipe's tasks from their training splits.

    Args:
      recipe: the run.
      data: the folder of all data.
      tokenizer: the large model's.
      window_tokens: the large model's; questions longer than this with an answer are left out.

    Raises:
      ConfigError: a file is missing or malformed, or nothing is left on one side.
    """
    questions: list[Question] = []
    numbers: list[int] = []
    for name in recipe.tasks:
        task = find_task(name)
        # A fair sample, in an order that follows from the contents.
        examples = sorted(task.read(data, "train"), key=lambda each: pseudo_random(f"asked\0{each.user}"))
        wanted, taken = max(recipe.questions, recipe.used_questions), 0
        for example in examples:
            question = Question.read(tokenizer, example, per_byte=task.per_byte)
            if _longest_tokens(tokenizer, question) <= window_tokens:
                questions.append(question)
                numbers.append(taken)
                taken += 1
            if taken == wanted:
                break
    sides = np.array([held_out(_key(each.example), recipe.held_out_share) for each in questions], bool)
    found = Questions(questions, sides, np.array(numbers, int))
    for count in filter(None, (recipe.questions, recipe.used_questions)):
        own = found.first(count).held_out
        if own.all() or not own.any():
            raise ConfigError(
                f"of {len(own)} questions {own.sum()} are held out; there must be some on either side: ask "
                "more questions or change held_out_share"
            )
    return found


def questions_digest(questions: Sequence[Question]) -> str:
    """A hexadecimal name for questions as a model reads them."""
    return _digest(text.encode() for each in questions for text in (each.prompt.text, _as_text(each.example)))


def kept_answers(
    path: Path,
    questions: Sequence[Question],
    scores: Sequence[np.ndarray],
    make: Callable[[Sequence[Question], Sequence[np.ndarray]], Answers],
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Answers:
    """Reads answers from a file, or makes them and writes it.

    They are made in shards of `SHARD_QUESTIONS`, each of which is stored next to the file until all are
    complete: a large model needs hours, and a stopped run resumes after the last one.

    Args:
      path: path of the file.
      questions: questions to answer.
      scores: scores that their prompts were shortened by; answers to other prompts are made anew.
      make: function that answers some questions.
      report: callback for (questions answered, all questions) after each shard.
    """
    shards = path.with_suffix("")

    def shard(first: int) -> dict[str, np.ndarray]:
        some = slice(first, first + SHARD_QUESTIONS)
        own = shards / f"{first}.npz"
        own.parent.mkdir(exist_ok=True)

        def arrays() -> dict[str, np.ndarray]:
            answers = make(questions[some], scores[some])
            return {"correct": answers.correct, "shares": answers.shares}

        found = _kept(own, _answers_key(questions[some], scores[some]), ("correct", "shares"), arrays)
        report(min(first + SHARD_QUESTIONS, len(questions)), len(questions))
        return found

    def arrays() -> dict[str, np.ndarray]:
        parts = [shard(first) for first in range(0, len(questions), SHARD_QUESTIONS)]
        return {name: np.concatenate([part[name] for part in parts]) for name in ("correct", "shares")}

    found = _kept(path, _answers_key(questions, scores), ("correct", "shares"), arrays)
    for first in range(0, len(questions), SHARD_QUESTIONS):
        (shards / f"{first}.npz").unlink(missing_ok=True)
    if shards.is_dir():
        shards.rmdir()
    return Answers(found["correct"], found["shares"])


def kept_support(
    path: Path, questions: Sequence[Question], make: Callable[[], list[np.ndarray]]
) -> list[np.ndarray]:
    """Reads tokens' support of right answers from a file, or measures it and writes the file.

    Args:
      path: of the file.
      questions: those to measure.
      make: measures (see `word_labels.token_support`).
    """
    found = _kept(path, questions_digest(questions), ("tokens",), lambda: {"tokens": np.concatenate(make())})
    ends = np.cumsum([len(each.prompt.ids) for each in questions])
    return np.split(found["tokens"], ends[:-1])


def _kept(
    path: Path, key: str, names: Sequence[str], make: Callable[[], dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Reads arrays that were stored under a key, or makes and stores them."""
    if path.exists():
        try:
            with np.load(path) as stored:
                if str(stored["key"]) == key:
                    return {name: stored[name] for name in names}
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            # A damaged file is replaced.
            pass
    arrays = make()
    with atomic_file(path) as file:
        np.savez(file, key=np.array(key), **arrays)  # pyright: ignore[reportArgumentType]
    return arrays


def _answers_key(questions: Sequence[Question], scores: Sequence[np.ndarray]) -> str:
    rounded = (np.asarray(each, np.float32).round(4).tobytes() for each in scores)
    return f"{questions_digest(questions)} {_digest(rounded)}"


def _longest_tokens(tokenizer: Tokenizer, question: Question) -> int:
    # An upper bound: a tokenizer may join question and option; the end of an answer is one more.
    options = (
        tokenizer.encode(each, add_special_tokens=False, special=False) for each in question.example.options
    )
    return len(question.prompt.ids) + max(map(len, options)) + 1


def _key(example: TaskExample) -> str:
    """Returns the text that variants of one question share: some tasks repeat it with other options."""
    return f"{example.answer}\0{example.user.partition(chr(10))[0]}"


def _as_text(example: TaskExample) -> str:
    """All of an example, field by field: the class may change, files of earlier runs must still be found."""
    names = ("user", "answer", "system", "options", "references", "form")
    return f"TaskExample({', '.join(f'{name}={getattr(example, name)!r}' for name in names)})"


def _digest(parts: Iterable[bytes]) -> str:
    whole = hashlib.blake2b(digest_size=16)
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.hexdigest()
