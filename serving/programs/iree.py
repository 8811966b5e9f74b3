"""Runs the modules of IREE that were compiled for this processor, with the weights beside them.

Modules are machine code, which nothing can screen as programs of StableHLO are screened: they run only where
the caller says that the folder is trusted (see SECURITY.md). A step takes the weights in the order of their
names, then caches, tokens, positions and any mask, and gives its results in the order of their names. The
runtime has no donation: a step reads one set of caches and makes another.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError, ProgramError, one_line
from jaxllm.program_folder.arrays import lengthened
from jaxllm.program_folder.manifest import WEIGHTS, Manifest, Signature
from jaxllm.program_folder.weights import read_weights
from serving.host.machine import cpu_features
from serving.host.progress import Progress
from serving.programs.adapters import FolderAdapters

PACKAGE = "iree-base-runtime"
# Among the versions of a manifest: which processor modules were compiled for.
PROCESSOR = "processor"
# Of one module, which has no weights.
_MAX_MODULE_BYTES = 64 << 20
_LOGITS = "logits"


class IreeExecutor:
    """Runs the signatures of a folder (see `Executor`).

    Attributes:
      manifest: of the folder.
      moves_rows: True: caches are arrays on the host.
      stops_early: True; there are no blocks of tokens.
    """

    moves_rows = stops_early = True

    def __init__(self, manifest: Manifest, folder: Path, *, threads: int = 0) -> None:
        """Opens a folder, and gets none of its modules ready.

        Args:
          manifest: of the folder.
          folder: of the modules.
          threads: that compute; 0 for all cores. A process keeps those of the first folder that it opens with
            more than one.

        Raises:
          ConfigError: IREE's runtime is not installed.
          ProgramError: the modules are for another processor, or the weights corrupt or of another model.
        """
        if importlib.util.find_spec("iree") is None or importlib.util.find_spec("iree.runtime") is None:
            raise ConfigError(f"{PACKAGE} is not installed; run `pip install {PACKAGE}`")
        if manifest.made_with.get(PROCESSOR) != processor_key():
            raise ProgramError(
                f"{folder}: its modules were compiled for another processor than this; export the model here"
            )
        from iree import runtime

        self.manifest, self.lock = manifest, threading.RLock()
        self.adapters = FolderAdapters(manifest, folder)
        self._folder, self._runtime = folder, runtime
        # One thread computes in the caller's.
        driver = "local-sync" if threads == 1 else "local-task"
        if threads > 1:
            runtime.flags.parse_flags(f"--task_topology_group_count={threads}")
        self._config = runtime.Config(driver)
        arrays = read_weights(manifest.require_intact(folder, WEIGHTS), model=manifest.model)
        self._weights = {
            level: [self._placed(each) for _, each in sorted(entry.views(arrays).items())]
            for level, entry in manifest.levels.items()
        }
        self._programs: dict[str, Any] = {}

    def prepare(self, signatures: Sequence[Signature], progress: Progress | None = None) -> None:
        """See `Executor`; modules are compiled already, and only loaded."""
        for done, signature in enumerate(signatures):
            self._program(signature)
            if progress is not None:
                progress("compile", done + 1, len(signatures))

    def is_ready(self, signature: Signature) -> bool:
        """See `Executor`."""
        return signature.name in self._programs

    def start(self, level: int, cache_tokens: int) -> dict[str, Any]:
        """See `Executor`."""
        shapes = self.manifest.cache_shapes(level, cache_tokens)
        return {name: self._placed(np.zeros(shape, np.float32)) for name, shape in shapes.items()}

    def grow(self, level: int, caches: dict[str, Any], cache_tokens: int) -> dict[str, Any]:
        """See `Executor`."""
        return self.restored(level, cache_tokens, {name: each.to_host() for name, each in caches.items()})

    def rows(self, level: int, caches: dict[str, Any], tokens: int) -> dict[str, np.ndarray]:
        """See `Executor`."""
        del level
        return {name: np.array(each.to_host()[:, :, :tokens]) for name, each in caches.items()}

    def restored(self, level: int, cache_tokens: int, rows: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """See `Executor`."""
        shapes = self.manifest.cache_shapes(level, cache_tokens)
        return {name: self._placed(lengthened(rows[name], shape)) for name, shape in shapes.items()}

    def run(
        self,
        signature: Signature,
        caches: dict[str, Any],
        tokens: np.ndarray,
        input_pos: np.ndarray,
        mask: np.ndarray | None = None,
        source: Mapping[str, Any] | None = None,
    ) -> tuple[np.ndarray | None, dict[str, Any]]:
        """See `Executor`; no source is ever given."""
        del source
        inputs = [each for each in (tokens, input_pos, mask) if each is not None]
        names = sorted(caches)
        wanted = names if signature.kind == "prefill" else sorted([*names, _LOGITS])
        try:
            given = self._program(signature)(
                *self._weights[signature.level], *(caches[each] for each in names), *inputs
            )
        except (RuntimeError, ValueError) as error:
            raise ProgramError(f"IREE cannot run {signature.name} ({one_line(error)})") from error
        out = dict(zip(wanted, given, strict=True))
        logits = out.pop(_LOGITS, None)
        return None if logits is None else logits.to_host(), out

    def keep(self, signature: Signature, caches: dict[str, Any], at: int, path: np.ndarray) -> dict[str, Any]:
        """See `Executor`."""
        del signature
        kept = {}
        for name, each in caches.items():
            rows = np.array(each.to_host())
            rows[:, :, at : at + len(path)] = rows[:, :, at + path]
            kept[name] = self._placed(rows)
        return kept

    def encode(self, signature: Signature, tokens: np.ndarray, count: int) -> Any:
        """Refuses: there are no modules of encoder-decoders."""
        raise _absent(signature, tokens, count)

    def run_block(
        self,
        signature: Signature,
        caches: dict[str, Any],
        token: int,
        at: int,
        controls: Mapping[str, np.ndarray],
        source: Mapping[str, Any] | None = None,
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Refuses: there are no modules of several tokens."""
        raise _absent(signature, caches, token, at, controls, source)

    def encode_chunks(self, signature: Signature, caches: Any, chunks: np.ndarray) -> dict[str, np.ndarray]:
        """Refuses (see `_absent`)."""
        raise _absent(signature, caches, chunks)

    def load_chunks(
        self, signature: Signature, caches: Any, chunks: np.ndarray, coded: Mapping[str, np.ndarray]
    ) -> Any:
        """Refuses (see `_absent`)."""
        raise _absent(signature, caches, chunks, coded)

    def run_tiny_lm(
        self, signature: Signature, tokens: np.ndarray, mask: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Refuses: there are no modules of the tiny LM."""
        raise _absent(signature, tokens, mask)

    def _placed(self, array: np.ndarray) -> Any:
        """A copy of an array in the device's memory."""
        return self._runtime.asdevicearray(self._config.device, array, implicit_host_transfer=True)

    def _program(self, signature: Signature) -> Any:
        """The function of a signature's module, which is loaded once."""
        if signature.name not in self._programs:
            raw = self.manifest.read_intact(self._folder, signature.file, most_bytes=_MAX_MODULE_BYTES)
            path = self._folder / signature.file
            try:
                context = self._runtime.SystemContext(config=self._config)
                module = self._runtime.VmModule.copy_buffer(context.instance, raw)
                context.add_vm_module(module)
                self._programs[signature.name] = context.modules[module.name]["main"]
            except (RuntimeError, ValueError, KeyError) as error:
                raise ProgramError(
                    f"{path}: IREE refuses it ({one_line(error)}); export the model again with this version"
                ) from error
        return self._programs[signature.name]


@functools.cache
def processor_key() -> str:
    """A key of what compilers know of this processor: modules for it run on its like alone."""
    return hashlib.sha256("\n".join(cpu_features()).encode()).hexdigest()[:32]


def runtime_version() -> str:
    """The version of IREE's runtime here; empty for none."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _absent(signature: Signature, *arguments: Any) -> ConfigError:
    del arguments
    return ConfigError(
        f"IREE has no {signature.kind} programs, as {signature.name}; export the model as tflite"
    )
