"""Runs a `.tflite` model by LiteRT: XNNPACK on a CPU, with its packed weights stored in a file.

XNNPACK reads weights in its own order. Packed once, they are a file that later processes map: a start is a
matter of milliseconds, and the system can drop pages of weights. There is one file per program folder and
width, named by its model, by the runtime that packed it and by its own checksum: the runtime does not check
whose weights a file has, so the name must identify it, and only this user may have written it
(`jaxllm.serving.host.user_cache`). A file is written under a temporary name and renamed when it is complete:
processes that open a program at the same time do not write into each other's files.

Programs are opened when they first run, in milliseconds: those over the same caches together, because the
runtime holds some memory for each (see `litert_library.py`). LiteRT writes its messages to the process's
standard error, which is captured.
"""

import contextlib
import dataclasses
import errno
import importlib.metadata
import logging
import os
import time
import uuid
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from jaxllm.errors import ConfigError, ProgramError, one_line
from jaxllm.export.contents import require_extra
from jaxllm.export.folder_format.manifest import MANIFEST, Manifest
from jaxllm.export.folder_format.parts import ADAPTER
from jaxllm.export.folder_format.signature import PENALIZED, PENALTIES, Signature
from jaxllm.export.programs.executor import Accelerator, Executor, FolderAdapters
from jaxllm.export.programs.litert_library import (
    IN_MEMORY,
    Buffer,
    Library,
    OpenPrograms,
    captured_messages,
    program_names,
)
from jaxllm.serving.host.allocator import give_back_memory
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


@dataclasses.dataclass(frozen=True)
class Buffers:
    """Caches of a level with `cache_tokens` positions, by name: those with the sequence, and those that the
    next step writes, which for a CPU are the same."""

    cache_tokens: int
    filled: dict[str, Buffer]
    spare: dict[str, Buffer]


class LiteRtExecutor(Executor):
    """Runs the signatures of one model (see `Executor`).

    Attributes:
      threads: number of threads that compute.
      accelerator: what runs the operations that it takes.
      moves_rows: False: drafts of its programs are lines.
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
        """Opens a model; packs its weights for the CPU if they are not stored.

        Args:
          threads: number of threads that compute; 0 for all cores of this process.
          accelerator: what runs the operations that it takes.
          packed: cache of packed weights; None for a folder in the user's cache directory, unless its limit
            is 0.
          stores: whether packed weights are stored at all.

        Raises:
          ConfigError: LiteRT is not installed.
          ProgramError: the model is corrupt, or LiteRT rejects it.
        """
        require_extra("export", "ai_edge_litert")
        super().__init__(manifest, FolderAdapters(manifest, folder))
        self.threads, self.accelerator = threads or usable_cores(), accelerator
        file, *others = {each.file for each in manifest.signatures}
        if others or manifest.cache_dtype == "bfloat16":
            raise ProgramError(
                f"{folder} is not a single model over caches of float32, float16 or int8, as LiteRT needs; "
                "export it again"
            )
        self._path = manifest.require_intact(folder, file)
        # Kept, because another folder may be put in its place before all programs are open.
        self._number = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._number)
        if missing := {each.name for each in manifest.signatures} - program_names(self._number):
            raise ProgramError(
                f"{self._path} lacks the signatures {', '.join(sorted(missing))}, which {folder / MANIFEST} "
                "names; copy both from one export"
            )
        if packed is None and stores and (limit := buckets_bytes()):
            packed = PackedFolder(cache_folder() / "xnnpack", limit_bytes=limit)
        self._packed, self._opened = packed, None
        self._buffers: dict[str, tuple[dict[str, Buffer], dict[str, Buffer]]] = {}
        with captured_messages():
            self._library = Library(accelerator)
        self._open(manifest.signatures[:1])

    def prepare(self, signatures: Sequence[Signature], progress: Progress | None = None) -> None:
        """See `Executor`; does nothing: programs are opened when they first run."""

    def is_ready(self, signature: Signature) -> bool:
        """See `Executor`; always True."""
        return True

    def grow(self, level: int, caches: Buffers, cache_tokens: int) -> Buffers:
        """See `Executor`."""
        return self.restored(level, cache_tokens, self.rows(level, caches, caches.cache_tokens))

    def rows(self, level: int, caches: Buffers, tokens: int) -> dict[str, np.ndarray]:
        """See `Executor`."""
        found = {}
        for name, each in caches.filled.items():
            with each.array() as whole:
                found[name] = whole[:, :, :tokens].copy()
        return found

    def restored(self, level: int, cache_tokens: int, rows: Mapping[str, np.ndarray]) -> Buffers:
        """See `Executor`."""
        decode = self.manifest.signature("decode", 1, level, cache_tokens)
        opened, buffers = self._open([decode]), Buffers(cache_tokens, {}, {})
        for name in self.manifest.cache_shapes(level, cache_tokens):
            buffers.filled[name] = opened.buffer(decode.name, name)
            # A CPU updates caches in place: programs read an old row only to write it again.
            own = self.accelerator == "cpu"
            spare = buffers.filled[name] if own else opened.buffer(decode.name, name, output=True)
            buffers.spare[name] = spare
            with buffers.filled[name].array(write=True) as whole:
                filled = rows[name].shape[2] if rows else 0
                if filled:
                    whole[:, :, :filled] = rows[name]
                # Masked positions are multiplied by zero: they must be finite.
                whole[:, :, filled:] = 0
        return buffers

    def place(self, level: int, inputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """See `Executor`."""
        # All programs but those that encode accept the same arrays.
        lengths = self.manifest.cache_tokens(level)
        decodes = [self.manifest.signature("decode", 1, level, each) for each in lengths]
        decode = next((each for each in decodes if each.name in self.opened_names), decodes[-1])
        opened, placed = self._open([decode]), {}
        for name, each in inputs.items():
            placed[name] = opened.buffer(decode.name, name)
            placed[name].write(each)
        return placed

    def run(
        self, signature: Signature, inputs: Mapping[str, Any], caches: Buffers | None = None
    ) -> tuple[dict[str, Any], Any]:
        """See `Executor`."""
        taken, interface = self._adapted(signature, inputs), self._interface(signature)
        opened, (given, results) = self._open([signature]), self._buffers_of(signature)
        given = dict(given)
        # Without penalties the program reads none of their large arrays.
        skipped = PENALTIES if "draw" in taken and not taken["draw"][PENALIZED] else ()
        for name, each in taken.items():
            if not isinstance(each, np.ndarray):
                given[name] = each
            elif name not in skipped:
                given[name].write(each)
        after = caches
        if caches is not None:
            given |= caches.filled
            if interface.writes:
                results = {**results, **caches.spare}
                after = Buffers(caches.cache_tokens, caches.spare, caches.filled)
        opened.run(signature.name, given, results)
        return {name: results[name].read() for name in interface.outputs}, after

    def _buffers_of(self, signature: Signature) -> tuple[dict[str, Buffer], dict[str, Buffer]]:
        """The buffers of a signature's inputs and outputs by name, without caches and what `place` makes."""
        name, interface, opened = signature.name, self._interface(signature), self._open([signature])
        if name not in self._buffers:
            placed = {ADAPTER}
            if signature.kind != "encode":
                placed |= self.manifest.source_shapes(signature.level).keys()
            inputs = {each: opened.buffer(name, each) for each in interface.inputs if each not in placed}
            outputs = {each: opened.buffer(name, each, output=True) for each in interface.outputs}
            for each in PENALTIES if signature.kind == "block" else ():
                inputs[each].write(np.zeros(*interface.inputs[each]))
            self._buffers[name] = inputs, outputs
        return self._buffers[name]

    @property
    def opened_names(self) -> Collection[str]:
        """Names of the open programs."""
        return () if self._opened is None else self._opened.names

    def _open(self, signatures: Sequence[Signature]) -> OpenPrograms:
        """The open programs, after opening those over the caches of any of `signatures` that is not among
        them; on an accelerator, whose drivers compile them for long, all at once."""
        if self._opened is not None and all(each.name in self.opened_names for each in signatures):
            return self._opened
        manifest, lazy = self.manifest, self.accelerator == "cpu"
        caches = {self._caches_of(each) for each in signatures}
        names = {each.name for each in manifest.signatures if self._caches_of(each) in caches or not lazy}
        names |= set(self.opened_names)
        # Before others take memory: all have the same weights and intermediate results.
        self._opened = None
        made_of = manifest.files[manifest.signatures[0].file].xxh3_128
        made_of += f" {importlib.metadata.version('ai-edge-litert')}"

        def opened(names: Collection[str] | None, packed: str) -> OpenPrograms:
            return OpenPrograms(self._library, self._number, names, threads=self.threads, packed=packed)

        with captured_messages() as said:
            try:
                for written in (False, True):
                    with self._packed_file(made_of) as kept:
                        if kept is not None and (kept.is_file() or not lazy):
                            self._opened = opened(names, str(kept))
                            break
                        # All weights at once: a file that lacks some is of no use to later programs.
                        if kept is None or written:
                            self._opened = opened(None, IN_MEMORY)
                            break
                        opened(None, str(kept))
            except ProgramError as error:
                why = f"{one_line(error)}; {one_line(said())}"
                raise ProgramError(f"{self._path}: LiteRT refuses it ({why}); export it again") from error
        # The runtime frees what it made programs of.
        give_back_memory()
        assert self._opened is not None
        return self._opened

    def _caches_of(self, signature: Signature) -> tuple[Any, ...]:
        """What programs that are opened together have in common: any request needs those that prefill and
        decode, and few need others."""
        needed = signature.kind in ("prefill", "decode")
        return signature.level, signature.cache_tokens, "" if needed else signature.kind

    def _packed_file(self, made_of: str) -> contextlib.AbstractContextManager[Path | None]:
        if self._packed is None:
            return contextlib.nullcontext()
        return self._packed.opened(self._path.parent, self.manifest.precision, made_of)
