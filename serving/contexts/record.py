"""What is known of a stored context besides its chunks: whose it is, its tokens, and what made its cache."""

import dataclasses
import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import xxhash

from jaxllm.atomic import atomic_file
from jaxllm.errors import CheckpointError, ContextGone
from jaxllm.kv.codecs import RAW, WIDTHS
from jaxllm.kv.recompute import LOST
from jaxllm.tokenizer import MAX_TOKEN_ID

VERSION = 1
_MOST_BYTES = 1 << 28
_ROWS = ("tokens", "bits", "mass", "seen", "files")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """What made a context's keys and values: they are of no use to anything else.

    Attributes:
      model: fingerprint of the bundle, its tokenizer included.
      level: of the bundle, in percent.
      adapter: name of the low-rank adapter; empty for none.
      codec: how chunks are stored.
      chunk_tokens: of each.
      dtype: of the cache.
    """

    model: str
    level: int
    adapter: str
    codec: str
    chunk_tokens: int
    dtype: str

    def require(self, other: "Origin", name: str) -> None:
        """Checks that `other` made it too.

        Raises:
          ContextGone: it did not; the message names what differs.
        """
        ours, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        differing = [each for each in ours if ours[each] != theirs[each]]
        if differing:
            facts = ", ".join(f"{each} {ours[each]!s:.40} (here {theirs[each]!s:.40})" for each in differing)
            raise ContextGone(
                f"the context {name} is of another model or of other settings: {facts}; open it with those, "
                "or delete it"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A stored context.

    Attributes:
      name: unique in the store.
      app: whose it is.
      origin: what made its cache.
      tokens: all of it, as text of last resort: whatever else is lost can be computed again from them.
      bits: of each chunk in order, or `LOST`; tokens behind the last chunk are computed again.
      mass: of each chunk, the attention that its tokens got so far, and
      seen: how much they could have got (see `jaxllm.kv.tolerance`).
      files: of each chunk, the name of the segment that holds it; empty where it is lost.
      pinned: never evicted to make room for another app's.
      used: counts up with every use in the store.
    """

    name: str
    app: str
    origin: Origin
    tokens: tuple[int, ...] = ()
    bits: tuple[int, ...] = ()
    mass: tuple[float, ...] = ()
    seen: tuple[float, ...] = ()
    files: tuple[str, ...] = ()
    pinned: bool = False
    used: int = 0

    @property
    def segments(self) -> tuple[str, ...]:
        """The segments that hold some chunk."""
        return tuple(sorted(set(self.files) - {""}))

    def lose(self, chunks: Set[int]) -> "Record":
        """This context with some chunks to be computed again."""
        bits = tuple(LOST if place in chunks else each for place, each in enumerate(self.bits))
        files = tuple("" if place in chunks else each for place, each in enumerate(self.files))
        return dataclasses.replace(self, bits=bits, files=files)

    def beside(self, resident: Mapping[int, int]) -> "Record":
        """This context with the widths of those chunks that are in memory alone, by number."""
        bits = tuple(resident.get(n, LOST) if each == LOST else each for n, each in enumerate(self.bits))
        return dataclasses.replace(self, bits=bits)

    def write(self, path: Path) -> None:
        """Replaces the record's file, whole or not at all."""
        # Not `asdict`, which copies every token.
        fields = {**vars(self), "origin": vars(self.origin)}
        body = json.dumps(fields, separators=(",", ":"), sort_keys=True)
        whole = {"version": VERSION, "xxh3_128": xxhash.xxh3_128_hexdigest(body.encode()), "record": body}
        with atomic_file(path) as file:
            file.write(json.dumps(whole).encode())

    @classmethod
    def read(cls, path: Path) -> "Record":
        """Reads what `write` wrote.

        Raises:
          CheckpointError: it is missing, corrupt or of another version.
        """
        try:
            with path.open("rb") as file:
                raw = file.read(_MOST_BYTES + 1)
            if len(raw) > _MOST_BYTES:
                raise CheckpointError(f"{path}: too large for the record of a context")
            whole = json.loads(raw)
            if whole["version"] != VERSION:
                raise CheckpointError(
                    f"{path} is of version {whole['version']!s:.20}, this jaxllm reads {VERSION}"
                )
            if xxhash.xxh3_128_hexdigest(whole["record"].encode()) != whole["xxh3_128"]:
                raise CheckpointError(f"{path} is corrupt")
            return cls._of(json.loads(whole["record"]))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is no record of a context ({error!r:.120})") from error

    @classmethod
    def _of(cls, body: Mapping[str, Any]) -> "Record":
        rows = {name: tuple(body[name]) for name in _ROWS if name in body}
        record = cls(**{**body, **rows, "origin": Origin(**body["origin"])})
        chunk_tokens = record.origin.chunk_tokens
        good = (
            all(type(each) is int and 0 <= each <= MAX_TOKEN_ID for each in record.tokens)
            and all(each in (LOST, RAW, *WIDTHS) for each in record.bits)
            and len(record.bits) == len(record.mass) == len(record.seen) == len(record.files)
            and all(type(each) is float and 0 <= each < float("inf") for each in record.mass + record.seen)
            and len(record.bits) <= len(record.tokens) // max(1, chunk_tokens)
            and all(isinstance(each, str) and (not each or Path(each).name == each) for each in record.files)
            and all(
                (bits == LOST) == (not file) for bits, file in zip(record.bits, record.files, strict=True)
            )
            and type(record.used) is int
        )
        if not good:
            raise ValueError("its chunks, tokens and files do not fit each other")
        return record
