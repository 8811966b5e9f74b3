"""Reads and writes the files of a program folder: their records, tokenizers (see
`Manifest.read_tokenizer`), and weights.

Weights are one mapped safetensors file with each array once. Arrays are aligned to 64 bytes if their sizes
allow, so that a CPU uses them in place. The file's metadata has the fingerprint of their bundle.
"""

import dataclasses
import json
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import xxhash

from jaxllm.errors import ProgramError
from jaxllm.files.input_files import open_regular
from jaxllm.options import check_options, option
from jaxllm.text.tokenizer import TokenizerFiles

# Files of a standalone device folder: the modules of the loop, and its entry point.
LOOP, MAIN = "loop.pyz", "__main__.py"
WEIGHTS, TOKENIZER = "weights.safetensors", "tokenizer.json"
TINY_WEIGHTS, TINY_TOKENIZER = "tiny_lm.safetensors", "tiny_lm_tokenizer.json"
_READ_BYTES = 1 << 24
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredFile:
    """Size and checksum of a file of the folder."""

    size_bytes: int = option(low=0, high=1 << 50)
    xxh3_128: str

    def __post_init__(self) -> None:
        check_options(self)

    @classmethod
    def of(cls, path: Path) -> "StoredFile":
        """The record of a file on disk.

        Raises:
          OSError: the file cannot be read, or is no regular file.
        """
        digest, size = xxhash.xxh3_128(), 0
        with open_regular(path) as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
                size += len(block)
        return cls(size_bytes=size, xxh3_128=digest.hexdigest())


def write_tokenizer(path: Path, files: TokenizerFiles) -> None:
    """Writes a tokenizer into a folder of programs."""
    path.write_text(json.dumps(files.to_json()), encoding="utf-8")


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
        raise ProgramError(f"{path}: malformed ({error!s:.200}); export the model again") from error
    if found != model:
        raise ProgramError(
            f"{path}: weights of another bundle ({found[:12] or 'unnamed'}) than the programs beside them "
            f"({model[:12]}); copy both from one export"
        )
    return arrays


def _array(body: memoryview, entry: dict) -> np.ndarray:
    start, end = entry["data_offsets"]
    if not 0 <= start <= end <= len(body):
        raise ValueError("an array beyond the file's end")
    if any(type(each) is not int or each < 0 for each in entry["shape"]):
        raise ValueError(f"an array of shape {entry['shape']!r:.80}")
    return np.frombuffer(body[start:end], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
