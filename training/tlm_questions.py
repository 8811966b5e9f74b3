"""The questions that a tiny LM's decisions are learnt from, and an elastic model's answers on disk."""

import hashlib
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jaxllm.atomic import atomic_file
from jaxllm.errors import ConfigError
from jaxllm.tasks import find_task
from jaxllm.tasks.example import TaskExample, held_out, pseudo_random
from jaxllm.tasks.shortened import Question
from jaxllm.tokenizer import Tokenizer
from training.self_labels import Answers
from training.tlm_recipe import TlmRecipe


def read_questions(
    recipe: TlmRecipe, data: Path, tokenizer: Tokenizer, window_tokens: int
) -> tuple[list[Question], np.ndarray]:
    """The questions of a recipe's tasks, from their training splits.

    Args:
      recipe: the run.
      data: the folder of all data.
      tokenizer: the large model's.
      window_tokens: questions that are longer with an answer are left out.

    Returns:
      The questions, and which of them are held out, `[N]` bool: by their content, variants of one together.

    Raises:
      ConfigError: a file is missing or malformed, or nothing is left on one side.
    """
    questions: list[Question] = []
    for name in recipe.tasks:
        task = find_task(name)
        # A fair sample, in an order that follows from the contents.
        examples = sorted(task.read(data, "train"), key=lambda each: pseudo_random(f"asked\0{each.user}"))
        left = recipe.questions
        for example in examples:
            question = Question.read(tokenizer, example, per_byte=task.per_byte)
            if left and _longest_tokens(tokenizer, question) <= window_tokens:
                questions.append(question)
                left -= 1
            if not left:
                break
    sides = np.array([held_out(_key(each.example), recipe.held_out_share) for each in questions], bool)
    if sides.all() or not sides.any():
        raise ConfigError(
            f"of {len(questions)} questions {sides.sum()} are held out; there must be some on either side: "
            "ask more questions or change held_out_share"
        )
    return questions, sides


def questions_digest(questions: Sequence[Question]) -> str:
    """A hexadecimal name for questions as a model reads them."""
    return _digest(
        text for each in questions for text in (each.prompt.text.encode(), repr(each.example).encode())
    )


def kept_answers(
    path: Path, questions: Sequence[Question], scores: Sequence[np.ndarray], make: Callable[[], Answers]
) -> Answers:
    """The answers in a file, or those that `make` gives, which are then kept there.

    Args:
      path: of the file.
      questions: what was asked.
      scores: by which their prompts were shortened; answers to other prompts are not taken.
      make: asks.
    """
    rounded = (np.asarray(each, np.float32).round(4).tobytes() for each in scores)
    key = f"{questions_digest(questions)} {_digest(rounded)}"
    if path.exists():
        try:
            with np.load(path) as stored:
                if str(stored["key"]) == key:
                    return Answers(stored["correct"], stored["shares"])
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            # Damaged: asked again.
            pass
    answers = make()
    with atomic_file(path) as file:
        np.savez(file, key=np.array(key), correct=answers.correct, shares=answers.shares)
    return answers


def _longest_tokens(tokenizer: Tokenizer, question: Question) -> int:
    # A tokenizer that joins question and option makes fewer; an answer's end is one more.
    options = (tokenizer.encode(each, add_special_tokens=False) for each in question.example.options)
    return len(question.prompt.ids) + max(map(len, options)) + 1


def _key(example: TaskExample) -> str:
    """What variants of one question share: some tasks ask it again with other options below it."""
    return f"{example.answer}\0{example.user.partition(chr(10))[0]}"


def _digest(parts) -> str:
    whole = hashlib.blake2b(digest_size=16)
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.hexdigest()
