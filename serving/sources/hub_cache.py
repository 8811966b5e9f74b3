"""Models of the hub on this machine: which files of Hugging Face's cache make up one, and which of them are
ours to remove.

The cache is `huggingface_hub`'s and shared with other programs. Beside a repository's snapshots lies
`jaxllm.json`, with the names that were pulled and every file that jaxllm has downloaded; others are never
removed. A pulled model is opened by this record alone, without a network.
"""

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from jaxllm.errors import CheckpointError, ConfigError, one_line
from jaxllm.files.atomic import atomic_file
from jaxllm.files.input_files import read_json
from jaxllm.formats import HUB
from jaxllm.serving.sources.files import INDEX, models_in

MAIN = "main"
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_PATH = r"[A-Za-z0-9][A-Za-z0-9._+/ -]{0,254}"
_NAME = re.compile(rf"hf:({_PART}/{_PART})(?:@({_PATH}))?(?::({_PATH}))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MARKS = "jaxllm.json"
# Ends the names of our unfinished downloads.
PARTIAL = ".jaxllm.incomplete"


@dataclasses.dataclass(frozen=True)
class HubName:
    """A model's name at the hub: `hf:OWNER/NAME[@REVISION][:FILE]`.

    Attributes:
      repository: owner and name.
      revision: a branch, tag or commit.
      file: a GGUF file of the repository; empty for its only model.
    """

    repository: str
    revision: str = MAIN
    file: str = ""

    @classmethod
    def parse(cls, text: str) -> "HubName":
        """Parses a name. Raises ConfigError if it is malformed."""
        found = _NAME.fullmatch(text)
        parts = [] if found is None else [part for each in found.groups() if each for part in each.split("/")]
        odd = any(".." in part or "--" in part or part in ("", ".") for part in parts)
        if found is None or odd or found[1].endswith(".git"):
            raise ConfigError(
                f"{text!r:.200} names no model of the hub; write hf:OWNER/NAME, hf:OWNER/NAME@REVISION or "
                "hf:OWNER/NAME:FILE.gguf, of letters, digits, '.', '-' and '_'"
            )
        if found[3] and not found[3].endswith(".gguf"):
            raise ConfigError(f"{text!r:.200} names a file that is no GGUF file; name one, or none")
        return cls(found[1], found[2] or MAIN, found[3] or "")

    def __str__(self) -> str:
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return f"{HUB}{self.repository}{revision}" + (f":{self.file}" if self.file else "")


@dataclasses.dataclass(frozen=True)
class Pulled:
    """A model that was pulled.

    Attributes:
      commit: its commit.
      path: its GGUF file in the commit's snapshot; empty for the snapshot itself.
      files: sizes in bytes of all of its files, by name.
      licence: name of its licence; empty if unknown.
    """

    commit: str
    path: str
    files: dict[str, int]
    licence: str


@dataclasses.dataclass(frozen=True)
class Marks:
    """The record of a repository.

    Attributes:
      pulled: models by name, each complete and verified.
      ours: names of files that jaxllm downloaded or began to, by commit.
    """

    pulled: dict[str, Pulled]
    ours: dict[str, list[str]]


@dataclasses.dataclass(frozen=True)
class CachedModel:
    """A model in the cache; `pulled` is whether jaxllm pulled it."""

    name: str
    path: Path
    format: str
    size_bytes: int
    licence: str
    pulled: bool


def cache() -> Path:
    """Folder of Hugging Face's cache. Raises ConfigError if `huggingface_hub` is not installed."""
    # It would tell the hub what it runs in.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        from huggingface_hub import constants
    except ImportError as error:
        raise ConfigError(
            "models of the hub need the package huggingface_hub; run `pip install 'jaxllm[hub]'`"
        ) from error
    return Path(constants.HF_HUB_CACHE)


def repository_folder(repository: str) -> Path:
    """Folder of a repository in the cache."""
    return cache() / f"models--{repository.replace('/', '--')}"


def read_marks(folder: Path) -> Marks:
    """The record in a repository's folder; empty if there is none. Raises CheckpointError if it is
    damaged."""
    path = folder / _MARKS
    if not path.exists():
        return Marks({}, {})
    data = read_json(path, "remove it")
    try:
        pulled = {str(name): Pulled(**each) for name, each in data["pulled"].items()}
        ours = {str(commit): [str(each) for each in names] for commit, names in data["ours"].items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({one_line(error)}); remove it") from error
    return Marks(pulled, ours)


def write_marks(folder: Path, marks: Marks) -> None:
    """Writes the record into a repository's folder; raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_file(folder / _MARKS) as file:
        file.write(json.dumps(dataclasses.asdict(marks), indent=1, sort_keys=True).encode())


def find_cached(name: HubName) -> Path | None:
    """The path of a pulled model; None if it was not pulled, or a file of it is gone."""
    folder = repository_folder(name.repository)
    pulled = read_marks(folder).pulled.get(str(name))
    if pulled is None:
        return None
    snapshot = folder / "snapshots" / pulled.commit
    for file, size in pulled.files.items():
        path = snapshot / file
        if not path.is_file() or path.stat().st_size != size:
            return None
    return snapshot / pulled.path


def find_foreign(name: HubName) -> Path | None:
    """The path of a whole model that another program has downloaded; None if there is none."""
    folder = repository_folder(name.repository)
    commit = name.revision
    if _COMMIT.fullmatch(commit) is None:
        with contextlib.suppress(OSError):
            commit = (folder / "refs" / name.revision).read_text()
    if _COMMIT.fullmatch(commit) is None:
        return None
    snapshot = folder / "snapshots" / commit
    models = models_in(each for each in snapshot.rglob("*") if each.is_file())
    meant = [each.path for each in models if each.path == snapshot / name.file]
    if not meant and not name.file and len(models) == 1:
        meant = [models[0].path]
    return meant[0] if meant and _is_whole(meant[0]) else None


def _is_whole(path: Path) -> bool:
    """Whether a folder has all shards of its index."""
    if not (path / INDEX).is_file():
        return True
    shards = read_json(path / INDEX, "download it again").get("weight_map", {})
    return isinstance(shards, dict) and all((path / str(each)).is_file() for each in shards.values())


def cached_models() -> list[CachedModel]:
    """All models in the cache, of jaxllm and of other programs, by name."""
    from huggingface_hub import scan_cache_dir

    if not cache().is_dir():
        return []
    found: list[CachedModel] = []
    for repo in scan_cache_dir(cache()).repos:
        if repo.repo_type != "model" or "/" not in repo.repo_id:
            continue
        pulled = read_marks(repo.repo_path).pulled
        for revision in repo.revisions:
            sizes = {
                PurePosixPath(
                    each.file_path.relative_to(revision.snapshot_path).as_posix()
                ): each.size_on_disk
                for each in revision.files
            }
            shown = {name: each for name, each in pulled.items() if each.commit == revision.commit_hash}
            for choice in models_in(sizes):
                path = "" if choice.format == "safetensors" else str(choice.path)
                names = [name for name, each in shown.items() if each.path == path]
                size = sum(sizes[each] for each in choice.files)
                at = MAIN if MAIN in revision.refs else revision.commit_hash
                for name in names or [str(HubName(repo.repo_id, at, path))]:
                    licence = shown[name].licence if names else ""
                    place = Path(revision.snapshot_path, choice.path)
                    found.append(CachedModel(name, place, choice.format, size, licence, bool(names)))
    return sorted(found, key=lambda each: each.name)


def remove(name: HubName, remove_prepared: Callable[[Path], None]) -> int:
    """Removes what jaxllm downloaded of a model; of a name without revision and file, all of its repository.
    Files of other programs stay, and those of other names that were pulled. `remove_prepared` removes what
    was prepared of the model at a path. Raises CheckpointError if nothing of it was pulled, and OSError if
    the cache cannot be changed.

    Returns:
      How many bytes were freed.
    """
    folder = repository_folder(name.repository)
    marks = read_marks(folder)
    whole = (name.revision, name.file) == (MAIN, "")
    gone = {each: pulled for each, pulled in marks.pulled.items() if whole or each == str(name)}
    if not (gone or (whole and marks.ours)):
        raise CheckpointError(
            f"{name} was not pulled by jaxllm, which removes only what it has pulled; see `jaxllm models`"
        )
    left = {each: pulled for each, pulled in marks.pulled.items() if each not in gone}
    kept = {(each.commit, file) for each in left.values() for file in each.files}
    removed = {
        commit: [
            file
            for file in files
            if (commit, file) not in kept
            and (whole or any(commit == each.commit and file in each.files for each in gone.values()))
        ]
        for commit, files in marks.ours.items()
    }
    for each in gone.values():
        remove_prepared(folder / "snapshots" / each.commit / each.path)
    before = _size(folder)
    if whole:
        for each in (folder / "blobs").glob(f"*{PARTIAL}"):
            each.unlink(missing_ok=True)
    _delete(folder, removed)
    ours = {
        commit: [each for each in files if each not in removed[commit]]
        for commit, files in marks.ours.items()
    }
    ours = {commit: files for commit, files in ours.items() if files}
    if left or ours:
        write_marks(folder, Marks(left, ours))
    else:
        (folder / _MARKS).unlink(missing_ok=True)
        for each in (folder / "snapshots", folder / "blobs", folder):
            # Others' files stay.
            with contextlib.suppress(OSError):
                each.rmdir()
    return before - _size(folder)


def _delete(folder: Path, files: dict[str, list[str]]) -> None:
    """Deletes files of a repository's snapshots; a snapshot without others as a revision."""
    from huggingface_hub import scan_cache_dir

    for alone in (True, False):
        info = scan_cache_dir(folder.parent)
        # Copies of a repository have its commits, too: without the others, a commit is this one's.
        repos = [each for each in info.repos if each.repo_path == folder.resolve()]
        info = dataclasses.replace(info, repos=frozenset(repos))
        found: list[tuple[str, list[Any], bool]] = []
        for revision in (each for repo in repos for each in repo.revisions):
            place, names = revision.snapshot_path, set(files.get(revision.commit_hash, ()))
            own = [each for each in revision.files if each.file_path.relative_to(place).as_posix() in names]
            found.append((revision.commit_hash, own, 0 < len(own) == len(revision.files)))
        if alone:
            info.delete_revisions(*(commit for commit, _, whole in found if whole)).execute()
        else:
            info.delete_files(*(each for _, own, _ in found for each in own)).execute()


def _size(folder: Path) -> int:
    """Bytes of the files of a repository, each of which is a blob."""
    return sum(each.stat().st_size for each in (folder / "blobs").glob("*") if not each.is_symlink())
