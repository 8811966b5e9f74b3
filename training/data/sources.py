"""Names sources of documents: texts, stories to be told, tasks, conversations; and opens their files.

Files at URLs (`gs://`, `s3://`, `https://`) are read through fsspec; other paths are local files.
"""

import contextlib
import dataclasses
import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from jaxllm.errors import ConfigError
from jaxllm.options import check_options, option
from jaxllm.tasks import find_task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Source of documents: texts, a file of stories to be told, a task, or conversations; for an
    encoder-decoder pairs.

    Attributes:
      text: path of a text file, of a folder of `.txt` files, or a pattern; all of each document is learned.
      stories: path of a text file; each document becomes a request to tell it, with its first sentence.
      task: name in `jaxllm.tasks.TASKS`, or a file of questions; its training split, with answers.
      chat: path of a file of JSON lines or parquet, of a folder of such files, or a pattern: conversations,
        and prompts with completions (see `jaxllm.training.data.documents`).
      functions: number of conversations with function calls to make (see `jaxllm.training.data.tool_use`).
      pairs: paths of two text files, whose lines of the same number are a source and its target; or of one
        file of JSON lines.
      fields: names of the source and of its target in such JSON lines; each of a list of targets is a pair.
      prefix: task prefix of each source of `pairs`; None for the model's own.
      skip_bad: whether malformed lines of `chat` are left out and counted, instead of an error.
    """

    text: str = ""
    stories: str = ""
    task: str = ""
    chat: str = ""
    functions: int = 0
    pairs: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    prefix: str | None = None
    skip_bad: bool = False
    repeats: float = option(
        1.0,
        "How often an epoch reads each document; below 1, that share is sampled anew every epoch.",
        low=0,
        high=1000,
    )
    prompt_weight: float | None = option(
        None,
        "Weight of the loss on a prompt's tokens; without it 0 for `chat` and `functions`, 1 for others.",
        low=0,
        high=1000,
    )
    answer_weight: float = option(1.0, "Weight of the loss on all other tokens.", low=0, high=1000)

    def __post_init__(self) -> None:
        if self.prompt_weight is None:
            object.__setattr__(self, "prompt_weight", 0.0 if self.chat or self.functions else 1.0)
        for name in ("pairs", "fields"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        named = [value for value in (self.text, self.stories, self.task, self.chat, *self.pairs[:1]) if value]
        if type(self.functions) is not int or self.functions < 0:
            raise ConfigError(f"functions is a number of conversations to make, got {self.functions!r:.20}")
        if len(named) + bool(self.functions) != 1 or not all(isinstance(each, str) for each in named):
            raise ConfigError(
                "a source is one of text, stories, task, chat, functions and pairs, each a name or names, of "
                f"functions a number; got {named}"
            )
        if (len(self.pairs), len(self.fields)) not in ((0, 0), (2, 0), (1, 2)):
            raise ConfigError(
                f"pairs are two text files, or one of JSON lines with two fields; got {self.pairs} and "
                f"fields {self.fields}"
            )
        if self.task:
            find_task(self.task)
        check_options(self)

    @property
    def weights(self) -> tuple[float, float]:
        """Weights of the losses on a prompt's tokens and on others."""
        return self.prompt_weight or 0.0, self.answer_weight

    @property
    def name(self) -> str:
        """The source's name in metrics."""
        if self.task or self.functions:
            return self.task or "functions"
        if self.pairs:
            return Path(self.pairs[0]).name
        if self.text or self.chat:
            return Path(self.text or self.chat).stem
        return f"{Path(self.stories).stem}-told"


_GLOB = frozenset("*?[")
# `Path` reduces two slashes to one; a drive of Windows has one letter.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def is_remote(path: Path | str) -> bool:
    """Whether a path is a URL."""
    return "://" in str(path)


def require_local(path: Path | str, what: str) -> Path:
    """Checks that a path to write, or of a folder to read, is local.

    Raises:
      ConfigError: it is a URL. As a path it would be a local folder named like the URL's scheme.
    """
    if _URL.match(str(path)):
        raise ConfigError(f"{what} is a path of this machine or of a mounted file system, not {path}")
    return Path(path)


def is_s3(url: str) -> bool:
    """Whether a URL names an object of S3, or of another service with its protocol."""
    return url.startswith("s3://")


def require_bucket(url: str) -> None:
    """Checks, before anything is written, that checkpoints can be stored at a URL.

    Raises:
      ConfigError: it is not `gs://bucket/path` or `s3://bucket/path`, or the package that writes there is
        not installed.
    """
    kind, _, place = url.partition("://")
    bucket, _, path = place.partition("/")
    if kind not in ("gs", "s3") or not bucket or (kind == "s3" and not path.strip("/")):
        raise ConfigError(
            f"checkpoints are kept in folders, at gs://bucket/path and at s3://bucket/path, not at {url}; "
            "mount other storage as a folder, and give --run in it"
        )
    if kind == "gs" and importlib.util.find_spec("gcsfs") is None:
        raise ConfigError(f"cannot keep checkpoints at {url}: `pip install gcsfs` first")


def source_files(path: Path, suffixes: Sequence[str]) -> list[Path]:
    """Lists the files of a path: one file, those in a folder and its folders that end in `suffixes`, or
    those of a pattern with `*`, `?` or `[`; sorted, independent of the file system's order.

    Raises:
      ConfigError: there are none.
    """
    if path.is_dir():
        found = sorted(each for each in path.rglob("*") if each.suffix in suffixes and each.is_file())
        if not found:
            raise ConfigError(f"the folder {path} holds no file that ends in {' or '.join(suffixes)}")
        return found
    if _GLOB & set(str(path)) and not path.exists():
        pattern = path.relative_to(path.anchor) if path.anchor else path
        found = sorted(each for each in Path(path.anchor or ".").glob(str(pattern)) if each.is_file())
        if not found:
            raise ConfigError(f"no file fits the pattern {path}")
        return found
    return [path]


def source_name(path: Path | str) -> str:
    """A path as recipes name it: absolute, or a URL unchanged."""
    return str(path) if is_remote(path) else str(Path(path).absolute())


def open_text(path: Path | str) -> contextlib.AbstractContextManager[TextIO]:
    """Opens a local file or a URL as UTF-8 text.

    Raises:
      ConfigError: the package that reads such URLs is not installed.
      OSError: the file cannot be opened.
    """
    return _opened(path, "r", encoding="utf-8")


def open_bytes(path: Path | str) -> contextlib.AbstractContextManager[BinaryIO]:
    """Opens a local file or a URL to read its bytes; raises as `open_text` does."""
    return _opened(path, "rb")


@contextlib.contextmanager
def _opened(path: Path | str, mode: str, encoding: str | None = None) -> Iterator[Any]:
    if not is_remote(path):
        with Path(path).open(mode, encoding=encoding) as file:
            yield file
        return
    files, own = _file_system(str(path))
    with files.open(own, mode, **({"encoding": encoding} if encoding else {})) as file:
        yield file


def remote_files(url: str, suffixes: Sequence[str]) -> list[str]:
    """Lists the files of a URL: one, those under it that end in `suffixes`, or those of a pattern; sorted.

    Raises:
      ConfigError: there are none, or the package that reads such URLs is not installed.
    """
    files, own = _file_system(url)
    try:
        if _GLOB & set(own):
            found = files.glob(own)
        elif files.isdir(own):
            found = [each for each in files.find(own) if each.endswith(tuple(suffixes))]
        else:
            return [url]
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot list {url}: {error}") from error
    if not found:
        raise ConfigError(f"no file at {url} ends in {' or '.join(suffixes)}, or fits the pattern")
    return [files.unstrip_protocol(each) for each in sorted(found)]


def _file_system(url: str) -> tuple[Any, str]:
    """Returns the file system of a URL, and its path there."""
    try:
        import fsspec
    except ImportError as error:
        raise ConfigError(f"cannot read {url}: `pip install 'jaxllm[data]'` first") from error
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        # fsspec names the package of this kind of URL.
        raise ConfigError(f"cannot read {url}: {error}; install it beside jaxllm[data]") from error
    except ValueError as error:
        raise ConfigError(f"cannot read {url}: {error}") from error
