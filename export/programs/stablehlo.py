"""Runs StableHLO programs, with separate weights, on JAX's device.

A program's sizes are checked before it is compiled (see `bounds`); trust a folder as a library (see
SECURITY.md).
"""

import hashlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.export.folder_format.levels import ProgramLevel
from jaxllm.export.folder_format.manifest import CODED_KINDS, WEIGHTS, Manifest, Signature
from jaxllm.export.folder_format.tiny_lm import TINY_WEIGHTS
from jaxllm.export.folder_format.weights import read_weights
from jaxllm.export.programs.adapters import FolderAdapters
from jaxllm.export.programs.bounds import Bounds, program_bounds
from jaxllm.export.programs.jax_programs import JaxPrograms
from jaxllm.serving.buckets.store import CompiledBucketFolder

# JAX's name of a platform -> the name in manifests.
_PLATFORMS = {"gpu": "cuda"}
# Alignment in bytes of an array that a CPU uses in place.
_ALIGN = 64
# Maximum bytes of one program, which has no weights.
MAX_PROGRAM_BYTES = 64 << 20


class StableHloExecutor(JaxPrograms):
    """Runs the programs of a folder. On a CPU the weights are in memory once, and a level reads the first
    units of the whole model's; other devices have a copy for each level."""

    def __init__(self, manifest: Manifest, folder: Path, kept: CompiledBucketFolder | None = None) -> None:
        """Opens the folder.

        Raises:
          ConfigError: the programs are for other devices, or the extra is missing.
          ProgramError: a file is corrupt, or the weights are another model's.
        """
        if importlib.util.find_spec("flatbuffers") is None:
            raise ConfigError("flatbuffers is not installed; run `pip install 'jaxllm[stablehlo]'`")
        device = jax.devices()[0]
        platform = _PLATFORMS.get(device.platform, device.platform)
        if platform not in manifest.platforms:
            raise ConfigError(
                f"{folder} was exported for {', '.join(manifest.platforms)}, this device is {platform}; "
                f"export the model with --platform {platform}"
            )
        arrays = read_weights(manifest.require_intact(folder, WEIGHTS), model=manifest.model)
        arrays = _in_memory(arrays) if platform == "cpu" else arrays
        weights = {level: _placed(arrays, each) for level, each in manifest.levels.items()}
        super().__init__(
            manifest,
            weights,
            self._step_of,
            self._contents_of,
            kept,
            tiny_lm=_tiny_lm(manifest, folder),
            adapters=FolderAdapters(manifest, folder),
        )
        self._folder = folder

    def _step_of(self, signature: Signature) -> Callable[..., dict[str, jax.Array]]:
        """A program's function, within its bounds."""
        # Imported here, because it is slow and cached buckets do not need it.
        import jax.export

        exported = jax.export.deserialize(bytearray(self._program(signature)))
        self._bounds(signature).require(exported, self._path(signature))
        # Results have the names that were checked.
        return cast("Callable[..., dict[str, jax.Array]]", exported.call)

    def _contents_of(self, signature: Signature) -> str:
        """Key of a program's contents, by SHA-256, so that no other file has it."""
        return f"{hashlib.sha256(self._program(signature)).hexdigest()} {self._bounds(signature)}"

    def _program(self, signature: Signature) -> bytes:
        """The contents of a program's file."""
        return self.manifest.read_intact(self._folder, signature.file, most_bytes=MAX_PROGRAM_BYTES)

    def _bounds(self, signature: Signature) -> Bounds:
        return program_bounds(signature, self.manifest, self._weights_of(signature))

    def _weights_of(self, signature: Signature) -> Mapping[str, Any]:
        if signature.kind in CODED_KINDS:
            return {}
        return self._tiny_lm if signature.kind == "tiny_lm" else self._weights[signature.level]

    def _path(self, signature: Signature) -> str:
        return str(self._folder / signature.file)


def _tiny_lm(manifest: Manifest, folder: Path) -> dict[str, jax.Array]:
    """The weights of a folder's tiny LM on the device; empty for none."""
    if manifest.tiny_lm is None:
        return {}
    arrays = read_weights(manifest.require_intact(folder, TINY_WEIGHTS), model=manifest.model)
    return {name: jax.device_put(each) for name, each in arrays.items()}


def _in_memory(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Copies arrays into one block of memory, which the system allocates in large pages: a decoded token
    reads all weights, which is slower from the small pages of a mapped file."""
    sizes = {name: each.nbytes + -each.nbytes % _ALIGN for name, each in arrays.items()}
    block = np.empty(sum(sizes.values()) + _ALIGN, np.uint8)
    at, found = -block.ctypes.data % _ALIGN, {}
    for name, each in arrays.items():
        found[name] = block[at : at + each.nbytes].view(each.dtype).reshape(each.shape)
        found[name][...] = each
        at += sizes[name]
    return found


def _placed(arrays: dict[str, np.ndarray], level: ProgramLevel) -> dict[str, jax.Array]:
    device = jax.devices()[0]
    return {name: jax.device_put(view, device, may_alias=True) for name, view in level.views(arrays).items()}
