"""Calls LiteRT's library by its C interface, and opens a few programs of a model.

What the runtime keeps of a program grows with its operators, not with its weights: over a megabyte for a
small model, and a folder has dozens of programs. A `.tflite` file is mapped, and programs that are not wanted
are emptied in this process's copy of the pages that list them, before the runtime reads these: the weights
and what names them stay where they are. The package's Python wrapper has neither: it opens whole files, and
brings a copy of the runtime and the plug-ins of accelerators.
"""

import contextlib
import ctypes
import importlib.util
import mmap
import os
import re
import struct
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError, ProgramError

_HOST_ACCELERATORS = {"cpu": 1, "gpu": 1 | 2}
_READ, _WRITE = 0, 1
# Packed weights that programs of one model share in memory; else each has its own.
IN_MEMORY = ":memory"
# Of LiteRT's numbers of element types, those of programs' arrays.
_TYPES = {1: np.float32, 2: np.int32, 3: np.uint8, 6: np.bool_, 9: np.int8, 10: np.float16}
# Fields in a model's file.
_SUBGRAPHS, _SIGNATURES = 2, 7
_KEY, _SUBGRAPH = 2, 4
# A subgraph's tensors, inputs, outputs and operators.
_LISTS = range(4)


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


class _TensorType(ctypes.Structure):
    """An element's type, the rank in 7 bits, and up to 8 dimensions and strides."""

    _fields_ = (
        ("element", ctypes.c_int32),
        ("rank", ctypes.c_uint32),
        ("sizes", ctypes.c_int32 * 8),
        ("strides", ctypes.c_uint32 * 8),
    )


class Library:
    """The runtime of this process, with an environment of its own.

    Args:
      accelerator: "cpu" or "gpu"; the GPU's library is loaded for it.
    """

    def __init__(self, accelerator: str) -> None:
        spec = importlib.util.find_spec("ai_edge_litert")
        assert spec is not None
        (folder,) = map(Path, spec.submodule_search_locations or ())
        if accelerator == "gpu":
            for each in sorted(folder.glob("libLiteRt*GpuAccelerator.*")):
                # The runtime finds it by its name once it is loaded.
                ctypes.CDLL(str(each), mode=ctypes.RTLD_GLOBAL)
        files = sorted(folder.glob("libLiteRt.*"))
        if not files:
            raise ConfigError(f"{folder} has no libLiteRt; pip install --force-reinstall ai-edge-litert")
        self._functions = ctypes.CDLL(str(files[0]))
        self.accelerators = _HOST_ACCELERATORS[accelerator]
        self.environment = self.made("Environment", ctypes.c_int(0), None)
        # Objects that hold this one end before.
        weakref.finalize(self, _end, self._functions, self.environment)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function.

        Raises:
          ProgramError: it reports an error, or this version of the library lacks it.
        """
        try:
            status = getattr(self._functions, f"LiteRt{name}")(*arguments)
        except AttributeError as error:
            raise ProgramError(
                f"this version of ai-edge-litert has no {name}; install another one"
            ) from error
        if not name.startswith("Destroy") and status:
            raise ProgramError(f"LiteRT reports error {status} of {name}")

    def made(self, what: str, *arguments: Any, get: bool = False) -> ctypes.c_void_p:
        """What a function makes, or gets of another object."""
        found = ctypes.c_void_p()
        self.call(f"{'Get' if get else 'Create'}{what}", *arguments, ctypes.byref(found))
        return found


def _end(functions: ctypes.CDLL, environment: ctypes.c_void_p) -> None:
    with captured_messages():
        functions.LiteRtDestroyEnvironment(environment)


class Buffer:
    """A runtime's array, freed with this object.

    Attributes:
      shape, dtype: of its numbers.
    """

    def __init__(self, library: Library, handle: ctypes.c_void_p, kind: _TensorType) -> None:
        self.handle, self._library, size = handle, library, ctypes.c_size_t()
        weakref.finalize(self, library.call, "DestroyTensorBuffer", handle)
        self.shape = tuple(kind.sizes[: kind.rank & 0x7F])
        self.dtype = np.dtype(_TYPES.get(kind.element, np.void))
        library.call("GetTensorBufferPackedSize", handle, ctypes.byref(size))
        if int(np.prod(self.shape)) * self.dtype.itemsize != size.value:
            raise ProgramError(
                f"an array {self.shape} {self.dtype} has {size.value:,} bytes; export it again"
            )

    @contextlib.contextmanager
    def array(self, *, write: bool = False) -> Iterator[np.ndarray]:
        """Yields its memory as an array; to write, all of it must be written."""
        address = ctypes.c_void_p()
        self._library.call("LockTensorBuffer", self.handle, ctypes.byref(address), _WRITE if write else _READ)
        try:
            size = int(np.prod(self.shape)) * self.dtype.itemsize
            raw = (ctypes.c_char * size).from_address(address.value or 0)
            yield np.frombuffer(raw, self.dtype).reshape(self.shape)
        finally:
            self._library.call("UnlockTensorBuffer", self.handle)

    def read(self) -> np.ndarray:
        """A copy of its numbers."""
        with self.array() as found:
            return found.copy()

    def write(self, values: np.ndarray) -> None:
        """Sets all of its numbers.

        Raises:
          ProgramError: it has another shape or type.
        """
        if (values.shape, values.dtype) != (self.shape, self.dtype):
            given = f"{values.shape} {values.dtype}"
            raise ProgramError(f"a program takes {self.shape} {self.dtype}, not {given}; export it again")
        with self.array(write=True) as found:
            found[...] = values


class OpenPrograms:
    """Some programs of a model's file, which share the memory of their intermediate results.

    Args:
      file: its descriptor, which may be closed.
      names: names of their signatures; None for all.
      threads: number of threads that compute.
      packed: path of a file of packed weights, or `IN_MEMORY`.

    Attributes:
      names: names of the signatures that are open.
    """

    def __init__(
        self, library: Library, file: int, names: Collection[str] | None, *, threads: int, packed: str
    ) -> None:
        """Opens them; raises ProgramError if the file is damaged, or the runtime refuses it."""
        self._library = library
        self._file = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
        if names is not None:
            keep_programs(self._file, names)
        size = len(self._file)
        start = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self._file)))
        self._model = library.made("ModelFromBuffer", library.environment, start, ctypes.c_size_t(size))
        weakref.finalize(self, library.call, "DestroyModel", self._model)
        self._compiled = self._compile(threads, packed)
        weakref.finalize(self, library.call, "DestroyCompiledModel", self._compiled)
        count = ctypes.c_size_t()
        library.call("GetNumModelSignatures", self._model, ctypes.byref(count))
        self._signatures: dict[str, tuple[int, ctypes.c_void_p, dict[bool, list[str]]]] = {}
        for index in range(count.value):
            signature = library.made("ModelSignature", self._model, ctypes.c_size_t(index), get=True)
            tensors = {output: self._tensors(signature, output) for output in (False, True)}
            key = library.made("SignatureKey", signature, get=True)
            self._signatures[_text(key)] = index, signature, tensors
        self.names = frozenset(self._signatures)

    def arrays(self, name: str, *, output: bool = False) -> list[str]:
        """Names of a program's inputs or outputs, in the order of the runtime."""
        return self._signatures[name][2][output]

    def _compile(self, threads: int, packed: str) -> ctypes.c_void_p:
        library, options = self._library, self._library.made("Options")
        facts = f'num_threads = {threads}\nweight_cache_file_path = "{packed}"\n'
        payload = ctypes.create_string_buffer(facts.encode())
        try:
            library.call("SetOptionsHardwareAccelerators", options, library.accelerators)
            opaque = library.made("OpaqueOptions", b"xnnpack", ctypes.byref(payload), _keep)
            library.call("AddOpaqueOptions", options, opaque)
            return library.made("CompiledModel", library.environment, self._model, options)
        finally:
            library.call("DestroyOptions", options)

    def _tensors(self, signature: ctypes.c_void_p, output: bool) -> list[str]:
        """Names of a signature's inputs or outputs, in the order of the runtime."""
        library, side, count = self._library, "Output" if output else "Input", ctypes.c_size_t()
        library.call(f"GetNumSignature{side}s", signature, ctypes.byref(count))
        places = map(ctypes.c_size_t, range(count.value))
        return [_text(library.made(f"Signature{side}Name", signature, each, get=True)) for each in places]

    def buffer(self, name: str, tensor: str, *, output: bool = False) -> Buffer:
        """A new array for an input or an output of a program.

        Raises:
          ProgramError: it has no such input or output.
        """
        index, signature, tensors = self._signatures[name]
        if tensor not in tensors[output]:
            raise ProgramError(f"the program {name} lacks the array {tensor}; export the model again")
        side, place = "Output" if output else "Input", ctypes.c_size_t(tensors[output].index(tensor))
        library, found = self._library, _TensorType()
        one = library.made(f"Signature{side}TensorByIndex", signature, place, get=True)
        library.call("GetRankedTensorType", one, ctypes.byref(found))
        wanted = library.made(
            f"CompiledModel{side}BufferRequirements", self._compiled, ctypes.c_size_t(index), place, get=True
        )
        kind = "ManagedTensorBufferFromRequirements"
        made = library.made(kind, library.environment, ctypes.byref(found), wanted)
        return Buffer(library, made, found)

    def run(self, name: str, inputs: Mapping[str, Buffer], outputs: Mapping[str, Buffer]) -> None:
        """Runs a program.

        Raises:
          ProgramError: the runtime fails.
        """
        index, _, tensors = self._signatures[name]
        arguments = []
        for output, buffers in ((False, inputs), (True, outputs)):
            handles = [buffers[each].handle for each in tensors[output]]
            arguments += [ctypes.c_size_t(len(handles)), (ctypes.c_void_p * len(handles))(*handles)]
        self._library.call("RunCompiledModel", self._compiled, ctypes.c_size_t(index), *arguments)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _keep(_: int) -> None:
    """Frees nothing: Python does."""


def _text(address: ctypes.c_void_p) -> str:
    return ctypes.string_at(address.value or 0).decode()


def program_names(file: int) -> set[str]:
    """Names of the signatures in a `.tflite` file, by its descriptor.

    Raises:
      ProgramError: the file is damaged.
    """
    with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as model:
        return set(_signature_records(model))


def keep_programs(model: Any, names: Collection[str]) -> None:
    """Empties in place the subgraphs of a model that other signatures name, and removes these signatures.

    Args:
      model: writable bytes of a `.tflite` file (a flatbuffer of `schema.fbs`); changed.
      names: names of the signatures that stay.

    Raises:
      ProgramError: the bytes are damaged.
    """
    records = _signature_records(model)
    kept = [record for name, record in records.items() if name in names]
    with _damage():
        subgraphs = _places(model, _list(model, _number(model, 0), _SUBGRAPHS))
        # Absent, it is the first.
        used = {
            record: _number(model, field) if (field := _field(model, record, _SUBGRAPH)) else 0
            for record in records.values()
        }
        for index in set(used.values()) - {used[record] for record in kept}:
            for each in _LISTS:
                if place := _list(model, subgraphs[index], each):
                    struct.pack_into("<I", model, place, 0)
        vector = _list(model, _number(model, 0), _SIGNATURES)
        offsets = [record - (vector + 4 + 4 * index) for index, record in enumerate(kept)]
        struct.pack_into(f"<{1 + len(kept)}I", model, vector, len(kept), *offsets)


def _signature_records(model: Any) -> dict[str, int]:
    """The places of a model's signatures, by name."""
    found = {}
    with _damage():
        for record in _places(model, _list(model, _number(model, 0), _SIGNATURES)):
            key = _list(model, record, _KEY)
            found[bytes(model[key + 4 : key + 4 + _number(model, key)]).decode()] = record
    return found


@contextlib.contextmanager
def _damage() -> Iterator[None]:
    try:
        yield
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ProgramError(f"the model's file is damaged ({error}); export it again") from error


def _number(model: Any, place: int) -> int:
    return struct.unpack_from("<I", model, place)[0]


def _field(model: Any, record: int, index: int) -> int:
    """The place of a record's field; 0 if it is absent."""
    facts = record - struct.unpack_from("<i", model, record)[0]
    at = 4 + 2 * index
    (offset,) = struct.unpack_from("<H", model, facts + at) if at < _number(model, facts) & 0xFFFF else (0,)
    return record + offset if offset else 0


def _list(model: Any, record: int, index: int) -> int:
    """The place of the vector or string that a record's field refers to; 0 if it is absent."""
    field = _field(model, record, index)
    return field + _number(model, field) if field else 0


def _places(model: Any, vector: int) -> list[int]:
    """The places of a vector's records."""
    slots = range(vector + 4, vector + 4 + 4 * _number(model, vector), 4)
    return [each + _number(model, each) for each in slots]
