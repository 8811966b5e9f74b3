"""StableHLO programs with the weights beside them, run by whatever device JAX has here."""

import functools
import importlib.util
from pathlib import Path

import jax
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.programs.manifest import WEIGHTS, Manifest, ProgramLevel, Signature
from jaxllm.programs.weights import read_weights
from serving.executables import ExecutableFolder
from serving.programs.graphs import JaxPrograms

# JAX's name of a device's platform -> the one that programs are made for.
_PLATFORMS = {"gpu": "cuda"}
# Where an array begins that a CPU runs in place.
_ALIGN = 64


class StableHloExecutor(JaxPrograms):
    """Programs of a folder. On a CPU the weights are in memory once, and a level reads the beginnings of the
    whole model's; other devices hold a copy for each level."""

    def __init__(self, manifest: Manifest, folder: Path, store: ExecutableFolder | None = None) -> None:
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
            functools.partial(_program, manifest, folder),
            lambda signature: manifest.files[signature.file].xxh3_128,
            store,
        )


def _in_memory(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Copies in one block of memory, which the system gives in large pages: a decoded token reads all
    weights, and takes longer where they lie in the small pages of a mapped file."""
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


def _program(manifest: Manifest, folder: Path, signature: Signature):
    # Here, because it is slow to import and kept executables need it not.
    import jax.export

    path = manifest.require_intact(folder, signature.file)
    return jax.export.deserialize(bytearray(path.read_bytes())).call
