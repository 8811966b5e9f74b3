"""Runs StableHLO programs, with separate weights, on JAX's device.

A program's sizes are checked before it is compiled: it uses the manifest's arrays, and none that is far
larger. Its computation is not checked: trust a folder of programs as you would a library (see SECURITY.md).
"""

import dataclasses
import hashlib
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np

from jaxllm.errors import ConfigError, ProgramError
from jaxllm.export.contents import require_extra
from jaxllm.export.folder_format.manifest import TINY_WEIGHTS, WEIGHTS, Manifest
from jaxllm.export.folder_format.signature import Signature
from jaxllm.export.folder_format.weights import read_weights
from jaxllm.export.programs.executor import FolderAdapters
from jaxllm.export.programs.jax_programs import JaxPrograms, jax_shapes
from jaxllm.serving.buckets.bucket_table import CompiledBucketFolder

if TYPE_CHECKING:
    import jax.export

# JAX's name of a platform -> the name in manifests.
_PLATFORMS = {"gpu": "cuda"}
# Alignment in bytes of an array that a CPU uses in place.
_ALIGN = 64
# Maximum bytes of one program, which has no weights.
MAX_PROGRAM_BYTES = 64 << 20
# Factor over the largest argument or result of a program, and number of elements that is always allowed.
_LARGEST, _SMALL = 256, 1 << 20
_TENSOR = re.compile(r"\btensor<((?:[?*\d]+x)*)")
_CUSTOM_CALL = re.compile(r"\b\w+\.custom_call\b")


class StableHloExecutor(JaxPrograms):
    """Runs the programs of a folder. On a CPU the weights are in memory once, and a level reads the first
    units of the whole model's; other devices have a copy for each level."""

    def __init__(self, manifest: Manifest, folder: Path, kept: CompiledBucketFolder | None = None) -> None:
        """Opens the folder.

        Raises:
          ConfigError: the programs are for other devices, or the extra is missing.
          ProgramError: a file is corrupt, or the weights are another model's.
        """
        require_extra("stablehlo", "flatbuffers")
        device = jax.devices()[0]
        platform = _PLATFORMS.get(device.platform, device.platform)
        if platform not in manifest.platforms:
            raise ConfigError(
                f"{folder} was exported for {', '.join(manifest.platforms)}, this device is {platform}; "
                f"export the model with --platform {platform}"
            )
        arrays = read_weights(manifest.require_intact(folder, WEIGHTS), model=manifest.model)
        arrays = _in_memory(arrays) if platform == "cpu" else arrays
        weights = {
            level: {
                name: jax.device_put(view, device, may_alias=True)
                for name, view in each.views(arrays).items()
            }
            for level, each in manifest.levels.items()
        }
        adapters, tiny = FolderAdapters(manifest, folder), {}
        if manifest.tiny_lm is not None:
            stored = read_weights(manifest.require_intact(folder, TINY_WEIGHTS), model=manifest.model)
            tiny = {name: jax.device_put(each) for name, each in stored.items()}
        super().__init__(manifest, weights, kept, tiny_lm=tiny, adapters=adapters)
        self._folder = folder

    def step(self, signature: Signature) -> Callable[..., dict[str, jax.Array]]:
        """See `JaxPrograms`; the program is within its bounds."""
        # Imported here, because it is slow and cached buckets do not need it.
        import jax.export

        exported = jax.export.deserialize(bytearray(self._program(signature)))
        self._bounds(signature).require(exported, self.path(signature))
        # Results have the names that were checked.
        return cast("Callable[..., dict[str, jax.Array]]", exported.call)

    def contents(self, signature: Signature) -> str:
        """See `JaxPrograms`; by SHA-256, so that no other file has it."""
        return f"{hashlib.sha256(self._program(signature)).hexdigest()} {self._bounds(signature)}"

    def _program(self, signature: Signature) -> bytes:
        return self.manifest.read_intact(self._folder, signature.file, most_bytes=MAX_PROGRAM_BYTES)

    def _bounds(self, signature: Signature) -> "Bounds":
        return program_bounds(signature, self.manifest, self.weights_of(signature))

    def path(self, signature: Signature) -> str:
        """See `JaxPrograms`."""
        return str(self._folder / signature.file)


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Bounds of a program.

    Attributes:
      inputs, outputs: trees of the shapes of arguments and results.
    """

    inputs: Any
    outputs: Mapping[str, jax.ShapeDtypeStruct]

    @property
    def largest_elements(self) -> int:
        """Maximum number of elements of an array."""
        return _SMALL + _LARGEST * max(
            math.prod(each.shape) for each in jax.tree.leaves((self.inputs, self.outputs))
        )

    def require(self, exported: "jax.export.Exported", name: str) -> None:
        """Checks a program, called `name`, before it is compiled.

        Raises:
          ProgramError: its arguments or results are not those of the manifest, it calls external functions,
            or it allocates an array of an unknown size or of one that no model of this size has.
        """
        for verb, avals, tree, expected in (
            ("takes", exported.in_avals, exported.in_tree, (self.inputs, {})),
            ("returns", exported.out_avals, exported.out_tree, self.outputs),
        ):
            actual = [(tuple(each.shape), each.dtype.name) for each in avals]
            wanted = [(tuple(each.shape), each.dtype.name) for each in jax.tree.leaves(expected)]
            if actual != wanted or tree != jax.tree.structure(expected):
                differing = [pair for pair in zip(actual, wanted, strict=False) if pair[0] != pair[1]][:1]
                raise ProgramError(
                    f"{name}: it {verb} {len(actual)} arrays, the manifest says {len(wanted)}, or others: "
                    f"{differing}; export the model again"
                )
        text = exported.mlir_module()
        if (call := _CUSTOM_CALL.search(text)) is not None:
            callee = text[call.end() : call.end() + 60].strip().split("(")[0]
            raise ProgramError(f"{name}: it calls {callee} outside of itself; export the model again")
        for shape in dict.fromkeys(_TENSOR.findall(text)):
            sizes = shape.split("x")[:-1]
            known = all(each.isdigit() for each in sizes)
            if not known or math.prod(map(int, sizes)) > self.largest_elements:
                raise ProgramError(
                    f"{name}: it allocates an array of {'x'.join(sizes)[:80]} numbers, and a model of its "
                    f"size at most {self.largest_elements}; export the model again"
                )


def program_bounds(signature: Signature, manifest: Manifest, weights: Mapping[str, Any]) -> Bounds:
    """The bounds of the program of a signature; `weights` are its own."""
    interface = manifest.interface(signature)
    shapes = {name: jax.ShapeDtypeStruct(each.shape, each.dtype) for name, each in weights.items()}
    caches, outputs = jax_shapes(interface.caches), jax_shapes(interface.outputs)
    inputs = shapes, caches, jax_shapes(interface.inputs)
    return Bounds(inputs, caches | outputs if interface.writes else outputs)


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
