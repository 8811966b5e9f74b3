"""Splits the documents of a run's sources, and stores their tokens in memory-mapped files.

A recipe names its sources by paths under the folder of all data. Documents are read one by one each time
that they are needed, so a corpus may be larger than memory. Nothing is shuffled or dropped here:
`jaxllm.training.data.rows` samples batches from these files.

The processes of a group open and encode a corpus together, each its own files. If there are fewer files than
processes, all read them and each encodes every n-th block of documents, which is most of the work. The result
is the same for any number of processes.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console

from jaxllm.errors import CheckpointError, ConfigError, JaxllmError
from jaxllm.files.atomic import atomic_folder
from jaxllm.tasks import find_task
from jaxllm.tasks.readers import story_example
from jaxllm.text.builtin_texts import builtin_texts
from jaxllm.training.data.documents import (
    PARQUET,
    Document,
    OnBad,
    chat_document,
    documents_digest,
    documents_of,
    held_out_digests,
    read_chats,
    read_texts,
    shortened_document,
    text_document,
)
from jaxllm.training.data.encoders import Encoder
from jaxllm.training.data.sources import Source, is_remote, remote_files, source_files

_DONE, _FAILED = b"\0", b"\1"


def exchanged(work: Callable[[], bytes]) -> list[bytes]:
    """Returns the result of `work` in each process, by process; all call this together, and wait for each
    other.

    Raises:
      ConfigError: `work` fails in one of them, and then in all.
    """
    if jax.process_count() == 1:
        return [work()]
    try:
        own = _DONE + work()
    except (JaxllmError, OSError) as error:
        own = _FAILED + f"process {jax.process_index()}: {error}".encode()
    sizes = np.asarray(multihost_utils.process_allgather(np.array([len(own)], np.int32))).reshape(-1)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(own)] = np.frombuffer(own, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    found = [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]
    for each in found:
        if each[:1] == _FAILED:
            raise ConfigError(each[1:].decode())
    return [each[1:] for each in found]


Split = Literal["train", "held_out"]

_TEXT_SUFFIXES, _CHAT_SUFFIXES = (".txt",), (".jsonl", ".json", PARQUET)
# Documents per call of the tokenizer, which stores all encodings of a call in memory.
_ENCODE_DOCUMENTS = 1024


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Documents of some sources, each on one side of a split.

    Attributes:
      data: folder of relative paths.
      digests: digest of every document, in order.
      held_out: digests of the origins that are held out.
      shortened_share: share of the training questions that lose words (see `shortened_document`); held-out
        ones stay complete.
      bad_lines: errors of the lines that were left out.
    """

    sources: tuple[Source, ...]
    data: Path | None
    digests: tuple[bytes, ...]
    held_out: frozenset[bytes]
    shortened_share: float = 0.0
    bad_lines: tuple[str, ...] = ()

    def report_bad_lines(self, console: Console) -> None:
        """Prints the number of lines that were left out and the first error, if any."""
        if self.bad_lines:
            console.print(
                f"left out {len(self.bad_lines):,} malformed lines, the first: {self.bad_lines[0]}",
                soft_wrap=True,
                markup=False,
            )

    @classmethod
    def open(
        cls,
        sources: Sequence[Source],
        data: Path | None,
        held_out_share: float,
        *,
        shortened_share: float = 0.0,
    ) -> "Corpus":
        """Reads all documents once, to split them.

        Raises:
          ConfigError: a source cannot be read, or there are too few documents.
        """
        sources = tuple(sources)

        def read() -> bytes:
            bad: list[str] = []
            files, own, digests = _files(sources, data), [], []
            for number, (_, documents) in enumerate(files):
                if number % jax.process_count() == jax.process_index():
                    of_file = [each.digest() + each.origin_digest() for each in documents(bad.append)]
                    own.append((number, len(of_file)))
                    digests += of_file
            return json.dumps({"files": own, "bad": bad}).encode() + b"\n" + b"".join(digests)

        by_file: dict[int, list[bytes]] = {}
        bad: list[str] = []
        for part in exchanged(read):
            head, _, joined = part.partition(b"\n")
            head, at = json.loads(head), 0
            bad += head["bad"]
            for number, count in head["files"]:
                by_file[number] = [joined[32 * row : 32 * row + 32] for row in range(at, at + count)]
                at += count
        both = [each for number in sorted(by_file) for each in by_file[number]]
        held_out = held_out_digests((each[16:] for each in both), held_out_share)
        return cls(sources, data, tuple(each[:16] for each in both), held_out, shortened_share, tuple(bad))

    def documents(self, split: Split) -> Iterator[tuple[int, Document]]:
        """The documents of a split, each with the number of its source."""
        for source, documents in _files(self.sources, self.data):
            yield from self._of_split(source, documents, split)

    def training_texts(self) -> Iterator[str]:
        """Texts that a tokenizer may learn from."""
        for _, document in self.documents("train"):
            yield from document.texts

    def digest(self) -> str:
        """A hexadecimal name for all documents in their order."""
        return documents_digest(self.digests)

    def tokenized(self, encoder: Encoder, split: Split, folder: Path) -> "TokenizedDocuments":
        """Returns the tokens of a split, from files in `folder` that are written once.

        The files' name contains a digest of documents and encoder, so stale files are never read.
        """
        key = hashlib.blake2b(encoder.identity.encode(), digest_size=8)
        key.update(self.digest().encode() + documents_digest(sorted(self.held_out)).encode())
        if split == "train" and self.shortened_share:
            key.update(repr(self.shortened_share).encode())
        place = Path(folder) / f"{split}-{key.hexdigest()}"
        # Asked together: a file system may show a folder to one process before another.
        if b"\0" in exchanged(lambda: bytes([place.exists()])):
            if jax.process_count() == 1:
                write_tokens(place, self.documents(split), encoder)
            else:
                self._write_together(place, split, encoder)
        return TokenizedDocuments.read(place)

    def _of_split(self, source: int, documents: "_Documents", split: Split) -> Iterator[tuple[int, Document]]:
        # Malformed lines were reported before.
        for document in documents(lambda wrong: None):
            if (document.origin_digest() in self.held_out) == (split == "held_out"):
                share = self.shortened_share if split == "train" else 0.0
                yield source, shortened_document(document, share)

    def _write_together(self, place: Path, split: Split, encoder: Encoder) -> None:
        """`write_tokens` of a split by all processes, each its own; the first joins them in order."""

        def shard(process: int) -> Path:
            return place.with_name(f"{place.name}.shard-{process}")

        def write() -> bytes:
            files, blocks = _files(self.sources, self.data), []
            process, processes = jax.process_index(), jax.process_count()
            by_file = len(files) >= processes
            shutil.rmtree(shard(process), ignore_errors=True)

            def own() -> Iterator[tuple[int, Document]]:
                for number, (source, documents) in enumerate(files):
                    if by_file and number % processes != process:
                        continue
                    for at, each in enumerate(self._of_split(source, documents, split)):
                        block = at // _ENCODE_DOCUMENTS
                        if by_file or block % processes == process:
                            if not blocks or blocks[-1][:2] != [number, block]:
                                blocks.append([number, block, 0])
                            blocks[-1][2] += 1
                            yield each

            write_tokens(shard(process), own(), encoder)
            return json.dumps(blocks).encode()

        blocks = [
            (number, block, process, count)
            for process, part in enumerate(exchanged(write))
            for number, block, count in json.loads(part)
        ]

        def join() -> bytes:
            if jax.process_index() == 0:
                shards = {process: shard(process) for _, _, process, _ in blocks}
                join_tokens(place, shards, [each[2:] for each in sorted(blocks)])
                for process in range(jax.process_count()):
                    shutil.rmtree(shard(process), ignore_errors=True)
            return b""

        exchanged(join)


@dataclasses.dataclass(frozen=True, eq=False)
class TokenizedDocuments:
    """Documents as tokens.

    Attributes:
      tokens: `[tokens]` unsigned ids of all documents, concatenated.
      starts: `[documents + 1]` int64, offset of each document; the last is the number of tokens.
      prompt_tokens: `[documents]` int64, number of tokens of each document's prompt.
      sources: `[documents]` int64, number of each document's source.
      text_bytes: UTF-8 bytes of all documents without special tokens.
    """

    tokens: np.ndarray
    starts: np.ndarray
    prompt_tokens: np.ndarray
    sources: np.ndarray
    text_bytes: int

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document `[documents]` int64."""
        return np.diff(self.starts)

    @classmethod
    def read(cls, folder: Path) -> "TokenizedDocuments":
        """Maps the files of `write_tokens`.

        Raises:
          CheckpointError: the files are damaged.
        """
        try:
            with (folder / "index.npz").open("rb") as file, np.load(file) as index:
                columns, dtype, text_bytes = (index[name] for name in ("columns", "dtype", "text_bytes"))
            tokens = np.memmap(folder / "tokens.bin", dtype=np.dtype(str(dtype)), mode="r")
            whole = columns.ndim == 2 and columns.shape[1] == 3 and np.all(np.diff(columns[:, 0]) > 0)
            if not whole or columns[-1, 0] != len(tokens):
                raise ValueError("its index and its tokens do not fit each other")
            return cls(tokens, columns[:, 0], columns[:-1, 1], columns[:-1, 2], int(text_bytes))
        except Exception as error:  # NumPy raises many kinds for a truncated file.
            raise CheckpointError(
                f"cannot read the tokens in {folder}: {error}; remove that folder, and they are made again"
            ) from error


def write_tokens(folder: Path, documents: Iterable[tuple[int, Document]], encoder: Encoder) -> None:
    """Writes tokens of documents, each with its source's number, into a new folder, whole or not at all."""
    dtype = np.dtype(np.uint16 if encoder.vocab_size <= 1 << 16 else np.uint32)
    columns, at, text_bytes, left = [], 0, 0, iter(documents)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(folder) as partial:
        with (partial / "tokens.bin").open("wb") as file:
            while batch := list(itertools.islice(left, _ENCODE_DOCUMENTS)):
                encodings = encoder.encode([document for _, document in batch])
                for (source, document), (ids, prompt_tokens) in zip(batch, encodings, strict=True):
                    columns.append((at, prompt_tokens, source))
                    at += len(ids)
                    text_bytes += sum(len(text.encode()) for text in document.texts)
                    file.write(np.asarray(ids, dtype).tobytes())
        columns.append((at, 0, 0))
        _write_index(partial, np.asarray(columns), dtype, text_bytes)


def join_tokens(folder: Path, shards: Mapping[int, Path], blocks: Sequence[tuple[int, int]]) -> None:
    """Concatenates several folders of tokens in a new one, atomically.

    Args:
      shards: folders that `write_tokens` wrote, by number.
      blocks: (shard, documents) in order; each is the next documents of a shard.
    """
    read = {name: TokenizedDocuments.read(path) for name, path in shards.items()}
    taken, at, columns = dict.fromkeys(read, 0), 0, []
    with atomic_folder(folder) as partial:
        with (partial / "tokens.bin").open("wb") as file:
            for name, count in blocks:
                part, rows = read[name], slice(taken[name], taken[name] + count)
                begin, end = (int(part.starts[each]) for each in (rows.start, rows.stop))
                of_part = part.starts[rows] - begin + at, part.prompt_tokens[rows], part.sources[rows]
                columns.append(np.stack(of_part, axis=1))
                part.tokens[begin:end].tofile(file)
                taken[name], at = rows.stop, at + end - begin
        _write_index(
            partial,
            np.concatenate([*columns, [(at, 0, 0)]]),
            next(iter(read.values())).tokens.dtype,
            sum(part.text_bytes for part in read.values()),
        )


def _write_index(folder: Path, columns: np.ndarray, dtype: np.dtype[Any], text_bytes: int) -> None:
    np.savez(
        folder / "index.npz",
        columns=np.asarray(columns, np.int64),
        dtype=dtype.name,
        text_bytes=np.int64(text_bytes),
    )


# The documents of a file, read anew at each call; the argument is a callback for lines that are left out.
_Documents = Callable[[OnBad], Iterator[Document]]


def _files(sources: Sequence[Source], data: Path | None) -> list[tuple[int, _Documents]]:
    """Returns each file of the sources in order, or its substitute: its source's number, and its
    documents."""
    if not sources:
        return [(0, lambda on_bad: map(text_document, builtin_texts()))]
    return [(number, each) for number, source in enumerate(sources) for each in _source_files(source, data)]


def _source_files(source: Source, data: Path | None) -> Iterator[_Documents]:
    if source.pairs:
        raise ConfigError("pairs of sources and targets are for encoder-decoders; give --text or --chat")
    if source.task:
        root = _root(source, data)
        yield lambda on_bad: map(chat_document, find_task(source.task).read(root, "train"))
        return
    if source.functions:
        from jaxllm.training.data.tool_use import conversations

        yield lambda on_bad: itertools.chain.from_iterable(map(documents_of, conversations(source.functions)))
        return
    named = source.text or source.stories or source.chat
    suffixes = _CHAT_SUFFIXES if source.chat else _TEXT_SUFFIXES
    if is_remote(named):
        files = remote_files(named, suffixes)
    else:
        path = Path(named)
        files = source_files(path if path.is_absolute() else _root(source, data) / path, suffixes)
    yield from (functools.partial(_documents_of, source, file) for file in files)


def _documents_of(source: Source, file: Path | str, on_bad: OnBad) -> Iterator[Document]:
    if source.chat:
        yield from read_chats(file, on_bad if source.skip_bad else None)
        return
    for text in read_texts(file):
        if source.text:
            yield text_document(text)
        elif (example := story_example(text)) is not None:
            yield chat_document(example, origin=text)


def _root(source: Source, data: Path | None) -> Path:
    if data is None:
        raise ConfigError(f"the recipe trains on {source.name}: say with --data where the data is")
    return Path(data)
