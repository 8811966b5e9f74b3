"""Defines the manifest of a folder of exported programs: their signatures, shapes and weights.

    program.json       this manifest
    tokenizer.json     see `jaxllm.text.tokenizer.TokenizerFiles`
    weights.safetensors, *.jaxexport     or     *.tflite

A signature names one program, an exported bucket: `prefill_16`, `decode`, `block_8`, `verify_8`; of a level
`level_30_decode`; over caches shorter than the context `cache_512_decode`. `encode_64` encodes a source of
an encoder-decoder, and `tiny_lm_64` a row of a prompt to plan a request. The manifest has all facts that a
loop over programs needs, so that running them requires neither model code nor the bundle.
"""

import collections
import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import xxhash

from jaxllm.config import MAX_DIMENSION, WHOLE
from jaxllm.contexts.codecs import WIDTHS
from jaxllm.errors import ConfigError, ProgramError
from jaxllm.export.folder_format.adapters import AdapterInputs, adapter_file
from jaxllm.export.folder_format.arrays import cache_shapes, source_shapes
from jaxllm.export.folder_format.codecs import CHUNK_TOKENS, require_codec
from jaxllm.export.folder_format.files import StoredFile, require_ints, require_text
from jaxllm.export.folder_format.levels import ProgramLevel, read_level
from jaxllm.export.folder_format.stages import STAGE_FILES, StageFacts
from jaxllm.export.folder_format.tiny_lm import TINY_TOKENIZER, TinyLmFacts
from jaxllm.files.input_files import read_bytes

# "live" programs are in no folder: a process traces them itself.
ProgramFormat = Literal["stablehlo", "tflite", "live"]
FORMATS: tuple[ProgramFormat, ...] = ("stablehlo", "tflite")
Kind = Literal["prefill", "decode", "block", "verify", "encode", "tiny_lm", "encode_chunks", "load_chunks"]
CODED_KINDS: tuple[Kind, ...] = ("encode_chunks", "load_chunks")
Precision = Literal["f32", "bf16", "int8", "w8a8"]
CACHE_DTYPES = ("float32", "bfloat16")

MANIFEST, TOKENIZER, WEIGHTS = "program.json", "tokenizer.json", "weights.safetensors"
VERSION = 2
# Suffixes of the names of an adapter's factors, after the parameter's name.
LEFT, RIGHT = ".left", ".right"
_MAX_MANIFEST_BYTES = 16 << 20
_MAX_SIGNATURES = 1 << 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature:
    """One program.

    Attributes:
      kind: prefill, decode, block (decodes several tokens), verify, encode (encodes a source), tiny_lm
        (encodes a row of a prompt, to plan), encode_chunks or load_chunks (of contexts).
      tokens: T, number of new tokens; maximum for a block; length of the longest source for an encode
        program.
      level: sub-model, in percent; 100 for a tiny LM's, which all levels share.
      cache_tokens: S, length of its caches; 0 for the whole context.
      file: name of its file.
      codec, bits: codec name and width of chunks of contexts; empty and 0 for other programs.
    """

    kind: Kind
    tokens: int
    level: int
    cache_tokens: int = 0
    file: str
    codec: str = ""
    bits: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"a program of kind {self.kind!r:.40}")
        require_text("a program's file", self.file)
        require_ints("a program", (self.tokens, self.level), 1, MAX_DIMENSION)
        require_ints("a program's cache", (self.cache_tokens,), 0, MAX_DIMENSION)
        if self.kind in CODED_KINDS:
            require_codec(self.codec, self.bits, self.tokens)
        elif self.codec or self.bits:
            raise ValueError("a codec of a program that has none")

    @property
    def name(self) -> str:
        """Its name in runtimes. Levels and short caches come first, so that LiteRT-LM, which matches
        prefixes, does not mistake their signatures for the model's."""
        parts = [] if self.level == WHOLE else [f"level_{self.level}"]
        parts += [f"cache_{self.cache_tokens}"] if self.cache_tokens else []
        size = self.bits or self.tokens
        parts += [self.kind] if self.kind == "decode" else [f"{self.kind}_{size}"]
        return "_".join(parts)


def level_signatures(
    level: int,
    *,
    chunk_tokens: Sequence[int],
    verify_tokens: Sequence[int],
    block_tokens: int = 0,
    cache_tokens: Sequence[int] = (),
    encode_tokens: Sequence[int] = (),
    codec: tuple[str, int] = ("", 0),
    file: Callable[[str], str] = lambda _: "",
) -> list[Signature]:
    """Lists the signatures of a level.

    Args:
      level: level in percent.
      chunk_tokens, verify_tokens: lengths of prefill chunks and sizes of trees.
      block_tokens: maximum number of tokens that a program decodes; 0 for only single tokens.
      cache_tokens: lengths of caches besides the whole context; each gets the chunks and trees that fit.
      encode_tokens: lengths of sources; these programs have no caches.
      codec: codec of chunks, and number of tokens of a program's chunks; 0 for no such programs.
      file: function from a program's name to its file.
    """
    found = []
    for cache in (*cache_tokens, 0):
        sizes: list[tuple[Kind, int]] = [
            *(("prefill", each) for each in chunk_tokens),
            ("decode", 1),
            *([("block", block_tokens)] if block_tokens else []),
            *(("verify", each) for each in verify_tokens),
            *(("encode", each) for each in encode_tokens if not cache),
        ]
        for kind, tokens in sizes:
            if not cache or tokens <= cache:
                bare = Signature(kind=kind, tokens=tokens, level=level, cache_tokens=cache, file="")
                found.append(dataclasses.replace(bare, file=file(bare.name)))
        coded = min(codec[1], cache or codec[1]) // CHUNK_TOKENS * CHUNK_TOKENS
        for kind, bits in itertools.product(CODED_KINDS if coded else (), WIDTHS):
            bare = Signature(
                kind=kind, tokens=coded, level=level, cache_tokens=cache, file="", codec=codec[0], bits=bits
            )
            found.append(dataclasses.replace(bare, file=file(bare.name)))
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """A folder of programs.

    Attributes:
      format: format of the programs.
      name: display name of the model.
      model: fingerprint of the exported bundle, also stored with the weights.
      context_tokens: length of the longest caches.
      precision: precision of the weight matrices, and for w8a8 also of activations.
      cache_dtype: dtype of keys and values.
      platforms: platforms that the programs run on.
      levels: levels by percent; 100 is the whole model.
      signatures: the programs.
      files: all files but the manifest, by name.
      made_with: versions of the packages that wrote it, for display.
      left_out: features of the bundle that the programs do not have, for display.
      tiny_lm: tiny LM that plans requests; None for none.
      adapters: adapters that programs accept as an input; None for none.
      stages: programs of single stages, for two processors; None for none.
    """

    format: ProgramFormat
    name: str
    model: str
    context_tokens: int
    precision: Precision
    cache_dtype: str
    platforms: tuple[str, ...]
    levels: Mapping[int, ProgramLevel]
    signatures: tuple[Signature, ...]
    files: Mapping[str, StoredFile]
    made_with: Mapping[str, str]
    left_out: tuple[str, ...] = ()
    tiny_lm: TinyLmFacts | None = None
    adapters: AdapterInputs | None = None
    stages: StageFacts | None = None

    def __post_init__(self) -> None:
        for what in (self.name, self.model, *self.platforms, *self.made_with.values(), *self.left_out):
            require_text("the manifest", what)
        require_ints("the number of programs", (len(self.signatures),), 1, _MAX_SIGNATURES)
        if WHOLE not in self.levels:
            raise ValueError("there is no whole model")
        for level in self.levels:
            require_ints("a level", (level,), 1, WHOLE)
        require_ints("context_tokens", (self.context_tokens,), 1, self.levels[WHOLE].cfg.window_tokens)
        if self.cache_dtype not in CACHE_DTYPES:
            raise ValueError(f"cache_dtype {self.cache_dtype!r:.40}")
        for each in self.signatures:
            room = self.room(each)
            # A row of the tiny LM is in no cache.
            tokens = 0 if each.kind == "tiny_lm" else each.tokens
            if each.level not in self.levels or tokens > room or room > self.context_tokens:
                raise ValueError(f"{each.name} is of no level, or does not fit its caches")
        kinds = collections.defaultdict(list)
        for each in self.signatures:
            kinds[each.level, self.room(each)].append(each.kind)
        for level in self.levels:
            for cache in {self.context_tokens, *self.cache_tokens(level)}:
                if kinds[level, cache].count("decode") != 1 or "prefill" not in kinds[level, cache]:
                    raise ValueError(f"level {level} cannot read a prompt and decode in {cache} tokens")
            encoder = self.levels[level].cfg.encoder
            sources = self.encode_tokens(level)
            if (encoder is not None) != bool(sources):
                raise ValueError(f"level {level} has an encoder, or programs that encode, but not both")
            if encoder is not None and sources[-1] > encoder.window_tokens:
                raise ValueError(f"level {level} encodes more tokens than its encoder's window")

        if (self.tiny_lm is None) != (not self.tiny_lm_tokens()):
            raise ValueError("there is a tiny LM, or programs of one, but not both")
        if self.tiny_lm is not None:
            self.tiny_lm.require_programs(self.tiny_lm_tokens())
        if self.adapters is not None and self.adapters.shapes.keys() != self.levels.keys():
            raise ValueError("adapters are of other levels")
        if self.stages is not None and (
            len(self.stages.shadowed) != self.levels[WHOLE].cfg.layers
            or self.stages.chunk_tokens[-1] > self.context_tokens
        ):
            raise ValueError("stages are of other layers, or do not fit the context")

    def tiny_lm_tokens(self) -> tuple[int, ...]:
        """Lengths of rows that the tiny LM has programs for, ascending."""
        return self._sizes("tiny_lm", WHOLE, self.context_tokens)

    def room(self, signature: Signature) -> int:
        """Positions of a program's caches (S)."""
        return signature.cache_tokens or self.context_tokens

    def cache_tokens(self, level: int) -> tuple[int, ...]:
        """Lengths of caches that a level has programs for, ascending."""
        return tuple(sorted({self.room(each) for each in self.signatures if each.level == level}))

    def chunk_tokens(self, level: int, cache_tokens: int) -> tuple[int, ...]:
        """Prefill chunk lengths of a level over caches of a length, ascending."""
        return self._sizes("prefill", level, cache_tokens)

    def verify_tokens(self, level: int, cache_tokens: int) -> tuple[int, ...]:
        """Tree sizes of a level over caches of a length, ascending."""
        return self._sizes("verify", level, cache_tokens)

    def encode_tokens(self, level: int) -> tuple[int, ...]:
        """Lengths of sources that a level of an encoder-decoder has programs for, ascending; the last one is
        the number of rows (R) of the source's keys and values."""
        return self._sizes("encode", level, self.context_tokens)

    def source_shapes(self, level: int) -> dict[str, tuple[int, ...]]:
        """Shapes of a level's source: `[1, K, R, H]` by name, and its number of tokens `[1]`."""
        return source_shapes(self.levels[level].cfg, max(self.encode_tokens(level), default=0))

    def block_tokens(self, level: int, cache_tokens: int) -> int:
        """Maximum number of tokens that a level decodes in one dispatch over caches of a length."""
        return max(self._sizes("block", level, cache_tokens), default=1)

    def coding(self, kind: Kind, bits: int, level: int, cache_tokens: int) -> Signature | None:
        """Returns the program that encodes or loads chunks of `bits` bits over caches of a length; None for
        none."""
        own = self._of(level, cache_tokens)
        return next((each for each in own if (each.kind, each.bits) == (kind, bits)), None)

    @property
    def codec(self) -> str:
        """Name of the codec of contexts that there are programs for; empty for none."""
        return next((each.codec for each in self.signatures if each.codec), "")

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
        return cache_shapes(self.levels[level].cfg, cache_tokens)

    def _stored(self, folder: Path, name: str) -> StoredFile:
        if name not in self.files:
            raise ProgramError(f"{folder} has no {name}; export the model again")
        return self.files[name]

    def _sizes(self, kind: Kind, level: int, cache_tokens: int) -> tuple[int, ...]:
        return tuple(sorted(each.tokens for each in self._of(level, cache_tokens) if each.kind == kind))

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
            data = json.loads(read_bytes(path, _MAX_MANIFEST_BYTES))
        except OSError as error:
            raise ProgramError(
                f"{folder}: not a folder of programs ({error.strerror}); make one with `jaxllm export`"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ProgramError(f"{path}: malformed ({error!s:.200}); export the model again") from error
        version = data.pop("version", None) if isinstance(data, dict) else None
        if version != VERSION:
            raise ProgramError(
                f"{path}: version {version!r:.40}, this jaxllm reads {VERSION}; export the model again"
            )
        try:
            manifest = cls._parsed(data)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, ConfigError) as error:
            raise ProgramError(f"{path}: malformed ({error!s:.200}); export the model again") from error
        for name, stored in manifest.files.items():
            if Path(name).name != name or "\0" in name:
                raise ProgramError(f"{path}: {name!r:.80} is not a file of its folder")
            file = folder / name
            if not file.is_file() or file.stat().st_size != stored.size_bytes:
                raise ProgramError(f"{file}: missing or truncated; copy the folder again or export it again")
        return manifest

    @classmethod
    def _parsed(cls, data: dict[str, Any]) -> "Manifest":
        fields = dict(data)
        for name, allowed in (("format", FORMATS), ("precision", get_args(Precision))):
            if fields[name] not in allowed:
                raise ValueError(f"{name} {fields[name]!r:.40}")
        fields["platforms"] = tuple(fields["platforms"])
        fields["left_out"] = tuple(fields.get("left_out", ()))
        fields["signatures"] = tuple(Signature(**each) for each in fields["signatures"])
        fields["files"] = {name: StoredFile(**each) for name, each in fields["files"].items()}
        fields["tiny_lm"] = TinyLmFacts.from_json(fields.get("tiny_lm"))
        fields["adapters"] = AdapterInputs.from_json(fields.get("adapters"))
        fields["stages"] = StageFacts.from_json(fields.get("stages"))
        fields["levels"] = {int(level): read_level(each) for level, each in fields["levels"].items()}
        manifest = cls(**fields)
        wanted = [TOKENIZER, *(each.file for each in manifest.signatures)]
        if manifest.tiny_lm is not None and manifest.tiny_lm.own_tokenizer:
            wanted.append(TINY_TOKENIZER)
        if manifest.adapters is not None:
            wanted += map(adapter_file, manifest.adapters.names)
        if manifest.stages is not None:
            wanted += STAGE_FILES.values()
        if unknown := [each for each in wanted if each not in manifest.files]:
            raise ValueError(f"there is no file {', '.join(unknown)}")
        return manifest

    def read_intact(self, folder: Path, name: str, *, most_bytes: int) -> bytes:
        """The content of a file.

        Raises:
          ProgramError: its checksum is wrong, it is larger than `most_bytes`, or not in the manifest.
        """
        path = folder / name
        stored = self._stored(folder, name)
        try:
            raw = read_bytes(path, most_bytes)
        except OSError as error:
            raise ProgramError(
                f"{path}: cannot be read ({error.strerror}); copy the folder again or export it again"
            ) from error
        if StoredFile(size_bytes=len(raw), xxh3_128=xxhash.xxh3_128_hexdigest(raw)) != stored:
            raise ProgramError(f"{path}: the checksum is wrong; copy the folder again or export it again")
        return raw

    def require_intact(self, folder: Path, name: str) -> Path:
        """The path of a file, after checking it.

        Raises:
          ProgramError: its checksum is wrong, or it is not in the manifest.
        """
        path = folder / name
        stored = self._stored(folder, name)
        try:
            found = StoredFile.of(path)
        except OSError as error:
            raise ProgramError(
                f"{path}: cannot be read ({error.strerror}); copy the folder again or export it again"
            ) from error
        if found != stored:
            raise ProgramError(f"{path}: the checksum is wrong; copy the folder again or export it again")
        return path
