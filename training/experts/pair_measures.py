"""Judges an encoder-decoder with experts on pairs: perplexity of the targets, and Rouge-2 of its answers, by
which EdgeMoE chooses widths (arXiv 2308.14352, section 3.2 and figure 7)."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.parameters import Params, sparse_layers
from jaxllm.tasks.rouge import require_rouge, rouge
from jaxllm.training.experts.text_measure import Visited
from jaxllm.training.experts.width_losses import perplexity_loss
from jaxllm.training.seq2seq.batches import PairBatch, PairRows
from jaxllm.training.seq2seq.job import cross_entropy, target_logits
from jaxllm.training.seq2seq.translation import Translator

# While one expert is lowered, the others have these bits.
OTHERS = 4


class PairPerplexity:
    """Nats per token of the pairs' targets (see `Measure`).

    Attributes:
      tokens: number of tokens of the targets.
    """

    others = OTHERS

    def __init__(self, cfg: ModelConfig, rows: PairRows) -> None:
        """Compiles nothing yet; `rows` are the pairs."""
        self._batches = list(rows.held_out())
        self.tokens = int(sum(batch.weights.sum() for batch in self._batches))
        self._nats = jax.jit(functools.partial(_nats, cfg))

    def value(self, params: Params) -> float:
        """Nats per token."""
        return sum(float(self._nats(params, batch)) for batch in self._batches) / self.tokens

    def loss(self, value: float, whole: float) -> float:
        """The growth of the perplexity."""
        return perplexity_loss(value, whole)


class PairRouge:
    """Mean Rouge-2 (F1) of greedy answers to the sources against the targets (see `Measure`)."""

    others = OTHERS

    def __init__(
        self, model: Translator, sources: Sequence[Sequence[int]], targets: Sequence[str], most_tokens: int
    ) -> None:
        """Uses the model's tokenizer and compiled steps.

        Args:
          model: the float model.
          sources: token ids of each.
          targets: reference answer of each.
          most_tokens: maximum number of tokens of an answer.

        Raises:
          ConfigError: `rouge-score` is not installed.
        """
        require_rouge()
        self._model, self._sources, self._targets, self._most = model, sources, targets, most_tokens

    def value(self, params: Params) -> float:
        """Mean Rouge-2, from 0 to 1."""
        floats: Any = params
        answers = self._model.translate(self._sources, self._most, params=floats)
        texts = (self._model.tokenizer.decode(each) for each in answers)
        pairs = zip(self._targets, texts, strict=True)
        return float(np.mean([rouge([target], text)["rouge2"] for target, text in pairs]))

    def loss(self, value: float, whole: float) -> float:
        """Returns the lost share of Rouge-2; negative if it grows."""
        if not whole:
            raise ConfigError(
                "the model's answers have no two words in a row in common with any target: it has not "
                "learned this task (is the --prefix that of its training?); measure by "
                "perplexity, or on other pairs"
            )
        return 1 - value / whole


@dataclasses.dataclass(frozen=True)
class PairVisits:
    """Visits of experts by pairs.

    Attributes:
      encoder: visits of the tokens of sources.
      decoder: visits of the tokens of targets.
      loads: `[L_sparse, E]`, the encoder's layers first: number of loads of each expert for a pair if none
        stays in memory. An encoder's is loaded once for all tokens of a source, a decoder's for each token
        of the target.
    """

    encoder: Visited
    decoder: Visited
    loads: np.ndarray


def pair_visits(cfg: ModelConfig, rows: PairRows, params: Params) -> PairVisits:
    """Counts the visits of experts by pairs in a model with these parameters."""
    assert cfg.encoder is not None
    of_encoder, experts = len(sparse_layers(cfg.encoder)), cfg.experts
    route: Callable[..., Any] = jax.jit(functools.partial(_visited, cfg))
    sides: list[tuple[list[np.ndarray], list[np.ndarray]]] = [([], []), ([], [])]
    once = np.zeros((of_encoder, experts))
    for batch in rows.held_out():
        ids = [np.asarray(each) for each in route(params, batch)]
        # A row without a pair has no weights.
        real = batch.read_tokens * (batch.weights.sum(axis=1) > 0)
        read = np.arange(batch.read.shape[1]) < real[:, None]
        for side, layers, tokens, where in (
            (sides[0], ids[:of_encoder], batch.read, read),
            (sides[1], ids[of_encoder:], batch.tokens, batch.weights > 0),
        ):
            side[0].append(np.stack([each[where] for each in layers]))
            side[1].append(tokens[where])
        visits = np.stack(ids[:of_encoder])[..., 0, None] == np.arange(experts)
        once += (visits & read[..., None]).any(axis=2).sum(axis=1)
    encoder, decoder = (
        Visited.of(np.concatenate(ids, axis=1), np.concatenate(tokens), experts) for ids, tokens in sides
    )
    return PairVisits(encoder, decoder, np.concatenate([once, decoder.paths.alone]) / len(rows.pairs))


def _nats(cfg: ModelConfig, params: Any, batch: PairBatch) -> jax.Array:
    """The loss of a batch, summed over its targets."""
    logits, _ = target_logits(params, batch, cfg=cfg)
    return jnp.sum(cross_entropy(logits, batch.targets) * batch.weights)


def _visited(cfg: ModelConfig, params: Any, batch: PairBatch) -> list[jax.Array]:
    """Returns the chosen experts `[B, T, k]` of tokens per sparse layer, the encoder's first."""
    return [routing.ids for routing in target_logits(params, batch, cfg=cfg)[1]]
