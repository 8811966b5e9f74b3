"""Reads the low-rank adapters in a folder of programs, by name, as the arrays that its programs accept."""

from pathlib import Path

import numpy as np

from jaxllm.config import WHOLE
from jaxllm.errors import ConfigError
from jaxllm.export.folder_format.adapters import adapter_file
from jaxllm.export.folder_format.manifest import Manifest

NO_ADAPTER = ""


class FolderAdapters:
    """Reads adapters of a folder on first use, and selects the current one.

    Attributes:
      used: name of the current adapter; empty for none.
    """

    def __init__(self, manifest: Manifest, folder: Path | None = None) -> None:
        self._manifest, self._folder, self.used = manifest, folder, NO_ADAPTER
        self._arrays: dict[tuple[str, int], np.ndarray] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all adapters in the folder."""
        return () if self._manifest.adapters is None else self._manifest.adapters.names

    @property
    def version(self) -> int:
        """A number of the adapter in use, 0 for none: caches of one are of no use to another."""
        return 1 + self.names.index(self.used) if self.used else 0

    def require(self, name: str) -> None:
        """Checks that an adapter exists; "", which is none, does.

        Raises:
          ConfigError: it does not.
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
        # A corrupt file is reported now, and changes nothing.
        self.array(WHOLE, name)
        self.used = name

    def digest(self, name: str) -> str:
        """The checksum of an adapter's file; empty for none."""
        return self._manifest.files[adapter_file(name)].xxh3_128 if name else ""

    def name_of(self, digest: str) -> str | None:
        """Name of the adapter of a digest, empty for none; None if the folder has none with it."""
        return next((each for each in (NO_ADAPTER, *self.names) if self.digest(each) == digest), None)

    def array(self, level: int, name: str) -> np.ndarray | None:
        """An adapter as an input of a level's programs, `[N]` float32; None if they accept none."""
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
