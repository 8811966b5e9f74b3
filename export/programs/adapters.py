"""The low-rank adapters in a folder of programs, by name, as the arrays that its programs take."""

from pathlib import Path

import numpy as np

from jaxllm.config import WHOLE
from jaxllm.errors import ConfigError
from jaxllm.export.folder_format.adapters import adapter_file
from jaxllm.export.folder_format.manifest import Manifest

NO_ADAPTER = ""


class FolderAdapters:
    """Reads adapters of a folder when they are first used, and says which one programs get now.

    Attributes:
      used: its name; empty for none.
    """

    def __init__(self, manifest: Manifest, folder: Path | None = None) -> None:
        self._manifest, self._folder, self.used = manifest, folder, NO_ADAPTER
        self._arrays: dict[tuple[str, int], np.ndarray] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Of all adapters in the folder."""
        return () if self._manifest.adapters is None else self._manifest.adapters.names

    @property
    def version(self) -> int:
        """A number of the adapter in use, 0 for none: caches of one are of no use to another."""
        return 1 + self.names.index(self.used) if self.used else 0

    def require(self, name: str) -> None:
        """Checks that an adapter is there; so is "", which is none.

        Raises:
          ConfigError: it is not.
        """
        if name and name not in self.names:
            known = ", ".join(self.names) or "none"
            raise ConfigError(
                f"the programs have no adapter {name!r:.80}, but {known}; export the model with "
                "--adapter-input NAME=DIR"
            )

    def use(self, name: str) -> None:
        """Gives programs another adapter from now on; "" for none.

        Raises:
          ConfigError: the folder has no such adapter.
          ProgramError: its file is corrupt.
        """
        self.require(name)
        # A corrupt file is told of now, and changes nothing.
        self.array(WHOLE, name)
        self.used = name

    def digest(self, name: str) -> str:
        """The checksum of an adapter's file; empty for none."""
        return self._manifest.files[adapter_file(name)].xxh3_128 if name else ""

    def name_of(self, digest: str) -> str | None:
        """The name of the adapter of a digest, empty for none; None where the folder has none of it."""
        return next((each for each in (NO_ADAPTER, *self.names) if self.digest(each) == digest), None)

    def array(self, level: int, name: str) -> np.ndarray | None:
        """An adapter as a level's programs take it, `[N]` float32; None where they take none."""
        inputs = self._manifest.adapters
        if inputs is None:
            return None
        if (name, level) not in self._arrays:
            if not name:
                found = np.zeros(inputs.size(level), np.float32)
            elif level != WHOLE:
                whole = self.array(WHOLE, name)
                assert whole is not None
                found = inputs.of_level(level, whole)
            else:
                assert self._folder is not None
                file = adapter_file(name)
                raw = self._manifest.read_intact(self._folder, file, most_bytes=inputs.file_bytes)
                found = inputs.parsed(name, raw)
            self._arrays[name, level] = found
        return self._arrays[name, level]
