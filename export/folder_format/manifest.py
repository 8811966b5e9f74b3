"""Defines the manifest of a folder of exported programs: their signatures, shapes and weights.

    program.json       this manifest
    program.sig        its signature, if a publisher signed it (see `publisher`)
    tokenizer.json     see `jaxllm.text.tokenizer.TokenizerFiles`
    weights.safetensors, *.jaxexport     or     *.tflite

A signature names one program, an exported bucket: `prefill_16`, `decode`, `block_8`, `verify_8`; of a level
`level_30_decode`; over caches shorter than the context `cache_512_decode`. `encode_64` encodes a source of
an encoder-decoder, and `tiny_lm_64` a row of a prompt to plan a request. The manifest has all facts that a
loop over programs needs, so that running them requires neither model code nor the bundle.
"""

import collections
import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import xxhash

from jaxllm.config import FULL_LEVEL
from jaxllm.errors import CheckpointError, ConfigError, ProgramError
from jaxllm.export.folder_format.parts import (
    STAGE_FILES,
    AdapterInputs,
    GoldenAnswer,
    ProgramLevel,
    StageFacts,
    TinyLmFacts,
    adapter_file,
    read_part,
)
from jaxllm.export.folder_format.signature import (
    Interface,
    Kind,
    Signature,
    cache_shapes,
    interface_of,
    source_shapes,
)
from jaxllm.files.input_files import open_regular, read_bytes
from jaxllm.layer_configs import require
from jaxllm.options import check_options, option
from jaxllm.text.tokenizer import TokenizerFiles

# Files of a standalone device folder: the modules of the loop, and its entry point; and of a store of two.
LOOP, MAIN, STORE = "loop.pyz", "__main__.py", "store.json"
WEIGHTS, TOKENIZER = "weights.safetensors", "tokenizer.json"
# The chat template for runtimes without Jinja (see `jaxllm.export.chat_pieces`).
CHAT = "chat.json"
TINY_WEIGHTS, TINY_TOKENIZER = "tiny_lm.safetensors", "tiny_lm_tokenizer.json"
_READ_BYTES = 1 << 20


def malformed(path: Path, error: Exception) -> ProgramError:
    """The error of a file that cannot be parsed."""
    return ProgramError(f"{path}: malformed ({error!s:.200}); export the model again")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredFile:
    """Size and checksums of a file of the folder: a fast one against damage, and a secure one, which the
    signature of the manifest covers."""

    size_bytes: int = option(low=0, high=1 << 50)
    xxh3_128: str
    sha256: str = ""

    def __post_init__(self) -> None:
        check_options(self)

    @classmethod
    def of(cls, path: Path, *, secure: bool = True) -> "StoredFile":
        """The record of a file on disk; without the secure checksum, which takes longer, unless `secure`.

        Raises:
          OSError: the file cannot be read, or is no regular file.
        """
        digest, sha256, size = xxhash.xxh3_128(), None, 0
        if secure:
            # Here, because a start needs none, and OpenSSL takes megabytes.
            import hashlib

            sha256 = hashlib.sha256()
        with open_regular(path) as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
                if sha256 is not None:
                    sha256.update(block)
                size += len(block)
        return cls(
            size_bytes=size, xxh3_128=digest.hexdigest(), sha256="" if sha256 is None else sha256.hexdigest()
        )

    def is_intact(self, found: "StoredFile") -> bool:
        """Whether a file that was found has this size and fast checksum."""
        return (found.size_bytes, found.xxh3_128) == (self.size_bytes, self.xxh3_128)


def write_tokenizer(path: Path, files: TokenizerFiles) -> None:
    """Writes a tokenizer into a folder of programs."""
    path.write_text(json.dumps(files.to_json()), encoding="utf-8")


# "live" programs are in no folder: a process traces them itself.
ProgramFormat = Literal["stablehlo", "tflite", "live"]
Precision = Literal["f32", "bf16", "int8", "int4", "w8a8"]
CacheDtype = Literal["float32", "bfloat16", "float16", "int8"]
Found = TypeVar("Found")

MANIFEST = "program.json"
VERSION = 1
MAX_MANIFEST_BYTES = 16 << 20
_MAX_TOKENIZER_BYTES = 64 << 20
_MAX_SIGNATURES = 1 << 12
_READ_ERRORS = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, ConfigError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """A folder of programs.

    Attributes:
      model: fingerprint of the exported bundle, also stored with the weights.
      context_tokens: length of the longest caches.
      precision: precision of the weight matrices, and for w8a8 also of activations.
      levels: levels by percent; 100 is the whole model.
      files: all files but the manifest, by name.
      made_with: versions of the packages that wrote it, for display.
      left_out: features of the bundle that the programs do not have, for display.
      tiny_lm: tiny LM that plans requests; None for none.
      adapters: adapters that programs accept as an input; None for none.
      stages: programs of single stages, for two processors; None for none.
      golden: answers that a device compares with its own at a first start.
      release: number of the publisher, higher for each update (see `jaxllm.export.device.store`).
    """

    format: ProgramFormat
    name: str
    model: str
    context_tokens: int = option(low=1)
    precision: Precision
    cache_dtype: CacheDtype
    platforms: tuple[str, ...]
    levels: Mapping[int, ProgramLevel]
    signatures: tuple[Signature, ...]
    files: Mapping[str, StoredFile]
    made_with: Mapping[str, str]
    left_out: tuple[str, ...] = ()
    tiny_lm: TinyLmFacts | None = None
    adapters: AdapterInputs | None = None
    stages: StageFacts | None = None
    golden: tuple[GoldenAnswer, ...] = ()
    release: int = option(0, low=0, high=1 << 50)

    def __post_init__(self) -> None:
        check_options(self)
        named = all(isinstance(each, str) for each in self.made_with.values())
        require(named, "made_with has values that are no text")
        count, whole = len(self.signatures), self.levels.get(FULL_LEVEL)
        require(1 <= count <= _MAX_SIGNATURES, f"there are {count} programs, not 1 to {_MAX_SIGNATURES}")
        if whole is None or not all(1 <= level <= FULL_LEVEL for level in self.levels):
            raise ConfigError("there is no whole model, or a level of other percents than 1 to 100")
        fits = self.context_tokens <= (window := whole.cfg.window_tokens)
        require(fits, f"context_tokens {self.context_tokens} is more than the window of {window}")
        kinds = collections.defaultdict(list)
        for each in self.signatures:
            room = self.room(each)
            # A row of the tiny LM is in no cache.
            tokens = 0 if each.kind == "tiny_lm" else each.tokens
            fits = each.level in self.levels and tokens <= room <= self.context_tokens
            require(fits, f"{each.name} is of no level, or does not fit its caches")
            kinds[each.level, room].append(each.kind)
        for level, entry in self.levels.items():
            for cache in {self.context_tokens, *self.cache_tokens(level)}:
                answers = kinds[level, cache].count("decode") == 1 and "prefill" in kinds[level, cache]
                require(answers, f"level {level} cannot read a prompt and decode in {cache} tokens")
            encoder, sources = entry.cfg.encoder, self.sizes("encode", level)
            both = (encoder is not None) == bool(sources)
            require(both, f"level {level} has an encoder, or programs that encode, but not both")
            fits = encoder is None or sources[-1] <= encoder.window_tokens
            require(fits, f"level {level} encodes more tokens than its encoder's window")
        tiny, rows = self.tiny_lm, self.sizes("tiny_lm")
        require((tiny is None) == (not rows), "there is a tiny LM, or programs of one, but not both")
        if tiny is not None and rows[-1] != tiny.row_tokens:
            raise ConfigError(f"no program of the tiny LM reads its rows of {tiny.row_tokens} tokens")
        if self.adapters is not None:
            require(self.adapters.shapes.keys() == self.levels.keys(), "adapters are of other levels")
        for each in self.golden:
            fits = each.level in self.levels and max(each.prompt + each.tokens) < whole.cfg.vocab_size
            fits &= len(each.prompt) + len(each.tokens) <= self.context_tokens
            require(fits, f"the golden answer of level {each.level} is none of these programs")
        if (stages := self.stages) is not None:
            fits = len(stages.shadowed) == whole.cfg.layers and stages.chunk_tokens[-1] <= self.context_tokens
            require(fits, "stages are of other layers, or do not fit the context")

    def room(self, signature: Signature) -> int:
        """Positions of a program's caches (S)."""
        return signature.cache_tokens or self.context_tokens

    def interface(self, signature: Signature) -> Interface:
        """The arrays of a program besides its weights."""
        level = signature.level
        return interface_of(
            signature,
            self.levels[level].cfg,
            self.room(signature),
            np.dtype(self.cache_dtype),
            source_tokens=max(self.sizes("encode", level), default=0),
            adapter_size=0 if self.adapters is None else self.adapters.size(level),
            tiny_lm=self.tiny_lm,
        )

    def cache_bytes(self, level: int, tokens: int) -> int:
        """Bytes of one set of a level's caches of `tokens` positions."""
        return self._bytes(self.cache_shapes(level, tokens))

    def source_bytes(self, level: int) -> int:
        """Bytes of a level's source; 0 for a model without an encoder."""
        return self._bytes(self.source_shapes(level))

    def _bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        return np.dtype(self.cache_dtype).itemsize * sum(map(math.prod, shapes.values()))

    def cache_tokens(self, level: int) -> tuple[int, ...]:
        """Lengths of caches that a level has programs for, ascending."""
        return tuple(sorted({self.room(each) for each in self.signatures if each.level == level}))

    def sizes(self, kind: Kind, level: int = FULL_LEVEL, cache_tokens: int = 0) -> tuple[int, ...]:
        """Numbers of tokens (T) of a level's programs of a kind, ascending, over caches of a length; 0 for
        the whole context."""
        own = self._of(level, cache_tokens or self.context_tokens)
        return tuple(sorted(each.tokens for each in own if each.kind == kind))

    def source_shapes(self, level: int) -> dict[str, tuple[int, ...]]:
        """Shapes of a level's source: `[1, K, R, H]` by name, where R is the length of the longest, and its
        number of tokens `[1]`."""
        return source_shapes(self.levels[level].cfg, max(self.sizes("encode", level), default=0))

    def coding(self, kind: Kind, bits: int, level: int, cache_tokens: int) -> Signature | None:
        """Returns the program that encodes or loads chunks of `bits` bits over caches of a length; None for
        none."""
        own = self._of(level, cache_tokens)
        return next((each for each in own if (each.kind, each.bits) == (kind, bits)), None)

    def signature(self, kind: Kind, tokens: int, level: int, cache_tokens: int) -> Signature:
        """The signature of these values.

        Raises:
          ProgramError: the folder has no such program.
        """
        for each in self._of(level, cache_tokens):
            if (each.kind, each.tokens) == (kind, tokens):
                return each
        names = ", ".join(each.name for each in self.signatures)
        raise ProgramError(
            f"there is no {kind} program of {tokens} tokens for level {level} in {cache_tokens}, only "
            f"{names}; export the model again with it"
        )

    def cache_shapes(self, level: int, cache_tokens: int) -> dict[str, tuple[int, ...]]:
        """Shapes `[1, K, S, H]` of a level's caches by name."""
        return cache_shapes(self.levels[level].cfg, cache_tokens, np.dtype(self.cache_dtype))

    def _of(self, level: int, cache_tokens: int) -> list[Signature]:
        return [each for each in self.signatures if each.level == level and self.room(each) == cache_tokens]

    def write(self, folder: Path) -> None:
        """Writes `program.json`."""
        data = {"version": VERSION, **dataclasses.asdict(self)}
        (folder / MANIFEST).write_text(json.dumps(data, indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Reads and checks `program.json`, and the existence and size of all files.

        Raises:
          ProgramError: the folder has no programs, is incomplete, or of another version.
        """
        path = folder / MANIFEST
        try:
            raw = read_bytes(path, MAX_MANIFEST_BYTES)
        except OSError as error:
            raise ProgramError(
                f"{folder}: not a folder of programs ({error.strerror}); make one with `jaxllm export`"
            ) from error
        manifest = cls.parse(raw, path)
        for name, stored in manifest.files.items():
            file = folder / name
            if not file.is_file() or file.stat().st_size != stored.size_bytes:
                raise ProgramError(f"{file}: missing or truncated; copy the folder again or export it again")
        return manifest

    @classmethod
    def parse(cls, raw: bytes, path: Path) -> "Manifest":
        """The manifest of the bytes of `program.json`, which errors name by `path`.

        Raises:
          ProgramError: it is malformed or of another version.
        """
        try:
            data = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise malformed(path, error) from error
        version = data.pop("version", None) if isinstance(data, dict) else None
        if version != VERSION:
            raise ProgramError(
                f"{path}: version {version!r:.40}, this jaxllm reads {VERSION}; export the model again"
            )
        try:
            manifest: Manifest = read_part(cls, data)
            wanted = [TOKENIZER, *(each.file for each in manifest.signatures)]
            if manifest.tiny_lm is not None and manifest.tiny_lm.own_tokenizer:
                wanted.append(TINY_TOKENIZER)
            if manifest.adapters is not None:
                wanted += map(adapter_file, manifest.adapters.names)
            if manifest.stages is not None:
                wanted += STAGE_FILES.values()
            unknown = [each for each in wanted if each not in manifest.files]
            require(manifest.format != "live", "format 'live'")
            require(not unknown, f"there is no file {', '.join(unknown)}")
        except _READ_ERRORS as error:
            raise malformed(path, error) from error
        for name in manifest.files:
            if Path(name).name != name or "\0" in name:
                raise ProgramError(f"{path}: {name!r:.80} is not a file of its folder")
        return manifest

    def read_tokenizer(self, folder: Path, name: str = TOKENIZER) -> TokenizerFiles:
        """Reads a tokenizer of the folder, by default the model's.

        Raises:
          ProgramError: it is malformed, or see `read_intact`.
        """
        raw = self.read_intact(folder, name, most_bytes=_MAX_TOKENIZER_BYTES)
        try:
            return TokenizerFiles.from_json(json.loads(raw))
        except (ValueError, RecursionError, CheckpointError) as error:
            raise malformed(folder / name, error) from error

    def read_intact(self, folder: Path, name: str, *, most_bytes: int) -> bytes:
        """The content of a file.

        Raises:
          ProgramError: its checksum is wrong, it is larger than `most_bytes`, or not in the manifest.
        """

        def read(path: Path) -> tuple[bytes, StoredFile]:
            raw = read_bytes(path, most_bytes)
            return raw, StoredFile(size_bytes=len(raw), xxh3_128=xxhash.xxh3_128_hexdigest(raw))

        return self._intact(folder, name, read)

    def require_intact(self, folder: Path, name: str) -> Path:
        """The path of a file, after checking it.

        Raises:
          ProgramError: its checksum is wrong, or it is not in the manifest.
        """
        return self._intact(folder, name, lambda path: (path, StoredFile.of(path, secure=False)))

    def _intact(self, folder: Path, name: str, read: Callable[[Path], tuple[Found, StoredFile]]) -> Found:
        path = folder / name
        if name not in self.files:
            raise ProgramError(f"{folder} has no {name}; export the model again")
        try:
            value, found = read(path)
        except OSError as error:
            raise ProgramError(
                f"{path}: cannot be read ({error.strerror}); copy the folder again or export it again"
            ) from error
        if not self.files[name].is_intact(found):
            raise ProgramError(f"{path}: the checksum is wrong; copy the folder again or export it again")
        return value
