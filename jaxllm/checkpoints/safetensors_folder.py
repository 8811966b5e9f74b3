"""Reads and writes the tensors of a model folder by stored name: one safetensors file, or shards with an
index.

Files are read lazily: a tensor's bytes are touched when a slice of it is read. Pickles are never opened,
and an index cannot refer outside of its folder.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

# The import registers the dtype "bfloat16" with NumPy, on which safetensors relies.
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxllm.errors import CheckpointError, one_line
from jaxllm.files.atomic import atomic_file
from jaxllm.files.input_files import open_regular, read_json
from jaxllm.quant.weights import all_finite, part_rows

# Stored name -> dtype (one of `FLOAT_TYPES`), shape, and a function that returns the values.
Tensors = dict[str, tuple[np.dtype, tuple[int, ...], Callable[[], np.ndarray]]]

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Allowed dtypes of weights: NumPy's name -> safetensors' name.
FLOAT_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
FLOATS = tuple(FLOAT_TYPES.values())

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# How many names a message lists; the others are counted.
_NAMED = 3
# Pages that were read stay in memory while a file is mapped: after this number of bytes it is mapped again.
_MOST_MAPPED_BYTES = 64 << 20


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights that `SafetensorsFolder` would open."""
    return (folder / WEIGHTS_FILE).is_file() or (folder / INDEX_FILE).is_file()


class SafetensorsFolder:
    """The tensors of a folder, opened and indexed but not read."""

    def __init__(self, folder: Path, file: str = WEIGHTS_FILE) -> None:
        """Finds `file`, or the shards of the index, and opens them.

        Raises:
          CheckpointError: there are no safetensors, or a file is missing, truncated or corrupt, or the
            index is malformed or refers outside of the folder.
        """
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._read_bytes: dict[str, int] = {}
        if (folder / file).is_file():
            self._file_of = dict.fromkeys(self._open(file).keys(), file)
        elif (folder / INDEX_FILE).is_file():
            self._file_of = self._read_index()
        else:
            pickles = [path.name for pattern in _PICKLES for path in folder.glob(pattern)]
            if not pickles:
                raise CheckpointError(f"{folder} holds neither {file} nor {INDEX_FILE}; download one")
            raise CheckpointError(
                f"{folder} holds weights only as pickles ({some(pickles)}), which can run code and are never "
                "opened; convert it where you trust it: transformers' from_pretrained(folder) and then "
                "save_pretrained(new_folder) writes safetensors"
            )

    def names(self) -> set[str]:
        """The stored names."""
        return set(self._file_of)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Dtype (safetensors' name) and shape of a tensor, from the header only."""
        stored = self._slices(name)
        return stored.get_dtype(), tuple(stored.get_shape())

    def check(self, name: str, shape: tuple[int, ...], dtypes: Collection[str] = FLOATS) -> None:
        """Checks a tensor's dtype and shape by only the header.

        Raises:
          CheckpointError: it is missing, its shape is not `shape`, or its dtype not one of `dtypes`.
        """
        if name not in self._file_of:
            raise CheckpointError(f"{self.folder} lacks the tensor {name}; download it again")
        dtype, stored = self.describe(name)
        if dtype not in dtypes or stored != shape:
            raise CheckpointError(
                f"tensor {name} of {self.folder} is {dtype} of shape {list(stored)} where its config.json "
                f"implies {', '.join(dtypes)} of shape {list(shape)}; the config belongs to other weights, "
                "or they are quantized in an unknown way: take the float weights of this model"
            )

    def require_complete(self, missing: Collection[str], extra: Collection[str], kind: str) -> None:
        """Refuses a folder that lacks tensors of a model, or has others; `kind` names the model."""
        if missing:
            raise CheckpointError(
                f"{self.folder} lacks {some(missing)} of {kind} with this config; the weights belong to "
                "another config, or are incomplete"
            )
        if extra:
            raise CheckpointError(
                f"{self.folder} holds {some(extra)}, which {kind} with this config does not have; the "
                "weights belong to another config"
            )

    def read(self, name: str, take: Callable[[Any], np.ndarray]) -> np.ndarray:
        """The result of `take`, which receives a tensor to index by slices.

        Raises:
          CheckpointError: the file cannot be read, or the result has numbers that are not finite.
        """
        values = self._read(name, lambda: take(self._slices(name)))
        if not all_finite(values):
            raise CheckpointError(
                f"tensor {name} of {self.folder} holds NaN or infinite values, so the model can only answer "
                "nonsense; take another copy or an earlier checkpoint"
            )
        return values

    def equal(self, name: str, other: str) -> bool:
        """Whether two matrices have the same numbers, in any types.

        Raises:
          CheckpointError: as `read`.
        """
        (dtype, shape), (other_dtype, other_shape) = self.describe(name), self.describe(other)
        if len(shape) != 2 or shape != other_shape or not {dtype, other_dtype} <= set(FLOATS):
            return False
        for first, last in part_rows(*shape):
            one, two = (
                self.read(each, lambda rows, at=(first, last): rows[slice(*at)]) for each in (name, other)
            )
            if not np.array_equal(one.astype(np.float32), two.astype(np.float32)):
                return False
        return True

    def close_to(self, name: str, values: np.ndarray) -> bool:
        """Whether a small tensor has some values in [-1, 1], as closely as any type of weights stores them.

        Raises:
          CheckpointError: as `read`.
        """
        dtype, shape = self.describe(name)
        if shape != values.shape or dtype not in FLOATS:
            return False
        return np.allclose(self.read(name, lambda rows: rows[:]).astype(np.float32), values, atol=4e-3)

    def integers(self, name: str, shape: tuple[int, ...], dtype: str = "I32") -> np.ndarray:
        """A tensor of integers of a type (safetensors' name).

        Raises:
          CheckpointError: it is missing, or of another type or shape, or the file cannot be read.
        """
        return self._all_of(name, shape, (dtype, "I64") if len(shape) == 1 else (dtype,))

    def floats(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A small tensor of floats, such as scales, in float32.

        Raises:
          CheckpointError: as `integers`.
        """
        return self._all_of(name, shape, FLOATS).astype(np.float32)

    def eighths(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A tensor of 8-bit floats (e4m3), in float32.

        Raises:
          CheckpointError: as `integers`.
        """
        self.check(name, shape, ("F8_E4M3",))
        path = self.folder / self._file_of[name]
        # The library has no such type in NumPy. It has checked the header: 8 bytes of length, JSON, data.
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            first, last = json.loads(file.read(length))[name]["data_offsets"]
            file.seek(8 + length + first)
            data = np.frombuffer(file.read(last - first), np.uint8)
        if data.size != math.prod(shape):
            raise self._corrupt(path.name, OSError("it ends early"))
        return data.view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(shape)

    def _all_of(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> np.ndarray:
        self.check(name, shape, dtypes)
        file = self._files[self._file_of[name]]
        # A scalar has no slices.
        return self._read(name, lambda: self._slices(name)[:] if shape else np.asarray(file.get_tensor(name)))

    def _read(self, name: str, read: Callable[[], np.ndarray]) -> np.ndarray:
        """The result of `read`; releases the pages of a file of which much was read."""
        file = self._file_of[name]
        try:
            values = read()
        except (SafetensorError, OSError) as error:
            raise self._corrupt(file, error) from error
        self._read_bytes[file] = self._read_bytes.get(file, 0) + values.nbytes
        if self._read_bytes[file] > _MOST_MAPPED_BYTES:
            self._read_bytes[file] = 0
            # The old mapping must end before there is a new one.
            del self._files[file]
            self._open(file)
        return values

    def _slices(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(name)

    def _open(self, file: str) -> Any:
        try:
            self._files[file] = safe_open(self.folder / file, framework="np")
        except FileNotFoundError as error:
            raise CheckpointError(
                f"shard {file} is missing from {self.folder} though {INDEX_FILE} names it; download the "
                "folder again"
            ) from error
        except (SafetensorError, OSError, MemoryError) as error:
            raise self._corrupt(file, error) from error
        return self._files[file]

    def _corrupt(self, file: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.folder / file} is truncated or corrupt ({one_line(error)}); download it again"
        )

    def _read_index(self) -> dict[str, str]:
        """Tensor name -> its shard, checked against the shards."""
        path = self.folder / INDEX_FILE
        file_of = read_json(path, "download it again").get("weight_map")
        if not isinstance(file_of, dict) or not file_of:
            raise CheckpointError(f"{path} has no 'weight_map' object; download it again")
        unplaced: dict[str, str] = {}
        for file in sorted(set(map(str, file_of.values()))):
            # Only plain names, so that an index cannot refer outside of its folder. Links are followed,
            # because Hugging Face's cache consists of them.
            if Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
                raise CheckpointError(
                    f"{path} names the shard {file!r}; a shard must be a .safetensors file in the same "
                    "folder: do not use this checkpoint"
                )
            placed = {name for name, where in file_of.items() if where == file}
            stored = set(self._open(file).keys())
            if absent := placed - stored:
                raise CheckpointError(
                    f"shard {file} of {self.folder} lacks {some(absent)}, which {INDEX_FILE} places "
                    "there; download the folder again"
                )
            # As in transformers, tensors missing in the index also belong to the model.
            unplaced |= dict.fromkeys(stored - file_of.keys(), file)
        return {**unplaced, **file_of}


def write_checkpoint(
    config_path: Path, config: Mapping[str, Any], weights_path: Path, tensors: Tensors
) -> None:
    """Writes a config and its weights, each of the files whole or not at all, with one tensor in memory at a
    time, which the library cannot do.

    Args:
      config_path: path of the config; its folder is created if missing.
      config: a JSON object.
      weights_path: path of the safetensors file, in the same folder.
      tensors: tensors to write; their values are made one at a time.
    """
    config_path.parent.mkdir(parents=True, exist_ok=True)
    # transformers requires this metadata.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, _) in tensors.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": FLOAT_TYPES[dtype.name], "shape": shape, "data_offsets": (offset, end)}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    # The inner file is renamed first; the config, already written, follows at once.
    with atomic_file(config_path) as config_file, atomic_file(weights_path) as file:
        config_file.write(json.dumps(config, indent=2).encode() + b"\n")
        # The header's length (8 bytes, little-endian), the header (JSON, padded to 8 bytes), data.
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for dtype, shape, make in tensors.values():
            values = np.ascontiguousarray(make(), dtype)
            assert values.shape == shape
            file.write(values.reshape(-1).view(np.uint8).data)


def check_parameters(shapes: Mapping[str, tuple[int, ...]], params: Mapping[str, Any]) -> None:
    """Checks parameters before they are written.

    Raises:
      CheckpointError: their names or shapes are not those of `shapes`, or they are not floats.
    """
    if params.keys() != shapes.keys():
        wrong = params.keys() ^ shapes.keys()
        raise CheckpointError(f"parameters and config disagree on {some(wrong)}; nothing was written")
    for name, wanted in shapes.items():
        shape, dtype = tuple(params[name].shape), getattr(params[name], "dtype", None)
        if shape != wanted:
            raise CheckpointError(
                f"parameter {name} has shape {list(shape)} but the config implies {list(wanted)}; "
                "nothing was written"
            )
        if dtype is None or np.dtype(dtype).name not in FLOAT_TYPES:
            raise CheckpointError(
                f"parameter {name} is {dtype or 'quantized'}; write {', '.join(FLOAT_TYPES)} weights"
            )


def some(names: Collection[str]) -> str:
    """The first few of `names`, sorted, and the number of the others, for messages."""
    shown = ", ".join(sorted(names)[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"
