"""Text to batches of tokens: documents, their split, a memory-mapped token file, packed windows.

Three laws hold, so that a run can be repeated and resumed:

- a document is in the training split or held out by its content alone, so copies of it never stand on
  both sides and the order of the files does not matter;
- documents are packed one behind the other, each ended by the end-of-text token;
- the batch of a step is a pure function of (tokens, seed, step): there is no position to save.

It does not shuffle documents within the token file, and attention is not stopped at a document's end.
"""

import dataclasses
import functools
import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from jaxllm.errors import ConfigError
from training.tokenizer import END_OF_TEXT, end_of_text_id

# Documents per call of the tokenizer, which keeps all encodings of a call in memory.
_ENCODE_DOCUMENTS = 1024


def read_documents(paths: Sequence[Path]) -> list[str]:
    """The documents of UTF-8 text files, in order, stripped, without empty ones.

    A file that holds `<|endoftext|>` is split there; any other at its blank lines, so one without
    blank lines is one document.

    Raises:
      ConfigError: a file cannot be read as UTF-8, or there is no document at all.
    """
    documents: list[str] = []
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the text file {path} as UTF-8: {error}") from error
        documents += split_text(text)
    if not documents:
        raise ConfigError(f"there is no text in {', '.join(map(str, paths)) or 'an empty list of files'}")
    return documents


def split_text(text: str) -> list[str]:
    """The documents in one text (see `read_documents`)."""
    if END_OF_TEXT in text:
        parts = text.split(END_OF_TEXT)
    else:
        # Blank lines may hold spaces: compare lines stripped, and keep the document's own line ends.
        parts = [""]
        for line in text.splitlines(keepends=True):
            if line.strip():
                parts[-1] += line
            elif parts[-1]:
                parts.append("")
    return [part.strip() for part in parts if part.strip()]


def builtin_text() -> list[str]:
    """Python's own language reference, one document per topic: text that needs no download.

    It differs a little from one Python version to the next.

    Raises:
      ConfigError: this Python was installed without its documentation.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError("this Python has no pydoc_data to train on; give text files with --text") from error
    return [text.strip() for _, text in sorted(topics.items()) if text.strip()]


def split_documents(documents: Sequence[str], held_out_share: float) -> tuple[list[str], list[str]]:
    """Splits into (training, held-out) documents, each in the given order.

    The distinct documents with the smallest digests are held out: `held_out_share` of them, rounded up.

    Raises:
      ConfigError: there are fewer than two distinct documents.
    """
    digests = [_digest(document) for document in documents]
    distinct = sorted(set(digests))
    if len(distinct) < 2:
        raise ConfigError(
            "training needs at least two distinct documents, one of them held out, got "
            f"{len(distinct)}; separate documents by {END_OF_TEXT} or by blank lines"
        )
    count = min(math.ceil(len(distinct) * held_out_share), len(distinct) - 1)
    held_digests = set(distinct[:count])
    train, held_out = [], []
    for document, digest in zip(documents, digests, strict=True):
        (held_out if digest in held_digests else train).append(document)
    return train, held_out


def token_file(folder: Path, name: str, documents: Sequence[str], tokenizer: Tokenizer) -> np.ndarray:
    """The packed tokens of `documents`, memory-mapped from a file in `folder` that is built once.

    The file's name carries a digest of the text and the tokenizer, so a stale one is never read.

    Returns:
      Token ids `[tokens]`, uint16 where the vocabulary fits, else uint32; read-only.
    """
    key = hashlib.blake2b(tokenizer.to_str().encode(), digest_size=8)
    for document in documents:
        key.update(_digest(document))
    path = Path(folder) / f"{name}-{key.hexdigest()}.npy"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        with partial.open("wb") as file:
            np.save(file, pack_documents(documents, tokenizer))
        # Renamed only when whole: a killed run leaves no half file under the name that is looked for.
        os.replace(partial, path)
    return np.load(path, mmap_mode="r")


def pack_documents(documents: Sequence[str], tokenizer: Tokenizer) -> np.ndarray:
    """The token ids of all documents in one row `[tokens]`, each ended by the end-of-text token."""
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    end = np.asarray([end_of_text_id(tokenizer)], dtype)
    # A special token's name inside a document is text, not a token: only packing ends a document.
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.encode_special_tokens = True
    rows = []
    for first in range(0, len(documents), _ENCODE_DOCUMENTS):
        batch = list(documents[first : first + _ENCODE_DOCUMENTS])
        for encoding in plain.encode_batch_fast(batch, add_special_tokens=False):
            rows += [np.asarray(encoding.ids, dtype), end]
    return np.concatenate(rows) if rows else np.zeros(0, dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingWindows:
    """Shuffled windows over a row of tokens, addressed by step.

    Each epoch cuts the row at a new offset below T and visits its windows in a new order, both drawn
    from (seed, epoch). Windows lie T apart and hold T+1 tokens: the last is only ever a target.

    Attributes:
      tokens: `[tokens]` unsigned ids.
      window_tokens: T, the tokens that the model sees at once.
      batch: B, windows per step.
      seed: of the order.
    """

    tokens: np.ndarray
    window_tokens: int
    batch: int
    seed: int

    def __post_init__(self) -> None:
        if self.windows < 1:
            raise ConfigError(
                f"{len(self.tokens)} training tokens are too few for windows of {self.window_tokens}; "
                f"give at least {2 * self.window_tokens} tokens of text or lower window_tokens"
            )

    @property
    def windows(self) -> int:
        """Windows per epoch: one fewer than would fit, so that every offset leaves the same number."""
        return len(self.tokens) // self.window_tokens - 1

    def batch_at(self, step: int) -> np.ndarray:
        """The batch `[B, T+1]` int32 of step `step` (from 0). Batches run across epochs' ends."""
        picks = range(step * self.batch, (step + 1) * self.batch)
        rows = np.empty((self.batch, self.window_tokens + 1), np.int32)
        for row, pick in zip(rows, picks, strict=True):
            epoch, place = divmod(pick, self.windows)
            offset, order = _epoch_order(self.seed, epoch, self.windows, self.window_tokens)
            start = offset + int(order[place]) * self.window_tokens
            row[:] = self.tokens[start : start + self.window_tokens + 1]
        return rows


@functools.lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, windows: int, window_tokens: int) -> tuple[int, np.ndarray]:
    generator = np.random.default_rng([seed, epoch])
    return int(generator.integers(window_tokens)), generator.permutation(windows)


def evaluation_batches(
    tokens: np.ndarray, window_tokens: int, batch: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches in which every token but the very first is a target exactly once.

    Yields:
      Tokens `[B, T+1]` int32 and target weights `[B, T]` float32, 0 where the last batch is filled up.
    """
    targets = len(tokens) - 1
    span = window_tokens * batch
    for first in range(0, targets, span):
        rows = np.zeros((batch, window_tokens + 1), np.int32)
        weights = np.zeros((batch, window_tokens), np.float32)
        for row in range(batch):
            start = first + row * window_tokens
            count = min(window_tokens, targets - start)
            if count <= 0:
                break
            rows[row, : count + 1] = tokens[start : start + count + 1]
            weights[row, :count] = 1.0
        yield rows, weights


def text_digest(documents: Sequence[str]) -> str:
    """A hexadecimal name for this sequence of documents."""
    return hashlib.blake2b(b"".join(map(_digest, documents)), digest_size=16).hexdigest()


def _digest(document: str) -> bytes:
    return hashlib.blake2b(document.encode(), digest_size=16).digest()
