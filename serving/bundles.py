"""From what a user names to an open bundle: a packaged model, a bundle, or a Hugging Face folder.

A folder is prepared once and kept in the user's cache directory, keyed by what it holds; a changed
folder is prepared again. Nothing is downloaded.
"""

import contextlib
import hashlib
import logging
from pathlib import Path

import xxhash

import jaxllm
from jaxllm.bundle import SUFFIX, Bundle, WeightFormat
from jaxllm.bundle.elastic import read_ladder
from jaxllm.config import WHOLE
from jaxllm.errors import BundleError, CheckpointError, ConfigError
from jaxllm.files.atomic import remove_abandoned
from serving.host.progress import Progress
from serving.host.user_cache import cache_folder, clear_entry, make_private_folder, private_file

# Changes whenever preparing the same folder would write another bundle.
_CACHE_KEY_VERSION = "2"
# Of the files in a model folder that a bundle may be made from.
_CONTENT_SUFFIXES = (".json", ".jinja", ".safetensors", ".model", ".spm", ".tiktoken", ".txt")
# Files of up to 32 MiB are read whole.
_SAMPLES, _SAMPLE_BYTES = 512, 64 << 10
_log = logging.getLogger(__name__)


def open_model(
    model: str | Path | None,
    *,
    weights: WeightFormat | None = None,
    progress: Progress | None = None,
) -> Bundle:
    """Opens `model` (see `Engine.open`).

    Raises:
      CheckpointError: there is no such model, or it cannot be read or prepared.
    """
    path = find_model(model)
    if path.is_dir():
        return _open_folder(path, weights, progress)
    if not path.exists():
        raise CheckpointError(
            f"{path}: no such file or folder; give a bundle made by `jaxllm prepare`, a Hugging Face model "
            f"folder, or one of the packaged models: {', '.join(packaged_models())}"
        )
    bundle = Bundle.open(path)
    if weights not in (None, bundle.layout.weights):
        raise CheckpointError(
            f"{path} holds {bundle.layout.weights} weights, not {weights}; prepare the original folder "
            f"again with --weights {weights}"
        )
    return bundle


def levels_of(model: str | Path | None) -> tuple[int, ...]:
    """All levels of `model` besides the whole, ascending, as `EngineOptions.levels` has them.

    A model that is not elastic has none.

    Raises:
      CheckpointError: see `open_model`.
      BundleError: its levels are malformed.
    """
    with open_model(model) as bundle:
        ladder = read_ladder(bundle)
    return () if ladder is None else tuple(level for level in ladder.levels if level != WHOLE)


def find_model(model: str | Path | None) -> Path:
    """The path that a user means: a packaged model's by its name, unless there is such a file; None is the
    default one."""
    if model is None:
        return default_bundle()
    packaged = _assets() / f"{model}{SUFFIX}"
    named = str(model) in packaged_models() and not Path(model).exists()
    return packaged if named else Path(model)


def packaged_models() -> list[str]:
    """Names of the models that ship with the package."""
    return sorted(path.stem for path in _assets().glob(f"*{SUFFIX}"))


def default_bundle() -> Path:
    """Path of the model that is used where none is named."""
    return _assets() / f"default{SUFFIX}"


def _assets() -> Path:
    return Path(jaxllm.__file__).parent / "assets"


def _open_folder(folder: Path, weights: WeightFormat | None, progress: Progress | None) -> Bundle:
    # Here, so that who opens a bundle does not wait for all that reads checkpoints.
    from jaxllm.prepare import prepare, weight_format_of

    weights = weights or weight_format_of(folder)
    place = cache_folder() / "bundles" / _digest([str(folder.resolve())]) / weights
    cached = place / f"{_content_key(folder)}{SUFFIX}"
    try:
        make_private_folder(place)
    except (OSError, ConfigError) as error:
        reason = f"{place}: cannot be created ({error.strerror})" if isinstance(error, OSError) else error
        raise CheckpointError(
            f"{reason}; set JAXLLM_CACHE to a writable folder of your own, or use `jaxllm prepare`"
        ) from error
    bundle = _open_cached(cached)
    if bundle is not None:
        return bundle
    prepare(folder, cached, weights=weights, progress=progress)
    cached.chmod(0o600)
    for older in place.glob(f"*{SUFFIX}"):
        # What the folder held before; a process that still maps it keeps its pages.
        if older != cached:
            older.unlink(missing_ok=True)
    remove_abandoned(place)
    return Bundle.open(cached)


def _open_cached(path: Path) -> Bundle | None:
    """A bundle that was prepared before; None where it is not there, or must be made again."""
    try:
        with private_file(path):
            pass
    except FileNotFoundError:
        return None
    except (OSError, ConfigError) as error:
        _log.warning("%s is not used, and made again (%s)", path, error)
        with contextlib.suppress(OSError):  # Said when it is written.
            clear_entry(path)
        return None
    # A cache that went bad is not the user's problem: prepare it again.
    with contextlib.suppress(BundleError):
        bundle = Bundle.open(path)
        bundle.verify()
        return bundle
    return None


def _content_key(folder: Path) -> str:
    """Names what a folder holds: of each file that may matter its name, size, times and content.

    Large files are not read whole, but here and there. Where one was changed elsewhere and its size and time
    were put back, the time tells at which its own facts changed, which nobody can set.
    """
    parts = [_CACHE_KEY_VERSION]
    for path in sorted(folder.iterdir()):
        if path.suffix in _CONTENT_SUFFIXES and path.is_file():
            facts = path.stat()
            parts += [path.name, str(facts.st_size), str(facts.st_mtime_ns), str(facts.st_ctime_ns)]
            parts.append(_sampled_digest(path, facts.st_size))
    return _digest(parts)


def _sampled_digest(path: Path, size: int) -> str:
    """Digest of a file, or of blocks of it that lie evenly from its first to its last."""
    step = max(_SAMPLE_BYTES, (size - _SAMPLE_BYTES) / (_SAMPLES - 1))
    starts = (int(n * step) for n in range(_SAMPLES))
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb", buffering=0) as file:
            for start in starts:
                if start < size:
                    file.seek(start)
                    digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
