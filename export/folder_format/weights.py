"""Reads and writes the weights of exported programs: one mapped safetensors file, each array once.

Arrays are aligned to 64 bytes if their sizes allow, so that a CPU uses them in place. The file's metadata
has the fingerprint of their bundle.
"""

import json
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.errors import ProgramError
from jaxllm.export.folder_format.manifest import malformed

_MAX_HEADER_BYTES = 64 << 20
_ALIGN = 64
_MODEL = "model"
_DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "I8": np.dtype(np.int8),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Exceptions of parsing a malformed header.
_MALFORMED = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, struct.error, RecursionError
)  # fmt: skip


def write_weights(path: Path, arrays: Mapping[str, np.ndarray], *, model: str) -> None:
    """Writes arrays of the bundle whose fingerprint is `model`."""
    header: dict[str, object] = {"__metadata__": {_MODEL: model}}
    offset = 0
    for name, array in arrays.items():
        end = offset + array.nbytes
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).view(np.uint8).data)


def read_weights(path: Path, *, model: str) -> dict[str, np.ndarray]:
    """The arrays of a file by name, as views of its pages.

    Raises:
      ProgramError: the file is malformed, or belongs to another model than `model`.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        (length,) = struct.unpack_from("<Q", data)
        if length > min(len(data) - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(data[8 : 8 + length])
        found = str(header.pop("__metadata__", {}).get(_MODEL, ""))
        body = memoryview(data)[8 + length :]
        arrays = {name: _array(body, entry) for name, entry in header.items()}
    except _MALFORMED as error:
        raise malformed(path, error) from error
    if found != model:
        raise ProgramError(
            f"{path}: weights of another bundle ({found[:12] or 'unnamed'}) than the programs beside them "
            f"({model[:12]}); copy both from one export"
        )
    return arrays


def _array(body: memoryview, entry: dict[str, Any]) -> np.ndarray:
    start, end = entry["data_offsets"]
    if not 0 <= start <= end <= len(body):
        raise ValueError("an array beyond the file's end")
    if any(type(each) is not int or each < 0 for each in entry["shape"]):
        raise ValueError(f"an array of shape {entry['shape']!r:.80}")
    return np.frombuffer(body[start:end], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
