"""What the tiny LM's heads are trained on: texts with labelled tokens, questions with labelled decisions.

All rows are read as in service: an SLO's marks, then the prompt as the large model's template writes it, in
the tiny LM's tokens. Batches follow from (rows, seed, step) alone; marks are drawn anew for every row, so
that scores do not come to depend on them and decisions are learnt for every SLO.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import flax.struct
import numpy as np

from jaxllm.elastic.compression import NO_WORD, words_of
from jaxllm.elastic.reading import MARKS, marked, reading_rows
from jaxllm.elastic.slo import MARK_PERCENTS, Slo
from jaxllm.errors import ConfigError
from jaxllm.tasks.droppable import prompt_tokens
from jaxllm.tasks.example import TaskExample
from jaxllm.tokenizer import Tokenizer
from training.keep_labels import KeptWords

# Every objective that marks can tell.
TOLD_SLOS = tuple(Slo(ttft=ttft / 100, tpot=tpot / 100) for ttft in MARK_PERCENTS for tpot in MARK_PERCENTS)
# Texts are joined to rows of so many tokens up to whole ones.
_LEAST_TOKENS = 24


@flax.struct.dataclass
class ScoreBatch:
    """Rows whose tokens are labelled.

    Attributes:
      tokens: `[B, T]` int32.
      mask: `[B, T]` bool, True = a real token.
      labels: `[B, T]` float32, the wanted probability of keeping each.
      weights: `[B, T]` float32, of each label; 0 where a token must stay, or is none of a text.
      sources: `[B, T]` int32, the number of each row's source.
    """

    tokens: np.ndarray
    mask: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    sources: np.ndarray


@flax.struct.dataclass
class DecisionBatch:
    """Rows each with a decision.

    Attributes:
      tokens: `[B, T]` int32.
      mask: `[B, T]` bool, True = a real token.
      choices: `[B, 2]` int32, the classes of model and prompt.
      weights: `[B, 1]` float32.
      sources: `[B, 1]` int32, the number of each row's SLO.
    """

    tokens: np.ndarray
    mask: np.ndarray
    choices: np.ndarray
    weights: np.ndarray
    sources: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class TinyReader:
    """How prompts become the tiny LM's rows.

    Attributes:
      tokenizer: the large model's, whose template writes prompts.
      own: the tiny LM's own; None where it reads the large model's tokens.
      mark_ids: the token of each of `marks()`.
      row_tokens: T.
    """

    tokenizer: Tokenizer
    own: Tokenizer | None
    mark_ids: tuple[int, ...]
    row_tokens: int

    @property
    def tokens(self) -> Tokenizer:
        """The tokenizer that it reads by."""
        return self.own or self.tokenizer


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
        orders = {epoch: self._order(epoch) for epoch in set((picks // count).tolist())}
        places = np.array([orders[pick // count][pick % count] for pick in picks])
        chosen = _rows_at(self.rows, places)
        draw = np.random.default_rng([self.seed, 1, step])
        slos = [TOLD_SLOS[each] for each in draw.integers(0, len(TOLD_SLOS), self.batch)]
        return chosen.replace(tokens=_marked_each(chosen.tokens, slos, self.mark_ids))

    def held_out(self) -> Iterator[ScoreBatch]:
        """All rows once, under the objectives in turn; the last batch is filled up with weights of zero."""
        for chosen, places in _in_order(self.rows, self.batch):
            slos = [TOLD_SLOS[each % len(TOLD_SLOS)] for each in places]
            yield chosen.replace(tokens=_marked_each(chosen.tokens, slos, self.mark_ids))

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, 0, epoch]).permutation(len(self.rows.tokens))


@dataclasses.dataclass(frozen=True, eq=False)
class DecisionRows:
    """Questions with their labels under every objective.

    Attributes:
      tokens: `[N, T]` int32, with room for marks.
      mask: `[N, T]` bool.
      labels: `[N, S, 2]` int32 (see `self_labels.lightest`).
      slos: S objectives.
      mark_ids: the token of each of `marks()`.
      batch: B.
      seed: of the draws.
    """

    tokens: np.ndarray
    mask: np.ndarray
    labels: np.ndarray
    slos: tuple[Slo, ...]
    mark_ids: tuple[int, ...]
    batch: int
    seed: int

    def batch_at(self, step: int) -> DecisionBatch:
        """The batch of a step (from 0): questions and objectives drawn at random."""
        draw = np.random.default_rng([self.seed, 2, step])
        questions = draw.integers(0, len(self.tokens), self.batch)
        return self._batch(questions, draw.integers(0, len(self.slos), self.batch))

    def held_out(self) -> Iterator[DecisionBatch]:
        """Every question under every objective once; the last batch is filled up with weights of zero."""
        count = len(self.tokens) * len(self.slos)
        for first in range(0, count, self.batch):
            places = np.arange(first, first + self.batch)
            batch = self._batch(*np.divmod(places % count, len(self.slos)))
            yield batch.replace(weights=(places < count).astype(np.float32)[:, None])

    def _batch(self, questions: np.ndarray, slos: np.ndarray) -> DecisionBatch:
        told = [self.slos[each] for each in slos]
        return DecisionBatch(
            tokens=_marked_each(self.tokens[questions], told, self.mark_ids),
            mask=self.mask[questions],
            choices=self.labels[questions, slos],
            weights=np.ones((self.batch, 1), np.float32),
            sources=slos.astype(np.int32)[:, None],
        )


def score_rows(
    sources: Sequence[Sequence[KeptWords]], reader: TinyReader, instructions: Sequence[str], seed: int
) -> ScoreBatch:
    """Labelled texts as rows, each the user's turn of a chat.

    Neighbouring texts of a source are joined, to few or to many tokens, since prompts are of all lengths;
    what does not fit a row goes on in the next. Several versions of one text come into rows far apart.

    Args:
      sources: the labelled texts of each source, in the order of its file.
      reader: of rows.
      instructions: one of them, drawn at random, is the system's turn; an empty one is none.
      seed: of lengths and instructions.

    Raises:
      ConfigError: there is nothing to learn from.
    """
    draw = np.random.default_rng([seed, 3])
    parts: list[tuple[np.ndarray, ...]] = []
    for number, texts in enumerate(sources):
        for group in _groups(texts, reader, draw):
            instruction = instructions[int(draw.integers(len(instructions)))] if instructions else ""
            parts.append((*_labelled(group, reader, instruction), np.int32(number)))
    if not parts:
        raise ConfigError("there are no labelled texts for the score head to learn from")
    tokens, mask, labels, weights = (np.concatenate([part[i] for part in parts]) for i in range(4))
    of = np.concatenate([np.full(part[0].shape, part[4], np.int32) for part in parts])
    return ScoreBatch(tokens, mask, labels, weights, of)


def joined(*rows: ScoreBatch) -> ScoreBatch:
    """Rows of several sources, one behind the other."""
    fields = [field.name for field in dataclasses.fields(ScoreBatch)]
    return ScoreBatch(*(np.concatenate([getattr(each, name) for each in rows]) for name in fields))


def question_rows(examples: Sequence[TaskExample], reader: TinyReader) -> tuple[np.ndarray, np.ndarray]:
    """The rows that decide for questions, `[N, T]` tokens and mask."""
    rows = []
    for example in examples:
        prompt = prompt_tokens(reader.tokenizer, example, reader=reader.own)
        tokens, mask = reading_rows(prompt.ids, reader.row_tokens)
        rows.append((tokens[0], mask[0]))
    tokens, mask = zip(*rows, strict=True)
    return np.stack(tokens), np.stack(mask)


def _groups(
    texts: Sequence[KeptWords], reader: TinyReader, draw: np.random.Generator
) -> Iterator[list[KeptWords]]:
    """Runs of texts whose tokens add up to a length that is drawn anew for each."""
    seen: dict[str, int] = {}
    versions = []
    for text in texts:
        versions.append(seen.get(text.text, 0))
        seen[text.text] = versions[-1] + 1
    group: list[KeptWords] = []
    size, wanted = 0, 0
    for place in np.argsort(versions, kind="stable"):
        count = len(reader.tokens.encode(texts[place].text, add_special_tokens=False))
        if group and (size + count > wanted or any(each.text == texts[place].text for each in group)):
            yield group
            group = []
        if not group:
            size, wanted = 0, int(draw.integers(_LEAST_TOKENS, max(reader.row_tokens, _LEAST_TOKENS + 1)))
        group.append(texts[place])
        size += count
    if group:
        yield group


def _labelled(group: Sequence[KeptWords], reader: TinyReader, instruction: str) -> tuple[np.ndarray, ...]:
    """Rows `[R, T]` of tokens, mask, labels and weights of texts that are joined to one."""
    user = " ".join(" ".join(each.text.split()) for each in group)
    example = TaskExample(system=instruction, user=user, answer="")
    prompt = prompt_tokens(reader.tokenizer, example, reader=reader.own)
    tokens, mask = reading_rows(prompt.ids, reader.row_tokens)
    # Where the template does not have the text as it is, nothing of it may go, and nothing is learnt. A short
    # text may stand in a marker, too: the right one reaches as far as what may go.
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
        chosen = _rows_at(rows, places % count)
        real = (places < count).astype(np.float32)[:, None]
        yield chosen.replace(weights=chosen.weights * real), places


def _rows_at(rows: ScoreBatch, places: np.ndarray) -> ScoreBatch:
    fields = [getattr(rows, field.name)[places] for field in dataclasses.fields(rows)]
    return ScoreBatch(*fields)


def _marked_each(tokens: np.ndarray, slos: Sequence[Slo], mark_ids: tuple[int, ...]) -> np.ndarray:
    return np.stack([marked(row, slo, mark_ids) for row, slo in zip(tokens, slos, strict=True)])
