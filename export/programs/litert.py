"""Runs a `.tflite` model by LiteRT: XNNPACK on a CPU, with its packed weights stored in a file.

XNNPACK reads weights in its own order. Packed once, they are a file that later processes map: a start is a
matter of milliseconds, and the system can drop pages of weights. There is one file per program folder and
width, named by its model, by the runtime that packed it and by its own checksum: the runtime does not check
whose weights a file has, so the name must identify it, and only this user may have written it
(`jaxllm.serving.host.user_cache`). A file is written under a temporary name and renamed when it is complete:
processes that open a program at the same time do not write into each other's files.

Caches are two sets of buffers; a step reads one and writes the other. LiteRT writes its messages to the
process's standard error, which is captured.
"""

import contextlib
import dataclasses
import errno
import importlib.metadata
import logging
import math
import os
import re
import sys
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from jaxllm.errors import ConfigError, ProgramError, one_line
from jaxllm.export.contents import require_extra
from jaxllm.export.folder_format.manifest import MANIFEST, Manifest
from jaxllm.export.folder_format.parts import ADAPTER
from jaxllm.export.folder_format.signature import PENALIZED, PENALTIES, TOKENS, Signature, lengthened
from jaxllm.export.programs.executor import Accelerator, Executor, FolderAdapters
from jaxllm.serving.host.machine import usable_cores
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.host.user_cache import buckets_bytes, cache_folder, make_private_folder, private_file

SUFFIX = ".bin"
_UNFINISHED = ".tmp"
_STALE_S = 3600
_READ_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class PackedFolder:
    """Packed weights in one folder of this user.

    Args:
      folder: path of the folder; created if missing, private to this user.
      limit_bytes: maximum bytes of files; the least recently used are deleted above it.
    """

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes

    @contextlib.contextmanager
    def opened(self, program: Path, width: str, made_of: str) -> Iterator[Path | None]:
        """Yields the file that the runtime reads packed weights from, or writes them to during the block.

        Args:
          program: folder of programs; its earlier packed weights are deleted.
          made_of: names of the model file and the runtime, in any characters.

        Yields:
          The file; None if the folder cannot be used.
        """
        digest = xxhash.xxh3_128_hexdigest
        place = f"{digest(str(program.resolve()).encode())}-{width}-"
        named = f"{place}{digest(made_of.encode())}-"
        try:
            make_private_folder(self._folder)
            packed = self._found(named)
        except (OSError, ConfigError) as error:
            _log.warning("%s: packed weights are not kept there (%s)", self._folder, error)
            yield None
            return
        if packed is not None:
            yield packed
            return
        written = self._folder / f"{named}{uuid.uuid4().hex}{_UNFINISHED}"
        try:
            yield written
            with contextlib.suppress(OSError):  # A runtime that packed nothing wrote nothing.
                written.chmod(0o600)
                with written.open("rb") as file:
                    os.fsync(file.fileno())
                final = self._folder / f"{named}{_checksum(written)}{SUFFIX}"
                os.replace(written, final)
                self._make_room(place, newest=final.name)
        finally:
            written.unlink(missing_ok=True)

    def _found(self, named: str) -> Path | None:
        """Returns the file whose name begins with `named`, if it is complete and this user's."""
        for path in sorted(self._folder.glob(f"{named}*{SUFFIX}")):
            try:
                with private_file(path) as number:
                    if _checksum(path) == path.name.removeprefix(named).removesuffix(SUFFIX):
                        # The time of its last use, by which room is made.
                        os.utime(number)
                        return path
                reason = "its checksum is wrong"
            except ConfigError as error:
                reason = str(error)
            except OSError as error:
                reason = str(error)
                if error.errno != errno.ELOOP:
                    # No link; storage may answer later.
                    _log.warning("%s is not used (%s)", path, reason)
                    continue
            _log.warning("%s is not used, and made again (%s)", path, reason)
            path.unlink(missing_ok=True)
        return None

    def _make_room(self, place: str, *, newest: str) -> None:
        """Deletes earlier files of the same place, the least recently used files above the limit, and old
        leftovers. Files that processes have mapped stay usable for them."""
        kept, gone = [], []
        for each in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # Another process makes room too.
                facts = each.stat(follow_symlinks=False)
                if each.name.endswith(_UNFINISHED):
                    gone += [each] if time.time() - facts.st_mtime > _STALE_S else []
                elif each.name.startswith(place) and each.name != newest:
                    gone.append(each)
                elif each.suffix == SUFFIX:
                    kept.append((each.name == newest, facts.st_mtime_ns, facts.st_size, each))
        total = sum(size for _, _, size, _ in kept)
        for _, _, size, each in sorted(kept):
            if total <= self._limit_bytes:
                break
            gone.append(each)
            total -= size
        for each in gone:
            each.unlink(missing_ok=True)


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


_MESSAGE_BYTES = 300
# Lines of the runtime: they name a file and line of its source, or are one of these.
_OURS = re.compile(
    rb"\b\w+\.(?:cc|h):\d+\]|^INFO: Created TensorFlow Lite|^WARNING: All log messages before|^\xe2\x94\x94"
)
# The process has one standard error: a thread that redirects it must restore it before another one does. A
# thread may redirect it twice, because models are closed whenever Python collects them.
_taking = threading.RLock()


@contextlib.contextmanager
def captured_messages() -> Iterator[Callable[[], str]]:
    """Captures the runtime's messages during the block; yields a function that returns the last of them.

    Redirects the whole process's standard error. Messages of others are written when the block ends.
    """
    with _taking, tempfile.TemporaryFile() as kept:
        sys.stderr.flush()
        before = os.dup(2)
        os.dup2(kept.fileno(), 2)

        def lines() -> list[bytes]:
            # By `pread`, because the file's offset is shared with the writers.
            return os.pread(kept.fileno(), os.fstat(kept.fileno()).st_size, 0).splitlines(keepends=True)

        def messages() -> str:
            own = b"".join(each for each in lines() if _OURS.search(each))
            return own[-_MESSAGE_BYTES:].decode(errors="replace")

        try:
            yield messages
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            others = b"".join(each for each in lines() if not _OURS.search(each))
            if others:
                os.write(2, others)


@dataclasses.dataclass(frozen=True)
class Buffers:
    """Caches of a level with `cache_tokens` positions, by name: those with the sequence, and those that the
    next step writes."""

    cache_tokens: int
    filled: dict[str, Any]
    spare: dict[str, Any]


class LiteRtExecutor(Executor):
    """Runs the signatures of one model (see `Executor`).

    Attributes:
      threads: number of threads that compute.
      accelerator: what runs the operations that it takes.
      moves_rows: False, because Python can only read and write whole buffers, which is slower than what
        accepted tokens of other branches save.
      stops_early: False, because its programs have no loops.
    """

    moves_rows = stops_early = False

    def __init__(
        self,
        manifest: Manifest,
        folder: Path,
        *,
        threads: int = 0,
        accelerator: Accelerator = "cpu",
        packed: PackedFolder | None = None,
        stores: bool = True,
    ) -> None:
        """Opens a model.

        Args:
          threads: number of threads that compute; 0 for all cores of this process.
          accelerator: what runs the operations that it takes; the CPU runs the others.
          packed: cache of packed weights; None for a folder in the user's cache directory, unless its limit
            is 0.
          stores: whether packed weights are stored at all.

        Raises:
          ConfigError: LiteRT is not installed.
          ProgramError: the model is corrupt, or LiteRT rejects it.
        """
        require_extra("export", "ai_edge_litert")
        from ai_edge_litert.compiled_model import CompiledModel
        from ai_edge_litert.cpu_options import CpuOptions
        from ai_edge_litert.hardware_accelerator import HardwareAccelerator
        from ai_edge_litert.options import Options

        super().__init__(manifest, FolderAdapters(manifest, folder))
        self.threads, self.accelerator = threads or usable_cores(), accelerator
        file, *others = {each.file for each in manifest.signatures}
        if others or manifest.cache_dtype != "float32":
            raise ProgramError(
                f"{folder} is not a single model over float32 caches, which LiteRT needs; export it again"
            )
        path = manifest.require_intact(folder, file)
        made_of = f"{manifest.files[file].xxh3_128} {importlib.metadata.version('ai-edge-litert')}"
        if packed is None and stores and (limit := buckets_bytes()):
            packed = PackedFolder(cache_folder() / "xnnpack", limit_bytes=limit)
        opened = (
            contextlib.nullcontext() if packed is None else packed.opened(folder, manifest.precision, made_of)
        )
        self._buffers: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        with opened as kept, captured_messages() as said:
            cpu = CpuOptions(num_threads=self.threads, xnnpack_weight_cache_path=str(kept or ""))
            kinds = HardwareAccelerator.CPU | getattr(HardwareAccelerator, accelerator.upper())
            options = Options(hardware_accelerators=kinds, cpu_options=cpu)
            try:
                self._model = CompiledModel.from_file(str(path), options=options)
            except RuntimeError as error:
                raise ProgramError(
                    f"{path}: LiteRT refuses it ({one_line(error)}; {one_line(said())}); export it again"
                ) from error
            there = self._model.get_signature_list()
            if missing := [each.name for each in manifest.signatures if each.name not in there]:
                raise ProgramError(
                    f"{path} lacks the signatures {', '.join(missing)}, which {folder / MANIFEST} names; "
                    "copy both from one export"
                )
            # The first buffer makes the runtime search for accelerators again: do so now.
            first = next(each for each in manifest.signatures if each.kind == "prefill")
            self._buffers_of(first)[0][TOKENS].write(np.zeros((1, first.tokens), np.int32))
        weakref.finalize(self, _close, self._model, self._buffers, self._placed)

    def prepare(self, signatures: Sequence[Signature], progress: Progress | None = None) -> None:
        """See `Executor`; LiteRT has all signatures ready, only their buffers are made."""
        for done, signature in enumerate(signatures):
            self._buffers_of(signature)
            if progress is not None:
                progress("compile", done + 1, len(signatures))

    def is_ready(self, signature: Signature) -> bool:
        """See `Executor`; always True."""
        return True

    def grow(self, level: int, caches: Buffers, cache_tokens: int) -> Buffers:
        """See `Executor`."""
        return self.restored(level, cache_tokens, self.rows(level, caches, caches.cache_tokens))

    def rows(self, level: int, caches: Buffers, tokens: int) -> dict[str, np.ndarray]:
        """See `Executor`."""
        shapes = self.manifest.cache_shapes(level, caches.cache_tokens).items()
        whole = {name: _read(caches.filled[name], shape, np.dtype(np.float32)) for name, shape in shapes}
        return {name: np.array(each[:, :, :tokens]) for name, each in whole.items()}

    def restored(self, level: int, cache_tokens: int, rows: Mapping[str, np.ndarray]) -> Buffers:
        """See `Executor`."""
        decode = self.manifest.signature("decode", 1, level, cache_tokens).name
        buffers = Buffers(cache_tokens, {}, {})
        for name, shape in self.manifest.cache_shapes(level, cache_tokens).items():
            buffers.filled[name] = self._model.create_input_buffer_by_name(decode, name)
            buffers.spare[name] = self._model.create_output_buffer_by_name(decode, name)
            # Masked positions are multiplied by zero: they must be finite.
            own = lengthened(rows[name], shape) if rows else np.zeros(shape, np.float32)
            buffers.filled[name].write(own)
        return buffers

    def place(self, level: int, inputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """See `Executor`."""
        # All programs but those that encode accept the same arrays.
        decode, placed = self.manifest.signature("decode", 1, level, self.manifest.context_tokens).name, {}
        for name, each in inputs.items():
            placed[name] = self._model.create_input_buffer_by_name(decode, name)
            placed[name].write(each)
        return placed

    def run(
        self, signature: Signature, inputs: Mapping[str, Any], caches: Buffers | None = None
    ) -> tuple[dict[str, Any], Any]:
        """See `Executor`."""
        interface, (given, results) = self._interface(signature), self._buffers_of(signature)
        given, taken = dict(given), self._adapted(signature, inputs)
        # Without penalties the program reads none of their large arrays.
        skipped = PENALTIES if "draw" in taken and not taken["draw"][PENALIZED] else ()
        for name, each in taken.items():
            if not isinstance(each, np.ndarray):
                given[name] = each
            elif name not in skipped:
                given[name].write(np.ascontiguousarray(each))
        after = caches
        if caches is not None:
            given |= caches.filled
            if interface.writes:
                results = {**results, **caches.spare}
                after = Buffers(caches.cache_tokens, caches.spare, caches.filled)
        try:
            self._model.run_by_name(signature.name, given, results)
        except RuntimeError as error:
            raise ProgramError(f"LiteRT cannot run {signature.name} ({one_line(error)})") from error
        return {name: _read(results[name], *each) for name, each in interface.outputs.items()}, after

    def _buffers_of(self, signature: Signature) -> tuple[dict[str, Any], dict[str, Any]]:
        """The buffers of a signature's inputs and outputs by name, without caches and what `place` makes."""
        name, interface = signature.name, self._interface(signature)
        if name not in self._buffers:
            placed = {ADAPTER}
            if signature.kind != "encode":
                placed |= self.manifest.source_shapes(signature.level).keys()
            inputs = {
                each: self._model.create_input_buffer_by_name(name, each)
                for each in interface.inputs
                if each not in placed
            }
            outputs = {
                each: self._model.create_output_buffer_by_name(name, each) for each in interface.outputs
            }
            for each in PENALTIES if signature.kind == "block" else ():
                inputs[each].write(np.zeros(*interface.inputs[each]))
            self._buffers[name] = inputs, outputs
        return self._buffers[name]


def _read(buffer: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return buffer.read(math.prod(shape), dtype.type).reshape(shape)


def _close(model: Any, *buffers: dict[Any, Any]) -> None:
    # The runtime's environment, which model and buffers own, prints a message at its end.
    with captured_messages():
        for each in buffers:
            each.clear()
        model.close()
        vars(model).clear()
