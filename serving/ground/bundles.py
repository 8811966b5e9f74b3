"""Opens models by name or path: a packaged model, a bundle, a Hugging Face folder, a GGUF file, or the
model of an installed Python package or of the hub (`find_model`).

A folder or GGUF file is prepared once and cached in the user's cache directory under a digest of its
contents, so that changed ones are prepared again. Also cached is which tokenizers consist of well-known
parts: the check takes 0.15 s of startup with a vocabulary of 150,000 tokens, and its result only depends on
the text. Nothing is downloaded but a model that is named by `hf:`.
"""

import contextlib
import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import xxhash

from jaxllm.bundle import SUFFIX, Bundle
from jaxllm.bundle.levels import read_ladder
from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.errors import BundleError, CheckpointError, ConfigError
from jaxllm.files.atomic import atomic_file, remove_abandoned
from jaxllm.files.input_files import begins_with
from jaxllm.formats import AUTO, GGUF_MAGIC, HUB, PACKAGE, WeightChoice
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.host.user_cache import cache_folder, clear_entry, make_private_folder, private_file
from jaxllm.text import tokenizer_bounds
from jaxllm.text.tokenizer import Tokenizer, TokenizerFiles

# Increment when preparing the same folder writes another bundle.
_CACHE_KEY_VERSION = "6"
# Suffixes of the files of a model folder that affect its bundle.
_CONTENT_SUFFIXES = (".json", ".jinja", ".safetensors", ".model", ".spm", ".tiktoken", ".txt")
# Files larger than 32 MiB are sampled in blocks.
_SAMPLES, _SAMPLE_BYTES = 512, 64 << 10
_log = logging.getLogger(__name__)
# A smaller text is as soon checked.
_MIN_TEXT_BYTES = 1 << 20
_ORDINARY, _UNKNOWN = b"ordinary", b"unknown"


def open_model(
    model: str | Path | None,
    *,
    weights: WeightChoice | None = None,
    room: Callable[[ModelConfig], int] | None = None,
    progress: Progress | None = None,
) -> Bundle:
    """Opens `model` (see `Engine.open`).

    Args:
      model: see `Engine.open`.
      weights: format of a checkpoint's weights; "auto" chooses one.
      room: bytes for the weights of a model, for "auto"; None for the smallest with little loss.
      progress: see `Engine.open`.

    Raises:
      CheckpointError: the model is missing, or cannot be read or prepared.
    """
    path = find_model(model, progress)
    if path.is_dir() or begins_with(path, GGUF_MAGIC):
        return _open_prepared(path, weights, room, progress)
    if not path.exists():
        raise CheckpointError(
            f"{path}: no such file or folder; give a bundle made by `jaxllm prepare`, a Hugging Face model "
            f"folder, a GGUF file, or one of the packaged models: {', '.join(packaged_models())}"
        )
    bundle = Bundle.open(path)
    if weights not in (None, AUTO, bundle.layout.weights):
        raise CheckpointError(
            f"{path} holds {bundle.layout.weights} weights, not {weights}; prepare the original folder "
            f"again with --weights {weights}"
        )
    return bundle


def levels_of(model: str | Path | None) -> tuple[int, ...]:
    """All levels of `model` except the whole, ascending, as for `EngineOptions.levels`.

    Empty for a model that is not elastic.

    Raises:
      CheckpointError: see `open_model`.
      BundleError: its levels are malformed.
    """
    with open_model(model) as bundle:
        ladder = read_ladder(bundle)
    return () if ladder is None else tuple(level for level in ladder.levels if level != FULL_LEVEL)


def find_model(model: str | Path | None, progress: Progress | None = None) -> Path:
    """The path of a model by name: every door that takes a model finds it here.

    Args:
      model: a path; a packaged model's name, unless a file has that name; `package:NAME`, the model of an
        installed Python package; `hf:OWNER/NAME[@REVISION][:FILE]`, a model of the hub, downloaded unless it
        was before; or None for the default model.
      progress: callback for (stage, done, total).

    Raises:
      ConfigError: the name is malformed, or its licence asks for consent that was not given.
      CheckpointError: there is no such model, or it cannot be downloaded.
    """
    if model is None:
        return default_bundle()
    if str(model).startswith(HUB):
        from jaxllm.serving.sources.hub import find_at_hub

        return find_at_hub(str(model), progress)
    if str(model).startswith(PACKAGE):
        from jaxllm.serving.sources.packages import find_packaged

        found = find_packaged(str(model))
        found.licence.require_consent()
        return found.path
    packaged = _assets() / f"{model}{SUFFIX}"
    named = str(model) in packaged_models() and not Path(model).exists()
    return packaged if named else Path(model)


def packaged_models() -> list[str]:
    """Names of the models that ship with the package."""
    return sorted(path.stem for path in _assets().glob(f"*{SUFFIX}"))


def default_bundle() -> Path:
    """The path of the default model."""
    return _assets() / f"default{SUFFIX}"


def open_tokenizer(files: TokenizerFiles) -> Tokenizer:
    """A bundle's tokenizer. Its parts are checked once per text and user; the result is cached.

    Raises:
      CheckpointError: `files` are not a tokenizer's.
    """
    text = files.tokenizer_json.encode(errors="surrogatepass")
    if len(text) < _MIN_TEXT_BYTES:
        return Tokenizer(files)
    # The verdict depends on the code of the check.
    digest = hashlib.blake2b(Path(tokenizer_bounds.__file__).read_bytes(), digest_size=16)
    digest.update(hashlib.blake2b(text, digest_size=32).digest())
    path = cache_folder() / "tokenizers" / digest.hexdigest()
    with contextlib.suppress(OSError, ConfigError), private_file(path) as number:
        kept = {_ORDINARY: True, _UNKNOWN: False}.get(os.read(number, 16))
        if kept is not None:
            return Tokenizer(files, ordinary=kept)
    ordinary = tokenizer_bounds.is_ordinary(files.tokenizer_json)
    tokenizer = Tokenizer(files, ordinary=ordinary)
    try:
        make_private_folder(path.parent)
        with atomic_file(path) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(_ORDINARY if ordinary else _UNKNOWN)
    except (OSError, ConfigError) as error:
        _log.warning("each start checks the tokenizer again, because nothing is kept in the cache: %s", error)
    return tokenizer


def remove_prepared(source: Path) -> None:
    """Removes what was prepared of a Hugging Face folder or a GGUF file from the cache."""
    shutil.rmtree(_place(source), ignore_errors=True)


def _assets() -> Path:
    return Path(__file__).parents[2] / "assets"


def _open_prepared(
    source: Path,
    weights: WeightChoice | None,
    room: Callable[[ModelConfig], int] | None,
    progress: Progress | None,
) -> Bundle:
    """The bundle of a Hugging Face folder or a GGUF file, from the cache or made now."""
    # Imported here, because opening a bundle does not need it.
    from jaxllm.checkpoints.gguf_config import read_gguf_config
    from jaxllm.checkpoints.gguf_file import read_gguf
    from jaxllm.checkpoints.huggingface import Checkpoint
    from jaxllm.prepare import WeightRecipe, prepare

    checkpoint, most_bytes = Checkpoint(source) if source.is_dir() else None, 0
    if checkpoint is not None and checkpoint.quantization is None:
        weights = weights or checkpoint.weight_format
    if weights == AUTO and room is not None:
        cfg = checkpoint.cfg if checkpoint else read_gguf_config(read_gguf(source))
        most_bytes = max(1, room(cfg))
    # Without a width, quantized weights keep the width of each tensor.
    kind = (weights or "own") + (f"-{most_bytes}" if most_bytes else "")
    place = _place(source) / kind
    cached = place / f"{_content_key(source)}{SUFFIX}"
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
    # Weights that do not fit even so are read from storage.
    recipe = WeightRecipe(weights=weights, most_bytes=most_bytes, or_smallest=True)
    if (chosen := prepare(checkpoint or source, cached, weights=recipe, progress=progress)) is not None:
        _log.info("%s: %s", source, chosen.in_words)
    cached.chmod(0o600)
    for older in place.glob(f"*{SUFFIX}"):
        # Bundles of earlier contents; a process that still maps one retains its pages.
        if older != cached:
            older.unlink(missing_ok=True)
    remove_abandoned(place)
    return Bundle.open(cached)


def _place(source: Path) -> Path:
    return cache_folder() / "bundles" / _digest([str(source.resolve())])


def _open_cached(path: Path) -> Bundle | None:
    """Opens a cached bundle; None if it is missing or must be prepared again."""
    try:
        with private_file(path):
            pass
    except FileNotFoundError:
        return None
    except (OSError, ConfigError) as error:
        _log.warning("%s is not used, and made again (%s)", path, error)
        with contextlib.suppress(OSError):  # Writing it raises the error.
            clear_entry(path)
        return None
    # A damaged cache entry is prepared again.
    with contextlib.suppress(BundleError):
        bundle = Bundle.open(path)
        bundle.verify()
        return bundle
    return None


def _content_key(source: Path) -> str:
    """A digest of the contents of a folder, or of a file and the other parts of a split one: name, size,
    times and content of each file that affects the bundle.

    Large files are only sampled. The change time, which no program can set, detects changes between the
    samples even if size and modification time were restored.
    """
    parts = [_CACHE_KEY_VERSION]
    if source.is_dir():
        paths = [path for path in source.iterdir() if path.suffix in _CONTENT_SUFFIXES]
    else:
        from jaxllm.checkpoints.gguf_file import gguf_parts

        paths = gguf_parts(source)
    for path in sorted(paths):
        if path.is_file():
            facts = path.stat()
            parts += [path.name, str(facts.st_size), str(facts.st_mtime_ns), str(facts.st_ctime_ns)]
            parts.append(_sampled_digest(path, facts.st_size))
    return _digest(parts)


def _sampled_digest(path: Path, size: int) -> str:
    """Digest of a file, or of evenly spaced blocks of a large one."""
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
    return hashlib.sha256(os.fsencode("\0".join(parts))).hexdigest()[:32]
