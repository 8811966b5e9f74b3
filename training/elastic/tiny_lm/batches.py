"""Samples the batches of the tiny LM's heads: texts with labelled tokens, questions with labelled decisions.

All rows are built as in service (`jaxllm.tasks.tiny_reader`): an SLO's marks, then the prompt in the large
model's template, in the tiny LM's tokens. Batches follow from (rows, seed, step) only; marks are sampled
anew for every row, so that scores do not depend on them and decisions are learned for every SLO.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jaxllm.elastic.compression import MARKS, NO_WORD, input_rows, marked, words_of
from jaxllm.elastic.slo import MARK_PERCENTS, Slo
from jaxllm.errors import ConfigError
from jaxllm.tasks.example import TaskExample
from jaxllm.tasks.tiny_reader import TinyReader
from jaxllm.text.droppable import prompt_tokens
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.training.elastic.tiny_lm.keep_labels import KeptWords

# Every objective that marks can express.
TOLD_SLOS = tuple(Slo(ttft=ttft / 100, tpot=tpot / 100) for ttft in MARK_PERCENTS for tpot in MARK_PERCENTS)
# Texts are joined to lengths from this to a full row.
_LEAST_TOKENS = 24


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ScoreBatch:
    """Rows with labelled tokens.

    Attributes:
      tokens: `[B, T]` int32.
      mask: `[B, T]` bool, True = a valid token.
      labels: `[B, T]` float32, target probability of keeping each.
      weights: `[B, T]` float32, weight of each label; 0 if a token must stay, or belongs to no text.
      sources: `[B, T]` int32, number of each row's source.
    """

    tokens: np.ndarray
    mask: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    sources: np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class DecisionBatch:
    """Questions with their decisions.

    Attributes:
      tokens: `[B, T]` int32, the first row of each.
      mask: `[B, T]` bool, True = a real token.
      choices: `[B, 2]` int32, the classes of level and prompt ratio.
      weights: `[B, 1]` float32.
      sources: `[B, 1]` int32, the number of each row's SLO.
    """

    tokens: np.ndarray
    mask: np.ndarray
    choices: np.ndarray
    weights: np.ndarray
    sources: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class ScoreRows:
    """Rows of labelled tokens, as in a `ScoreBatch` but with room for marks."""

    rows: ScoreBatch
    mark_ids: tuple[int, ...]
    batch: int
    seed: int

    def batch_at(self, step: int) -> ScoreBatch:
        """The batch of a step (from 0): all rows in a new order every epoch."""
        count = len(self.rows.tokens)
        picks = np.arange(step * self.batch, (step + 1) * self.batch)
        epochs = set((picks // count).tolist())
        orders = {each: np.random.default_rng([self.seed, 0, each]).permutation(count) for each in epochs}
        places = np.array([orders[pick // count][pick % count] for pick in picks.tolist()])
        chosen = jax.tree.map(lambda each: each[places], self.rows)
        draw = np.random.default_rng([self.seed, 1, step])
        slos = [TOLD_SLOS[each] for each in draw.integers(0, len(TOLD_SLOS), self.batch)]
        return dataclasses.replace(chosen, tokens=_marked_each(chosen.tokens, slos, self.mark_ids))

    def held_out(self) -> Iterator[ScoreBatch]:
        """All rows once, under the objectives in turn; the last batch is padded with weights of zero."""
        for chosen, places in _in_order(self.rows, self.batch):
            slos = [TOLD_SLOS[each % len(TOLD_SLOS)] for each in places]
            yield dataclasses.replace(chosen, tokens=_marked_each(chosen.tokens, slos, self.mark_ids))


@dataclasses.dataclass(frozen=True, eq=False)
class DecisionRows:
    """Questions with their labels under every objective.

    Attributes:
      tokens: `[N, T]` int32, the first row of each question, with room for marks.
      mask: `[N, T]` bool, True = a real token.
      labels: `[N, S, 2]` int32 (see `self_labels.lightest`).
      slos: S objectives.
      mark_ids: token of each of `marks()`.
      batch: B.
      seed: seed of the samples.
    """

    tokens: np.ndarray
    mask: np.ndarray
    labels: np.ndarray
    slos: tuple[Slo, ...]
    mark_ids: tuple[int, ...]
    batch: int
    seed: int

    def batch_at(self, step: int) -> DecisionBatch:
        """Returns the batch of a step (from 0): questions and objectives sampled at random."""
        draw = np.random.default_rng([self.seed, 2, step])
        questions = draw.integers(0, len(self.tokens), self.batch)
        return self._batch(questions, draw.integers(0, len(self.slos), self.batch))

    def held_out(self) -> Iterator[DecisionBatch]:
        """Every question under every objective once, in order; padding has weights of zero."""
        count = len(self.tokens) * len(self.slos)
        for first in range(0, count, self.batch):
            places = np.arange(first, first + self.batch)
            batch = self._batch(*np.divmod(places % count, len(self.slos)))
            yield dataclasses.replace(batch, weights=(places < count).astype(np.float32)[:, None])

    def _batch(self, questions: np.ndarray, slos: np.ndarray) -> DecisionBatch:
        return DecisionBatch(
            tokens=_marked_each(self.tokens[questions], [self.slos[each] for each in slos], self.mark_ids),
            mask=self.mask[questions],
            choices=self.labels[questions, slos],
            weights=np.ones((self.batch, 1), np.float32),
            sources=slos.astype(np.int32)[:, None],
        )


def score_rows(
    sources: Sequence[Sequence[KeptWords]],
    tokenizer: Tokenizer,
    reader: TinyReader,
    instructions: Sequence[str],
    seed: int,
) -> ScoreBatch:
    """Encodes labelled texts as rows, each the user's turn of a chat.

    Neighbouring texts of a source are joined, to few or to many tokens, since prompts are of all lengths;
    the rest that does not fit a row continues in the next. Versions of one text are far apart.

    Args:
      sources: labelled texts of each source, in the order of its file.
      tokenizer: tokenizer of the large model, with its template.
      reader: reader of rows.
      instructions: system's turns, one of which is sampled per row; an empty one is none.
      seed: seed of lengths and instructions.

    Raises:
      ConfigError: there are no labels.
    """
    draw = np.random.default_rng([seed, 3])
    parts: list[tuple[np.ndarray, ...]] = []
    for number, texts in enumerate(sources):
        for group in _groups(texts, reader.own or tokenizer, reader.row_tokens, draw):
            instruction = instructions[int(draw.integers(len(instructions)))] if instructions else ""
            rows = _labelled(group, tokenizer, reader, instruction)
            parts.append((*rows, np.full(rows[0].shape, number, np.int32)))
    if not parts:
        raise ConfigError("there are no labelled texts for the score head to learn from")
    return ScoreBatch(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def joined(*rows: ScoreBatch) -> ScoreBatch:
    """Concatenates rows of several sources."""
    return jax.tree.map(lambda *parts: np.concatenate(parts), *rows)


def _groups(
    texts: Sequence[KeptWords], tokenizer: Tokenizer, row_tokens: int, draw: np.random.Generator
) -> Iterator[list[KeptWords]]:
    """Yields runs of texts whose tokens add up to a length sampled anew for each, at most a row's."""
    seen: dict[str, int] = {}
    versions = []
    for text in texts:
        versions.append(seen.get(text.text, 0))
        seen[text.text] = versions[-1] + 1
    group: list[KeptWords] = []
    size, wanted = 0, 0
    for place in np.argsort(versions, kind="stable"):
        count = len(tokenizer.encode(texts[place].text, add_special_tokens=False, special=False))
        if group and (size + count > wanted or any(each.text == texts[place].text for each in group)):
            yield group
            group = []
        if not group:
            size, wanted = 0, int(draw.integers(_LEAST_TOKENS, max(row_tokens, _LEAST_TOKENS + 1)))
        group.append(texts[place])
        size += count
    if group:
        yield group


def _labelled(
    group: Sequence[KeptWords], tokenizer: Tokenizer, reader: TinyReader, instruction: str
) -> tuple[np.ndarray, ...]:
    """Returns rows `[R, T]` of tokens, mask, labels and weights of texts that are joined to one."""
    user = " ".join(" ".join(each.text.split()) for each in group)
    example = TaskExample(system=instruction, user=user, answer="")
    prompt = reader.tokens(prompt_tokens(tokenizer, example))
    tokens, mask = input_rows(prompt.ids, reader.row_tokens)
    # Where the template changes the text, nothing of it may be dropped, and nothing is learnt. A short text
    # may also occur in a marker: the right occurrence ends with the droppable span.
    begins = prompt.text.find(user, max(0, int(prompt.spans.max(initial=0)) - len(user)))
    words = words_of(prompt.offsets - begins, user)
    inside = (prompt.offsets[:, 0] >= begins) & (prompt.offsets[:, 1] <= begins + len(user))
    real = inside & ~prompt.forced & (words != NO_WORD)
    kept = np.concatenate([each.kept for each in group])
    labels, weights = np.zeros(tokens.shape, np.float32), np.zeros(tokens.shape, np.float32)
    text = mask.copy()
    text[:, :MARKS] = False
    labels[text] = np.where(real, kept[np.where(real, words, 0)], False)
    weights[text] = real
    return tokens, mask, labels, weights


def _in_order(rows: ScoreBatch, batch: int) -> Iterator[tuple[ScoreBatch, np.ndarray]]:
    count = len(rows.tokens)
    for first in range(0, count, batch):
        places = np.arange(first, first + batch)
        chosen = jax.tree.map(lambda each, at=places % count: each[at], rows)
        real = (places < count).astype(np.float32)[:, None]
        yield dataclasses.replace(chosen, weights=chosen.weights * real), places


def _marked_each(tokens: np.ndarray, slos: Sequence[Slo], mark_ids: tuple[int, ...]) -> np.ndarray:
    return np.stack([marked(row, slo, mark_ids) for row, slo in zip(tokens, slos, strict=True)])
