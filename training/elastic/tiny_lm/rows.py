"""Samples the batches of the tiny LM's heads: texts with labelled tokens, questions with labelled decisions.

All rows are built as in service (`jaxllm.tasks.tiny_reader`): an SLO's marks, then the prompt in the large
model's template, in the tiny LM's tokens. Batches follow from (rows, seed, step) only; marks are sampled
anew for every row, so that scores do not depend on them and decisions are learned for every SLO.

The words of a text that its shorter version keeps are labelled as in LLMLingua-2 (arXiv 2403.12968, section
3.2): words of the shorter version are looked up in the text one after another, near the position of the last
match, and matches are labelled as kept. Words (`jaxllm.elastic.compression`, between white space) are
compared without case, inflection and punctuation around them, since manual summaries are also polished.
Badly aligned rows are left out: those with many words that the text does not have (variation rate), and those
with many words that it has, but without an unlabelled position left (alignment gap).
"""

import dataclasses
import re
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.elastic.compression import MARKS, NO_WORD, input_rows, marked, words_of
from jaxllm.elastic.slo import MARK_PERCENTS, Slo
from jaxllm.errors import ConfigError
from jaxllm.tasks.example import Record, TaskExample, read_json, read_jsonl, text_field
from jaxllm.tasks.tiny_reader import TinyReader
from jaxllm.text.droppable import prompt_tokens
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.training.data.documents import held_out_digests, text_document

# Search distance for the next word, to either side of the last one.
WINDOW_WORDS = 150
VARIATION_SHARE = 0.05
GAP_SHARE = 0.1

_TEST_ID = re.compile(r"\w+[-_]test[-_]\d+", re.IGNORECASE)
_TEST_FILE = re.compile(r"(?:.*[-_.])?test(?:[-_.].*)?", re.IGNORECASE)
_SUFFIXES = ("ingly", "edly", "ing", "ed", "ies", "es", "ly", "s")
# Least letters of a word without its suffix.
_STEM_LETTERS = 3


# A text and a shorter version of it.
Compression = tuple[str, str]


@dataclasses.dataclass(frozen=True, eq=False)
class KeptWords:
    """Text with labelled words.

    Attributes:
      kept: `[words]` bool, True = the shorter version has this word.
      variation: share of the shorter version's words that the text does not have.
      gap: number of its words that the text has without an unlabelled position left, as a share of the
        text's words.
    """

    text: str
    kept: np.ndarray
    variation: float
    gap: float


def align(text: str, shorter: str) -> KeptWords:
    """Labels the words of a text by its shorter version.

    A word with several positions is matched to the nearest free one; of two equally near the later one.
    Words without letters and digits are labelled, too, but count in neither rate.
    """
    words, chosen = text.split(), shorter.split()
    free: dict[str, list[int]] = {}
    for place, word in enumerate(words):
        free.setdefault(stem(word), []).append(place)
    known = frozenset(free)
    kept = np.zeros(len(words), bool)
    at = 0
    for word in chosen:
        places = free.get(stem(word), [])
        near = [each for each in places if abs(each - at) < WINDOW_WORDS]
        if near:
            found = min(near, key=lambda each: (abs(each - at), -each))
            places.remove(found)
            kept[found] = True
            # A far match may be wrong: it moves the search by at most half a window.
            at = min(found, at + WINDOW_WORDS // 2)
    real = [stem(word) for word in chosen if _says_something(word)]
    counted = sum(map(_says_something, words))
    has = sum(each in known for each in real)
    labelled = sum(_says_something(word) for word, each in zip(words, kept, strict=True) if each)
    return KeptWords(
        text=text,
        kept=kept,
        variation=1 - has / len(real) if real else 1.0,
        gap=(has - labelled) / max(counted, 1),
    )


def well_aligned(rows: Sequence[KeptWords]) -> list[KeptWords]:
    """Leaves out badly aligned rows of one source, since sources differ in how much they polish: the share of
    the highest variation rate, then that of the highest alignment gap. Where more rows have the highest, all
    of them stay.
    """
    left = [row for row in rows if row.kept.any()]
    for measure, share in (("variation", VARIATION_SHARE), ("gap", GAP_SHARE)):
        values = np.array([getattr(row, measure) for row in left])
        if left:
            # Upper bound of retained values; rounding errors do not count.
            most = np.sort(values)[len(left) - 1 - int(share * len(left) + 1e-6)] + 1e-9
            left = [row for row, value in zip(left, values, strict=True) if value <= most]
    return left


def split_rows(rows: Sequence[KeptWords], held_out_share: float) -> tuple[list[KeptWords], list[KeptWords]]:
    """Splits rows into training and held-out sets by their texts' contents: versions of one text stay
    together.

    Raises:
      ConfigError: there are fewer than two different texts.
    """
    digests = [text_document(row.text).digest() for row in rows]
    held_out = held_out_digests(digests, held_out_share)
    sides: tuple[list[KeptWords], list[KeptWords]] = ([], [])
    for row, digest in zip(rows, digests, strict=True):
        sides[digest in held_out].append(row)
    return sides


def read_compressions(path: Path) -> Iterator[Compression]:
    """Yields the pairs in a file, in order.

    A `.jsonl` file has a `text` and its `summaries` in each line. A `.json` file is a list like
    LLMLingua-2's data of MeetingBank: records with a `prompt` and its `compressed_prompt`, or with lists of
    parts, `prompt_list` and `compressed_prompt_list`; unpaired parts are left out.

    Raises:
      ConfigError: the file is missing or of another form, or a test set by its name or its records' ids.
    """
    path = Path(path)
    if _TEST_FILE.fullmatch(path.stem):
        raise ConfigError(f"{path} is a file of tests by its name: nothing is to be trained on it")
    pairs = read_jsonl(path, _summaries) if path.suffix == ".jsonl" else _prompts(path)
    for text, shorter in pairs:
        if text.split() and shorter.split():
            yield text, shorter


def stem(word: str) -> str:
    """Returns the form in which words are compared: without case, punctuation and the commonest English
    endings."""
    bare = word.strip(string.punctuation + "“”‘’…–—").lower()
    if not bare:
        return word
    bare = bare.removesuffix("'s").removesuffix("’s")
    for suffix in _SUFFIXES:
        if bare.endswith(suffix) and len(bare) - len(suffix) >= _STEM_LETTERS:
            bare = bare.removesuffix(suffix) + ("y" if suffix == "ies" else "")
            break
    # stopped, stop; making, make; agreed, agree.
    while len(bare) > _STEM_LETTERS and (bare[-1] == bare[-2] or bare[-1] == "e"):
        bare = bare[:-1]
    return bare


def _says_something(word: str) -> bool:
    return any(map(str.isalnum, word))


def _summaries(record: Record) -> list[Compression]:
    text, summaries = text_field(record, "text"), record["summaries"]
    _refuse_tests(record)
    if not isinstance(summaries, list) or not all(isinstance(each, str) for each in summaries):
        raise ConfigError(f"'summaries' must be a list of texts, got {summaries!r:.80}")
    return [(text, each) for each in summaries]


def _prompts(path: Path) -> Iterator[Compression]:
    records = read_json(path)
    if not isinstance(records, list):
        raise ConfigError(f"{path} must hold a list of records, got {type(records).__name__}")
    for number, record in enumerate(records):
        try:
            yield from _parts(record)
        except (ConfigError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}, record {number} is no prompt with its shorter version: {error}"
            ) from error


def _parts(record: Any) -> list[Compression]:
    if not isinstance(record, dict):
        raise ConfigError(f"expected an object, got {record!r:.80}")
    _refuse_tests(record)
    if "prompt_list" not in record:
        return [(text_field(record, "prompt"), text_field(record, "compressed_prompt"))]
    texts, shorter = record["prompt_list"], record["compressed_prompt_list"]
    for each in (texts, shorter):
        if not isinstance(each, list) or not all(isinstance(part, str) for part in each):
            raise ConfigError(f"the parts of a prompt must be a list of texts, got {each!r:.80}")
    return list(zip(texts, shorter, strict=True)) if len(texts) == len(shorter) else []


def _refuse_tests(record: Record) -> None:
    name = str(record.get("id", ""))
    if _TEST_ID.fullmatch(name) or record.get("split") == "test":
        raise ConfigError(f"the record {name!r} is one to test with: nothing is to be trained on it")


# Every objective that marks can express.
MARKED_SLOS = tuple(Slo(ttft=ttft / 100, tpot=tpot / 100) for ttft in MARK_PERCENTS for tpot in MARK_PERCENTS)
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
        slos = [MARKED_SLOS[each] for each in draw.integers(0, len(MARKED_SLOS), self.batch)]
        return dataclasses.replace(chosen, tokens=_marked_each(chosen.tokens, slos, self.mark_ids))

    def held_out(self) -> Iterator[ScoreBatch]:
        """All rows once, under the objectives in turn; the last batch is padded with weights of zero."""
        count = len(self.rows.tokens)
        for first in range(0, count, self.batch):
            places = np.arange(first, first + self.batch)
            chosen = jax.tree.map(lambda each, at=places % count: each[at], self.rows)
            slos = [MARKED_SLOS[at % len(MARKED_SLOS)] for at in places]
            tokens = _marked_each(chosen.tokens, slos, self.mark_ids)
            real = (places < count).astype(np.float32)[:, None]
            yield dataclasses.replace(chosen, tokens=tokens, weights=chosen.weights * real)


@dataclasses.dataclass(frozen=True, eq=False)
class DecisionRows:
    """Questions with their labels under every objective.

    Attributes:
      tokens: `[N, T]` int32, the first row of each question, with room for marks.
      mask: `[N, T]` bool, True = a real token.
      labels: `[N, S, 2]` int32 (see `labels.lightest`).
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
      instructions: system's turns, one of which is sampled per row; an empty one is none.
      seed: seed of lengths and instructions.

    Raises:
      ConfigError: there are no labels.
    """
    draw = np.random.default_rng([seed, 3])
    parts: list[ScoreBatch] = []
    for number, texts in enumerate(sources):
        for group in _groups(texts, reader.own or tokenizer, reader.row_tokens, draw):
            instruction = instructions[int(draw.integers(len(instructions)))] if instructions else ""
            parts.append(_labelled(group, tokenizer, reader, instruction, number))
    if not parts:
        raise ConfigError("there are no labelled texts for the score head to learn from")
    return joined(*parts)


def labelled_rows(
    ids: np.ndarray, row_tokens: int, labels: np.ndarray, weights: np.ndarray, source: int
) -> ScoreBatch:
    """The rows of a prompt with labels and weights of its tokens, all `[T]`."""
    tokens, mask = input_rows(ids, row_tokens)
    text = mask.copy()
    text[:, :MARKS] = False
    own_labels, own_weights = (np.zeros(tokens.shape, np.float32) for _ in range(2))
    own_labels[text], own_weights[text] = labels, weights
    return ScoreBatch(tokens, mask, own_labels, own_weights, np.full(tokens.shape, source, np.int32))


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
    group: Sequence[KeptWords], tokenizer: Tokenizer, reader: TinyReader, instruction: str, source: int
) -> ScoreBatch:
    """Returns the rows of texts that are joined to one."""
    user = " ".join(" ".join(each.text.split()) for each in group)
    example = TaskExample(system=instruction, user=user, answer="")
    prompt = reader.tokens(prompt_tokens(tokenizer, example))
    # Where the template changes the text, nothing of it may be dropped, and nothing is learnt. A short text
    # may also occur in a marker: the right occurrence ends with the droppable span.
    begins = prompt.text.find(user, max(0, int(prompt.spans.max(initial=0)) - len(user)))
    words = words_of(prompt.offsets - begins, user)
    inside = (prompt.offsets[:, 0] >= begins) & (prompt.offsets[:, 1] <= begins + len(user))
    real = inside & ~prompt.forced & (words != NO_WORD)
    kept = np.concatenate([each.kept for each in group])
    labels = np.where(real, kept[np.where(real, words, 0)], False)
    return labelled_rows(prompt.ids, reader.row_tokens, labels, real, source)


def _marked_each(tokens: np.ndarray, slos: Sequence[Slo], mark_ids: tuple[int, ...]) -> np.ndarray:
    return np.stack([marked(row, slo, mark_ids) for row, slo in zip(tokens, slos, strict=True)])
