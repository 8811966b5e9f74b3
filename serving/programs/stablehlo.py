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


class StableHloExecutor(JaxPrograms):
    """Programs of a folder. On a CPU the weights are the mapped file's pages, and a level reads the
    beginnings of the whole model's; other devices hold a copy for each level."""

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
        weights = {level: _placed(arrays, each) for level, each in manifest.levels.items()}
        super().__init__(
            manifest,
            weights,
            functools.partial(_program, manifest, folder),
            lambda signature: manifest.files[signature.file].xxh3_128,
            store,
        )


def _placed(arrays: dict[str, np.ndarray], level: ProgramLevel) -> dict[str, jax.Array]:
    device = jax.devices()[0]
    return {name: jax.device_put(view, device, may_alias=True) for name, view in level.views(arrays).items()}


def _program(manifest: Manifest, folder: Path, signature: Signature):
    # Here, because it is slow to import and kept executables need it not.
    import jax.export

    path = manifest.require_intact(folder, signature.file)
    return jax.export.deserialize(bytearray(path.read_bytes())).call
