"""What a folder of exported programs holds: signatures, the shapes they take, and whose weights they need.

    program.json       this manifest
    tokenizer.json     see `jaxllm.tokenizer.TokenizerFiles`
    weights.safetensors, *.jaxexport     or     *.tflite

A signature is one compiled step: `prefill_16`, `decode`, `verify_8`, and of a level `level_30_decode`. The
manifest says all that a loop over them needs, so that running them takes neither model code nor the bundle.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import xxhash

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError, ProgramError
from jaxllm.tokenizer import TokenizerFiles

# "live" programs are in no folder: what a process traces for itself.
ProgramFormat = Literal["stablehlo", "tflite", "iree", "live"]
FORMATS: tuple[ProgramFormat, ...] = ("stablehlo", "tflite", "iree")
Kind = Literal["prefill", "decode", "verify"]
Precision = Literal["f32", "bf16", "int8", "w8a8"]

MANIFEST, TOKENIZER, WEIGHTS = "program.json", "tokenizer.json", "weights.safetensors"
VERSION = 1
WHOLE = 100
KEYS, VALUES = "kv_cache_k_{}", "kv_cache_v_{}"
# What the names of an adapter's sides end in, behind their parameter's.
LEFT, RIGHT = ".left", ".right"
_READ_BYTES = 1 << 24
_MAX_MANIFEST_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature:
    """One program: `tokens` new tokens of a level, in the file `file`."""

    kind: Kind
    tokens: int
    level: int
    file: str

    @property
    def name(self) -> str:
        """What runtimes know it by; LiteRT-LM must not take a level's for the whole model's."""
        own = "decode" if self.kind == "decode" else f"{self.kind}_{self.tokens}"
        return own if self.level == WHOLE else f"level_{self.level}_{own}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Argument:
    """A weight that a level's programs take: which stored array, and of it so many leading units."""

    stored: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramLevel:
    """A level: the sub-model, and by name the weights that its programs take (none where they hold them)."""

    cfg: ModelConfig
    weights: Mapping[str, Argument]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredFile:
    """Size and checksum of a file of the folder."""

    size_bytes: int
    xxh3_128: str

    @classmethod
    def of(cls, path: Path) -> "StoredFile":
        """As the file is."""
        digest = xxhash.xxh3_128()
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
        return cls(size_bytes=path.stat().st_size, xxh3_128=digest.hexdigest())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """A folder of programs.

    Attributes:
      format: what the programs are.
      name: the model's name, for people.
      model: fingerprint of the bundle that they were made of; their weights carry the same.
      context_tokens: S, the room of the caches.
      precision: of the weight matrices, and for w8a8 of what they are multiplied with.
      cache_dtype: of keys and values.
      platforms: that the programs run on.
      levels: by percent; 100 is the whole model.
      signatures: the programs.
      files: all files but the manifest, by name.
      made_with: versions of what wrote it, for people.
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

    def chunk_tokens(self, level: int) -> tuple[int, ...]:
        """Prefill chunk lengths of a level, ascending."""
        return tuple(sorted(each.tokens for each in self._of(level) if each.kind == "prefill"))

    def verify_tokens(self, level: int) -> tuple[int, ...]:
        """Tree sizes of a level, ascending."""
        return tuple(sorted(each.tokens for each in self._of(level) if each.kind == "verify"))

    def signature(self, kind: Kind, tokens: int, level: int) -> Signature:
        """A program.

        Raises:
          ProgramError: the folder has none such.
        """
        for each in self._of(level):
            if (each.kind, each.tokens) == (kind, tokens):
                return each
        names = ", ".join(each.name for each in self.signatures)
        raise ProgramError(
            f"there is no {kind} program of {tokens} tokens for level {level}, only {names}; export the "
            "model again with it"
        )

    def cache_shapes(self, level: int) -> dict[str, tuple[int, ...]]:
        """Shapes `[1, K, S, H]` of a level's caches by name."""
        return cache_shapes(self.levels[level].cfg, self.context_tokens)

    def _of(self, level: int) -> list[Signature]:
        return [each for each in self.signatures if each.level == level]

    def write(self, folder: Path) -> None:
        """Writes `program.json`."""
        data = {"version": VERSION, **dataclasses.asdict(self)}
        (folder / MANIFEST).write_text(json.dumps(data, indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Reads and checks `program.json`, and that all files are there in their size.

        Raises:
          ProgramError: the folder is no program, incomplete, or of another version.
        """
        path = folder / MANIFEST
        try:
            if path.stat().st_size > _MAX_MANIFEST_BYTES:
                raise ProgramError(f"{path}: {path.stat().st_size} bytes are no manifest")
            data = json.loads(path.read_text(encoding="utf-8"))
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
        except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
            raise ProgramError(f"{path}: malformed ({error!s:.200}); export the model again") from error
        for name, stored in manifest.files.items():
            if Path(name).name != name:
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
        fields["signatures"] = tuple(Signature(**each) for each in fields["signatures"])
        fields["files"] = {name: StoredFile(**each) for name, each in fields["files"].items()}
        fields["levels"] = {int(level): _level(each) for level, each in fields["levels"].items()}
        manifest = cls(**fields)
        unknown = [each.file for each in manifest.signatures if each.file not in manifest.files]
        homeless = [each.name for each in manifest.signatures if each.level not in manifest.levels]
        if unknown or homeless or WHOLE not in manifest.levels:
            raise ValueError(f"programs without a file or level: {[*unknown, *homeless]}")
        return manifest

    def require_intact(self, folder: Path, name: str) -> Path:
        """The path of a file whose checksum is right.

        Raises:
          ProgramError: it is not.
        """
        path = folder / name
        if StoredFile.of(path) != self.files[name]:
            raise ProgramError(f"{path}: the checksum is wrong; copy the folder again or export it again")
        return path


def cache_shapes(cfg: ModelConfig, context_tokens: int) -> dict[str, tuple[int, ...]]:
    """Shapes `[1, K, S, H]` of the caches of a model by name."""
    shapes = {}
    for layer in range(cfg.layers):
        shape = (1, cfg.units(layer).kv_heads, context_tokens, cfg.head_dim)
        shapes[KEYS.format(layer)] = shapes[VALUES.format(layer)] = shape
    return shapes


def write_tokenizer(folder: Path, files: TokenizerFiles) -> None:
    """Writes the tokenizer beside the programs."""
    (folder / TOKENIZER).write_text(json.dumps(files.to_json()), encoding="utf-8")


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """The tokenizer beside the programs.

    Raises:
      ProgramError: it is malformed.
    """
    try:
        return TokenizerFiles.from_json(json.loads((folder / TOKENIZER).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise ProgramError(
            f"{folder / TOKENIZER}: malformed ({error!s:.200}); export the model again"
        ) from error


def _level(data: dict[str, Any]) -> ProgramLevel:
    weights = {
        name: Argument(stored=each["stored"], shape=tuple(each["shape"]))
        for name, each in data["weights"].items()
    }
    return ProgramLevel(cfg=ModelConfig.from_json(data["cfg"]), weights=weights)
