"""Translates texts greedily, in batches, and scores them: BLEU, and how often a draft agrees.

Arithmetic is float32 for any weight format; served models are measured by their own benchmarks.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models import decoder
from jaxllm.quant import dequantize
from jaxllm.tasks.rouge import rouge
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.training.loop.fitting import FrozenModel
from jaxllm.training.seq2seq.forward import KeysValues, decode_next, encode_rows, source_keys_values
from jaxllm.training.seq2seq.job import FAMILIES, target_logits
from jaxllm.training.seq2seq.pairs import PairRows

# Lengths of rows: few, because each is compiled.
LENGTHS = (32, 64, 128, 256, 512)
_BATCH_TOKENS = 4096
# Number of tokens so far, last token of each row, whether it has ended, keys and values, and the answers.
_State = tuple[jax.Array, jax.Array, jax.Array, list[KeysValues], jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Translator:
    """A trained model.

    Attributes:
      params: float32.
    """

    cfg: ModelConfig
    params: Mapping[str, jax.Array]
    tokenizer: Tokenizer

    @classmethod
    def read(cls, model: Path) -> "Translator":
        """Reads a Hugging Face folder, or a bundle at the width of its weights.

        Raises:
          CheckpointError: there is no such model.
          ConfigError: its family cannot be trained here.
        """
        frozen = FrozenModel.read(model)
        cfg, files, float32 = frozen.cfg, frozen.tokenizer.files, jnp.dtype(jnp.float32)
        params = {name: dequantize(each, float32) for name, each in frozen.params.items()}
        if cfg.model_type not in FAMILIES:
            raise ConfigError(f"{model} is of {cfg.model_type}; here {', '.join(FAMILIES)} are judged")
        if not files.start_ids:
            raise ConfigError(f"{model} does not say which token its decoder begins with")
        return cls(cfg, params, frozen.tokenizer)

    @property
    def start_id(self) -> int:
        """Token that the decoder begins with."""
        return self.tokenizer.files.start_ids[0]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, with its end."""
        return [list(self.tokenizer.encode(text)) for text in texts]

    def translate(
        self,
        sources: Sequence[Sequence[int]],
        most_tokens: int = 100,
        *,
        params: Mapping[str, jax.Array] | None = None,
    ) -> list[list[int]]:
        """Returns the greedy answer to each source, with its end if that comes within `most_tokens`.

        Args:
          sources: token ids.
          most_tokens: maximum number of tokens of an answer.
          params: parameters in place of the model's own, of the same shapes; nothing is compiled for them.
        """
        answers: list[list[int]] = [[] for _ in sources]
        ends, own = set(self.tokenizer.eos_ids), self.params if params is None else params
        for places, read, read_tokens in _source_rows(sources, self.start_id):
            tokens = np.asarray(self._compiled(most_tokens, own, read, read_tokens))
            for place, row in zip(places, tokens.tolist(), strict=False):
                stop = next((at for at, token in enumerate(row) if token in ends), most_tokens - 1)
                answers[place] = row[: stop + 1]
        return answers

    def agreement(self, sources: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> float:
        """Returns the share of another model's answer tokens that this model predicts after the preceding
        ones."""
        rows = PairRows(
            list(zip(sources, answers, strict=True)), np.zeros(len(sources), np.int32), LENGTHS,
            batch_tokens=_BATCH_TOKENS, rows_multiple=1, start_id=self.start_id, seed=0,
        )  # fmt: skip
        logits = jax.jit(lambda params, batch: target_logits(params, batch, cfg=self.cfg)[0].argmax(-1))
        same, count = 0.0, 0.0
        for batch in rows.held_out():
            said = np.asarray(logits(self.params, batch))
            same += float(((said == batch.targets) * batch.weights).sum())
            count += float(batch.weights.sum())
        return same / count

    @functools.cached_property
    def _compiled(self) -> Callable[..., jax.Array]:
        """`_greedy`, compiled once for each shape."""
        return jax.jit(self._greedy, static_argnums=0)

    def _greedy(
        self, most_tokens: int, params: Mapping[str, jax.Array], read: jax.Array, read_tokens: jax.Array
    ) -> jax.Array:
        """`[B, most_tokens]` int32; undefined after a row's end."""
        cfg, rows = self.cfg, read.shape[0]
        encoded, _ = encode_rows(params, read, read_tokens, cfg=cfg)
        sources = source_keys_values(params, encoded, cfg=cfg)
        empty = jnp.zeros((rows, cfg.kv_heads, most_tokens, cfg.head_dim), jnp.float32)
        ends = np.asarray(self.tokenizer.eos_ids, np.int32)

        def going_on(state: _State) -> jax.Array:
            position, _, ended, _, _ = state
            return (position < most_tokens) & ~jnp.all(ended)

        def more(state: _State) -> _State:
            position, last, ended, past, said = state
            hidden, past = decode_next(params, last, position, past, sources, read_tokens, cfg=cfg)
            token = decoder.logits(params, hidden, cfg=cfg).argmax(-1).astype(jnp.int32)
            said = jax.lax.dynamic_update_slice_in_dim(said, token[:, None], position, axis=1)
            ended = ended | (token[:, None] == ends).any(-1)
            return position + 1, token, ended, past, said

        start = jnp.full(rows, self.start_id, jnp.int32)
        begun = (
            jnp.zeros((), jnp.int32), start, jnp.zeros(rows, bool), [(empty, empty)] * cfg.layers,
            jnp.zeros((rows, most_tokens), jnp.int32),
        )  # fmt: skip
        return jax.lax.while_loop(going_on, more, begun)[-1]


def bleu(texts: Sequence[str], references: Sequence[str]) -> float:
    """Returns BLEU of a corpus, from 0 to 100, by `sacrebleu` with its defaults: one reference per text,
    cased, 13a tokens (arXiv 1804.08771).

    Raises:
      ConfigError: `sacrebleu` is not installed, or the numbers of references and texts differ.
    """
    try:
        import sacrebleu
    except ImportError as error:
        raise ConfigError("BLEU needs sacrebleu: pip install 'jaxllm[eval]'") from error
    if len(texts) != len(references) or not texts:
        raise ConfigError(f"BLEU takes a reference for each text, got {len(references)} for {len(texts)}")
    return float(sacrebleu.corpus_bleu(list(texts), [list(references)]).score)


def likeness(texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Compares texts to their references, of several to the best: the share of exact matches (`exact`), and
    Rouge as in `jaxllm.tasks.rouge`, all from 0 to 1.

    Raises:
      ConfigError: `rouge-score` is not installed, or the numbers of references and texts differ.
    """
    if len(texts) != len(references) or not texts:
        raise ConfigError(f"each text needs references, got {len(references)} for {len(texts)}")
    each = [
        {"exact": float(text in right), **rouge(right, text)}
        for text, right in zip(texts, references, strict=True)
    ]
    return {name: round(sum(one[name] for one in each) / len(each), 4) for name in each[0]}


def _source_rows(
    sources: Sequence[Sequence[int]], padding_id: int
) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
    """Yields batches of sources of one length: indices, tokens `[B, S]` and numbers of valid tokens `[B]`."""
    lengths = np.array([len(each) for each in sources])
    if lengths.max() > LENGTHS[-1]:
        raise ConfigError(f"a source has {lengths.max()} tokens; at most {LENGTHS[-1]} are read here")
    of = np.searchsorted(LENGTHS, lengths)
    for number, length in enumerate(LENGTHS):
        own, count = np.flatnonzero(of == number), _BATCH_TOKENS // length
        for first in range(0, len(own), count):
            places = own[first : first + count].tolist()
            read, read_tokens = np.full((count, length), padding_id, np.int32), np.ones(count, np.int32)
            for row, place in enumerate(places):
                read[row, : lengths[place]], read_tokens[row] = sources[place], lengths[place]
            yield places, read, read_tokens
