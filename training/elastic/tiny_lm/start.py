"""Makes a tiny LM to train: random, or over a trained MobileBERT, with tokens for an SLO's marks; and reads
all inputs of its training before it begins, so that mistakes show at once.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxllm.checkpoints.encoder_folders import read_encoder
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer
from jaxllm.elastic.slo import marks
from jaxllm.errors import ConfigError
from jaxllm.models import tiny_lm as tlm
from jaxllm.models.tiny_lm import TlmConfig
from jaxllm.tasks.tiny_reader import TinyReader
from jaxllm.text.tokenizer import Tokenizer, TokenizerFiles
from jaxllm.training.data.documents import documents_digest, text_document
from jaxllm.training.elastic.tiny_lm.batches import (
    DecisionBatch,
    ScoreBatch,
)
from jaxllm.training.elastic.tiny_lm.keep_labels import (
    KeptWords,
    align,
    read_compressions,
    split_rows,
    well_aligned,
)
from jaxllm.training.elastic.tiny_lm.recipe import TinyLmRecipe
from jaxllm.training.elastic.tiny_lm.self_labels import Questions, questions_digest, read_questions
from jaxllm.training.loop.checkpoints import Params
from jaxllm.training.loop.trainer import Job
from jaxllm.training.settings import TrainSettings


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """Tiny LM before its training.

    Attributes:
      cfg: its config, with a vocabulary that includes the marks.
      params: float32 parameters.
      mark_ids: token of each of `marks()`.
      own: its own tokenizer; None if it shares the large model's.
    """

    cfg: TlmConfig
    params: Params
    mark_ids: tuple[int, ...]
    own: TokenizerFiles | None = None

    @classmethod
    def of(cls, recipe: TinyLmRecipe, tokenizer: Tokenizer, encoder: Path | None = None) -> "Start":
        """Makes random parameters, or uses a trained encoder under both heads.

        Marks are tokens that the tokenizer reserves for them, or new ones after its vocabulary; their
        embeddings are orthogonal.

        Args:
          recipe: recipe of the run.
          tokenizer: tokenizer of the large model.
          encoder: MobileBERT folder with its tokenizer; None trains the recipe's encoder from scratch.

        Raises:
          ConfigError: there is no encoder to train, or its vocabulary or window is too small.
          CheckpointError: the folder cannot be read.
        """
        sizes = {
            "shared_layers": recipe.shared_layers,
            "levels": len(recipe.levels),
            "prompt_levels": len(recipe.prompt_ratios),
        }
        key, marks_key = jax.random.split(jax.random.key(recipe.score.seed))
        own = None
        if encoder is not None:
            own = read_tokenizer(encoder)
            encoder_cfg, trained = read_encoder(encoder)
            cfg = TlmConfig(encoder=encoder_cfg, **sizes)
            wide = {name: jnp.asarray(value, jnp.float32) for name, value in trained.items()}
            params: Any = tlm.tlm_from_encoder(wide, cfg, key)
        elif recipe.encoder is not None:
            # The model's vocabulary replaces the recipe's, which nothing was trained with.
            words = dataclasses.replace(recipe.encoder, vocab_size=tokenizer.vocab_size)
            cfg = TlmConfig(encoder=words, **sizes)
            params = tlm.init_tlm(cfg, key)
        else:
            raise ConfigError(
                "the recipe has no encoder: give it one, or the folder of a MobileBERT (--tiny-lm-encoder)"
            )
        reads = tokenizer if own is None else Tokenizer(own)
        window, rows = cfg.encoder.window_tokens, recipe.score.row_tokens
        if rows > window:
            raise ConfigError(f"row_tokens ({rows}) must be at most the encoder's window ({window})")
        vocab = cfg.encoder.vocab_size
        if reads.vocab_size > vocab:
            raise ConfigError(f"the tokenizer has {reads.vocab_size} tokens, the encoder only {vocab}")
        ids = _reserved(reads)
        if ids:
            params = tlm.separate_tokens(params, ids, marks_key)
        else:
            params, cfg = tlm.grow_vocabulary(params, cfg, len(marks()), marks_key)
            ids = tuple(range(vocab, vocab + len(marks())))
        return cls(cfg, params, ids, own)

    def reader(self, row_tokens: int) -> TinyReader:
        """Reader of prompts in rows of that length."""
        own = None if self.own is None else Tokenizer(self.own)
        return TinyReader(own, self.mark_ids, row_tokens)


def _reserved(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens that a tokenizer reserves for marks; empty if it lacks one."""
    ids = [tokenizer.encode(mark, add_special_tokens=False) for mark in marks()]
    whole = all(len(each) == 1 for each in ids) and len({each[0] for each in ids}) == len(ids)
    return tuple(each[0] for each in ids) if whole else ()


def score_job(start: Start, settings: TrainSettings) -> Job:
    """Returns the job that trains the score head and the layers that both heads share."""
    cfg, dtype = start.cfg, jnp.dtype(settings.computed_in)

    def losses(params: Params, frozen: Any, batch: ScoreBatch) -> tuple[jax.Array, jax.Array]:
        logits = tlm.score(params, jnp.asarray(batch.tokens), jnp.asarray(batch.mask), cfg=cfg, dtype=dtype)
        return optax.sigmoid_binary_cross_entropy(logits, batch.labels), jnp.zeros(())

    return Job(_without(start.params, "decide."), losses)


def decide_job(start: Start, trained: Mapping[str, Any], settings: TrainSettings) -> Job:
    """Returns the job that trains the decision head over `trained`, the parameters of a `score_job`."""
    cfg, dtype = start.cfg, jnp.dtype(settings.computed_in)
    own = {name: value for name, value in start.params.items() if name.startswith("decide.")}

    def losses(params: Params, frozen: Params, batch: DecisionBatch) -> tuple[jax.Array, jax.Array]:
        logits = tlm.decide(
            {**frozen, **params}, jnp.asarray(batch.tokens), jnp.asarray(batch.mask), cfg=cfg, dtype=dtype
        )
        entropy = optax.softmax_cross_entropy_with_integer_labels
        both = sum(entropy(each, batch.choices[:, place]) for place, each in enumerate(logits))
        return jnp.asarray(both)[:, None], jnp.zeros(())

    return Job(own, losses, _without(trained, "score."))


def _without(params: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name: value for name, value in params.items() if not name.startswith(prefix)}


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
        rows = []
        for path in recipe.compressions:
            rows.append(well_aligned([align(pair) for pair in read_compressions(data / path)]))
            if not rows[-1]:
                raise ConfigError(f"{data / path} holds no text with a shorter version")
        texts = tuple(split_rows(each, recipe.held_out_share) for each in rows)
        named = (f"{row.text}\0{row.kept.tobytes().hex()}" for each in rows for row in each)
        questions = read_questions(recipe, data, tokenizer, window_tokens)
        return cls(
            recipe=recipe,
            start=Start.of(recipe, tokenizer, encoder),
            texts=texts,
            questions=questions.first(recipe.questions),
            used=questions.first(recipe.used_questions),
            identity={
                "encoder": "" if encoder is None else Path(encoder).resolve().name,
                "texts": documents_digest(text_document(text).digest() for text in named),
                "questions": questions_digest(questions.all),
            },
        )
