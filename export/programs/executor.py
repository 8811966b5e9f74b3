"""Defines what executors of programs share.

`live.py` jits the steps themselves, `jax_programs.py` runs files of `jax.export`, `litert.py` a `.tflite`
model.
"""

import abc
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxllm.config import FULL_LEVEL
from jaxllm.errors import ConfigError, ContextGone
from jaxllm.export.folder_format.manifest import Manifest
from jaxllm.export.folder_format.parts import ADAPTER, adapter_file
from jaxllm.export.folder_format.signature import Interface, Signature
from jaxllm.serving.host.progress import Progress

if TYPE_CHECKING:
    from jaxllm.serving.server.calls import AdapterFacts

# What runs programs of LiteRT.
Accelerator = Literal["cpu", "gpu"]


class FolderAdapters:
    """The adapters that were exported with a model, read on first use, and the current one. They are those of
    a server, too (see `jaxllm.serving.server.opening.Adapters`).

    Attributes:
      used: name of the current adapter; empty for none.
    """

    def __init__(self, manifest: Manifest, folder: Path | None = None) -> None:
        self._manifest, self._folder, self.used = manifest, folder, ""
        self._arrays: dict[tuple[str, int], np.ndarray] = {}
        self._opened_s = time.time()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all adapters in the folder."""
        return () if self._manifest.adapters is None else self._manifest.adapters.names

    @property
    def version(self) -> int:
        """A number of the adapter in use, 0 for none: caches of one are of no use to another."""
        return 1 + self.names.index(self.used) if self.used else 0

    @property
    def size_bytes(self) -> int:
        """See `Adapters`."""
        return sum(each.size_bytes for each in self.facts())

    def facts(self) -> "list[AdapterFacts]":
        """See `Adapters`."""
        # Here, because only a server asks, and its calls take megabytes.
        from jaxllm.serving.server.calls import AdapterFacts

        inputs, made = self._manifest.adapters, self._opened_s
        size = 0 if inputs is None else inputs.file_bytes
        return [
            AdapterFacts(name=each, digest=self.digest(each), size_bytes=size, created_s=made)
            for each in self.names
        ]

    def require(self, name: str) -> None:
        """Checks that an adapter exists; "", which is none, does.

        Raises:
          AdapterGone: it does not.
        """
        if name and name not in self.names:
            from jaxllm.serving.server.calls import AdapterGone

            known = ", ".join(self.names) or "none"
            raise AdapterGone(
                f"the programs have no adapter {name!r:.80}, but {known}; export the model with "
                "--adapter-input NAME=DIR"
            )

    def use(self, name: str) -> None:
        """Gives programs another adapter from now on; "" for none.

        Raises:
          AdapterGone: the folder has no such adapter.
          ProgramError: its file is corrupt.
        """
        self.require(name)
        if name:
            # A corrupt file is reported now, and changes nothing.
            self.array(FULL_LEVEL, name)
        self.used = name

    def digest(self, name: str) -> str:
        """The checksum of an adapter's file; empty for none."""
        return self._manifest.files[adapter_file(name)].xxh3_128 if name else ""

    def name_of(self, digest: str) -> str:
        """Name of the adapter of a digest, empty for none; the digest itself if the folder has none with
        it."""
        return next((each for each in self.names if self.digest(each) == digest), digest)

    def of_context(self, digest: str, context: str, asked: str = "") -> str:
        """Returns the adapter of a context's turn (see `Adapters.of_context`).

        Raises:
          ContextGone: it was not exported.
          ConfigError: the call requests another one.
        """
        self.require(asked)
        known = {self.digest(each): each for each in ("", *self.names)}
        if digest not in known:
            raise ContextGone(
                f"the context {context} was made with an adapter that is not among these programs "
                f"({digest}): run those that have it, or delete it"
            )
        if asked not in ("", name := known[digest]):
            made = f"the adapter {name!r}" if name else "no adapter"
            raise ConfigError(
                f"the context {context} was made with {made}, and its cache is of no use to {asked!r:.80}; "
                "leave the adapter out, or make another context"
            )
        return name

    def read(self, name: str, folder: str) -> Any:
        """Refuses: adapters are exported with the model."""
        raise ConfigError(
            "programs have the adapters that they were exported with; export the model with --adapter-input"
        )

    def unload(self, name: str) -> Collection[tuple[int, int]]:
        """Refuses: they are the folder's."""
        self.require(name)
        raise ConfigError(f"the adapter {name!r:.80} was exported with the programs, and stays")

    def array(self, level: int, name: str) -> np.ndarray:
        """An adapter as an input of a level's programs, which accept one, `[N]` float32."""
        inputs = self._manifest.adapters
        assert inputs is not None
        if (name, level) not in self._arrays:
            if not name:
                found = np.zeros(inputs.size(level), np.float32)
            elif level != FULL_LEVEL:
                found = inputs.of_level(level, self.array(FULL_LEVEL, name))
            else:
                assert self._folder is not None
                file = adapter_file(name)
                raw = self._manifest.read_intact(self._folder, file, most_bytes=inputs.file_bytes)
                found = inputs.parsed(name, raw)
            self._arrays[name, level] = found
        return self._arrays[name, level]


class Executor(abc.ABC):
    """Runs the programs of a manifest. Its caches are opaque: a result of `restored`, `grow`, `run` or `keep`
    is passed to `grow`, `run` or `keep`, once.

    Attributes:
      lock: lock that the caller acquires: one call at a time.
      adapters: low-rank adapters that its programs accept, and the current one.
      moves_rows: whether `keep` is implemented; else trees must be lines, whose accepted nodes are already
        at their positions.
      stops_early: whether a block of tokens ends after a stop token or its limit; else it costs as much as
        a full one.
    """

    moves_rows = stops_early = True

    def __init__(self, manifest: Manifest, adapters: FolderAdapters) -> None:
        self.manifest, self.adapters, self.lock = manifest, adapters, threading.RLock()
        self._placed: dict[tuple[str, int], dict[str, Any]] = {}
        self._interfaces: dict[str, Interface] = {}

    @abc.abstractmethod
    def prepare(self, signatures: Sequence[Signature], progress: Progress | None = None) -> None:
        """Prepares programs, and the buckets that grow their caches, so that a request compiles nothing."""

    @abc.abstractmethod
    def is_ready(self, signature: Signature) -> bool:
        """Whether a program can run at once."""

    @abc.abstractmethod
    def grow(self, level: int, caches: Any, cache_tokens: int) -> Any:
        """Copies the sequence into caches of the next length, `cache_tokens`."""

    @abc.abstractmethod
    def rows(self, level: int, caches: Any, tokens: int) -> dict[str, np.ndarray]:
        """Copies of the first `tokens` rows of each cache, `[1, K, tokens, H]`; the caches stay."""

    @abc.abstractmethod
    def restored(self, level: int, cache_tokens: int, rows: Mapping[str, np.ndarray]) -> Any:
        """Returns caches of a level, of a length that it has programs for, that begin with `rows` (see
        `rows`); without any they are empty."""

    @abc.abstractmethod
    def place(self, level: int, inputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Returns inputs of a level's programs in the runtime's memory, for any number of runs."""

    @abc.abstractmethod
    def run(
        self, signature: Signature, inputs: Mapping[str, Any], caches: Any = None
    ) -> tuple[dict[str, Any], Any]:
        """Runs a program with the current adapter.

        Args:
          inputs: its inputs by name, of NumPy or of `place`; without the adapter.
          caches: its caches, donated if it returns them.

        Returns:
          Its outputs by name, which NumPy can read; and the caches.
        """

    def keep(self, signature: Signature, caches: Any, at: int, path: np.ndarray) -> Any:
        """Moves an accepted path of a tree to the beginning of the tree in the caches.

        Args:
          signature: signature of the program that verified the tree.
          caches: caches, donated.
          at: position of the tree's root.
          path: `[n]` int32, accepted nodes, ascending.

        Returns:
          The caches.

        Raises:
          ConfigError: it moves no rows (see `moves_rows`).
        """
        raise ConfigError(f"{signature.name} moves no rows, {path.tolist()}: give it lines of tokens")

    def _interface(self, signature: Signature) -> Interface:
        if signature.name not in self._interfaces:
            self._interfaces[signature.name] = self.manifest.interface(signature)
        return self._interfaces[signature.name]

    def _adapted(self, signature: Signature, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inputs with the current adapter, if the program accepts one."""
        if ADAPTER not in self._interface(signature).inputs:
            return inputs
        key = self.adapters.used, signature.level
        if key not in self._placed:
            self._placed[key] = self.place(
                signature.level, {ADAPTER: self.adapters.array(signature.level, self.adapters.used)}
            )
        return {**inputs, **self._placed[key]}
