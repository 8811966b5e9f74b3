"""Makes a tiny LM to train: random, or over a trained MobileBERT, with tokens for an SLO's marks."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.checkpoints.mobilebert_folder import read_encoder
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer
from jaxllm.elastic.slo import marks
from jaxllm.errors import ConfigError
from jaxllm.models import tiny_lm as tlm
from jaxllm.models.tiny_lm import TlmConfig
from jaxllm.tasks.tiny_reader import TinyReader
from jaxllm.text.tokenizer import Tokenizer, TokenizerFiles
from training.loop.checkpoints import Params
from training.tiny_lm.recipe import TinyLmRecipe


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """A tiny LM before its training.

    Attributes:
      cfg: its config, with a vocabulary that includes the marks.
      params: float32.
      mark_ids: the token of each of `marks()`.
      own: its own tokenizer; None where it shares the large model's.
    """

    cfg: TlmConfig
    params: Params
    mark_ids: tuple[int, ...]
    own: TokenizerFiles | None = None

    @classmethod
    def of(cls, recipe: TinyLmRecipe, tokenizer: Tokenizer, encoder: Path | None = None) -> "Start":
        """Random parameters, or a trained encoder's under both heads.

        Marks are tokens that the tokenizer reserves for them, or new ones behind its vocabulary; their
        embeddings are orthogonal.

        Args:
          recipe: the run.
          tokenizer: the large model's.
          encoder: a MobileBERT folder with its tokenizer; None trains the recipe's encoder from nothing.

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
            # The model's vocabulary replaces the recipe's: nothing was trained with that.
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
        """How it reads prompts in rows of such a length."""
        own = None if self.own is None else Tokenizer(self.own)
        return TinyReader(own, self.mark_ids, row_tokens)


def _reserved(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that a tokenizer reserves for marks; empty where it lacks one."""
    ids = [tokenizer.encode(mark, add_special_tokens=False) for mark in marks()]
    whole = all(len(each) == 1 for each in ids) and len({each[0] for each in ids}) == len(ids)
    return tuple(each[0] for each in ids) if whole else ()
