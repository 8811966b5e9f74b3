"""Downloads models of the hub by `huggingface_hub`: only files that a model is read from, each verified by
the hub's checksum.

    pull("hf:HuggingFaceTB/SmolLM2-135M-Instruct")     its folder in Hugging Face's cache

A killed download resumes where it ended. Which hub and which cache, the token and offline mode are
huggingface_hub's own settings: HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE.
"""

import contextlib
import dataclasses
import errno
import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from jaxllm.errors import CheckpointError, JaxllmError, one_line
from jaxllm.files.input_files import open_regular
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.sources.files import Choice, is_pickle, models_in
from jaxllm.serving.sources.hub_cache import (
    PARTIAL,
    HubName,
    Marks,
    Pulled,
    cache,
    find_cached,
    find_foreign,
    read_marks,
    repository_folder,
    write_marks,
)
from jaxllm.serving.sources.licences import Licence
from jaxllm.version import __version__

_NAMED = 6
# Of the disk, beside a model's files.
_SPARE_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class _File:
    """A file of a repository: its size in bytes, its sha256 or, of a small file, git's sha1."""

    size: int
    digest: str
    large: bool


@dataclasses.dataclass(frozen=True)
class _Listing:
    """A revision of a repository."""

    commit: str
    files: dict[PurePosixPath, _File]
    licence: Licence


def find_at_hub(text: str, progress: Progress | None = None) -> Path:
    """The path of a model of the hub: as it was pulled, without a network; else it is pulled now.

    Raises:
      ConfigError: the name is malformed, or its licence asks for consent that was not given.
      CheckpointError: it cannot be downloaded.
    """
    name = HubName.parse(text)
    return find_cached(name) or pull(name, progress)


def pull(
    name: HubName,
    progress: Progress | None = None,
    *,
    consent: Callable[[Licence], None] = Licence.require_consent,
) -> Path:
    """Downloads a model, or what a newer revision has changed.

    Args:
      name: its name.
      progress: callback for ("download", bytes done, bytes in all).
      consent: checks the user's consent to the licence; raises what `require_consent` does.

    Returns:
      Its path in Hugging Face's cache.

    Raises:
      ConfigError: see `consent`.
      CheckpointError: it is not there, is not given to this user, is no model that jaxllm reads, or cannot
        be downloaded whole.
    """
    folder = repository_folder(name.repository)
    from huggingface_hub import constants
    from huggingface_hub.utils import WeakFileLock

    if constants.is_offline_mode():
        if (found := find_cached(name) or find_foreign(name)) is not None:
            return found
        raise CheckpointError(
            f"{name} is not in {cache()}, and HF_HUB_OFFLINE is set; unset it to download it"
        )
    with _explained(name):
        listing = _listing(name)
        choice = _chosen(name, listing)
        consent(listing.licence)
        lock = cache() / ".locks" / folder.name / "jaxllm.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            path = "" if choice.format == "safetensors" else str(choice.path)
            files = {str(each): listing.files[each] for each in choice.files}
            marks = read_marks(folder)
            sizes = {each: file.size for each, file in files.items()}
            pulled = Pulled(listing.commit, path, sizes, listing.licence.name)
            if marks.pulled.get(str(name)) != pulled or find_cached(name) is None:
                marks = _marked(folder, marks, listing.commit, files)
                _download(name, listing.commit, files, marks, progress)
                write_marks(folder, Marks({**marks.pulled, str(name): pulled}, marks.ours))
    return folder / "snapshots" / listing.commit / path


def _listing(name: HubName) -> _Listing:
    """The files of a repository with their checksums, as the hub lists them."""
    from huggingface_hub import HfApi, constants

    api = HfApi(library_name="jaxllm", library_version=__version__)
    try:
        info = api.model_info(
            name.repository,
            revision=name.revision,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
        files = dict[PurePosixPath, _File]()
        for each in info.siblings or ():
            large = each.lfs is not None
            size, digest = (each.lfs.size, each.lfs.sha256) if each.lfs else (each.size, each.blob_id)
            if isinstance(size, int) and size >= 0 and len(str(digest)) == (64 if large else 40):
                files[PurePosixPath(each.rfilename)] = _File(size, str(digest), large)
        commit, card = str(info.sha), info.card_data
        if len(commit) != 40 or not files:
            raise ValueError("no commit, or no checksums of files")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{name}: {constants.ENDPOINT} does not answer as a hub does ({one_line(error)}); check "
            "HF_ENDPOINT"
        ) from error
    known = {} if card is None else card.to_dict()
    licence = one_line(known.get("license_name") or known.get("license") or "unknown")[:80]
    terms = str(known.get("license_link") or "")
    if not (terms.startswith("https://") and terms.isprintable()):
        terms = f"{constants.ENDPOINT}/{name.repository}"
    of = f"hf:{name.repository}"
    return _Listing(commit, files, Licence(str(name), licence, terms, gated=bool(info.gated), of=of))


def _chosen(name: HubName, listing: _Listing) -> Choice[PurePosixPath]:
    """The model that is meant: the named file, else the folder of safetensors, else the only GGUF file."""
    root = PurePosixPath()
    # Other folders have copies for other programs, and a name from elsewhere may lead anywhere.
    names = [each for each in listing.files if not each.is_absolute() and ".." not in each.parts]
    models = models_in(each for each in names if each.suffix == ".gguf" or each.parent == root)
    listed = [str(each.path) for each in models if each.format == "GGUF"]
    some = ", ".join(listed[:_NAMED]) + (", ..." if len(listed) > _NAMED else "")
    if name.file:
        found = [each for each in models if PurePosixPath(name.file) in (each.path, *each.files)]
        if not found or found[0].format != "GGUF":
            raise CheckpointError(f"{name}: there is no such file; the GGUF files are: {some or 'none'}")
        return found[0]
    if models and (models[0].path == root or len(models) == 1):
        return models[0]
    if models:
        raise CheckpointError(
            f"{name} has {len(models)} GGUF files; name one, such as {name}:{listed[0]}; they are: {some}"
        )
    pickles = [str(each) for each in names if is_pickle(each)][:_NAMED]
    if pickles:
        raise CheckpointError(
            f"{name} has weights only as pickles ({', '.join(pickles)}), which can run code and are never "
            "downloaded; look for a copy with safetensors"
        )
    raise CheckpointError(f"{name} has no GGUF file, and no config.json with safetensors; name another model")


def _marked(folder: Path, marks: Marks, commit: str, files: dict[str, _File]) -> Marks:
    """The record with the files that are not there yet, which are ours from now on."""
    ours = set(marks.ours.get(commit, ()))
    ours |= {each for each in files if not (folder / "snapshots" / commit / each).exists()}
    marks = Marks(marks.pulled, {**marks.ours, commit: sorted(ours)})
    write_marks(folder, marks)
    return marks


def _download(
    name: HubName, commit: str, files: dict[str, _File], marks: Marks, progress: Progress | None
) -> None:
    """Downloads the files of a model that are missing, small ones first, and verifies all."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import tqdm

    folder = repository_folder(name.repository)
    snapshot, blobs = folder / "snapshots" / commit, folder / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    missing = sum(
        file.size - _size(blobs / f"{file.digest}{PARTIAL}")
        for each, file in files.items()
        if not (snapshot / each).exists() and not (blobs / file.digest).exists()
    )
    if (free := shutil.disk_usage(blobs).free) < missing + _SPARE_BYTES * bool(missing):
        raise OSError(errno.ENOSPC, f"{missing / 1e6:,.1f} MB are needed, {free / 1e6:,.1f} MB are free")
    done, total = 0, sum(each.size for each in files.values())

    def report(now: int) -> None:
        if progress is not None:
            progress("download", min(now, total), total)

    class Silent(tqdm):
        """A bar of huggingface_hub that is not shown: progress is reported by files."""

        def __init__(self, *args: Any, **how: Any) -> None:
            super().__init__(*args, **{**how, "disable": True})

    for each, file in sorted(files.items(), key=lambda item: (item[1].large, item[0])):
        path, blob = snapshot / each, blobs / file.digest
        report(done)
        if file.large and not path.exists() and not blob.exists():
            _fetch(name, commit, each, file, blob, lambda now, done=done: report(done + now))
        # Links a file that is there, and downloads others.
        hf_hub_download(name.repository, each, revision=commit, library_name="jaxllm", tqdm_class=Silent)
        if _digest(path, file) != file.digest:
            hint = f"`jaxllm rm hf:{name.repository}`"
            if each in marks.ours[commit]:
                path.resolve().unlink()
                path.unlink(missing_ok=True)
                hint = "it is removed; try again"
            raise CheckpointError(
                f"{name}: {each} has another checksum than the hub says ({file.digest}); {hint}"
            )
        done += file.size
    report(total)


def _fetch(
    name: HubName, commit: str, path: str, file: _File, blob: Path, report: Callable[[int], None]
) -> None:
    """Downloads a large file as a blob of the cache, from where a killed download of it ended.

    `hf_hub_download` would begin again: since its version 1.0 each download has a file of its own.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    class Report:
        """Reports bytes in place of a bar."""

        def __init__(self, **_how: Any) -> None:
            pass

        def __enter__(self) -> "Report":
            return self

        def __exit__(self, *_error: object) -> None:
            pass

        def update(self, count: int) -> None:
            report(out.tell() + count)

    partial = blob.with_name(f"{blob.name}{PARTIAL}")
    if _size(partial) > file.size:
        partial.unlink()
    headers = build_hf_headers(library_name="jaxllm", library_version=__version__)
    with partial.open("ab") as out:
        http_get(
            hf_hub_url(name.repository, path, revision=commit),
            out,
            resume_size=out.tell(),
            headers={**headers, "Accept-Encoding": "identity"},
            expected_size=file.size,
            displayed_filename=path,
            tqdm_class=Report,  # pyright: ignore[reportArgumentType]: what it uses of a bar
        )
    if _digest(partial, file) != file.digest:
        partial.unlink()
        raise CheckpointError(
            f"{name}: {path} arrived with another checksum than the hub says ({file.digest}); nothing of it "
            "is kept; try again"
        )
    partial.replace(blob)


def _digest(path: Path, file: _File) -> str:
    with open_regular(path) as opened:
        if file.large:
            return hashlib.file_digest(opened, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]
        digest = hashlib.sha1(f"blob {_size(path)}\0".encode(), usedforsecurity=False)
        digest.update(opened.read(file.size + 1))
        return digest.hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@contextlib.contextmanager
def _explained(name: HubName) -> Iterator[None]:
    """Raises errors of huggingface_hub and of the system as CheckpointErrors that say what to do."""
    from huggingface_hub import constants, errors

    hub, page = constants.ENDPOINT, f"{constants.ENDPOINT}/{name.repository}"
    try:
        try:
            yield
        except errors.LocalEntryNotFoundError as error:
            # Raised after an error of the hub, or of the connection to it.
            raise error.__cause__ or error from error
    except JaxllmError:
        raise
    except errors.HfHubHTTPError as error:
        status, wait = error.response.status_code, error.response.headers.get("Retry-After", "")
        if isinstance(error, errors.GatedRepoError):
            why = f"its owner gates it: accept its terms at {page}, and set HF_TOKEN to your token"
        elif isinstance(error, errors.RevisionNotFoundError):
            why = f"it has no revision {name.revision!r}; leave @{name.revision} out, or name another"
        elif status in (401, 404):
            why = f"{hub} has no such model for you; check its name, and HF_TOKEN if it is private"
        elif status == 403:
            why = f"{hub} refuses it to you; set HF_TOKEN to a token that may read it"
        elif status == 429:
            wait = f"in {wait} s" if wait.isdecimal() else "later"
            why = f"{hub} has had too many requests; try again {wait}, or set HF_TOKEN"
        else:
            why = f"{hub} failed; try again later: what has arrived is kept"
        raise CheckpointError(f"{name}: {why} (HTTP {status})") from error
    except OSError as error:
        if error.errno is None:
            why = f"{one_line(error)}; try again: what has arrived is kept"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            why = (
                f"the disk of {cache()} is full ({error.strerror}); make room, or set HF_HOME to another one"
            )
        else:
            why = f"{error.filename or cache()}: {error.strerror}; set HF_HOME to a folder of your own"
        raise CheckpointError(f"{name}: {why}") from error
    except Exception as error:
        # Errors of connections, of whichever HTTP library this version has.
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2", "requests"):
            raise
        raise CheckpointError(
            f"{name}: {hub} cannot be reached ({one_line(error)}); check the network and HF_ENDPOINT, then "
            "try again: what has arrived is kept"
        ) from error
