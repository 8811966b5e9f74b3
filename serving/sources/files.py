"""Chooses the files of models from lists of names: a package's, or those of a repository of the hub.

Chosen by allow-lists: configs, tokenizers, safetensors and GGUF files. Pickles and code are never among
them.
"""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import Generic, TypeVar

PathLike = TypeVar("PathLike", bound=PurePath)
CONFIG = "config.json"
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
INDEX = "model.safetensors.index.json"
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
# Image encoders and statistics of texts, beside a model.
_NO_MODEL = re.compile(r"(mmproj|.*imatrix).*")
_SMALL = {
    CONFIG, INDEX, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "added_tokens.json",
    "special_tokens_map.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.json",
    "chat_template.jinja", "preprocessor_config.json", "processor_config.json",
}  # fmt: skip
_VOCABULARIES = (".model", ".spm", ".tiktoken")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclasses.dataclass(frozen=True)
class Choice(Generic[PathLike]):
    """A model among files.

    Attributes:
      path: a GGUF file (of a split one the first part), or a folder of safetensors.
      files: all files that it is read from.
    """

    path: PathLike
    files: tuple[PathLike, ...]

    @property
    def format(self) -> str:
        """Name of its format."""
        return format_of(self.path)


def format_of(path: PurePath) -> str:
    """Name of the format of a model at a path."""
    return "GGUF" if path.suffix == ".gguf" else "safetensors"


def models_in(paths: Iterable[PathLike]) -> list[Choice[PathLike]]:
    """The models among files: folders first, then GGUF files, each by name."""
    folders: dict[PathLike, list[PathLike]] = {}
    files: dict[PathLike, list[PathLike]] = {}
    for path in sorted(set(paths)):
        if path.suffix == ".gguf":
            if _NO_MODEL.match(path.name.lower()) is None:
                named = _PART.fullmatch(path.name)
                first = path.with_name(f"{named[1]}-00001-of-{named[3]}.gguf") if named else path
                files.setdefault(first, []).append(path)
        elif path.name in _SMALL or path.suffix in _VOCABULARIES or WEIGHTS.fullmatch(path.name):
            folders.setdefault(path.parent, []).append(path)
    for folder, inside in folders.items():
        if folder / "model.safetensors" in inside:
            # Shards are then a copy.
            folders[folder] = [each for each in inside if each.name != INDEX and "-of-" not in each.name]
    whole = {
        folder: inside
        for folder, inside in folders.items()
        if any(each.name == CONFIG for each in inside)
        and any(WEIGHTS.fullmatch(each.name) for each in inside)
    }
    return [Choice(path, tuple(inside)) for path, inside in (whole | files).items()]


def is_pickle(path: PurePath) -> bool:
    """Whether a file is named like weights that are not read, mostly pickles."""
    return path.suffix.lower() in _PICKLES
