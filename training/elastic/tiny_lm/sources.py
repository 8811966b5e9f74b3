"""Reads all inputs of a tiny LM's training before it begins, so that mistakes show at once."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jaxllm.errors import ConfigError
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.training.data.documents import documents_digest, text_document
from jaxllm.training.elastic.tiny_lm.keep_labels import (
    KeptWords,
    align,
    read_compressions,
    split_rows,
    well_aligned,
)
from jaxllm.training.elastic.tiny_lm.questions import Questions, questions_digest, read_questions
from jaxllm.training.elastic.tiny_lm.recipe import TinyLmRecipe
from jaxllm.training.elastic.tiny_lm.start import Start


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TinyLmSources:
    """Inputs of a recipe, read for one large model.

    Attributes:
      recipe: recipe of the run.
      start: the tiny LM before its training.
      texts: training and held-out rows, for each file of shorter versions.
      questions: questions of all tasks, to learn decisions from.
      used: questions of all tasks, to learn the words from that the elastic model uses.
      identity: names and digests of all inputs, to claim a run's folder with.
    """

    recipe: TinyLmRecipe
    start: Start
    texts: tuple[tuple[list[KeptWords], list[KeptWords]], ...]
    questions: Questions
    used: Questions
    identity: dict[str, str]

    @classmethod
    def read(
        cls,
        recipe: TinyLmRecipe,
        data: Path,
        tokenizer: Tokenizer,
        window_tokens: int,
        encoder: Path | None = None,
    ) -> "TinyLmSources":
        """Reads all inputs of a run.

        Args:
          recipe: recipe of the run.
          data: folder of the recipe's files.
          tokenizer: tokenizer of the large model.
          window_tokens: window of the large model; longer questions are left out.
          encoder: MobileBERT folder to start from; None trains the recipe's encoder from scratch.

        Raises:
          ConfigError: a file is missing, malformed or too small, or the encoder is too small.
          CheckpointError: the encoder cannot be read.
        """
        rows = [_aligned(data / path) for path in recipe.compressions]
        texts = tuple(split_rows(each, recipe.held_out_share) for each in rows)
        questions = read_questions(recipe, data, tokenizer, window_tokens)
        return cls(
            recipe=recipe,
            start=Start.of(recipe, tokenizer, encoder),
            texts=texts,
            questions=questions.first(recipe.questions),
            used=questions.first(recipe.used_questions),
            identity={
                "encoder": "" if encoder is None else Path(encoder).resolve().name,
                "texts": _texts_digest(rows),
                "questions": questions_digest(questions.all),
            },
        )


def _aligned(path: Path) -> list[KeptWords]:
    rows = well_aligned([align(pair) for pair in read_compressions(path)])
    if not rows:
        raise ConfigError(f"{path} holds no text with a shorter version")
    return rows


def _texts_digest(sources: Sequence[Sequence[KeptWords]]) -> str:
    digests = [
        text_document(f"{row.text}\0{row.kept.tobytes().hex()}").digest() for rows in sources for row in rows
    ]
    return documents_digest(digests)
